"""Clipping: from per-unit norms to factors, with the sensitivity that they guarantee.

Shapes: norms [G, U] for G clipping groups and U units -> factors [G, U]. The clipped direction of
unit i is the concatenation over groups of factors[g, i] * d_i[g].

Guarantee of every class here: for any direction, the Euclidean norm of the clipped direction is at
most ``sensitivity``, so adding or removing one unit moves the sum by at most that. A clipping may
release K extra coordinates per unit (:mod:`dpbam.contenders.clippings`); then ``sensitivity``
bounds the norm of both together, and they get the same noise.

===============  ========================================  =====================================
clipping         factor at norm |d|                        when to use it
===============  ========================================  =====================================
``flat``         min(1, C / |d|)                           the paper's; measure C first
``automatic``    C / (|d| + gamma)                         C unknown: the step hardly depends on it
``per-layer``    min(1, C / (sqrt(G) |d_g|)) per layer g   one layer outweighs the others
===============  ========================================  =====================================

==============================  =====================================
a unit whose norm is            contributes
==============================  =====================================
0                               zero (no division by it)
at most C                       itself (flat, per-layer)
above C                         itself scaled to norm C
NaN or infinite in any group    nothing at all: factor 0 in all groups
==============================  =====================================

Norms are float32 or better; a float32 sum of squares overflows at norms near 1e19, which counts as
infinite, and may vanish below 1e-18, so C must be well above that. Rounding may exceed the bound by
a relative 1e-6; by 3e-4 where the parts of a direction cancel nearly so far that the fused engine
would materialise it.

Summing rounds too. A float32 sum of r aligned directions of norm C is off by about r 2^-24 C, and
one unit more or less rounds it differently: at r = 65,536 that moved the sum by C (1 + 0.002). So
an engine sums at most :data:`MOST_SUMMED` units in float32 (:func:`portions`), and portions and
physical batches are added in float64. For 65,536 aligned directions one unit then moves the sum by
C (1 + ROUNDING) at most; measured: C (1 + 0.0002).

The mechanism clips through :class:`StepClipping`, the clipping of one step, which fixes the
sensitivity before a unit is seen and refuses factors that exceed it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbam import _validate
from dpbam.catalogue import CLIPPINGS
from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.own_code import OwnCode

MOST_SUMMED = 1024  # units that are added in float32
ROUNDING = 2.0**-11  # what float32 arithmetic may add to the sensitivity, relative to it
FACTOR_ROUNDING = 1e-6  # what factor times norm may exceed the sensitivity by, relative to it

VANISHING_NORM = 1e-18  # the squares of a float32 norm below it may add up to 0
LEAST_NORM = 1e-10  # of C, well above it
_LEAST_GAMMA = 1e-6  # relative to 1 and to C; a float32 norm of 1 is known to 1e-7


class Clipping(ABC):
    """Maps norms to factors. Noise is calibrated to its ``sensitivity``.

    Subclass it and write :attr:`sensitivity` and :meth:`scales` to make your own. The oracle checks
    at every step that no unit exceeds the sensitivity. Factors must not depend on other units.

    Guarantee: asked of a subclass: for every direction, ``scales`` and ``extra`` keep the norm of
    what a unit contributes within ``sensitivity``.

    Assumptions: a unit's factors and extra coordinates depend on that unit and on public values
    alone.

    Proof: :class:`StepClipping` refuses at every step what exceeds it.
    """

    coordinates: int = 0  # K, the extra coordinates per unit

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """The most that one unit can move the clipped sum, in Euclidean norm."""

    @abstractmethod
    def scales(self, norms: Tensor) -> Tensor:
        """Map finite norms [G, U] to factors [G, U]."""

    def at(self, step: int, phi: float = 1.0) -> StepClipping:
        """Return the clipping of one step, whose sensitivity is fixed before its units are seen.

        Args:
            step: its number, from 0.
            phi: the factor on C of the plan's clip schedule at this step.
        """
        return StepClipping(self, phi)

    def groups(self, names: Iterable[str]) -> dict[str, int]:
        """Return the clipping group of each parameter; by default one group for all."""
        return dict.fromkeys(names, 0)

    def factors(self, norms: Tensor) -> Tensor:
        """Map norms [G, U] to factors [G, U], 0 where a unit is not finite."""
        ordinary = torch.nan_to_num(norms, 0.0, 0.0, 0.0)
        finite = ordinary == norms  # [G, U]
        if norms.shape[0] > 1:
            finite = finite.all(dim=0, keepdim=True)  # a unit is finite in all groups, or dropped
            ordinary = ordinary * finite
        return self.scales(ordinary) * finite

    def extra(self, norms: Tensor, factors: Tensor) -> Tensor:
        """Return what each unit adds to the extra coordinates, [K, U], within the sensitivity.

        Units with a norm that is not finite are left out afterwards.
        """
        return norms.new_zeros(self.coordinates, norms.shape[1])

    def update(self, released: Tensor) -> None:  # noqa: B027
        """Adapt to the released extra coordinates [K]: (sum + noise) / l, so public."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return what :meth:`update` has changed, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Resume from :meth:`state_dict`."""


class StepClipping:
    """A clipping at one step: its factors, its sensitivity C_t = phi C, and the checks of both.

    With a clip schedule, phi is the schedule's factor: the clipping is applied to norms / phi, and
    its extra coordinates are multiplied by phi, so that a unit's part is at most phi C.

    Guarantee: for each unit i, over the groups g and the extra coordinates k,

        sqrt(sum_g (f_gi |d_gi|)^2 + sum_k e_ki^2) <= C_t (1 + 1e-6),

    every factor f finite and not negative, and 0 where a norm is not finite; and C_t is what it was
    before the units of the step were seen. Otherwise :meth:`verify` refuses the step. A norm below
    1e-18, which may have vanished in float32, counts as 1e-18.

    Assumptions: the engine's norms are right (tests compare engines); :meth:`verify` is called
    before the sum is released; a factor depends on its own unit alone. Of a clipping of the user's
    own the last is searched for mistakes (:mod:`dpbam.own_code`): it is computed again on other
    batches of the same units, and its attributes must be the same after the units as before. State
    that it keeps elsewhere, such as in a global, and passes over at the second call, is not seen.

    Proof: the inequality itself is evaluated in float64, on the norms and factors that are used.

    Args:
        clipping: maps norms to factors.
        phi: the clip schedule's factor on C at this step.

    Example:
        >>> step = StepClipping(FlatClipping(1.0), phi=2.0)
        >>> step.clip(torch.tensor([[0.5, 4.0]]))[0], step.sensitivity
        (tensor([[1.0000, 0.5000]]), 2.0)
        >>> step.verify()
    """

    # without a dict, so that an ``at`` of the user's own cannot put other checks in place of these
    __slots__ = ("_clipping", "_fixed", "_measured", "_own_code", "_phi", "coordinates")

    def __init__(self, clipping: Clipping, phi: float = 1.0) -> None:
        self._clipping, self._phi = clipping, float(phi)
        # C, read once, before any unit; in double precision, whatever a user's clipping has:
        # sigma C in half precision would be less than what is charged
        self._fixed = float(clipping.sensitivity)
        self.coordinates = clipping.coordinates
        self._measured: list[Tensor] = []  # [2] per physical batch, on the device
        self._own_code = OwnCode(clipping)

    @property
    def sensitivity(self) -> float:
        """C_t; infinite where nothing is clipped. Read-only: the noise is that of the checks."""
        return self._fixed * self._phi

    def clip(self, norms: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the factors [G, U] of norms [G, U], and the sum of the extra coordinates [K].

        The sum is None where the clipping has no extra coordinates; else in float64 (on MPS, which
        has no float64, in float32).
        """
        scaled = norms / self._phi if self._phi != 1 else norms
        factors, extra = self._compute(norms, scaled)
        self._measured.append(measure(self._clipping, scaled, factors, extra))
        for places in self._own_code.other_batches(norms):
            apart, extra_apart = self._compute(norms[:, places], scaled[:, places])
            self._own_code.compare(factors[:, places], apart, 0.0)
            if extra is not None:
                self._own_code.compare(extra[:, places], extra_apart, self._fixed)
        if extra is None:
            return factors, None
        return factors, self._phi * extra.to(widest_dtype(extra)).sum(1)

    def _compute(self, norms: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the factors [G, U] and the extra coordinates [K, U] of norms [G, U].

        ``scaled`` [G, U] are the norms divided by phi, which the clipping is given.
        """
        factors = self._clipping.factors(shield_norms(self._clipping, scaled))  # [G, U]
        if self._own_code.measured:  # it may use this memory again: what is measured is summed
            factors = factors.clone()
        if self._phi < 1:  # a norm below this one may be too small to be right: it is not raised
            factors = torch.where(norms < LEAST_NORM, factors.clamp(max=1.0), factors)
        if not self.coordinates:
            return factors, None
        finite = scaled.isfinite().all(dim=0)  # [U]; a unit that is not adds nothing
        extra = self._clipping.extra(torch.where(finite, scaled, 0.0), factors)
        return factors, torch.where(finite, extra, 0.0)

    def measured(self) -> Tensor:
        """Return what :meth:`verify` decides by, on the device: two numbers per physical batch."""
        return torch.cat(self._measured) if self._measured else torch.empty(0)

    def verify(self, measured: Sequence[float] | None = None) -> None:
        """Refuse the step if a unit exceeds C_t, or C follows the units.

        Once for all physical batches of a step, so that a GPU waits once: for ``measured``, which
        the caller may read together with other numbers; None reads it here.
        """
        numbers = self.measured().tolist() if measured is None else measured
        rows = list(zip(numbers[::2], numbers[1::2], strict=True))
        try:
            check_factors(self._clipping, self._fixed, rows)
            if self._clipping.sensitivity != self._fixed:
                raise PlanViolationError(
                    f"the sensitivity of {type(self._clipping).__name__} was {self._fixed:g} "
                    "before this step's units were clipped and is "
                    f"{self._clipping.sensitivity:g} after: a norm that follows the units without "
                    "noise reveals them; adapt it in update, to extra coordinates"
                )
            check_alone(self._clipping, self._own_code)
        except PlanViolationError:
            self._own_code.refuse()
            raise

    def abandon(self) -> None:
        """Refuse the clipping from now on if it has kept something of a step that failed."""
        self._own_code.abandon()

    def adapt(self, released: Tensor) -> None:
        """Give the clipping its extra coordinates [K] when they are released, divided by l."""
        self._clipping.update((released / self._phi).cpu())


def shield_norms(clipping: Clipping, norms: Tensor) -> Tensor:
    """Return norms that the clipping may write to: a copy, where its ``factors`` are its own.

    Guarantee: the norms that factors are checked against are the engine's.

    Assumptions: none.

    Proof: :meth:`Clipping.factors` writes to no norms, and any other gets a copy.
    """
    builtin = getattr(clipping.factors, "__func__", None) is Clipping.factors
    return norms if builtin else norms.clone()


def measure(
    clipping: Clipping, norms: Tensor, factors: Tensor, extra: Tensor | None = None
) -> Tensor:
    """Return what :func:`check_factors` decides by, on the device, without waiting for it: [2].

    The largest norm that a unit contributes, which is not finite where a factor, or the norm of a
    unit with another factor than 0, is not; and minus the least factor.

    Guarantee: none by itself; :func:`check_factors` decides by it.

    Assumptions: as for :class:`StepClipping`.

    Proof: that of :class:`StepClipping`; the maximum over physical batches loses no violation.

    Args:
        clipping: what computed the factors.
        norms: [G, U] of G clipping groups and U units. Not to be shared.
        factors: [G, U].
        extra: [K, U], the clipping's extra coordinates; None: it has none.
    """
    name = type(clipping).__name__
    if factors.shape != norms.shape:
        raise PlanViolationError(
            f"{name} returned factors of shape {tuple(factors.shape)} for norms of shape "
            f"{tuple(norms.shape)}: return one factor per group and unit"
        )
    dtype = widest_dtype(norms)
    lengths = norms.to(dtype).clamp(min=VANISHING_NORM)  # of a norm of 0 a factor may be too large
    precise = factors.to(dtype)
    joint = (lengths * precise).masked_fill_(precise == 0, 0.0)  # [G, U]
    if extra is not None:
        if extra.shape != (clipping.coordinates, norms.shape[1]):
            raise PlanViolationError(
                f"{name} returned extra coordinates of shape {tuple(extra.shape)}, not "
                f"({clipping.coordinates}, {norms.shape[1]}): return one row per coordinate"
            )
        joint = torch.cat([joint, extra.to(dtype)])  # [G + K, U]
    if not norms.shape[1]:
        return torch.zeros(2, dtype=dtype, device=norms.device)
    if joint.shape[0] > 1:  # one row that is below zero is seen by the least factor
        joint = torch.linalg.vector_norm(joint, dim=0, keepdim=True)
        precise = precise.amin(0, keepdim=True)
    return torch.cat([joint, -precise]).amax(1)  # NaN stays NaN


def check_factors(
    clipping: Clipping, sensitivity: float, measured: Sequence[Sequence[float]]
) -> None:
    """Refuse factors that let a unit move the sum by more than the sensitivity.

    Guarantee: that of :class:`StepClipping`; else nothing is charged or released.

    Assumptions: as there.

    Proof: as there.

    Args:
        clipping: what computed the factors.
        sensitivity: what a unit's part may be.
        measured: [2] numbers of :func:`measure` for each physical batch.

    Example:
        >>> flat, norms = FlatClipping(1.0), torch.tensor([[4.0]])
        >>> check_factors(flat, 1.0, [measure(flat, norms, torch.tensor([[0.25]])).tolist()])
        >>> check_factors(flat, 1.0, [measure(flat, norms, torch.tensor([[1.0]])).tolist()])
        Traceback (most recent call last):
        ...
        dpbam.errors.PlanViolationError: FlatClipping lets a unit through with norm 4, ...
    """
    name = type(clipping).__name__
    for largest, below_zero in measured:
        if not math.isfinite(largest) or not below_zero <= 0:
            raise PlanViolationError(
                f"{name} returned a factor that is negative, not finite, or not 0 for a norm that "
                "is not finite: a factor is a finite number from 0 on, and a unit with NaN or "
                "infinity in it contributes nothing"
            )
        if largest > sensitivity * (1 + FACTOR_ROUNDING):
            raise PlanViolationError(
                f"{name} lets a unit through with norm {largest:.6g}, above its sensitivity "
                f"{sensitivity:g}, to which the noise is calibrated: factor times norm, over all "
                "groups and extra coordinates together, must be at most the sensitivity"
            )


def check_alone(clipping: Clipping, code: OwnCode) -> None:
    """Refuse a clipping that lets a unit change the factors of others, now or in a later step.

    Guarantee: a clipping by the batch's largest, mean or median norm is refused, and so is one that
    keeps norms in its attributes: one unit would move the parts of all others, each by up to C.

    Assumptions: units that change one another do so in one of the batches that are compared, which
    is a search, and no proof (:mod:`dpbam.own_code`).

    Proof: factors and extra coordinates are computed again for the units of each physical batch in
    other batches; attributes are compared with those before the units were seen.
    """
    name = type(clipping).__name__
    if code.mixes():
        raise PlanViolationError(
            f"{name} returned other factors for a unit when other units were left out: a factor "
            "must depend on its own unit alone, or one unit moves the parts of all others; adapt "
            "to the batch in update, by extra coordinates"
        )
    if code.keeps():
        raise PlanViolationError(
            f"{name} keeps something of this step's units in an attribute, which a later step "
            "would read without noise: adapt it in update, to extra coordinates"
        )


def widest_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype of sums on the device of ``values``."""
    return torch.float32 if values.device.type == "mps" else torch.float64  # mps has no float64


def check_groups(groups: Mapping[str, int], names: list[str]) -> None:
    """Refuse clipping groups that are not 0 .. G - 1, with every trained parameter in one of them.

    Guarantee: every trained parameter is part of the norm that bounds it.

    Assumptions: the engine's norms have a row for each of the groups 0 .. G - 1.

    Proof: the groups are a partition of the names.
    """
    numbers = set(groups.values())
    if set(groups) != set(names) or numbers != set(range(len(numbers))):
        raise ArgumentError(
            "the clipping's groups must give each of the trained parameters one of the numbers "
            f"0 .. G - 1, and leave none of these numbers out; got {dict(groups)}"
        )


def check_coordinates(clipping: Clipping) -> None:
    """Refuse a clipping whose ``extra`` or ``update`` would never be called.

    Guarantee: a clipping that adapts by released coordinates has them, or is refused before a step.

    Assumptions: the number of coordinates is known when the oracle is made.

    Proof: the mechanism calls both where ``coordinates`` is positive, which is compared with what
    is overridden.
    """
    for hook in ("extra", "update"):
        function = getattr(getattr(clipping, hook), "__func__", None)
        if not clipping.coordinates and function is not getattr(Clipping, hook):
            raise ArgumentError(
                f"{type(clipping).__name__} overrides {hook} and has no extra coordinates, so that "
                "it would never be called: set coordinates to their number"
            )


def unclipped(norms: Tensor) -> Tensor:
    """Map norms [G, U] to factors that keep every finite unit as it is, and drop the others."""
    return FlatClipping(math.inf).factors(norms)


def portions(factors: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Split [G, U] factors into [G, U] factors of at most MOST_SUMMED units each, 0 elsewhere.

    Each comes with the slice of those units. Float64 factors are split, too: the engine adds in
    the dtype of the directions, which may be float32.

    Guarantee: at most MOST_SUMMED units are added in float32; the rest is added in float64.

    Assumptions: the engine adds what one call hands it in float32 or better.

    Proof: float32 addition of r terms is off by at most r 2^-24 of their sum (Higham 2002);
    measured in tests/claims/test_rounding_claims.py.
    """
    units = factors.shape[1]
    if units <= MOST_SUMMED:
        yield factors, slice(0, units)
        return
    for start in range(0, units, MOST_SUMMED):
        span = slice(start, min(start + MOST_SUMMED, units))
        portion = torch.zeros_like(factors)
        portion[:, span] = factors[:, span]
        yield portion, span


def bound_factors(norms: Tensor, bound: float) -> Tensor:
    """Return min(1, bound / norm), and 1 at norm 0.

    Guarantee: norm times factor is at most ``bound``, up to a relative 1e-6.

    Assumptions: norms are finite, in float32 or better.

    Proof: min(1, bound / |d|) |d| = min(|d|, bound).
    """
    if math.isinf(bound):
        return torch.ones_like(norms)
    return (norms / bound).clamp_(min=1.0).reciprocal_()


@dataclass(frozen=True)
class NormClipping(Clipping):
    """A clipping whose sensitivity is the constant C, ``clip_norm``; infinity clips nothing.

    Guarantee: asked of a subclass: no clipped direction is longer than C.

    Assumptions: as for every clipping.

    Proof: that of the subclass.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        check_norm(self.clip_norm)

    @property
    def sensitivity(self) -> float:
        return self.clip_norm


@dataclass(frozen=True)
class FlatClipping(NormClipping):
    """The paper's clipping: g / max(1, |g| / C) over all parameters together.

    Guarantee: the sum moves by at most C when a unit is added or removed.

    Assumptions: norms are over all trained parameters.

    Proof: |min(1, C / |d|) d| <= C.

    Example:
        >>> FlatClipping(1.0).factors(torch.tensor([[0.5, 4.0, float("nan")]]))
        tensor([[1.0000, 0.2500, 0.0000]])
    """

    def scales(self, norms: Tensor) -> Tensor:
        return bound_factors(norms, self.clip_norm)


@dataclass(frozen=True)
class AutomaticClipping(NormClipping):
    """Normalise instead of clipping: C g / (|g| + gamma), after Bu et al. 2023 (AUTO-S).

    Every unit is rescaled, so the step hardly depends on C; ``gamma`` keeps small gradients small.
    Not compared with the authors' code.

    A gamma below 1e-6 or below 1e-6 C is refused. In float32 it would round away: norm + gamma
    equals the norm from norms of 2^24 gamma on, so that a gradient of norm C would not come out
    below C. At norm 0 the factor C / gamma would be infinite, or would amplify a gradient whose
    norm float32 rounds to 0 beyond C.

    Guarantee: the sum moves by less than C.

    Assumptions: as for every clipping; gamma is not rounded away, which is checked.

    Proof: |d| C / (|d| + gamma) < C.

    Example:
        >>> AutomaticClipping(1.0, gamma=1.0).factors(torch.tensor([[0.0, 1.0, 3.0]]))
        tensor([[1.0000, 0.5000, 0.2500]])
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        check_norm(_validate.positive("clip_norm", self.clip_norm))
        least = _LEAST_GAMMA * max(1.0, self.clip_norm)
        if _validate.positive("gamma", self.gamma) < least:
            raise ArgumentError(
                f"gamma must be at least {least:g} for clip_norm {self.clip_norm:g}, got "
                f"{self.gamma!r}: a smaller one rounds away in float32; raise gamma, or lower "
                "clip_norm and raise the learning rate"
            )

    def scales(self, norms: Tensor) -> Tensor:
        return self.clip_norm / (norms + self.gamma)


@dataclass(frozen=True)
class PerLayerClipping(NormClipping):
    """Clip each of G layers to C / sqrt(G), so that together they stay within C.

    A layer is a module with parameters of its own: its weight and bias are clipped together.

    Guarantee: the sum moves by at most C.

    Assumptions: every trained parameter is in exactly one group.

    Proof: the squares of the G parts add up to at most G (C / sqrt(G))^2 = C^2.

    Example:
        >>> clipping = PerLayerClipping(1.0)
        >>> clipping.groups(["conv.weight", "conv.bias", "head.weight"])
        {'conv.weight': 0, 'conv.bias': 0, 'head.weight': 1}
        >>> clipping.factors(torch.tensor([[1.0], [0.1]]))  # each layer's share is 1/sqrt(2)
        tensor([[0.7071],
                [1.0000]])
    """

    def groups(self, names: Iterable[str]) -> dict[str, int]:
        layers: dict[str, int] = {}
        return {n: layers.setdefault(n.rpartition(".")[0], len(layers)) for n in names}

    def scales(self, norms: Tensor) -> Tensor:
        return bound_factors(norms, self.clip_norm / math.sqrt(norms.shape[0]))


def check_norm(clip_norm: float) -> None:
    """Refuse what is not positive; infinity means no clipping, for non-private plans."""
    if clip_norm != math.inf and _validate.positive("clip_norm", clip_norm) < LEAST_NORM:
        raise ArgumentError(
            f"clip_norm must be at least {LEAST_NORM:g}, got {clip_norm!r}: a norm so small can "
            "vanish in float32, and would not be clipped"
        )


def make_clipping(name: str, clip_norm: float) -> Clipping:
    """Return the clipping called ``name``; the user's own must be given as an object."""
    if ":" in name:
        raise ArgumentError(f"the plan's clipping {name} is the user's own: pass clipping=")
    clipping: Clipping = CLIPPINGS.load(name)(clip_norm)
    return clipping
