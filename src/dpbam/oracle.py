"""The private gradient oracle: the paper's Algorithm 1.

    per-unit direction -> clip to C -> sum -> noise once -> divide by the expected batch size

Everything private passes through :meth:`PrivateGradientOracle.backward`. It replaces
``loss.backward()`` in a training loop and works with every optimiser of ``torch.optim`` but LBFGS.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpbam import _validate
from dpbam.batches import LogicalBatch, Views
from dpbam.checks import (
    BatchSizes,
    GivenBatches,
    check_alike,
    check_ascent,
    check_before,
    check_deviations,
    check_factors,
    check_fixed,
    check_groups,
    check_interceptable,
    check_made,
    check_new,
    check_parts,
    check_resumed,
    check_step,
    check_unchanged,
    check_units,
    contributions,
)
from dpbam.compute import Computation, Compute
from dpbam.distributed import Ranks
from dpbam.engines import Engine, Loss
from dpbam.engines.memory import Fit
from dpbam.errors import ArgumentError
from dpbam.filters import Filter
from dpbam.loading import PoissonBatches
from dpbam.methods import DPSGD, History, Method, present
from dpbam.nn import check_model, check_trainable
from dpbam.observers import JointRelease, Observer, PerSample, StepFacts, each, watching
from dpbam.params import (
    Params,
    Snapshot,
    add_into,
    cast,
    device_of,
    digest,
    elementwise,
    joint_digest,
    shifted,
    sum_of_none,
    trainable,
    zeros,
)
from dpbam.privacy.clipping import LEAST_NORM, Clipping, portions
from dpbam.privacy.ledger import BEFORE, Ledger
from dpbam.privacy.noise import GaussianNoise, NoiseMechanism
from dpbam.privacy.plan import PrivacyPlan
from dpbam.privacy.randomness import Randomness, SecureRandomness
from dpbam.privacy.sampling import PoissonSampler
from dpbam.privacy.secure_noise import SecureGaussianNoise, make_noise

SAMPLINGS = ("poisson", "unchecked")
_EXTRA = "clipping/extra"  # in a sum; no parameter has a slash in its name
_NOISES = (GaussianNoise, SecureGaussianNoise)  # they keep neither sums nor what they return


@dataclass
class _Attempt:
    """A step on its way from the clipped sum to ``.grad``.

    Attributes:
        step: its number.
        size: the units of its batch, over all ranks.
        records: inputs and units, as they were handed over; None after an interruption.
        replays: whether the ledger had the step before.
        noise_std: of each entry of the gradient.
        charged: whether this attempt has charged it.
        published: the statistics that are released with the gradient.
        written: whether ``.grad`` holds its gradient.
    """

    step: int
    size: int
    records: tuple[Any, Tensor | None]
    replays: bool
    noise_std: float
    charged: bool = False
    published: Params = field(default_factory=dict)
    written: bool = False


class PrivateGradientOracle:
    """Writes private gradients into ``.grad``.

    The arguments come in four groups: what is computed (no mark), *privacy* (what is released, and
    how it is accounted for), *measurement*, and *speed*, which changes no result.

    Args:
        model: any module that runs on a batch of one and keeps no state. Parameters that do not
            require a gradient stay frozen and cost nothing.
        loss: (output, targets) -> one value per sample, for example
            ``torch.nn.CrossEntropyLoss(reduction="none")``.
        plan: the privacy plan; C, sigma, q and the expected batch size come from it.
        method: what a sample's direction is: DPSGD(), DPSAT(lam), BAM(lam), or your own.
        augment: (inputs, keys) -> inputs, a random augmentation of each row drawn from its key.
        augment_targets: the same for targets that move with the inputs (masks): equal keys are to
            draw equal changes.
        multiplicity: K, the number of augmented views per sample; their gradients are averaged
            within the sample before it is clipped.
        filter: maps the released gradient to the optimiser's gradient, at no cost
            (:mod:`dpbam.filters`); None: the method's own, or none.
        clipping: *privacy.* Overrides the plan's kind of clipping; its sensitivity must be C at the
            first step. Norms and extra coordinates are checked against it at every step.
        sampling: *privacy.* ``"poisson"`` refuses batch sizes that Poisson sampling cannot give.
            ``"unchecked"`` is for batches from elsewhere, such as fixed batches of a test: nothing
            is amplified, and each step is charged at q = 1. The ledger's epsilon then holds if one
            unit more or less changes nothing else in a batch; the plan's does not.
        noise: *privacy.* ``"standard"``, or ``"secure"``: from a cryptographic generator, exactly
            rounded to a grid (:mod:`dpbam.privacy.secure_noise`), and without a seed; or a
            :class:`~dpbam.privacy.noise.NoiseMechanism` of your own, charged as it states.
        seed: *privacy.* Reproducible noise and draws, for research only; None: system entropy.
        noise_seed: *privacy.* A seed for the noise alone, so that paired runs can share all other
            draws; None: as ``seed``.
        ledger: *privacy.* Where steps are recorded; None keeps a ledger in memory.
        statistics: *privacy.* Statistics of the batch that are released with noise next to each
            gradient, for example :class:`dpbam.bias.PrivateStatistics`. The plan must contain
            their noise multipliers.
        observer: *measurement.* Watches the steps without noise, for the operator only; for
            example :class:`dpbam.bias.BiasLens`.
        compute: *speed.* Engine, physical batch size and memory limit
            (:class:`~dpbam.compute.Compute`).
        ranks: *speed.* The processes that train together, each on its own units
            (:func:`dpbam.distributed.joined`); None: this process alone.

    Guarantee: for every method, each call of :meth:`backward` on a Poisson batch of the plan is one
    subsampled Gaussian mechanism with noise multiplier sigma, under adding or removing one unit,
    and is on the ledger before ``.grad`` is written. Inputs are checked against the plan before a
    step is charged (:mod:`dpbam.checks`).

    Assumptions: batches are drawn by ``batches``, or as Poisson samples of the plan's units; the
    random bits are unknown to the attacker; a method, clipping, noise or augmentation of the user's
    own lets no unit depend on another; times and sizes are not seen.

    Proof: docs/privacy.md, step by step: a unit's direction depends on it and on public values
    alone, the clip is the last thing before the sum, noise is added once; then Zhu, Dong, Wang 2022
    for the subsampled mechanism and its adaptive composition.

    ======================  =====================================================================
    edge case               result
    ======================  =====================================================================
    empty batch             a step of noise alone; it is counted
    NaN or infinite sample  replaced by zero as a whole
    numbers beyond 4e9      as NaN (1e77 in float64), since their products could overflow; except
                            infinity and the largest number, which are masks
    zero gradient           contributes zero; BAM does not perturb it
    float16 parameters      norms in float32, sums and noise in float64; ``.grad`` in the
                            parameter's dtype
    ======================  =====================================================================

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> plan = PrivacyPlan(n=100, batch_size=10, steps=1, noise_multiplier=1.0, delta=1e-3)
        >>> oracle = PrivateGradientOracle(model, nn.CrossEntropyLoss(reduction="none"), plan)
        >>> data = (torch.randn(100, 2), torch.zeros(100, dtype=torch.long))
        >>> for inputs, targets, units in oracle.batches(data):
        ...     oracle.backward(inputs, targets, units)
        >>> model.weight.grad.shape, oracle.step
        (torch.Size([2, 2]), 1)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        plan: PrivacyPlan,
        method: Method | None = None,
        *,
        augment: Callable[[Any, Tensor], Any] | None = None,
        augment_targets: Callable[[Any, Tensor], Any] | None = None,
        multiplicity: int = 1,
        filter: Filter | None = None,
        clipping: Clipping | None = None,
        sampling: str = "poisson",
        noise: str | NoiseMechanism = "standard",
        seed: int | None = None,
        noise_seed: int | None = None,
        ledger: Ledger | None = None,
        statistics: JointRelease | None = None,
        observer: Observer | None = None,
        compute: Compute | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if noise_seed is not None and seed is None:
            raise ArgumentError(
                "noise_seed needs a seed: without one all randomness comes from the system"
            )
        check_model(model)
        check_trainable(model)
        check_interceptable(model, loss)
        self.model, self.plan = model, plan
        self.method = DPSGD() if method is None else method
        self.clipping = plan.clipper() if clipping is None else clipping
        self.sampling = _validate.one_of("sampling", sampling, SAMPLINGS)
        self.randomness = Randomness(seed)
        own_seed = seed if noise_seed is None else noise_seed
        self.noise = make_noise(noise, own_seed) if isinstance(noise, str) else noise
        self.filter = self.method.filter() if filter is None else filter
        self.ledger = plan.ledger() if ledger is None else ledger
        self.statistics, self.observer, self.ranks = statistics, observer, ranks or Ranks()
        self.step = 0
        self.stream = self._new_stream()
        self.before = f"{self.stream}{BEFORE}"  # of the release that the plan has before step 0
        self._previous: Params | None = None  # DP-SAT's ascent direction: released, so public
        self._noise_std = 0.0
        self._attempt: _Attempt | None = None  # a step that was interrupted, until it is settled
        self._spare: Params | None = None  # memory for the next sum
        self._written: Snapshot | None = None  # the parameters when ``.grad`` was written
        self._warned = False
        self._present = self.method  # as it is at this step's history
        self._history: list[tuple[Params, Params]] = []  # released gradient, and theta there
        self._sizes = BatchSizes(plan)
        check_parts(plan, self.method, self.clipping, statistics, filtered=filter is not None)
        check_made(self.ranks, plan, noise=self.noise, clipping=self.clipping, method=self.method,
                   filter=self.filter)  # fmt: skip
        self._names = list(trainable(self.model))
        groups = self.clipping.groups(self._names)
        check_groups(groups, self._names)
        self._computation = Computation(
            compute or Compute(), model, loss, groups,
            Views(augment, multiplicity, augment_targets),
        )  # fmt: skip

    @property
    def engine(self) -> Engine:
        return self._computation.engine

    @property
    def views(self) -> Views:
        """The augmented views of each sample."""
        return self._computation.views

    @property
    def physical_batch_size(self) -> int | None:
        """The most rows computed at once; None until it is given or measured."""
        return self._computation.rows

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise in each entry of the latest gradient: public."""
        return self._noise_std

    def batches(
        self, dataset: Any, *, units: Any = None, num_workers: int = 0
    ) -> Iterator[tuple[Any, Any, Any]]:
        """Draw the Poisson batches of the steps that are left, as (inputs, targets, units).

        Plan, seed, security, the step to resume from and, with several ranks, the share of the
        units are the oracle's own.

        Args:
            dataset: a map-style data set of (input, target) pairs, a tuple of two tensors, or a
                :class:`dpbam.data.DataSet`; its size is the plan's n.
            units: the owner of each record, where the unit of privacy is not the record.
            num_workers: workers that read ahead, for data sets that read from disk.
        """
        drawn = PoissonBatches(
            self.plan, dataset, self.sampler(),
            units=units, num_workers=num_workers, share=self.ranks.share,
        )  # fmt: skip
        return iter(drawn)

    def sampler(self) -> PoissonSampler:
        """Return a DataLoader's ``batch_sampler`` that draws as :meth:`batches`, for all ranks."""
        self._settle()
        return self.plan.sampler(seed=self.randomness.seed, start=self.step, secure=self.secure)

    def backward(self, inputs: Any, targets: Any, units: Tensor | None = None) -> None:
        """Write the private gradient of one logical batch into ``.grad``. One step of the plan.

        Args:
            inputs: [N, ...] tensor, or a tuple (positional) or dict (keyword) of tensors.
            targets: [N, ...] likewise.
            units: [N] the unit of privacy of each row; None: every row is a unit of its own.

        Model, loss, method and clipping run before the step is charged: if they raise, or the
        observer does while it watches, nothing is charged, and the same batch may be handed over
        again. Once the step is charged it is taken. The clipping then adapts, the filter turns the
        released gradient into ``.grad``, the statistics are published, and the observer gets copies
        of the sums, in this order. If one of these raises, or Ctrl-C comes, the error has a note on
        what ``.grad`` holds: this step's gradient, or None; the next batch is the next step.

        Raises:
            dpbam.checks.PlanViolationError: what was handed over is not what the plan accounts for;
                nothing was charged.
        """
        self._settle()
        check_step(self.plan, self.step)
        if self.ranks.leads:  # who has the ledger
            check_before(self.plan, self.ledger, self.before)
        check_model(self.model)
        check_unchanged(self._names, trainable(self.model))
        self._warn_unmoved()
        check_units(self.plan, units, self.ranks)
        self._present = method = present(self.method, self._public_history())
        lam = self._lam_of(method)
        batch = LogicalBatch.of(inputs, targets, units, self.plan.max_records)
        watched, releasing = self.observer is not None, self.statistics is not None
        given = GivenBatches.of(self.ledger)
        again = self._drawn and given.has(inputs, units)
        replayed = self.ledger.entry(self.stream, self.step) is not None  # on the leader
        counted = batch.size, again, replayed, watched, releasing
        size, repeats, replays, *alike = map(int, self.ranks.sums(*counted))  # of all ranks
        check_new(0 if replays else repeats)  # a seeded replay has its own batch again
        check_alike(self.ranks, *alike)
        if self.plan.private and self.sampling == "poisson":
            self._sizes.check(size)
        batch = batch.keyed(self.randomness, self.step)
        if self.physical_batch_size is None and len(batch.ids):
            self._computation.fit_or_fall_back(inputs, targets, method, lam)
        ascent = method.ascent(lam, self._previous, lambda: self._for_ascent(batch))
        seen = watched or releasing
        facts = StepFacts(
            self.step, self.plan, method, lam,
            previous=_copied(self._previous) if seen and self._previous else None,
            sensitivity=self.clipping.sensitivity * self.plan.clip_factor_at(self.step),
            shift=None if ascent is None or not seen else _copied(ascent),
            whole=self.ranks.world == 1 and self._computation.is_whole(batch),
            zeros=lambda: zeros(trainable(self.model)),
            batch_gradient=lambda: self._batch_gradient(batch), ranks=self.ranks,
        )  # fmt: skip
        watchers = watching(facts, self.observer, self.statistics)
        with shifted(trainable(self.model), ascent):  # theta + ascent; theta again afterwards
            clipped = self._clipped_sum(batch, lam, watchers)  # sum_i clip(d_i)
        std = self.plan.noise_multiplier_at(self.step) * self._sensitivity()
        attempt = _Attempt(
            self.step, size, (inputs, units), bool(replays), std / self.plan.batch_size
        )
        self._attempt = attempt
        try:
            released = self._privatised(clipped)
            attempt.charged = True
            self._settle()
            self._hand_out(attempt, clipped, released, watched=self.observer in watchers)
            self._leave(clipped)
        except BaseException as error:
            self._explain(attempt, error)
            raise

    def _settle(self) -> None:
        """Count the latest attempt as a step if it was charged, also if it was interrupted then.

        Nothing of a step that was interrupted right after its charge has left the oracle, and its
        noise is not drawn again here. A state that is saved before the training continues does not
        count it: a run that resumes from there takes the step again, as after a crash.
        """
        attempt = self._attempt
        if attempt is None:
            return
        if self._is_charged(attempt):
            GivenBatches.of(self.ledger).add(*attempt.records)
            self._sizes.count(attempt.size)
            self._noise_std = attempt.noise_std
            self.step = attempt.step + 1  # last: an interrupt before it leaves the attempt open
        elif not self.noise.randomness.seeded:
            # a charge that failed may be on disk all the same: its name is not used again
            self.stream = self._new_stream()
        self._attempt = None

    def _is_charged(self, attempt: _Attempt) -> bool:
        """Whether the attempt has charged its step: the ledger knows, whatever interrupted it."""
        recorded = self.ledger.entry(self.stream, attempt.step) is not None
        return attempt.charged or (recorded and not attempt.replays)

    def _hand_out(
        self, attempt: _Attempt, clipped: Params, released: Params, *, watched: bool
    ) -> None:
        """Give what was released to those who use it, the user's own code last.

        The step is charged and counted: whatever raises here, the next one is possible.
        """
        extra = released.pop(_EXTRA, None)
        total = self.ranks.total(_without_extra(clipped)) if watched else {}
        self._remember(released)
        if extra is not None:
            factor = self.plan.clip_factor_at(attempt.step)
            self.clipping.update((extra / factor).cpu())
        self._write(released)
        attempt.written = True
        if self.statistics is not None:
            self.statistics.publish(attempt.published)
        if watched and self.observer:
            self.observer.finish(total, _copied(released))

    def _explain(self, attempt: _Attempt, error: BaseException) -> None:
        """Note on an error after the charge what became of the step."""
        if self.step == attempt.step and not self._is_charged(attempt):
            self._settle()
            return
        # by weak references: the oracle, and a file that it is pickled into, holds no record
        GivenBatches.of(self.ledger).add(*attempt.records)
        attempt.records = (None, None)
        if not attempt.written:
            for parameter in trainable(self.model).values():
                parameter.grad = None
        holds = "holds its private gradient" if attempt.written else "is None"
        error.add_note(
            f"step {attempt.step} is charged and counts as taken, and .grad {holds}: continue with "
            "the next batch, not with this one"
        )

    @property
    def _drawn(self) -> bool:
        """Whether each step needs a Poisson sample of its own."""
        return self.plan.private and self.sampling == "poisson" and self.plan.sampling_rate < 1

    def _clipped_sum(
        self, batch: LogicalBatch, lam: float, watchers: list[Observer | JointRelease]
    ) -> Params:
        """Return sum_i clip(d_i), and that of the extra coordinates, in float64.

        A clip schedule scales both by phi: with norms / phi, a unit's part is at most phi C.
        """
        summed: dict[str, Tensor] = dict(trainable(self.model))
        if self.clipping.coordinates:
            extra_sum = torch.zeros(self.clipping.coordinates, device=device_of(self.model))
            summed[_EXTRA] = extra_sum
        total = self._zeros(summed)
        wants_plain = self.observer in watchers and self.observer.wants_plain
        method, phi = self._present, self.plan.clip_factor_at(self.step)
        sensitivity, measured = self.clipping.sensitivity, list[Tensor]()
        for physical in self._computation.physical(batch):
            directions = self._computation.directions(physical, method, lam, plain=wants_plain)
            norms = directions.norms()  # [G, U]
            scaled = norms / phi if phi != 1 else norms
            factors = self.clipping.factors(scaled)  # [G, U]
            if phi < 1:  # a norm below this one may be too small to be right: it is not raised
                factors = torch.where(norms < LEAST_NORM, factors.clamp(max=1.0), factors)
            extra = self._extra(scaled, factors)
            measured.append(contributions(self.clipping, scaled, factors, extra))
            if extra is not None:
                total[_EXTRA] += phi * extra.to(total[_EXTRA].dtype).sum(1)
            for portion, span in portions(factors):
                add_into(total, directions.weighted_sum(portion, span))
            for watcher in watchers:  # copies: none changes what the next one sees
                watcher.observe(directions, norms.clone(), factors.clone())
        # once for all physical batches, so that a GPU waits once; a refusal discards the sums
        check_factors(self.clipping, measured)
        check_fixed(self.clipping, sensitivity)
        return total

    def _zeros(self, summed: dict[str, Tensor]) -> Params:
        """Return zeros to sum into: the memory that the step before left, if it did."""
        total, self._spare = self._spare, None
        alike = total is not None and all(
            n in total and total[n].shape == t.shape for n, t in summed.items()
        )
        if total is None or not alike or len(total) != len(summed):
            return sum_of_none(summed)
        return total

    def _leave(self, clipped: Params) -> None:
        """Leave the memory of a sum that is released to the next step, on a processor.

        New memory is mapped page by page, which takes as long as the noise of a large model. It is
        not used again where an observer, or a noise mechanism of the user's own, may still hold it.
        """
        here = all(t.device.type == "cpu" for t in clipped.values())
        if here and self.observer is None and type(self.noise) in _NOISES:
            # zeroed now, not when it is used: a copy of the oracle, or a file that it is pickled
            # into, would hold the sum without its noise
            torch._foreach_zero_(list(clipped.values()))
            self._spare = dict(clipped)

    def _extra(self, norms: Tensor, factors: Tensor) -> Tensor | None:
        """Return the clipping's extra coordinates [K, U]; 0 for a unit that is not finite."""
        if not self.clipping.coordinates:
            return None
        finite = norms.isfinite().all(dim=0)
        kept = torch.where(finite, norms, 0.0)
        return torch.where(finite, self.clipping.extra(kept, factors), 0.0)

    def unmoved(self) -> list[str]:
        """Return the trained parameters that nothing has changed since the last ``backward``.

        After ``optimizer.step()`` the list is empty, or the optimiser does not have them.

        Example:
            >>> import torch
            >>> model = nn.Linear(2, 2)
            >>> plan = PrivacyPlan(n=9, batch_size=3, steps=1, noise_multiplier=1.0, delta=1e-3)
            >>> oracle = PrivateGradientOracle(model, nn.CrossEntropyLoss(reduction="none"), plan)
            >>> optimizer = torch.optim.SGD([model.weight], lr=0.1)
            >>> oracle.backward(torch.randn(3, 2), torch.tensor([0, 1, 1]))
            >>> optimizer.step()
            >>> oracle.unmoved()
            ['bias']
        """
        return [] if self._written is None else self._written.unmoved(trainable(self.model))

    def _warn_unmoved(self) -> None:
        """Warn once if a step of the optimiser has moved some trained parameters, not others."""
        still = self.unmoved()
        if still and len(still) < len(self._names) and not self._warned:
            self._warned = True
            warnings.warn(
                f"{len(still)} of {len(self._names)} trained parameters did not move since the "
                f"last step, {still[0]} among them, though they got a private gradient: make the "
                "optimiser after the last change of the model, from "
                "[p for p in model.parameters() if p.requires_grad]",
                stacklevel=3,
            )

    def _theta(self) -> Params:
        return {n: p.detach() for n, p in trainable(self.model).items()}

    def lam(self) -> float:
        """Return lambda at the present step and parameters; public, as they are."""
        return self._lam_of(present(self.method, self._public_history()))

    def _lam_of(self, method: Method) -> float:
        lam = method.lam_at(self.step, self._theta())  # a schedule, or a method of the user's own
        return _validate.non_negative(f"lam of {method.name} at step {self.step}", lam)

    def _public_history(self) -> History:
        gradients, parameters = zip(*self._history, strict=True) if self._history else ((), ())
        return History(tuple(gradients), tuple(parameters), self._theta())

    def per_sample(self, inputs: Any, targets: Any, units: Tensor | None = None) -> PerSample:
        """Return each unit's direction and its norm as tensors: **not to be shared**.

        Nothing is clipped, noised, charged or written. Views and dropout are drawn as in the next
        step. It holds one gradient per unit in memory.

        Args:
            inputs: as of :meth:`backward`; any number of rows.
            targets: likewise.
            units: likewise.
        """
        batch = LogicalBatch.of(inputs, targets, units, self.plan.max_records)
        method = present(self.method, self._public_history())
        lam = self._lam_of(method)
        if self.physical_batch_size is None:
            self._computation.fit_or_fall_back(inputs, targets, method, lam)
        ascent = method.ascent(lam, self._previous, lambda: self._for_ascent(batch))
        with shifted(trainable(self.model), ascent):
            keyed = batch.keyed(self.randomness, self.step)
            found = [
                each(self._computation.directions(physical, method, lam))
                for physical in self._computation.physical(keyed)
            ]
        return PerSample.joined(found, torch.from_numpy(batch.counts.argsort(kind="stable")))

    def fit(self, inputs: Any, targets: Any) -> Fit:
        """Choose the physical batch size, if it was not given, so that a step stays in memory.

        Of the batch only shapes and types are read: the model is measured on rows without a record,
        numbers between 0 and 1 and whole numbers 0 or 1 (:mod:`dpbam.engines.synthetic`). The first
        batch does this by itself; the same model and limit give the same size on every machine.
        """
        return self._computation.fit(inputs, targets, self._present, self.lam())

    def try_model(self, inputs: Any, targets: Any) -> None:
        """Run the model on rows without a record, once, before other code gives it a batch.

        What a model fixes at its first use is then not taken from a record. :meth:`backward` does
        this by itself; call it if you evaluate training data before the first step.
        """
        if not self._computation.tried:
            self._computation.fit_or_fall_back(inputs, targets, self._present, self.lam())

    def _for_ascent(self, batch: LogicalBatch) -> Params:
        """Return g_hat for SAM's ascent; refuse it under a private plan."""
        check_ascent(self.plan, self.method)
        return self._batch_gradient(batch)

    def _batch_gradient(self, batch: LogicalBatch) -> Params:
        """Return g_hat over all ranks, neither clipped nor noised."""
        total = self.ranks.total(self._computation.plain_sum(batch))
        return {n: s / self.plan.batch_size for n, s in total.items()}

    def _privatised(self, clipped: Params) -> Params:
        """Return (sum_i clip(d_i) + N(0, (sigma_t C_t)^2 I)) / l, when the step is on the ledger.

        Each of several ranks adds the noise of its own coordinates, to the sum over all ranks. Only
        when the leader has charged the step are the parts put together.
        """
        std = self.plan.noise_multiplier_at(self.step) * self._sensitivity()  # sigma_t C_t
        noised = self._noised(clipped, std, "noise")  # once per logical batch
        own = elementwise(self._averaged, noised)
        del noised
        sums = {} if self.statistics is None else self.statistics.sums()
        if sums:
            check_deviations(self.ranks, {k: std for k, (_, std) in sums.items()})
        extra = {k: self._noised(*sums[k], f"statistics-{k}") for k in sums}
        replayed = self._replayed([own, *extra.values()])
        self.ranks.from_leader(lambda: self._charge(replayed))  # the others wait for it
        if self._attempt:
            self._attempt.charged = True  # also on the ranks without the ledger
            for k in sums:
                self._attempt.published |= self.ranks.gathered(extra[k], sums[k][0])
        return self.ranks.gathered(own, clipped)

    def _averaged(self, noised: Tensor) -> Tensor:
        """Divide by the expected batch size, never by the realised one."""
        if type(self.noise) in _NOISES and self.plan.noise_multiplier:
            return noised.div_(self.plan.batch_size)  # the mechanism's own memory, used once
        return noised / self.plan.batch_size

    def _noised(self, sums: Params, std: float, stream: str) -> Params:
        """Return this rank's part of the sum over all ranks + N(0, std^2 I)."""
        part, start = self.ranks.scattered(sums)
        return self.noise.add(part, std, self.step, stream=stream, start=start)

    def _replayed(self, parts: list[Params]) -> str | None:
        """Return a digest of what all ranks release, to recognise a seeded replay."""
        if not self.randomness.seeded:
            return None
        # numbered: a statistic's entry named as a parameter would take its place, and a step with
        # another gradient, under the same noise, would pass for a replay
        own = digest({f"{k}/{n}" if k else n: s for k, p in enumerate(parts) for n, s in p.items()})
        first, *others = self.ranks.collected(own)
        return joint_digest(first, *others) if others else first

    def _charge(self, replayed: str | None) -> None:
        self.ledger.charge(
            self.stream,
            self.step,
            noise_multiplier=self.noise.charged(self.plan.charged_at(self.step)),
            sampling_rate=1.0 if self.sampling == "unchecked" else self.plan.sampling_rate,
            unit=self.plan.unit,
            release=replayed,
        )

    def _remember(self, released: Params) -> None:
        """Keep what later steps of the method depend on."""
        if self.method.needs_previous:
            self._previous = _copied(released)
        if self.method.remembers:
            theta = _copied(self._theta())
            self._history = [*self._history, (_copied(released), theta)][-self.method.remembers :]

    def _write(self, released: Params) -> None:
        """Write into ``.grad`` what is on the ledger, filtered: of all parameters or of none."""
        parameters = trainable(self.model)
        for parameter in parameters.values():
            parameter.grad = None
        self._written = Snapshot(parameters)
        written = released if self.filter is None else self.filter.apply(_copied(released))
        gradients = cast(written, parameters)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the previous private gradient where the method uses it, and ``parts``.

        ``parts`` holds the tensors on which clipping, filter and method depend; all are public. So
        is ``before``, the ledger's name for the release that the plan has before the first step.
        """
        parts = {f"clipping/{k}": v for k, v in self.clipping.state_dict().items()}
        if self.filter is not None:
            parts |= {f"filter/{k}": v for k, v in self.filter.state_dict().items()}
        for k, (gradient, theta) in enumerate(self._history):
            parts |= {f"history/{k}/gradient/{n}": g for n, g in gradient.items()}
            parts |= {f"history/{k}/theta/{n}": t for n, t in theta.items()}
        state = {"step": self.step, "previous": self._previous, "parts": parts}
        return state if self.plan.released_before is None else state | {"before": self.before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`. Unseeded, steps done again are new releases.

        The ledger must have the steps of the state already: it was read from its file, or the
        entries of a checkpoint were merged into it.
        """
        step = _validate.count("the state's step", state["step"], least=0)
        if self.ranks.leads:  # who has the ledger
            check_resumed(self.plan, self.ledger, step)
        self.step, self._attempt = step, None
        self._previous, self._sizes = state["previous"], BatchSizes(self.plan)
        self._written = None
        parts = state.get("parts", {})
        if clipping := _below(parts, "clipping/"):
            self.clipping.load_state_dict(clipping)
        if self.filter is not None:
            self.filter.load_state_dict(_below(parts, "filter/"))
        pairs = [_below(parts, f"history/{k}/") for k in range(self.method.remembers)]
        self._history = [(_below(p, "gradient/"), _below(p, "theta/")) for p in pairs if p]
        self.stream = self._new_stream()
        self.before = state.get("before", self.before)

    @property
    def secure(self) -> bool:
        """Whether the noise is secure; then the Poisson draws should be, too."""
        return isinstance(self.noise.randomness, SecureRandomness)

    def _new_stream(self) -> str:
        """Name the noise on the ledger; unseeded noise never repeats, and nor does its name."""
        noise = self.noise.randomness
        return f"seed-{noise.seed}" if noise.seeded else secrets.token_hex(8)

    def _sensitivity(self) -> float:
        """C_t; without noise (a non-private plan) it may be infinite, and is not needed."""
        if not self.plan.noise_multiplier:
            return 0.0
        return self.clipping.sensitivity * self.plan.clip_factor_at(self.step)


def _copied(tree: Params) -> Params:
    """Copy what others get, so that they cannot change what the oracle uses."""
    return elementwise(torch.clone, tree)


def _without_extra(tree: Params) -> Params:
    return {name: t for name, t in tree.items() if name != _EXTRA}


def _below(parts: Mapping[str, Tensor], prefix: str) -> Params:
    return {k.removeprefix(prefix): v for k, v in parts.items() if k.startswith(prefix)}
