"""Clippings of the bench: two fixed ones, and two whose norm adapts to what was released.

==============  ========================================  ====================================
clipping        factor at norm |d|                        when to use it
==============  ========================================  ====================================
``normalised``  C / |d|                                   norms shrink below C during training
``psac``        C / (|d| + r / (|d| + r))                 as automatic, with many small gradients
``quantile``    min(1, C_t / |d|), C_t a quantile         C unknown, and norms change
``slaclip``     min(1, C_t / |d|), C_t from the slack     the same, at no cost in noise
==============  ========================================  ====================================

In an adaptive one, a unit contributes its clipped direction and K extra coordinates e_i. Both are
one vector of norm at most S, the sensitivity, and get noise sigma S: one Gaussian mechanism,
charged at sigma as without them. C_t depends on earlier releases alone.

==============  ========================================  ====================================
clipping        extra coordinates of unit i               price
==============  ========================================  ====================================
``quantile``    2 rho C (1[|d_i| <= C] - 1/2)             C = S / sqrt(1 + rho^2): the noise
                                                          relative to C grows by sqrt(1 + rho^2)
``slaclip``     the slack C - |clipped d_i| as a bar      none: C = S, what clipping left unused
                over K coordinates
==============  ========================================  ====================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.privacy.clipping import LEAST_NORM, Clipping, NormClipping, bound_factors, check_norm

_LEAST_R = 1e-12  # factors stay below C / (2 sqrt(r)), at norms of sqrt(r), which float32 knows
_GRID = 2.0**-12  # slacks are multiples of this share of a bar
_RANGE = 1e6  # the norm stays within this factor of the first


@dataclass(frozen=True)
class NormalisedClipping(NormClipping):
    """Scale every unit to norm C: C g / |g|, the direction alone (DP-NSGD, Yang et al. 2022).

    A gradient of norm below 1e-10 has no direction in float32, and contributes nothing. The
    regularised form C g / (|g| + r) of the same paper is :class:`AutomaticClipping` with gamma = r.
    Compared with the paper's abstract alone (arXiv:2206.13033), which has no formula.

    Guarantee: the sum moves by at most C.

    Assumptions: norms of 1e-10 and more are right in float32; smaller ones contribute nothing.

    Proof: |C d / |d|| = C.

    Example:
        >>> NormalisedClipping(1.0).factors(torch.tensor([[0.0, 0.5, 4.0]]))
        tensor([[0.0000, 2.0000, 0.2500]])
    """

    def __post_init__(self) -> None:
        check_norm(_validate.positive("clip_norm", self.clip_norm))

    def scales(self, norms: Tensor) -> Tensor:
        known = norms >= LEAST_NORM
        return torch.where(known, self.clip_norm / torch.where(known, norms, 1.0), 0.0)


@dataclass(frozen=True)
class PSACClipping(NormClipping):
    """Weigh by C / (|g| + r / (|g| + r)), after DP-PSAC (Xia et al. 2023).

    Compared with a third party's summary of the paper's Algorithm 1 (arXiv:2212.00328), not with
    the paper's text; two optimisers of this name that were proposed for Opacus differ from it.
    Unlike normalising it does not raise small gradients to norm C: near 0 the factor tends to C.

    Guarantee: the sum moves by less than C.

    Assumptions: as for every clipping.

    Proof: |d| / (|d| + r / (|d| + r)) < 1, since r > 0.

    Example:
        >>> PSACClipping(1.0, r=0.1).factors(torch.tensor([[0.0, 1.0]]))
        tensor([[1.0000, 0.9167]])
    """

    r: float = 0.1

    def __post_init__(self) -> None:
        check_norm(_validate.positive("clip_norm", self.clip_norm))
        if _validate.positive("r", self.r) < _LEAST_R:
            raise ArgumentError(
                f"r must be at least {_LEAST_R:g}, got {self.r!r}: a smaller one vanishes in "
                "float32, and small norms would not be clipped"
            )

    def scales(self, norms: Tensor) -> Tensor:
        return self.clip_norm / (norms + self.r / (norms + self.r))


class AdaptiveClipping(Clipping):
    """Flat clipping to a norm C_t that each release moves: C_t+1 = C_t exp(-rate (seen - wanted)).

    Guarantee: direction and extra coordinates together are within the sensitivity of their step;
    adapting costs nothing more.

    Assumptions: C_t depends only on what was released before step t, and noise is scaled to the
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
        return bound_factors(norms, self.bound)

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

    Compared with the authors' implementation in TensorFlow Privacy and Federated: the same update
    with the same rate and quantile, and the same split of sigma. They choose sigma_b = l / 20,
    which is rho near 10 sigma / l; here rho is the option.

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
    """Adapt C to the slack that clipping leaves below it (SlaClip, Zou et al., ICML 2026).

    With x_i = K (1 - |clipped d_i| / C), rounded down, unit i fills the K extra coordinates as a
    bar, e_ik = C / sqrt(K) min(max(x_i - k, 0), 1). Their released mean over C / sqrt(K), I_k, is
    the share of units with norms below C (1 - k / K), averaged over the bin from k to k + 1: the
    first is the share that is not clipped, the last that of norms near 0. Then

        C_t+1 = C_t exp(rate (wanted - I_0)),   wanted = 1 - beta (1 - min(max(I_(K-1) / C, 0), 1)).

    Compared with the authors' code for Opacus (their equations 6 to 11 and 28 to 30, eta = 0.5,
    beta = 1/2), not with the text of the paper. Here C stays within a factor of 10^6 of the first,
    theirs within 0.1 and 50, and I_0 counts as 0 or 1 where noise puts it outside.

    Guarantee: charged at the plan's sigma: the sum with its slacks moves by at most C.

    Assumptions: as for AdaptiveClipping; slacks are rounded down.

    Proof: with n = |clipped d_i| / C, sum_k e_ik^2 <= C^2 / K sum_k min(max(x_i - k, 0), 1) =
    C^2 x_i / K <= C^2 (1 - n), and n^2 + 1 - n <= 1 since n <= 1.

    Args:
        clip_norm: C at the first step.
        beta: the share of units to clip, if no norms are near 0.
        rate: the learning rate of log C, the authors' eta.
        bins: K; the authors take (l / (5.15 sigma))^(2/3), rounded down.

    Attributes:
        below: the latest I_0, ..., I_(K-1), with noise of standard deviation sigma sqrt(K) / l
            each; None before the first step.

    Example:
        >>> clipping = SlackClipping(1.0, bins=4)
        >>> norms = torch.tensor([[0.375, 0.0, 5.0]])
        >>> clipping.extra(norms, clipping.factors(norms))  # 2.5, 4 and none of 4 bars
        tensor([[0.5000, 0.5000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.2500, 0.5000, 0.0000],
                [0.0000, 0.5000, 0.0000]])
    """

    def __init__(
        self, clip_norm: float, beta: float = 0.5, rate: float = 0.5, bins: int = 8
    ) -> None:
        super().__init__(clip_norm, rate)
        self.beta = _validate.probability("beta", beta)
        self.coordinates = _validate.count("bins", bins)
        self.below: tuple[float, ...] | None = None

    @property
    def _bar(self) -> float:
        return self.bound / math.sqrt(self.coordinates)

    def extra(self, norms: Tensor, factors: Tensor) -> Tensor:
        clipped_share = (factors * norms).norm(dim=0) / self.bound  # [U], 0 .. 1
        x = ((1 - clipped_share) * self.coordinates / _GRID).floor() * _GRID
        bars = torch.arange(self.coordinates, device=norms.device)[:, None]
        filled: Tensor = (x - bars).clamp(min=0.0, max=1.0)
        return filled * self._bar

    def update(self, released: Tensor) -> None:
        self.below = tuple((released / self._bar).tolist())
        near_zero = min(max(self.below[-1] / self.bound, 0.0), 1.0)
        self._move(self.below[0], 1 - self.beta * (1 - near_zero))
