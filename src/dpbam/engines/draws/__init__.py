"""Keyed random draws: those of a model depend on the row's key, not on the batch around the row.

While a model runs on one row under :class:`KeyedDraws`, every random draw of torch is a hash of
(row key, number of the draw in this forward pass, position). The same row gets the same draws
alone, in any micro-batch, on any rank, in every engine, and in both of BAM's gradients. This holds
for dropout of all kinds, dropout inside attention and between recurrent layers, stochastic depth,
and noise that the model draws itself; ``generator=`` arguments are ignored. Draws that cannot be
keyed are refused. Draws by numpy or by Python's ``random`` are not intercepted: they differ from
pass to pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpbam.engines.decomposed import attention
from dpbam.engines.decomposed.recurrent import DECOMPOSED
from dpbam.engines.draws import dropout, samplers
from dpbam.engines.draws.row import RowDraws, below_zero, refusal
from dpbam.errors import ArgumentError
from dpbam.params import Keywords

KEYED = {**dropout.KEYED, **samplers.KEYED}
RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
LESS = {torch.lt, Tensor.lt, Tensor.__lt__}
REFUSED = {
    torch.poisson, torch.binomial, torch._standard_gamma, torch._sample_dirichlet,
    torch._fused_dropout, Tensor.geometric_, init.uniform_, init.normal_, init.kaiming_uniform_,
    F.fractional_max_pool2d, F.fractional_max_pool3d,
    F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices,
}  # fmt: skip

_INTERCEPTED = {
    *KEYED, *RECURRENT, *LESS, *REFUSED, F.scaled_dot_product_attention,
    F.multi_head_attention_forward,
}  # fmt: skip
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class KeyedDraws(TorchFunctionMode):
    """Run one forward pass of one row with keyed draws.

    Args:
        key: int64 scalar, the row's key, or a function that returns it, called at the first draw;
            under vmap it is batched. A second pass over the same row creates a new ``KeyedDraws``
            with the same key, and so gets the same draws.

    Without ``vmap(randomness="error")``, which refuses all other draws, run forward and backward
    under :class:`OnlyKeyedDraws` as well.

    Example:
        >>> def row(x, key):
        ...     with KeyedDraws(key):
        ...         return F.dropout(x)
        >>> keys, x = torch.tensor([1, 2]), torch.ones(2, 4)
        >>> torch.equal(torch.func.vmap(row)(x, keys)[1], row(x[1], keys[1]))
        True
    """

    def __init__(self, key: Tensor | Callable[[], Tensor]) -> None:
        super().__init__()
        self._row = RowDraws(key)

    def intercepts(self, func: Any) -> bool:
        """Whether a call of ``func`` may draw."""
        return func in _INTERCEPTED or isinstance(func, _OPERATORS)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in KEYED:
            return KEYED[func](self._row, func, *args, **kwargs)
        replacement = _replacement_of(func, args, kwargs)
        if replacement is not None:
            with self:
                return replacement(*args, **kwargs)
        if func in LESS and (answer := below_zero(args)) is not None:
            return answer
        if func in REFUSED or _is_random_overload(func):
            raise refusal(func)
        return func(*args, **kwargs)


def _replacement_of(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Keywords
) -> Callable[..., Any] | None:
    """Return the replacement of a torch function that has dropout inside, or None."""
    if func is F.scaled_dot_product_attention:
        p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        return attention.dot_product if p > 0 else None
    if func is F.multi_head_attention_forward:
        call = attention.arguments(args, kwargs)
        if not call["training"] or call["dropout_p"] == 0:
            return None
        if reason := attention.reason_against(call):
            raise ArgumentError(f"{reason} together with keyed dropout: give it dropout=0")
        return lambda *_, **__: attention.multi_head(call)
    if func in RECURRENT:  # (..., dropout, train, ...): dropout is the one float
        at = next((i for i, a in enumerate(args) if isinstance(a, float)), None)
        return DECOMPOSED[func] if at is not None and args[at] > 0 and args[at + 1] else None
    return None


def _is_random_overload(func: Any) -> bool:
    """Whether this is ``torch.ops.aten.bernoulli`` or another random operator, called directly."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        names = func.overloads()  # type: ignore[no-untyped-call]
        return any(_is_random_overload(getattr(func, name)) for name in names)
    seeded = torch.Tag.nondeterministic_seeded
    return isinstance(func, torch._ops.OpOverload) and seeded in func.tags


class OnlyKeyedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse every draw from torch's generators, in forward and in backward.

    :class:`KeyedDraws` intercepts the functions that forward calls. This mode intercepts the
    operators behind them, also in backward, where gradient checkpointing recomputes parts of the
    model without ``KeyedDraws``: dropout would draw another mask there. It is not needed under
    ``vmap(randomness="error")``.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_random_overload(func) and _dropout_p(func, args, kwargs) != 0:
            raise ArgumentError(
                f"the model draws random numbers with {func.name()} where they cannot be keyed, "
                "such as in a part that gradient checkpointing recomputes: set its dropout to 0, "
                "or switch checkpointing off"
            )
        return func(*args, **kwargs)


def _dropout_p(func: Any, args: tuple[Any, ...], kwargs: Keywords) -> float | None:
    """Return the ``dropout_p`` of an attention operator, which draws unless it is 0; else None."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            p = args[at] if at < len(args) else kwargs.get("dropout_p", argument.default_value)
            return float(p)
    return None
