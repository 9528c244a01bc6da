"""The handle that the fused engine returns: norms and weighted sums of factored gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpbam.engines.fused.collect import Collected
from dpbam.engines.fused.ghost_norm import Factors
from dpbam.engines.fused.gradients import (
    FactoredGradient,
    Gradient,
    Joined,
    Materialised,
    Measured,
    Norm,
    measure,
    settle,
)
from dpbam.engines.precision import measured
from dpbam.params import Params, accumulation_dtype, zeros

_SMALL = 2**13  # entries of a unit's gradient that is joined with others


class FusedDirections:
    """Directions d_1 .. d_U held as factored gradients: see :mod:`~dpbam.engines.fused.gradients`.

    ``norms`` are those of the gradients, where they are already known. ``gradients`` are those of
    ``collected`` in the same order, but small ones are materialised and joined at the end.
    """

    def __init__(
        self,
        collected: Collected,
        groups: Mapping[str, int],
        units: int,
        parameters: Mapping[str, Tensor],
        norms: list[Norm] | None = None,
    ) -> None:
        self.collected, self._groups, self._units = collected, groups, units
        self._parameters = parameters
        self.large: list[Materialised] = []
        self.joined: list[Joined] = []
        self.gradients = collected.gradients if norms is not None else self._join_small()
        self._norms = norms
        self._ordinary = False  # whether no unit can make a sum infinite, as far as is known
        self.plain: FusedDirections | None = None
        self.row_losses: Tensor | None = None  # [U R], of the pass at theta

    def _zeros(self) -> Tensor:
        """Return [U] zeros."""
        one = next(iter(self._parameters.values()))
        return one.detach().new_zeros(self._units, dtype=accumulation_dtype(one.dtype))

    def _join_small(self) -> list[Gradient]:
        """Return the gradients with small materialised ones joined, by clipping group."""
        factored: list[FactoredGradient] = []
        materialised = list(self.collected.materialised)
        for gradient in self.collected.factored:
            small_gradient = gradient.as_small()
            if small_gradient is None:
                factored.append(gradient)
            else:
                materialised.append(small_gradient)
        small: dict[Any, list[Materialised]] = defaultdict(list)
        for each in materialised:
            if each.size <= _SMALL:
                small[self._groups[each.name], each.values.dtype].append(each)
            else:
                self.large.append(each)
        self.joined = [Joined.of(gradients) for gradients in small.values()]
        return [*factored, *self.large, *self.joined]

    @measured
    def each_norm(self) -> list[Norm]:
        """Return the norm of each gradient, small ones joined at the end, computed once."""
        return self._each_norm()

    def _each_norm(self) -> list[Norm]:
        if self._norms is None:
            self._norms, self._ordinary = settle(self.gradients)
        return self._norms

    def losses(self) -> Tensor:
        assert self.row_losses is not None
        return self.row_losses.reshape(self._units, -1).mean(1)

    @measured
    def measure(self) -> Measured:
        """Compute the norms, to be settled later: until then they are used as they are."""
        result = measure(self.gradients)
        self._norms = result.norms
        return result

    @measured
    def settle(self, result: Measured, sound: Sequence[bool]) -> bool:
        """Repair the norms where ``sound`` is False; return whether one was repaired."""
        self._norms, self._ordinary = result.settle(sound)
        return any(a is not b for a, b in zip(self._norms, result.norms, strict=True))

    @measured
    def norms(self) -> Tensor:
        squares: list[list[Tensor]] = [[] for _ in range(max(self._groups.values()) + 1)]
        for gradient, norm in zip(self.gradients, self._each_norm(), strict=True):
            squares[self._groups[gradient.name]].append(norm.square)
        if len(squares) == 1 and squares[0]:
            by_group = torch.stack(squares[0]).sum(0, keepdim=True)
        else:  # a group may have no gradient
            by_group = torch.stack([torch.stack(s or [self._zeros()]).sum(0) for s in squares])
        return by_group.clamp_min_(0).sqrt_()

    @measured
    def parameter_norms(self) -> dict[str, Tensor]:
        squares = dict.fromkeys(self._parameters, self._zeros())
        for gradient, norm in zip(self.gradients, self._each_norm(), strict=True):
            for name, square in gradient.square_by_parameter(norm).items():
                squares[name] = squares[name] + square
        return {name: square.clamp_min(0).sqrt() for name, square in squares.items()}

    @measured
    def weighted_sum(self, factors: Tensor, span: slice | None = None) -> Params:
        total: Params = {}
        if span is not None and self._ordinary:  # 0 times any of these numbers is 0
            all_units = span == slice(0, self._units)
            by_group = [Factors(f) if all_units else Factors(f[span], span) for f in factors]
        else:
            by_group = [Factors.of(each) for each in factors]
        known: Sequence[Norm | None] = self._norms or [None] * len(self.gradients)
        for gradient, norm in zip(self.gradients, known, strict=True):
            sums = gradient.weighted_sum(by_group[self._groups[gradient.name]], norm)
            for name, term in sums.items():
                total[name] = total[name] + term if name in total else term
        if len(total) < len(self._parameters):
            total |= zeros({n: p for n, p in self._parameters.items() if n not in total})
        return {n: total[n] for n in self._parameters}

    @measured
    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        total = self._zeros()
        for gradient in self.collected.gradients:
            total = total + gradient.inner(vector)
        return total
