"""Clipping norms that adapt to what was released, and all clippings by name.

A unit contributes its clipped direction and K extra coordinates e_i. Both are one vector of norm at
most S, the sensitivity, and get noise sigma S: one Gaussian mechanism, charged at sigma as without
them. C_t depends on earlier releases alone.

==============  ========================================  ====================================
clipping        extra coordinates of unit i               price
==============  ========================================  ====================================
``quantile``    2 rho C (1[|d_i| <= C] - 1/2)             C = S / sqrt(1 + rho^2): the noise
                                                          relative to C grows by sqrt(1 + rho^2)
``slaclip``     sqrt(C^2 - |clipped d_i|^2), in the bin   none: C = S, what clipping left unused
                of |d_i| among K
==============  ========================================  ====================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.privacy.clipping import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    NormalisedClipping,
    PerLayerClipping,
    PSACClipping,
    bounded,
    check_norm,
)

_GRID = 2.0**-12  # slacks are multiples of this share of C
_RANGE = 1e6  # the norm stays within this factor of the first


class AdaptiveClipping(Clipping):
    """Flat clipping to a norm C_t that each release moves: C_t+1 = C_t exp(-rate (seen - wanted)).

    Guarantee: direction and extra coordinates together are within the sensitivity of their step;
    adapting costs nothing more.

    Assumptions: C_t depends on what was released before step t alone, and noise is scaled to the
    sensitivity of step t.

    Proof: adaptive composition: each step is a Gaussian mechanism of the plan's sigma, given the
    releases before it.

    Args:
        clip_norm: the sensitivity at the first step.
        rate: the learning rate of log C.
    """

    def __init__(self, clip_norm: float, rate: float) -> None:
        check_norm(_validate.positive("clip_norm", clip_norm))
        self._first = self._sensitivity = float(clip_norm)
        self.rate = _validate.positive("rate", rate)

    @property
    def sensitivity(self) -> float:
        return self._sensitivity

    @property
    def bound(self) -> float:
        """C_t: the norm to which directions are clipped."""
        return self._sensitivity

    def scales(self, norms: Tensor) -> Tensor:
        return bounded(norms, self.bound)

    def state_dict(self) -> dict[str, Tensor]:
        return {"sensitivity": torch.tensor(self._sensitivity, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sensitivity = float(state["sensitivity"])

    def _move(self, seen: float, wanted: float) -> None:
        moved = self._sensitivity * math.exp(-self.rate * (min(max(seen, 0.0), 1.0) - wanted))
        self._sensitivity = min(max(moved, self._first / _RANGE), self._first * _RANGE)


class QuantileClipping(AdaptiveClipping):
    """Clip to a quantile of the norms, which is tracked privately (Andrew et al. 2021).

    With b_i = 1[|d_i| <= C], the share of units within C is released as

        b = 1/2 + (sum_i (b_i - 1/2) + N(0, sigma_b^2)) / l,
        sigma_b = sigma sqrt(1 + rho^2) / (2 rho)

    Args:
        clip_norm: S, the sensitivity at the first step; C = S / sqrt(1 + rho^2).
        quantile: the share of units that should not be clipped.
        rate: the learning rate of log C.
        share: rho, the norm of the extra coordinate relative to C.

    Guarantee: charged at the plan's sigma. In the paper's letters, sigma^-2 = z_Delta^-2 +
    (2 sigma_b)^-2 with z_Delta = sigma sqrt(1 + rho^2), the noise on the gradient over C.

    Assumptions: as for AdaptiveClipping.

    Proof: |d_i|^2 + e_i^2 <= C^2 + rho^2 C^2 = S^2, since (2 rho C / 2)^2 = rho^2 C^2; Andrew et
    al. 2021 for the statistic.

    Example:
        >>> clipping = QuantileClipping(1.0, quantile=0.5, rate=0.2, share=0.1)
        >>> round(clipping.bound, 4)
        0.995
        >>> clipping.update(torch.tensor([-0.5 * 2 * 0.1 * clipping.bound]))  # all were clipped
        >>> round(clipping.sensitivity, 4)  # exp(0.2 * 0.5)
        1.1052
    """

    coordinates = 1

    def __init__(
        self, clip_norm: float, quantile: float = 0.5, rate: float = 0.2, share: float = 0.1
    ) -> None:
        super().__init__(clip_norm, rate)
        self.quantile = _validate.probability("quantile", quantile)
        self.share = _validate.positive("share", share)

    @property
    def bound(self) -> float:
        return self._sensitivity / math.sqrt(1 + self.share**2)

    def extra(self, norms: Tensor, factors: Tensor) -> Tensor:
        length = norms.norm(dim=0, keepdim=True)
        most = torch.full_like(length, self.share * self.bound)
        return torch.where(length <= self.bound, most, -most)

    def update(self, released: Tensor) -> None:
        self._move(0.5 + float(released) / (2 * self.share * self.bound), self.quantile)


class SlackClipping(AdaptiveClipping):
    """Adapt C to the slack, the norm that clipping leaves unused (SlaClip, Zou et al. 2026).

    s_i = sqrt(C^2 - |clipped d_i|^2), rounded down, is released in the bin of |clipped d_i| / C
    among K. Direction and slack together have norm C at most, the sensitivity of flat clipping. The
    mean slack over C is 0 if every unit is clipped, and 1 if all gradients are zero.

    Guarantee: charged at the plan's sigma: the sum with its slacks moves by at most C.

    Assumptions: as for AdaptiveClipping; slacks are rounded down.

    Proof: |clipped d_i|^2 + s_i^2 <= C^2, and a unit has one bin.

    Args:
        clip_norm: C at the first step.
        slack: the mean slack over C that is aimed at; 0.3 is near the median of the norms.
        rate: the learning rate of log C.
        bins: K.

    Attributes:
        histogram: the latest release: the mean slack over C by bin of |clipped d_i| / C, with
            noise of standard deviation sigma / l each; None before the first step.

    Example:
        >>> clipping = SlackClipping(1.0, bins=2)
        >>> norms = torch.tensor([[0.6, 0.0, 5.0]])
        >>> clipping.extra(norms, clipping.factors(norms))  # 0.8 and 1, rounded down; none
        tensor([[0.0000, 1.0000, 0.0000],
                [0.7998, 0.0000, 0.0000]])
    """

    def __init__(
        self, clip_norm: float, slack: float = 0.3, rate: float = 0.2, bins: int = 4
    ) -> None:
        super().__init__(clip_norm, rate)
        self.slack = _validate.probability("slack", slack)
        self.coordinates = _validate.count("bins", bins)
        self.histogram: tuple[float, ...] | None = None

    def extra(self, norms: Tensor, factors: Tensor) -> Tensor:
        kept = (factors * norms).norm(dim=0) / self.bound  # [U], 0 .. 1
        slack = (1 - kept.square()).clamp(min=0).sqrt()
        slack = (slack / _GRID).floor() * _GRID * self.bound
        bin_of = (kept * self.coordinates).long().clamp(max=self.coordinates - 1)  # [U]
        bins = torch.arange(self.coordinates, device=norms.device)
        return torch.where(bin_of == bins[:, None], slack, 0.0)

    def update(self, released: Tensor) -> None:
        self.histogram = tuple((released / self.bound).tolist())
        self._move(math.fsum(self.histogram), self.slack)


#: The clippings by the names that plans and configurations use.
CLIPPINGS: dict[str, Callable[..., Clipping]] = {
    "flat": FlatClipping,
    "automatic": AutomaticClipping,
    "per-layer": PerLayerClipping,
    "normalised": NormalisedClipping,
    "psac": PSACClipping,
    "quantile": QuantileClipping,
    "slaclip": SlackClipping,
}


def make_clipping(name: str, clip_norm: float) -> Clipping:
    """Return the built-in clipping called ``name``; the user's own must be given as an object."""
    if name not in CLIPPINGS:
        raise ArgumentError(f"the plan's clipping {name} is the user's own: pass clipping=")
    return CLIPPINGS[name](clip_norm)
