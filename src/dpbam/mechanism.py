"""The mechanism: everything private passes through :func:`release`, a step by :func:`private_step`.

    g_t = ( sum_i clip(d_i, C_t) + N(0, (sigma_t C_t)^2 I) ) / l        the paper's Algorithm 1

Guarantee: on a Poisson sample of rate q, one step is the subsampled Gaussian mechanism with noise
multiplier sigma_t under adding or removing one unit, and it is on the ledger before anything of it
leaves this module.

====  =====================  ======================================================================
line  quantity               why it is what the accountant composes
====  =====================  ======================================================================
1     sum_i clip(d_i, C_t)   a unit's direction depends on it and on public values alone, and its
                             part has norm C_t at most, or ``clipping.StepClipping`` refuses the
                             step: one unit moves the sum by at most C_t, up to rounding
2     + N(0, std^2 I)        std = sigma_t C_t, of public values alone, once per logical batch, in
                             each coordinate by exactly one rank
3     / l                    the expected batch size, which is public, never the realised one
4     charge                 by the leader, before the slices of the ranks are gathered; on disk, if
                             the ledger has a file (``plan.ledger(path)``)
====  =====================  ======================================================================

A unit also adds its extra coordinates, where the clipping has them, which are part of the same
vector of norm C_t, and its part of the statistics, each sum with its own sigma_k: all are
queries (:class:`~dpbam.privacy.noise.Query`), and the joint event is what the plan charges.

Of the user's code, model, loss, augmentation, method, clipping and statistics run inside the loop
of line 1, and observers there get copies of norms and factors; after the loop the method's state
and the sensitivities of clipping and statistics are read again. A noise of the user's own runs in
lines 2 and 4 (``charged``); after the charge nothing of the user's runs here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpbam.batches import LogicalBatch
from dpbam.compute import Runner
from dpbam.distributed import Ranks
from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.joint_release import StepStatistics
from dpbam.methods import Method
from dpbam.observers import Observation, Watch
from dpbam.own_code import MethodState
from dpbam.params import (
    Params,
    WeakTensors,
    add_into,
    digest,
    elementwise,
    joint_digest,
    overwrite,
    shifted,
    sum_of_none,
)
from dpbam.privacy.clipping import StepClipping, portions
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.noise import NoiseMechanism, Query
from dpbam.privacy.plan import PrivacyPlan
from dpbam.scratch import SumMemory, check_unwritten, keeps_nothing

_GRADIENT, _COORDINATES, _STATISTICS = "gradient", "coordinates", "statistics/"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How sums are released: which noise they get, and what is charged for them.

    Attributes:
        noise: adds the noise.
        ranks: the processes that have a part of the sums each.
        ledger: where the release is charged.
        stream: the name of the noise on the ledger.
        number: of the step; 0 for a release before the first.
        noise_multiplier: sigma of the joint event of all sums, as the plan has it.
        sampling_rate: q of the charge; 1 where all units, or batches of any kind, are used.
        unit: of privacy.
        seeded: whether the noise can be repeated, so that a replay has to be recognised.
        memory: what sums are accumulated in.
    """

    noise: NoiseMechanism
    ranks: Ranks
    ledger: Ledger
    stream: str
    number: int
    noise_multiplier: float
    sampling_rate: float
    unit: str
    seeded: bool
    memory: SumMemory


@dataclass
class Attempt:
    """What becomes of a step, on its way from the guard to ``.grad``. It holds no record.

    Attributes:
        number: of the step.
        size: the units of its batch, over all ranks.
        batch: weak references to the tensors that were handed over.
        replays: whether the ledger had the step before.
        noise_std: of each entry of the gradient.
        active: whether ``backward`` is still running.
        charged: whether this attempt has charged it.
        written: whether ``.grad`` holds its gradient.
    """

    number: int
    size: int
    batch: WeakTensors
    replays: bool
    noise_std: float
    active: bool = True
    charged: bool = False
    written: bool = False

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"active": False}  # of a copy, no step is running


@dataclass(frozen=True, kw_only=True)
class Step:
    """One admitted step: everything that :func:`private_step` uses.

    Attributes:
        plan: sigma_t and l.
        terms: the noise, and what is charged.
        batch: the logical batch: one Poisson sample of this rank's units.
        computation: the engine, and the physical batches that it is given.
        method: defines a unit's direction, as it is at this step.
        method_state: of the oracle's method: units must not change it.
        lam: its lambda at this step.
        theta: the trained parameters.
        constants: what else no pass may write to: frozen parameters, buffers, those of the loss.
        shift: what is added to theta for the whole batch (DP-SAT, DiSK): public; None: nothing.
        clipping: of this step, with its sensitivity C_t.
        statistics: of this step, which are released with the gradient; None: none.
        watch: observers.
        attempt: what becomes of the step.
        unshifted: theta, while it is shifted.
    """

    plan: PrivacyPlan
    terms: Terms
    batch: LogicalBatch
    computation: Runner
    method: Method
    method_state: MethodState
    lam: float
    theta: Mapping[str, nn.Parameter]
    constants: Sequence[Tensor]
    shift: Params | None
    clipping: StepClipping
    statistics: StepStatistics | None
    watch: Watch
    attempt: Attempt
    unshifted: Params = field(default_factory=dict)

    def abandon(self) -> None:
        """Restore theta after a step that failed; refuse user code that kept something of it."""
        overwrite(self.theta, self.unshifted)
        self.clipping.abandon()
        self.method_state.abandon()
        if self.statistics is not None:
            self.statistics.abandon()


@dataclass(frozen=True)
class Released:
    """What a step has made public: noised, and on the ledger.

    Attributes:
        gradient: by parameter, divided by l.
        coordinates: [K] the clipping's extra coordinates, divided by l; None: it has none.
        statistics: the sums of the joint release, by name.
    """

    gradient: Params
    coordinates: Tensor | None = None
    statistics: dict[str, Params] = field(default_factory=dict)


def private_step(step: Step) -> Released:
    """Clip, sum, noise, charge: Algorithm 1 on one logical batch.

    Guarantee: the result is the Gaussian mechanism of the module's first lines, and is on the
    ledger, on disk if that has a file; if anything raises before the charge, nothing was released
    or charged.

    Assumptions: the guard has admitted the step; the engine's handle is right.

    Proof: docs/mechanism.md, line by line.
    """
    queries = clipped_sums(step)  # sum_i clip(d_i, C_t), and what is released with it
    noised = release(queries, step.terms)  # once per batch; on the ledger on return
    step.attempt.charged = True  # also on the ranks without the ledger
    return gather(noised, queries, step.terms.ranks)


def release(queries: Mapping[str, Query], terms: Terms) -> dict[str, Params]:
    """Noise, then charge: return this rank's slices of the noised sums, by query.

    Guarantee: no sum leaves without noise, or before the release is on the ledger; what raises
    before the charge has released nothing.

    Assumptions: ``terms.noise_multiplier`` is that of the joint event: 1 / sigma^2 is the sum over
    the queries of (what one unit moves the sums by / std)^2 at most.

    Proof: the order of the lines.
    """
    check_noise(queries, terms)
    noised = {name: add_noise(query, terms) for name, query in queries.items()}
    terms.memory.clear(queries, noised, terms.noise)  # on a CPU no raw sum is left
    replay = identify(noised, terms)
    terms.ranks.from_leader(lambda: charge(terms, replay))  # the others wait for it
    terms.memory.keep(queries, terms.noise)
    return noised


def clipped_sums(step: Step) -> dict[str, Query]:
    """Return sum_i clip(d_i, C_t) over this rank's units, and the sums that are released with it.

    Float32 sums of at most ``MOST_SUMMED`` units are added in float64.

    Guarantee: one unit moves the gradient and the extra coordinates together by at most C_t, up to
    rounding (measured: 2e-4 C_t for 65,536 aligned units), and a statistic by its own bound.

    Assumptions: norms are those of the directions, and a unit is in one physical batch of one rank.

    Proof: ``StepClipping.verify`` refuses a unit with a larger part, before anything is returned,
    and ``StepStatistics.queries`` likewise.
    """
    clipping, plan, watch, statistics = step.clipping, step.plan, step.watch, step.statistics
    gradient = step.terms.memory.take(step.theta)
    device = next(iter(step.theta.values())).device
    empty = True  # whether no unit is in the sum yet
    coordinates: Params = {}
    if clipping.coordinates:
        coordinates = sum_of_none({"extra": torch.zeros(clipping.coordinates, device=device)})
    # theta + shift, which no pass may write to; theta again afterwards, in any case
    unwritten = step.terms.memory.fixed(step.theta, step.constants)
    with shifted(step.theta, step.shift, step.unshifted), unwritten as changed:
        for physical in step.computation.physical(step.batch):  # whole units, this rank's
            directions = step.computation.directions(
                physical, step.method, step.lam, plain=watch.wants_plain
            )  # d_1 .. d_U
            norms = directions.norms()  # [G, U]
            factors, extra = clipping.clip(norms)  # [G, U], [K]
            for portion, span in portions(factors):
                add_into(gradient, directions.weighted_sum(portion, span), first=empty)
                empty = False
            if extra is not None:
                coordinates["extra"] += extra
            if statistics is None and not watch.observers:
                continue
            # the unit's part is in the sum: what an observer does to its copies changes nothing
            batch = Observation(watch.next_ids(norms.shape[1]), norms, factors, directions)
            watch.observe(batch)
            if statistics is not None:
                statistics.add(batch)
        # a refusal discards the sums; what the device knows is read in one wait
        measured, was_written = read_together(clipping.measured(), changed())
        check_unwritten(was_written)
    # at theta again: a clipping that holds the model must find it as it was before the shift
    clipping.verify(measured)
    check_method_state(step)
    watch.copy_sum(gradient)
    # sigma_t C_t; a plan without noise may have no clip, so that C_t is infinite
    sigma = plan.noise_multiplier_at(step.attempt.number)
    std = sigma * clipping.sensitivity if sigma else 0.0
    queries = {_GRADIENT: Query(gradient, std, "noise", divisor=plan.batch_size)}
    if clipping.coordinates:
        start = sum(s.numel() for s in gradient.values())  # after the gradient's own coordinates
        queries[_COORDINATES] = Query(coordinates, std, "noise", start, plan.batch_size)
    if statistics is not None:
        of_statistics = statistics.queries()
        check_same_noise(step.terms.ranks, {n: query.std for n, query in of_statistics.items()})
        queries |= {_STATISTICS + name: query for name, query in of_statistics.items()}
    return queries


def add_noise(query: Query, terms: Terms) -> Params:
    """Return this rank's slice of (sum over all ranks + N(0, std^2 I)) / divisor.

    Guarantee: every coordinate gets noise of the full variance, from exactly one rank.

    Assumptions: the noise mechanism's own.

    Proof: the slices of the ranks are a partition of the coordinates.
    """
    sums, start = terms.ranks.scatter(query.sums)
    where = query.start + start
    if not keeps_nothing(terms.noise):
        noised = terms.noise.add(sums, query.std, terms.number, stream=query.stream, start=where)
        return elementwise(lambda s: s / query.divisor, noised)
    # the sums are used once: a processor writes over them
    noised = terms.noise.add(
        sums, query.std, terms.number, stream=query.stream, start=where, reuse=True
    )
    if query.divisor != 1 and noised:  # a rank may have no coordinate
        torch._foreach_div_(list(noised.values()), float(query.divisor))
    return noised


def identify(noised: Mapping[str, Params], terms: Terms) -> str | None:
    """Return a digest of what all ranks release, to recognise a seeded replay; else None."""
    if not terms.seeded:
        return None
    # numbered: a statistic's entry named as a parameter would take its place, and a step with
    # another gradient, under the same noise, would pass for a replay
    named = {
        f"{k}/{name}" if k else name: sums
        for k, query in enumerate(noised.values())
        for name, sums in query.items()
    }
    first, *others = terms.ranks.collect(digest(named))
    return joint_digest(first, *others) if others else first


def charge(terms: Terms, replay: str | None) -> None:
    """Write the release to the ledger; on return it is on disk, if the ledger has a file."""
    terms.ledger.charge(
        terms.stream,
        terms.number,
        noise_multiplier=terms.noise.charged(terms.noise_multiplier),
        sampling_rate=terms.sampling_rate,
        unit=terms.unit,
        release=replay,
    )


def gather(noised: Mapping[str, Params], queries: Mapping[str, Query], ranks: Ranks) -> Released:
    """Put the slices of all ranks together, once the step is on the ledger."""
    released = {name: ranks.gather(noised[name], queries[name].sums) for name in queries}
    gradient = released.pop(_GRADIENT)
    coordinates = released.pop(_COORDINATES, {}).get("extra")
    statistics = {name.removeprefix(_STATISTICS): sums for name, sums in released.items()}
    return Released(gradient, coordinates, statistics)


def check_noise(queries: Mapping[str, Query], terms: Terms) -> None:
    """Refuse sums that would get no noise, or noise that is not finite.

    Guarantee: nothing is released without noise.

    Assumptions: the noise mechanism's own.

    Proof: it is called for all sums of a private release, before any gets its noise.
    """
    for query in queries.values():
        if not 0 < query.std < math.inf:
            raise PlanViolationError(
                f"the noise of step {terms.number} has standard deviation {query.std:g}, which "
                "hides nothing: training without noise is PrivacyPlan.non_private(...)"
            )


def check_method_state(step: Step) -> None:
    """Refuse a method whose state is not what it was before the units of this step were seen.

    Guarantee: what a method keeps, and a checkpoint holds, are released and public values.

    Assumptions: the state is what ``state_dict`` returns; ``update`` gets what was released.

    Proof: its digest is compared before and after the units, before the step is charged.
    """
    if step.method_state.has_changed():
        raise PlanViolationError(
            f"the state of {step.method.name} changed while units were seen, and would be kept "
            "without noise: change it in update, which gets the released gradient"
        )


def read_together(numbers: Tensor, flag: Tensor) -> tuple[list[float], bool]:
    """Return numbers [K] and a scalar flag of the device, in one wait."""
    *values, last = torch.cat([numbers, flag.view(1)]).tolist()
    return values, bool(last)


def check_same_noise(ranks: Ranks, deviations: Mapping[str, float]) -> None:
    """Refuse statistics with other noise on some rank, such as that of a smaller bound.

    Guarantee: every slice of the statistics has the noise that rank 0 charges.

    Assumptions: their sigmas are the plan's, which is compared when the oracle is made.

    Proof: the deviations of each rank are compared with those of rank 0 at every step, before it is
    charged.
    """
    leaders, *others = ranks.collect(dict(deviations))
    for rank, other in enumerate(others, 1):
        if other != leaders:
            raise ArgumentError(
                f"rank {rank} adds noise of deviations {other} to the statistics, rank 0 of "
                f"{leaders}: make the statistics with the same options on every rank"
            )
