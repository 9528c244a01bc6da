"""The guard: what is refused before a step is charged.

The accountant composes T steps, each on a Poisson sample of rate q, each clipped to C. Batches and
clipping may be the user's own, so both are checked at every step. A check lives with the object
that it checks; :meth:`Guard.admit` calls all of them, and none can be left out:

=========  =====================================================================================
of         is refused
=========  =====================================================================================
the step   one beyond the plan's T (``PrivacyPlan.check_step``), or before a release that the plan
           has before it is on the ledger (``check_before``)
the model  layers that mix samples (``nn.check_model``), and other trained parameters than those
           that the oracle was made for (:func:`check_unchanged`)
the clip   a step's clipping that does not check its own factors (:func:`check_step_clipping`)
the rows   rows without owners, units of another rank (:func:`check_units`), a unit with too many
           rows (``LogicalBatch.of``)
the batch  batches from elsewhere that are not declared (:func:`check_source`), a batch that was
           part of a step before (:class:`UsedBatches`), sizes that Poisson sampling cannot give
           (``sampling.BatchSizes``)
the ranks  those at another step, or with another C_t or noise (:func:`check_same_step`), with
           other observers or statistics (:func:`check_same_watchers`)
=========  =====================================================================================

The clipping is checked on the units themselves, by ``clipping.StepClipping.verify``, before their
sum is released. What an oracle is made of is checked once, by :mod:`dpbam.assembly`.

A check refuses what cannot be right, and proves nothing else: batches of plausible sizes may still
be drawn wrongly. :meth:`dpbam.oracle.PrivateGradientOracle.batches` draws correctly.

Whether a check refuses depends on the data without noise; the exception is for the operator only.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dpbam.batches import LogicalBatch
from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.nn import check_model
from dpbam.params import WeakTensors, trained_and_constant, version_of
from dpbam.privacy.accounting import total_epsilon
from dpbam.privacy.clipping import Clipping, StepClipping
from dpbam.privacy.ledger import BEFORE, Ledger
from dpbam.privacy.plan import PrivacyPlan
from dpbam.privacy.rounding import up
from dpbam.privacy.sampling import BatchSizes

if TYPE_CHECKING:
    from dpbam.distributed import Ranks
    from dpbam.oracle import PrivateGradientOracle

SAMPLINGS = ("poisson", "poisson-elsewhere", "unchecked")


@dataclass(frozen=True)
class Admitted:
    """A logical batch that the plan accounts for.

    Attributes:
        batch: its rows, ordered by unit.
        size: the units of all ranks. Not to be shared.
        theta: the trained parameters.
        constants: what else no pass may write to: frozen parameters, buffers, those of the loss.
        clipping: of the step.
        replays: whether the ledger has the step already, from a seeded run.
        tensors: what was handed over, by weak references.
    """

    batch: LogicalBatch
    size: int
    theta: dict[str, nn.Parameter]
    constants: list[Tensor]
    clipping: StepClipping
    replays: bool
    tensors: WeakTensors


class Guard:
    """Admits the steps of one oracle, or refuses them.

    Guarantee: what is refused charges nothing, and nothing of it is released.

    Assumptions: every batch passes through :meth:`admit`, which ``backward`` calls first.

    Proof: it is called before the mechanism, and raises.
    """

    def __init__(self, plan: PrivacyPlan, names: list[str]) -> None:
        self._names, self._sizes = names, BatchSizes(plan.n, plan.batch_size)
        self.step_runs = False  # set while ``backward`` runs
        self.knows_ledger = False  # whether its earlier steps were looked at

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"step_runs": False}  # of a copy, no step is running

    def check_no_step_runs(self) -> None:
        """Refuse a step inside another: it would sum into memory that is still handed out.

        Guarantee: what a step hands out is what it has released.

        Assumptions: one thread at a time uses the oracle; of two, the later is refused as well,
        unless both begin at the same instant.

        Proof: ``backward`` calls it first, and marks the step for as long as it runs.
        """
        if self.step_runs:
            raise PlanViolationError(
                "backward was called while a step of this oracle runs, by its method, filter, "
                "clipping or an observer, or in another thread: call it from the training loop"
            )

    def admit(
        self, oracle: PrivateGradientOracle, inputs: Any, targets: Any, units: Tensor | None
    ) -> Admitted:
        """Return the batch of the next step, or refuse it."""
        # the oracle's own values, as they are charged: a copy here could disagree with them
        plan, ranks, tensors = oracle.plan, oracle.ranks, WeakTensors(inputs, units)
        plan.check_step(oracle.step)
        if ranks.leads:  # it has the ledger
            plan.check_before(oracle.ledger, oracle.before)
            if not self.knows_ledger:
                warn_of_earlier_steps(oracle)
        self.knows_ledger = True

        # the model may have been changed since the oracle was made
        theta, constants = trained_and_constant(oracle.model, oracle.loss)
        check_model(oracle.model)
        check_unchanged(self._names, theta)

        clipping = oracle.clipping.at(oracle.step, plan.clip_factor_at(oracle.step))
        check_step_clipping(oracle.clipping, clipping)

        check_units(plan, units, ranks)
        batch = LogicalBatch.of(inputs, targets, units, plan.max_records)

        # a new Poisson sample of the plan, over all ranks
        poisson = plan.private and oracle.sampling != "unchecked"
        if poisson:
            check_source(oracle)
        amplified = poisson and plan.sampling_rate < 1
        used = amplified and UsedBatches.of(oracle.ledger).has(inputs, units)
        replays = oracle.ledger.entry(oracle.stream, oracle.step) is not None  # on the leader
        # one message for counts and digits, so that ranks wait for one another once
        digits: list[int] = []
        if ranks.world > 1:
            sigma = plan.noise_multiplier_at(oracle.step)
            digits = digits_of(oracle.step, sigma, clipping.sensitivity)
        counts = batch.size, used, replays, len(oracle.observers), oracle.statistics is not None
        size, repeats, replayed, observers, releases, *sums = map(int, ranks.sums(*counts, *digits))
        check_same_step(ranks, oracle.step, clipping.sensitivity, sums)
        check_new(0 if replayed else repeats)  # a seeded replay has its own batch again
        check_same_watchers(ranks, len(oracle.observers), observers, releases)
        if poisson:
            self._sizes.check(size)
        return Admitted(batch, size, theta, constants, clipping, bool(replayed), tensors)

    def count(self, ledger: Ledger, size: int, tensors: WeakTensors) -> None:
        """Record the batch of a step that is taken."""
        self.recognise(ledger, tensors)
        self._sizes.count(size)

    def recognise(self, ledger: Ledger, tensors: WeakTensors) -> None:
        """Refuse these tensors from now on, in any step on the ledger."""
        UsedBatches.of(ledger).add(tensors)

    def resume(self, oracle: PrivateGradientOracle, step: int) -> None:
        """Refuse a state whose steps are not on the ledger, and begin new runs of sizes."""
        if oracle.ranks.leads:  # it has the ledger
            oracle.plan.check_resumed(oracle.ledger, step)
        self.knows_ledger = True
        self._sizes = BatchSizes(oracle.plan.n, oracle.plan.batch_size)


class UsedBatches:
    """Refuses a batch that ``backward`` was given before. One object per ledger.

    A plan accounts for a new Poisson sample per step. An optimiser that evaluates its closure
    several times per step, such as LBFGS, or several oracles with one ledger could be given the
    same sample again, which costs more: k releases of one sample are one at sigma / sqrt(k).

    Guarantee: the tensors of a released step, the same objects and not changed in place since, are
    refused in another step: all of the inputs together, or units alone.

    Assumptions: copies and views of a whole batch are not recognised; drawing a new one for each
    step is the caller's duty. At q = 1 every batch is the whole data set, and may be the same.

    Proof: identity of the tensors, by weak references, and torch's count of in-place changes.
    """

    def __init__(self) -> None:
        self._versions: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> its version

    @classmethod
    def of(cls, ledger: Ledger) -> UsedBatches:
        """Return the object of a ledger; several ledgers on one file are one."""
        if ledger.path is not None:
            return _USED_BY_FILE.setdefault(ledger.path.resolve(), cls())
        return _USED.get(ledger) or _USED.setdefault(ledger, cls())

    def has(self, inputs: object, units: Tensor | None) -> bool:
        """Whether a step was given these records, or these owners, as the same tensors."""
        return self._knows(inputs) or self._knows(units)

    def add(self, tensors: WeakTensors) -> None:
        for tensor in tensors.alive():
            self._versions[tensor] = version_of(tensor)

    def _knows(self, batch: object) -> bool:
        tensors, known = WeakTensors(batch).alive(), self._versions
        return bool(tensors) and all(t in known and known[t] == version_of(t) for t in tensors)


_USED: WeakKeyDictionary[Ledger, UsedBatches] = WeakKeyDictionary()
_USED_BY_FILE: dict[Path, UsedBatches] = {}  # of weak references alone: a name per ledger file


def check_new(repeats: int) -> None:
    """Refuse a batch that was given before, on this rank or another.

    Guarantee: no charge is made for a sample that a step with the same ledger has used.

    Assumptions: those of :class:`UsedBatches`, whose findings on all ranks are added up.

    Proof: it is called before the step is charged.
    """
    if repeats:
        raise PlanViolationError(
            "this batch was part of a step before, and the plan accounts for a new Poisson sample "
            "per step: call backward once per batch; an optimiser that evaluates its closure "
            "several times per step, such as LBFGS, cannot be used (if these tensors were filled "
            "anew through numpy or .data, pass clones)"
        )


def check_unchanged(names: list[str], parameters: Iterable[str]) -> None:
    """Refuse a model whose trainable parameters are not ``names`` any more."""
    if list(parameters) != names:
        raise ArgumentError(
            "the model's trainable parameters are not those that the oracle was made for: "
            "make a new oracle after freezing or unfreezing, with the same ledger"
        )


def warn_of_earlier_steps(oracle: PrivateGradientOracle) -> None:
    """Warn of a ledger file that has steps of another training: its epsilon counts them, too.

    Guarantee: none; the ledger's epsilon is right without it, and above the plan's.

    Assumptions: a training that continues another one loads its state, and is not warned.

    Proof: entries under other names than the oracle's own are counted.
    """
    plan, ledger = oracle.plan, oracle.ledger
    if not plan.private or ledger.path is None:
        return
    earlier = [entry for entry in ledger.entries() if entry["stream"] != oracle.stream]
    count = sum(not entry["stream"].endswith(BEFORE) for entry in earlier)
    if count:
        spent = [*ledger.charges(), *plan.charges(plan.steps)]
        total = total_epsilon(spent, ledger.delta, accountant=ledger.accountant)
        warnings.warn(
            f"the ledger {ledger.path} has {count} steps of an earlier training: its epsilon will "
            f"end at {up(total)}, where this plan alone costs {up(plan.epsilon())}; give a "
            "new training a new file, and to continue the earlier one load its state",
            stacklevel=5,
        )


def check_source(oracle: PrivateGradientOracle) -> None:
    """Refuse batches from elsewhere, such as a shuffled loader's, unless they are declared.

    Guarantee: at the first step, no batch is charged as a Poisson sample of an oracle that has not
    drawn any.

    Assumptions: an oracle that has drawn a batch is given what was drawn; sizes are checked
    besides.

    Proof: it is called before the first charge, and the oracle's samplers record that they drew.
    """
    if oracle.sampling == "poisson" and oracle.plan.sampling_rate < 1 and not oracle.draws:
        raise PlanViolationError(
            "this oracle has drawn no batch, and a loader's batches are not the Poisson samples "
            "that the plan accounts for: draw with oracle.batches(dataset), or a DataLoader with "
            "batch_sampler=oracle.sampler(); for Poisson samples from elsewhere make the oracle "
            "with sampling='poisson-elsewhere', and for other batches with sampling='unchecked', "
            "which charges each step without amplification by sampling"
        )


def check_units(plan: PrivacyPlan, units: Tensor | None, ranks: Ranks) -> None:
    """Refuse rows without units where the unit is not the record, and units of another rank.

    Guarantee: a unit's rows are on one rank, and are counted as one unit.

    Assumptions: owners are named rightly.

    Proof: ``UnitShare``'s shares are a partition of the units.
    """
    if units is None and plan.unit != "record":
        raise ArgumentError(
            f"the plan's unit is the {plan.unit}: pass units, the {plan.unit} of each row, or "
            "every row would count as one"
        )
    if ranks.world == 1:
        return
    if units is None or not ranks.share.owns(torch.as_tensor(units).cpu().numpy()).all():
        raise ArgumentError(
            f"rank {ranks.rank} of {ranks.world} takes its own units only, or one could count "
            "twice: draw with oracle.batches(dataset), and pass its units"
        )


def check_step_clipping(clipping: Clipping, step_clipping: object) -> None:
    """Refuse a clipping of a step that does not check its own factors.

    Guarantee: every step's factors are checked against the sensitivity that its noise has.

    Assumptions: none.

    Proof: it is a :class:`~dpbam.privacy.clipping.StepClipping` and no class derived from it.
    """
    if type(step_clipping) is not StepClipping:
        raise ArgumentError(
            f"{type(clipping).__name__}.at returned a {type(step_clipping).__name__}, whose "
            "factors are not checked: return the at(step, phi) of a clipping, such as "
            "FlatClipping(norm).at(step, phi)"
        )


def digits_of(*values: float) -> list[int]:
    """Return digits of a digest of the values, then the digits' squares, to be added over ranks.

    The values are the same on all W ranks where, for each digit, W times the sum of the squares is
    the square of the sum. Digits are below 2^16, so that the sums are exact in float64 for a
    thousand ranks.
    """
    message = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    digits = [int.from_bytes(message[k : k + 2], "big") for k in range(0, len(message), 2)]
    return [*digits, *(digit**2 for digit in digits)]


def check_same_step(ranks: Ranks, step: int, sensitivity: float, sums: list[int]) -> None:
    """Refuse ranks at different steps, or with another sensitivity or noise multiplier.

    Guarantee: at every step all ranks clip to the same C_t, and each slice of the sum has noise of
    the same deviation.

    Assumptions: other values have another digest of 64 bits.

    Proof: :func:`digits_of`; every rank decides by the same sums, before a unit is seen.

    Example:
        >>> from dpbam.distributed import Ranks
        >>> one, other = digits_of(5, 1.0), digits_of(6, 1.0)
        >>> check_same_step(Ranks(), 5, 1.0, one)
        >>> two = Ranks()
        >>> two.world = 2
        >>> check_same_step(two, 5, 1.0, [a + b for a, b in zip(one, other)])
        Traceback (most recent call last):
        ...
        dpbam.errors.ArgumentError: the ranks are not at the same step, or do not clip to the ...
    """
    half = len(sums) // 2
    for total, of_squares in zip(sums[:half], sums[half:], strict=True):
        if ranks.world * of_squares != total**2:
            raise ArgumentError(
                "the ranks are not at the same step, or do not clip to the same norm with the same "
                f"noise (rank {ranks.rank}: step {step}, norm {sensitivity:g}): resume all of them "
                "from the same state, and make their oracles with the same options"
            )


def check_same_watchers(ranks: Ranks, here: int, observers: int, releases: int) -> None:
    """Refuse observers, or statistics, that only some of the ranks have."""
    if observers != here * ranks.world or releases not in (0, ranks.world):
        raise ArgumentError(
            f"{ranks.world} ranks have {observers} observers and {releases} statistics together: "
            "make the oracle with the same ones on every rank"
        )
