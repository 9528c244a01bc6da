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

from dpbam.randomness import derive, keyed_uniform

_ELEMENT = {F.dropout, torch.dropout, torch.dropout_}
_CHANNEL = {
    F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_,
}  # fmt: skip
_ALPHA = {F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout}
_DRAWS = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli, torch.normal,
    torch.multinomial, torch.poisson, torch.rand_like, torch.randn_like, torch.randint_like,
    Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.random_,
    Tensor.bernoulli, Tensor.multinomial, F.rrelu, F.gumbel_softmax, torch.rrelu,
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
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p", 0.0) > 0:
            return self._attention(*args, **kwargs)
        if func in _ALPHA and _arguments(args, kwargs)[2]:
            raise _refusal(func)
        if func in _DRAWS:
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


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, float, bool]:
    """(input, p, training) of any of torch's dropouts, with their common defaults."""
    names = ("input", "p", "training")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given["input"], float(given.get("p", 0.5)), bool(given.get("training", True))


def _refusal(func: Callable[..., Any]) -> ValueError:
    name = getattr(func, "__name__", str(func))
    return ValueError(
        f"the model draws random numbers with {name}, which would depend on the micro-batch: use "
        "torch.nn.Dropout, or draw from dpbam.randomness.keyed_uniform, or put the model in eval"
    )
