"""Dropout whose mask depends on the row's key, not on the micro-batch it sits in.

While a model runs under :class:`KeyedDropout`, every dropout of torch draws its mask by hashing
(row key, number of the call in this forward pass, position): the same row gets the same mask in
any micro-batch, on any rank, and in both of BAM's gradients. Any other random draw inside the
model is refused, because it could not keep that promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpbam.engines import multihead
from dpbam.randomness import derive, keyed_uniform

_ELEMENT = {F.dropout, torch.dropout, torch.dropout_}
_CHANNEL = {
    F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_,
}  # fmt: skip
_ALPHA = {
    F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
}  # fmt: skip
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_DRAWS = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli, torch.normal,
    torch.multinomial, torch.poisson, torch.rand_like, torch.randn_like, torch.randint_like,
    Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.random_,
    Tensor.bernoulli, Tensor.multinomial, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_,
    torch.binomial, torch.native_dropout, F.rrelu, F.gumbel_softmax, torch.rrelu,
    F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices,
}  # fmt: skip


class KeyedDropout(TorchFunctionMode):
    """Run one forward pass with keyed dropout.

    Args:
        keys: [N] int64, one a row of the batch that the model sees.

    Example:
        >>> keys, x = torch.tensor([1, 2]), torch.ones(2, 4)
        >>> with KeyedDropout(keys):
        ...     both = F.dropout(x)
        >>> with KeyedDropout(keys[1:]):
        ...     one = F.dropout(x[1:])
        >>> torch.equal(both[1:], one)
        True
    """

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self._keys = keys
        self._calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ELEMENT:
            return self._dropout(*_arguments(args, kwargs), channels=False)
        if func in _CHANNEL:
            return self._dropout(*_arguments(args, kwargs), channels=True)
        if func is F.scaled_dot_product_attention:
            if (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0:
                return self._attention(*args, **kwargs)
        elif func is F.multi_head_attention_forward:
            return self._multi_head(args, kwargs)
        elif _draws(func, args, kwargs):
            raise _refusal(func)
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float, training: bool, *, channels: bool) -> Tensor:
        if not training or p == 0:
            return x
        if p >= 1:
            return x * 0
        n = self._keys.shape[0]
        if x.shape[0] % n:
            raise ValueError(
                f"dropout on a tensor of shape {tuple(x.shape)}: its first axis must count the "
                f"{n} samples of the batch (move the batch axis first)"
            )
        kept = (x.shape[0] // n, *x.shape[1:])
        if channels:  # one draw a channel, the same over its positions
            kept = (*kept[:2], *(1 for _ in kept[2:]))
        draws = keyed_uniform(derive(self._keys, self._calls), kept)
        self._calls += 1
        mask = (draws >= p).reshape(x.shape[0], *kept[1:])
        return x * mask.to(x.dtype) / (1 - p)

    def _multi_head(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Torch runs it as one function, where its dropout would not be seen: take it apart."""
        given = multihead.arguments(args, kwargs)
        if not given["training"] or given["dropout_p"] == 0:
            return F.multi_head_attention_forward(*args, **kwargs)
        if reason := multihead.unserved(given):
            raise ValueError(f"{reason} together with keyed dropout: give it dropout=0")
        with self:
            return multihead.forward(given)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if enable_gqa:
            raise ValueError("keyed dropout does not serve grouped-query attention: use dropout 0")
        size = query.shape[-1] ** -0.5 if scale is None else scale
        scores = (query * size) @ key.transpose(-2, -1)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~mask, float("-inf"))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, float("-inf"))
            else:
                scores = scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p, True, channels=False) @ value


def _draws(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call would draw random numbers that hang on no key."""
    if func in _ALPHA:
        return _arguments(args, kwargs, training=False)[2]
    if func in _RECURRENT:  # (..., dropout, train, ...): dropout is the one float
        at = next((i for i, a in enumerate(args) if isinstance(a, float)), None)
        return at is not None and args[at] > 0 and bool(args[at + 1])
    return func in _DRAWS


def _arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool = True
) -> tuple[Tensor, float, bool]:
    """(input, p, training) of any of torch's dropouts, with their common defaults."""
    given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
    active = given.get("training", given.get("train", training))
    return given["input"], float(given.get("p", 0.5)), bool(active)


def _refusal(func: Callable[..., Any]) -> ValueError:
    name = getattr(func, "__name__", str(func))
    return ValueError(
        f"the model draws random numbers with {name}, which would depend on the micro-batch: use "
        "torch.nn.Dropout, or draw from dpbam.randomness.keyed_uniform, or put the model in eval"
    )
