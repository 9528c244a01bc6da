"""The handle that the fused engine returns: norms and weighted sums of factored gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dpbam.engines.fused.collect import Collected
from dpbam.engines.fused.gradients import Norm
from dpbam.engines.precision import measured
from dpbam.params import Params, accumulation_dtype


class FusedDirections:
    """Directions d_1 .. d_U held as factored gradients: see :mod:`~dpbam.engines.fused.gradients`.

    Args:
        collected: the gradients.
        groups: the clipping group of each parameter.
        units: U.
        parameters: the trainable ones.
        norms: of the gradients, where they are already known.
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
        self._like = {
            n: p.detach().new_zeros((), dtype=accumulation_dtype(p.dtype)).expand(p.shape)
            for n, p in parameters.items()
        }
        self._zeros = next(iter(self._like.values())).new_zeros(units)
        self._norms = norms
        self.plain: FusedDirections | None = None

    @measured
    def each_norm(self) -> list[Norm]:
        """Return the norm of each gradient, computed once."""
        if self._norms is None:
            self._norms = [gradient.norm() for gradient in self.collected.gradients]
        return self._norms

    @measured
    def norms(self) -> Tensor:
        """Return |d_u| by group: [G, U]."""
        squares = self._zeros.repeat(max(self._groups.values()) + 1, 1)
        for gradient, found in zip(self.collected.gradients, self.each_norm(), strict=True):
            squares[self._groups[gradient.name]] += found.square
        return squares.clamp_min(0).sqrt()

    @measured
    def parameter_norms(self) -> dict[str, Tensor]:
        """Return the norm of d_u's entries by parameter: [U] each."""
        squares = dict.fromkeys(self._like, self._zeros)
        for gradient, found in zip(self.collected.gradients, self.each_norm(), strict=True):
            squares[gradient.name] = squares[gradient.name] + found.square
        return {name: square.clamp_min(0).sqrt() for name, square in squares.items()}

    @measured
    def weighted_sum(self, factors: Tensor) -> Params:
        """Return sum_u factors[g, u] d_u; a factor of 0 removes even a NaN."""
        total: Params = {}
        known: Sequence[Norm | None] = self._norms or [None] * len(self.collected.gradients)
        for gradient, found in zip(self.collected.gradients, known, strict=True):
            parts = gradient.weighted_sum(factors[self._groups[gradient.name]], found)
            for name, part in parts.items():
                total[name] = total[name] + part if name in total else part
        return {n: total.get(n, like.clone()) for n, like in self._like.items()}

    @measured
    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Return <d_u, vector>: [U]."""
        total = self._zeros
        for gradient in self.collected.gradients:
            total = total + gradient.inner(vector)
        return total
