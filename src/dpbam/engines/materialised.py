"""The handle of engines that materialise every direction: one tensor [U, *shape] per parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dpbam.engines.precision import measured
from dpbam.params import Params, accumulation_dtype


class MaterialisedDirections:
    """Directions held as one tensor [U, *shape] per parameter."""

    def __init__(
        self,
        directions: Params,
        groups: Mapping[str, int],
        losses: Tensor,
        plain: MaterialisedDirections | None = None,
    ) -> None:
        self._losses = losses.detach()
        self._d = {n: d.detach().to(accumulation_dtype(d.dtype)) for n, d in directions.items()}
        self._groups, self.plain = groups, plain

    def losses(self) -> Tensor:
        return self._losses.clone()  # other code gets them, and may write to them

    @measured
    def norms(self) -> Tensor:
        count = max(self._groups.values()) + 1
        squares: list[list[Tensor]] = [[] for _ in range(count)]
        for name, d in self._d.items():
            squares[self._groups[name]].append(_rows(d).square().sum(1))
        return torch.stack([torch.stack(s).sum(0) for s in squares]).sqrt()

    @measured
    def parameter_norms(self) -> dict[str, Tensor]:
        return {name: _rows(d).square().sum(1).sqrt() for name, d in self._d.items()}

    @measured
    def weighted_sum(self, factors: Tensor, span: slice | None = None) -> Params:
        some_removed = not bool((factors != 0).all())  # read once, not for every parameter
        return {
            name: _contract(factors[self._groups[name]], d, some_removed=some_removed)
            for name, d in self._d.items()
        }

    @measured
    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        parts = [_rows(d) @ vector[n].to(d).flatten() for n, d in self._d.items()]
        return torch.stack(parts).sum(0)


def _rows(d: Tensor) -> Tensor:
    return d.reshape(d.shape[0], -1)


def _contract(factors: Tensor, d: Tensor, *, some_removed: bool) -> Tensor:
    if some_removed:  # 0 * NaN would be NaN
        d = torch.where((factors != 0).view(-1, *(1 for _ in d.shape[1:])), d, 0.0)
    return (factors.to(d.dtype) @ _rows(d)).reshape(d.shape[1:])
