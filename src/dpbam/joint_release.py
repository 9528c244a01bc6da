"""Statistics of a batch that are released with noise, next to its gradient.

What each unit adds is summed here, not by the statistic, and is checked against the bound to which
the noise is calibrated, as a clipping's factors are. Gradient and sums are one Gaussian mechanism
on the concatenated, rescaled sums: with

    1 / sigma_joint^2 = 1 / sigma^2 + sum_k 1 / sigma_k^2

its noise multiplier is sigma_joint, and it is charged once, by the plan. Two charges, each with its
own Poisson sample, would be too low: the batch is the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor

from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.observers import Observation, StepFacts, UnitFacts, no_units
from dpbam.own_code import OwnCode, check_not_refused
from dpbam.params import Params, add_into, doubled
from dpbam.privacy.clipping import FACTOR_ROUNDING, VANISHING_NORM, portions, widest_dtype
from dpbam.privacy.noise import Query
from dpbam.privacy.plan import PrivacyPlan


@dataclass(frozen=True)
class Contributions:
    """What each unit of a physical batch adds to one sum: numbers, or a multiple of its direction.

    Attributes:
        values: [K, U] the numbers of each unit; None: multiples of directions.
        factors: [G, U] by which the directions are multiplied; None: numbers.
    """

    values: Tensor | None = None
    factors: Any = None

    def __post_init__(self) -> None:
        if (self.values is None) == (self.factors is None):
            raise ArgumentError("give contributions either values or factors, and not both")


class JointRelease(Protocol):
    """Says what each unit adds to which sums; they are released with the gradient of the batch.

    Example: the number of units, next to each gradient.
        >>> from dpbam import PrivacyPlan, PrivateGradientOracle
        >>> class Count:
        ...     noise_multipliers = (20.0,)
        ...     sensitivities = {"count": 1.0}
        ...     def begin(self, facts):
        ...         pass
        ...     def contributions(self, batch):
        ...         return {"count": Contributions(torch.ones(1, len(batch.ids)))}
        ...     def publish(self, released):
        ...         self.released = released["count"]["statistics/count"]
        >>> plan = PrivacyPlan(n=20, batch_size=5, steps=3, noise_multiplier=1.0, delta=1e-3,
        ...                    joint_noise_multipliers=Count.noise_multipliers)
        >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
        >>> oracle = PrivateGradientOracle(torch.nn.Linear(2, 2), loss, plan, statistics=Count())
        >>> data = (torch.randn(20, 2), torch.zeros(20).long())
        >>> oracle.backward(*next(oracle.batches(data)))
        >>> oracle.statistics.released.shape
        torch.Size([1])
    """

    noise_multipliers: tuple[float, ...]  # sigma_k of each sum, in the order of ``sensitivities``

    @property
    def sensitivities(self) -> Mapping[str, float]:
        """The most that one unit may add to each sum, by name, in Euclidean norm."""

    def begin(self, facts: StepFacts) -> None:
        """Receive the public facts of a step, before its units are seen; no ``batch_gradient``."""

    def contributions(self, batch: UnitFacts) -> Mapping[str, Contributions]:
        """Return what the units of a physical batch add to each sum, each by its own facts alone.

        The facts are ``ids``, ``norms``, ``factors``, ``losses()`` and ``layer_norms()``; there is
        no engine's handle, which an observer gets.
        """

    def publish(self, released: dict[str, Params]) -> None:
        """Receive the sums by name, of all ranks and noised, with the step on the ledger.

        A sum of numbers is ``released[name]["statistics/<name>"]``, [K]; of directions, there is an
        entry ``"statistics/<name>/<parameter>"`` for each parameter.
        """


class StepStatistics:
    """The sums of a joint release at one step, and the checks of what units add to them.

    Guarantee: a unit adds at most s_k, in Euclidean norm, to the k-th sum, and its noise is
    sigma_k s_k; s_k is what it was before the units of the step were seen. Otherwise
    :meth:`queries` refuses the step. No sum without noise outlives this object.

    Assumptions: the engine's norms are right; what a unit adds depends on that unit and on public
    values alone. Of a statistic of the user's own the last is searched for mistakes as of a
    clipping (:mod:`dpbam.own_code`): it is asked again in other batches of the same units, and its
    attributes must be the same afterwards.

    Proof: the norm of each unit's part, one column of what is summed, is evaluated in float64, with
    norms of which the statistic has a copy; the statistic never holds a sum.
    """

    def __init__(self, statistics: JointRelease, facts: StepFacts, groups: int) -> None:
        check_not_refused(statistics)
        statistics.begin(replace(facts.copy(), batch_gradient=_refuse_gradient))
        self._statistics, self._plan = statistics, facts.plan
        # read once, before any unit; as float, since sigma C in a type of the user's may be rounded
        self._bounds = {name: float(bound) for name, bound in statistics.sensitivities.items()}
        check_counted(facts.plan, self._bounds)
        zeros = facts.zeros()
        self._sums = {
            name: doubled({f"statistics/{name}/{n}": z for n, z in zeros.items()})
            if added.values is None
            else {f"statistics/{name}": _sum_units(added.values)}
            for name, added in self._ask(no_units(zeros, groups)).items()
        }
        self._exceeding: dict[str, list[Tensor]] = {name: [] for name in self._bounds}
        # after its ``begin``, which may set public attributes, and before any unit
        self._own_code = OwnCode(statistics)

    def add(self, batch: Observation) -> None:
        """Add what the units of one physical batch contribute."""
        units = batch.facts()
        parts = self._ask(units)
        for name, added in parts.items():
            if added.values is not None:
                self._measure(name, added.values)
                self._add(name, {f"statistics/{name}": _sum_units(added.values)})
                continue
            # a unit whose norm is not finite has no multiple but 0
            norms = torch.where(batch.norms.isfinite(), batch.norms, torch.inf)
            norms = norms.clamp(min=VANISHING_NORM)  # of 0 a factor may be too large
            self._measure(name, torch.where(added.factors == 0, 0.0, added.factors * norms))
            for portion, span in portions(added.factors):
                sums = batch.directions.weighted_sum(portion, span)
                self._add(name, {f"statistics/{name}/{n}": s for n, s in sums.items()})
        for places in self._own_code.other_batches(batch.norms):
            self._compare(parts, self._ask(units.select(places)), places)

    def _ask(self, units: UnitFacts) -> dict[str, Contributions]:
        # a copy: what a unit adds is measured by the engine's norms, whatever is written to these
        parts = dict(self._statistics.contributions(units.copy()))
        if list(parts) != list(self._bounds):
            raise PlanViolationError(
                f"the statistics have contributions to {list(parts)} and sensitivities for "
                f"{list(self._bounds)}: name the same sums in the same order"
            )
        for name, added in parts.items():
            _check_shape(name, added, units)
            if added.values is not None:  # it may use this memory again: what is measured is summed
                parts[name] = Contributions(added.values.clone())
        return parts

    def _measure(self, name: str, parts: Tensor) -> None:
        """Note, on the device, the length of a part that exceeds its bound, or 0: parts [K, U]."""
        lengths = parts.to(widest_dtype(parts)).norm(dim=0)
        within = lengths <= self._bounds[name] * (1 + FACTOR_ROUNDING)  # False for NaN
        self._exceeding[name].append(torch.where(within, 0.0, lengths).max())

    def _add(self, name: str, sums: Params) -> None:
        total = self._sums[name]
        if {n: s.shape for n, s in sums.items()} != {n: s.shape for n, s in total.items()}:
            raise PlanViolationError(
                f"the contributions to the sum {name!r} have another form than those of no units: "
                "return the same number of values per unit in every batch, [K, U]"
            )
        add_into(total, sums)

    def _compare(
        self,
        together: Mapping[str, Contributions],
        apart: Mapping[str, Contributions],
        places: Tensor,
    ) -> None:
        """Compare what units contribute in the physical batch and in one of those at ``places``."""
        for name, added in together.items():
            if added.values is not None:
                bound = self._bounds[name]
                self._own_code.compare(added.values[:, places], apart[name].values, bound)
            else:
                self._own_code.compare(added.factors[:, places], apart[name].factors, 0.0)

    def queries(self) -> dict[str, Query]:
        """Return the sums with the deviation of their noise, or refuse the step."""
        try:
            self._verify()
        except PlanViolationError:
            self._own_code.refuse()
            raise
        sigmas = self._plan.joint_noise_multipliers if self._plan.private else repeat(0.0)
        return {
            name: Query(self._sums[name], sigma * bound, f"statistics-{name}")
            for (name, bound), sigma in zip(self._bounds.items(), sigmas, strict=False)
        }

    def _verify(self) -> None:
        name = type(self._statistics).__name__
        for sum_name, measured in self._exceeding.items():
            largest = float(torch.stack(measured).max()) if measured else 0.0
            if largest != 0:  # NaN, too
                raise PlanViolationError(
                    f"{name} lets a unit add {largest:.6g} to the sum {sum_name!r}, above its "
                    f"sensitivity {self._bounds[sum_name]:g}, to which the noise is calibrated: "
                    "shorten what a unit adds"
                )
        if dict(self._statistics.sensitivities) != self._bounds:
            raise PlanViolationError(
                f"the sensitivities of {name} follow the units of the step: fix them before"
            )
        if self._own_code.mixes():
            raise PlanViolationError(
                f"what a unit adds to the statistics of {name} changes when other units are left "
                "out: it must depend on its own unit alone"
            )
        if self._own_code.keeps():
            raise PlanViolationError(
                f"{name} keeps something of this step's units in an attribute, which has no "
                "noise: return what a unit adds, and keep nothing"
            )

    def abandon(self) -> None:
        """Refuse the statistics from now on if they have kept something of a step that failed."""
        self._own_code.abandon()


def _refuse_gradient() -> Params:
    raise PlanViolationError(
        "a statistic asks for the batch gradient, which has no noise: return what each unit adds"
    )


def check_counted(plan: PrivacyPlan, sums: Collection[str]) -> None:
    """Refuse statistics of another number than the plan charges."""
    charged = len(plan.joint_noise_multipliers)
    if len(sums) != charged:
        raise PlanViolationError(
            f"the statistics release {len(sums)} sums and the plan charges {charged}: give "
            "noise_multipliers one entry for each of the sums"
        )


def _check_shape(name: str, added: Contributions, units: UnitFacts) -> None:
    """Refuse parts that are not one column per unit: of others the norm is not a unit's."""
    if added.values is not None:
        wanted, shape = (*added.values.shape[:1], len(units.ids)), added.values.shape
    else:
        wanted, shape = tuple(units.norms.shape), added.factors.shape
    if tuple(shape) != wanted:
        raise PlanViolationError(
            f"the contributions to the sum {name!r} have shape {tuple(shape)} for "
            f"{len(units.ids)} units: return values of shape [K, U], or factors of the shape of "
            "batch.norms"
        )


def _sum_units(values: Tensor) -> Tensor:
    """Sum [K, U] over the units, in float64 where the device has it: [K]."""
    return values.to(widest_dtype(values)).sum(1)
