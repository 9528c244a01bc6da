"""The private gradient oracle: the training loop's handle on the mechanism.

    admit (:mod:`dpbam.guard`) -> clip, sum, noise, charge (:mod:`dpbam.mechanism`) -> ``.grad``

It replaces ``loss.backward()`` in a training loop and works with every optimiser of ``torch.optim``
but LBFGS.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from dpbam import _validate
from dpbam.assembly import check_instance, check_oracle, check_parts
from dpbam.batches import LogicalBatch, Views
from dpbam.compute import Compute, Runner
from dpbam.distributed import Ranks
from dpbam.engines import Engine, Loss
from dpbam.engines.interruption import switched_back
from dpbam.engines.memory import Fit
from dpbam.errors import ArgumentError
from dpbam.filters import Filter
from dpbam.guard import SAMPLINGS, Admitted, Guard
from dpbam.inspection import Movement, PerSample
from dpbam.joint_release import JointRelease, StepStatistics
from dpbam.loading import PoissonBatches
from dpbam.mechanism import Attempt, Released, Step, Terms, private_step, release
from dpbam.methods import DPSGD, History, Method, check_needs, overrides
from dpbam.observers import Observer, StepFacts, Watch
from dpbam.own_code import MethodState, call_hook, has_own_code
from dpbam.params import Params, cast, copied, shifted, trainable, zeros
from dpbam.privacy.clipping import Clipping
from dpbam.privacy.ledger import BEFORE, Ledger
from dpbam.privacy.noise import NoiseMechanism, Query
from dpbam.privacy.plan import PrivacyPlan
from dpbam.privacy.randomness import Randomness, SecureRandomness
from dpbam.privacy.sampling import PoissonSampler
from dpbam.privacy.secure_noise import make_noise
from dpbam.reference import reference_step
from dpbam.scratch import SumMemory, check_unwritten


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
        sampling: *privacy.* ``"poisson"``: batches are drawn by :meth:`batches` or
            :meth:`sampler`; sizes that Poisson sampling cannot give are refused.
            ``"poisson-elsewhere"``: you draw Poisson samples of the plan by other means.
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
        observers: *measurement.* One or several that watch the steps without noise, for the
            operator only; for example :class:`dpbam.bias.BiasLens`.
        compute: *speed.* Engine, physical batch size and memory limit
            (:class:`~dpbam.compute.Compute`).
        ranks: *speed.* The processes that train together, each on its own units
            (:func:`dpbam.distributed.joined`); None: this process alone.

    Guarantee: for every method, each call of :meth:`backward` on a Poisson batch of the plan is one
    subsampled Gaussian mechanism with noise multiplier sigma, under adding or removing one unit,
    and is on the ledger before ``.grad`` is written. Inputs are checked against the plan before a
    step is charged (:mod:`dpbam.guard`).

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
        observers: Observer | Sequence[Observer] = (),
        compute: Compute | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if noise_seed is not None and seed is None:
            raise ArgumentError(
                "noise_seed needs a seed: without one all randomness comes from the system"
            )
        self.model, self.loss, self.plan = model, loss, plan
        self.method = DPSGD() if method is None else method
        for name, component, base in (("method", method, Method), ("clipping", clipping, Clipping),
                                  ("filter", filter, Filter)):  # fmt: skip
            check_instance(name, component, base)
        self.clipping = plan.clipper() if clipping is None else clipping
        self.sampling = _validate.one_of("sampling", sampling, SAMPLINGS)
        self.randomness = Randomness(seed)
        self.noise = (
            noise
            if not isinstance(noise, str)
            else make_noise(noise, seed if noise_seed is None else noise_seed)
        )
        self.filter = self.method.filter() if filter is None else filter
        self.ledger = plan.ledger() if ledger is None else ledger
        self.observers = tuple(observers) if isinstance(observers, Sequence) else (observers,)
        self.statistics, self.ranks = statistics, ranks or Ranks()
        check_oracle(self, loss, filtered=filter is not None)
        self.step = 0
        self._samplers: list[PoissonSampler] = []  # of which batches may be drawn
        self._own_method = has_own_code(self.method)
        self.stream = self._new_stream()
        self.before = f"{self.stream}{BEFORE}"  # of the release that the plan has before step 0
        names = list(trainable(model))
        self._guard = Guard(plan, names)
        self._memory = SumMemory()
        self._releases: list[tuple[Params, Params]] = []  # released gradient, and theta there
        self._noise_std = 0.0
        self._attempt: Attempt | None = None  # a step that was interrupted, until it is settled
        self._movement = Movement()
        groups = self.clipping.groups(names)
        self._groups = len(set(groups.values()))
        views = Views(augment, multiplicity, augment_targets)
        self._computation = Runner(compute or Compute(), model, loss, groups, views)

    @property
    def engine(self) -> Engine:
        return self._computation

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

    @property
    def secure(self) -> bool:
        """Whether the noise is secure; then the Poisson draws should be, too."""
        return isinstance(self.noise.randomness, SecureRandomness)

    @property
    def draws(self) -> bool:
        """Whether a batch was drawn by a sampler of this oracle."""
        return any(sampler.has_drawn for sampler in self._samplers)

    def batches(self, dataset: Any, *, units: Any = None, num_workers: int = 0) -> PoissonBatches:
        """Draw the Poisson batches of the steps that are left, as (inputs, targets, units).

        Plan, seed, security, the step to resume from and, with several ranks, the share of the
        units are the oracle's own.

        Args:
            dataset: a map-style data set of (input, target) pairs or of dicts with a target's key
                (labels, label, targets or target), a tuple of two tensors, or a
                :class:`dpbam.data.DataSet`; its size is the plan's n.
            units: the owner of each record, where the unit of privacy is not the record.
            num_workers: workers that read ahead, for data sets that read from disk.
        """
        return PoissonBatches(
            self.plan, dataset, self.sampler(),
            units=units, num_workers=num_workers, share=self.ranks.share,
        )  # fmt: skip

    def sampler(self) -> PoissonSampler:
        """Return a DataLoader's ``batch_sampler`` that draws as :meth:`batches`, for all ranks."""
        self._settle()
        seed = self.randomness.seed
        sampler = self.plan.sampler(seed=seed, start=self.step, secure=self.secure)
        self._samplers.append(sampler)
        return sampler

    def backward(self, inputs: Any, targets: Any, units: Tensor | None = None) -> None:
        """Write the private gradient of one logical batch into ``.grad``. One step of the plan.

        Args:
            inputs: [N, ...] tensor, or a tuple (positional) or dict (keyword) of tensors.
            targets: [N, ...] likewise.
            units: [N] the unit of privacy of each row; None: every row is a unit of its own.

        Model, loss, method and clipping run before the step is charged: if they raise, or an
        observer does while it watches, nothing is charged, and the same batch may be handed over
        again. Once the step is charged it is taken. The clipping then adapts, the filter turns the
        released gradient into ``.grad``, the method's ``update`` gets a copy of it, the statistics
        are published, and observers get copies of the sums, in this order. If one of these raises,
        or Ctrl-C comes, the error has a note on what ``.grad`` holds: this step's gradient, or
        None; the next batch is the next step.

        Raises:
            dpbam.errors.PlanViolationError: what was handed over is not what the plan accounts for;
                nothing was charged.
        """
        self._guard.check_no_step_runs()
        try:
            self._guard.step_runs = True
            self._take_step(inputs, targets, units)
        finally:
            self._guard.step_runs = False

    def _take_step(self, inputs: Any, targets: Any, units: Tensor | None) -> None:
        self._settle()
        admitted = self._guard.admit(self, inputs, targets, units)  # every check, before a charge
        self._movement.warn(admitted.theta)
        with switched_back():
            step = self._prepare(admitted, inputs, targets)
        attempt = self._attempt = step.attempt
        try:
            with switched_back():
                released = private_step(step) if self.plan.private else reference_step(step)
            self._commit(attempt)
            self._hand_out(step, released)
        except BaseException as error:
            if not attempt.charged:
                step.abandon()
            self._explain(attempt, error)
            raise
        finally:
            attempt.active = False

    def _prepare(self, admitted: Admitted, inputs: Any, targets: Any) -> Step:
        """Put together what the mechanism needs for the batch."""
        plan, number, theta = self.plan, self.step, admitted.theta
        history, method, lam = self._present(theta)
        batch = admitted.batch.keyed(self.randomness, number)
        clipping, method_state = admitted.clipping, MethodState(self.method)
        if not self._computation.tried and len(batch.ids):
            # once: which engine serves, and on how many rows, is decided on rows without a record
            with self._memory.fixed(theta, admitted.constants) as changed:
                self._computation.fit_or_fall_back(inputs, targets, method, lam)
                check_unwritten(bool(changed()))
        shift = self._ascent(history, method, lam, batch)
        watching: list[Observer] = []
        statistics, ids = None, batch.ids[:0]
        if self.observers or self.statistics is not None:
            facts = StepFacts(
                number, plan, method, lam,
                previous=history.previous, sensitivity=clipping.sensitivity, shift=shift,
                in_one_batch=self.ranks.world == 1 and self._computation.is_whole(batch),
                zeros=lambda: zeros(theta),
                batch_gradient=lambda: self._batch_gradient(batch), ranks=self.ranks,
            )  # fmt: skip
            ids = batch.ids_as_split()
            # statistics first: their attributes are recorded before an observer has the batch
            # gradient
            if self.statistics is not None:
                statistics = StepStatistics(self.statistics, facts, self._groups)
            try:
                watching = [each for each in self.observers if each.begin(facts.copy())]
            except BaseException:
                if statistics is not None:
                    statistics.abandon()
                raise
        sigma = plan.noise_multiplier_at(number)
        return Step(
            plan=plan, batch=batch, computation=self._computation, method=method, lam=lam,
            method_state=method_state, theta=theta, shift=shift,
            constants=admitted.constants,
            clipping=clipping, statistics=statistics, watch=Watch(watching, ids),
            terms=self._terms(
                self.stream, number, plan.charged_at(number),
                sampling_rate=1.0 if self.sampling == "unchecked" else plan.sampling_rate,
            ),
            attempt=Attempt(
                number, admitted.size, admitted.tensors, admitted.replays,
                noise_std=sigma * clipping.sensitivity / plan.batch_size if sigma else 0.0,
            ),
        )  # fmt: skip

    def release_before(self, sums: Params, std: float) -> Params:
        """Release sums over all units, before the first step, as the plan's ``released_before``.

        Guarantee: as of :func:`dpbam.mechanism.release`, at q = 1.

        Assumptions: one unit moves the sums by at most ``std`` / sigma, in Euclidean norm, sigma
        the plan's ``released_before``; the sums are those of all ranks, and the leader alone, which
        has the ledger, calls it.

        Proof: as there.

        Args:
            sums: by name. Noise, or zeros, may be written over them.
            std: the standard deviation of the noise in each coordinate.

        Example: the number of units.
            >>> import torch
            >>> plan = PrivacyPlan(n=100, batch_size=10, steps=1, noise_multiplier=1.0, delta=1e-3,
            ...                    released_before=5.0)
            >>> loss = nn.CrossEntropyLoss(reduction="none")
            >>> oracle = PrivateGradientOracle(nn.Linear(2, 2), loss, plan)
            >>> noised = oracle.release_before({"count": torch.tensor([100.0])}, std=5.0)
            >>> oracle.ledger.released_before() == [oracle.before]
            True
        """
        sigma = self.plan.released_before
        if sigma is None:
            raise ArgumentError(
                "the plan has no release before the first step: make it with released_before, the "
                "noise multiplier of that release"
            )
        queries = {"before": Query(sums, std, "class-counts")}
        terms = self._terms(self.before, 0, sigma, sampling_rate=1.0)
        return release(queries, replace(terms, ranks=Ranks()))["before"]

    def _terms(
        self, stream: str, number: int, noise_multiplier: float, *, sampling_rate: float
    ) -> Terms:
        """Return how sums are released: by the oracle's noise, on its ledger."""
        return Terms(
            noise=self.noise, ranks=self.ranks, ledger=self.ledger, stream=stream, number=number,
            noise_multiplier=noise_multiplier, sampling_rate=sampling_rate, unit=self.plan.unit,
            seeded=self.randomness.seeded, memory=self._memory,
        )  # fmt: skip

    def _settle(self) -> None:
        """Count an interrupted attempt as a step if it was charged.

        Nothing of a step that was interrupted right after its charge has left the oracle, and its
        noise is not drawn again here. A state that is saved before the training continues does not
        count it: a run that resumes from there takes the step again, as after a crash.
        """
        attempt = self._attempt
        if attempt is None or attempt.active:  # active: an observer has asked, inside the step
            return
        if self._is_charged(attempt):
            self._commit(attempt)
        elif not self.noise.randomness.seeded:
            # a charge that failed may be on disk all the same: its name is not used again
            self.stream = self._new_stream()
        self._attempt = None

    def _commit(self, attempt: Attempt) -> None:
        """Count a charged step as taken."""
        self._guard.count(self.ledger, attempt.size, attempt.batch)
        self._noise_std = attempt.noise_std
        self.step = attempt.number + 1  # last: an interrupt before it leaves the attempt open
        self._attempt = None

    def _is_charged(self, attempt: Attempt) -> bool:
        """Whether the attempt has charged its step: the ledger knows, whatever interrupted it.

        =========  =============  ======  ======================================================
        charged    on the ledger  replay  the step
        =========  =============  ======  ======================================================
        yes        yes            any     is taken
        no         yes            no      is taken: the charge was interrupted when it was done
        no         yes            yes     is open: an earlier run has charged it, with this seed
        no         no             any     is open: it has cost nothing
        =========  =============  ======  ======================================================

        On a rank without the ledger a step that is not charged is open; the next one is refused, if
        the other ranks have taken it.
        """
        recorded = self.ledger.entry(self.stream, attempt.number) is not None
        return attempt.charged or (recorded and not attempt.replays)

    def _hand_out(self, step: Step, released: Released) -> None:
        """Give what was released to those who use it, observers last.

        The step is charged and counted: whatever raises here, the next one is possible.
        """
        if self.method.remembers:
            pair = copied(released.gradient), copied(_detached(step.theta))
            self._releases = [*self._releases, pair][-self.method.remembers :]
        if released.coordinates is not None:
            step.clipping.adapt(released.coordinates)
        self._write(released.gradient, step.theta)
        step.attempt.written = True
        if overrides(self.method, "update"):
            self.method.update(copied(released.gradient))
        if self.statistics is not None:
            self.statistics.publish(released.statistics)
        step.watch.finish(released.gradient, self.ranks)

    def _write(self, released: Params, parameters: Mapping[str, nn.Parameter]) -> None:
        """Write into ``.grad`` what is on the ledger, filtered: of all parameters or of none."""
        for parameter in parameters.values():
            parameter.grad = None
        self._movement.begin(parameters)
        filtered = released if self.filter is None else self.filter.apply(copied(released))
        gradients = cast(filtered, parameters)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]

    def _explain(self, attempt: Attempt, error: BaseException) -> None:
        """Note on an error after the charge what became of the step."""
        attempt.active = False
        if self.step == attempt.number and not self._is_charged(attempt):
            self._settle()
            return
        self._guard.recognise(self.ledger, attempt.batch)  # also if Ctrl-C came before the commit
        if not attempt.written:
            for parameter in trainable(self.model).values():
                parameter.grad = None
        holds = "holds its private gradient" if attempt.written else "is None"
        error.add_note(
            f"step {attempt.number} is charged and counts as taken, and .grad {holds}: continue "
            "with the next batch, not with this one"
        )

    def expect_earlier_steps(self) -> None:
        """Do not warn of steps that the ledger has: they are this training's, begun again."""
        self._guard.knows_ledger = True

    def unmoved(self) -> list[str]:
        """Return the trained parameters that nothing has changed since the last ``backward``.

        After ``optimizer.step()`` the list is empty, or the optimiser does not have them.

        Example:
            >>> import torch
            >>> model = nn.Linear(2, 2)
            >>> plan = PrivacyPlan(n=9, batch_size=3, steps=1, noise_multiplier=1.0, delta=1e-3)
            >>> oracle = PrivateGradientOracle(model, nn.CrossEntropyLoss(reduction="none"), plan)
            >>> optimizer = torch.optim.SGD([model.weight], lr=0.1)
            >>> data = (torch.randn(9, 2), torch.zeros(9, dtype=torch.long))
            >>> oracle.backward(*next(oracle.batches(data)))
            >>> optimizer.step()
            >>> oracle.unmoved()
            ['bias']
        """
        return self._movement.unmoved(trainable(self.model))

    def lam(self) -> float:
        """Return lambda at the present step and parameters; public, as they are."""
        return self._present()[2]

    def _present(
        self, parameters: Mapping[str, nn.Parameter] | None = None
    ) -> tuple[History, Method, float]:
        """Return what was released, the method of the next step, and its lambda."""
        theta = _detached(trainable(self.model) if parameters is None else parameters)
        releases = self._releases
        if self._own_method:  # what it writes to must be neither theta nor what was released
            theta, releases = copied(theta), [(copied(g), copied(t)) for g, t in releases]
        history = History(tuple(g for g, _ in releases), tuple(t for _, t in releases), theta)
        method = self._call_method(self.method, "at", history)
        check_needs(self.method, method)
        # a schedule, or a method of the user's own
        lam = self._call_method(method, "lam_at", self.step, history.theta)
        name = f"lam of {method.name} at step {self.step}"
        return history, method, _validate.non_negative(name, lam)

    def _ascent(
        self, history: History, method: Method, lam: float, batch: LogicalBatch
    ) -> Params | None:
        """Return the shift of theta for the whole logical batch, or None."""
        shift: Params | None = self._call_method(
            method, "ascent", lam, history.previous, lambda: self._gradient_for_ascent(batch)
        )
        return shift

    def _call_method(self, method: Method, hook: str, *arguments: Any) -> Any:
        """Call a hook that must not change the method; of dpbam's own none does."""
        if self._own_method and overrides(method, hook):
            return call_hook(method, hook, *arguments)
        return getattr(method, hook)(*arguments)

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
        if not len(batch.ids):  # a Poisson sample may be empty
            return PerSample.of_no_units(trainable(self.model))
        history, method, lam = self._present()
        if not self._computation.tried:
            self._computation.fit_or_fall_back(inputs, targets, method, lam)
        shift = self._ascent(history, method, lam, batch)
        with shifted(trainable(self.model), shift):
            keyed = batch.keyed(self.randomness, self.step)
            return PerSample.of(self._computation, keyed, method, lam)

    def fit(self, inputs: Any, targets: Any) -> Fit:
        """Choose the physical batch size, if it was not given, so that a step stays in memory.

        Of the batch only shapes and types are read: the model is measured on rows without a record,
        numbers between 0 and 1 and whole numbers 0 or 1 (:mod:`dpbam.engines.synthetic`). The first
        batch does this by itself; the same model and limit give the same size on every machine.
        """
        _, method, lam = self._present()
        return self._computation.fit(inputs, targets, method, lam)

    def try_model(self, inputs: Any, targets: Any) -> None:
        """Run the model on rows without a record, once, before other code gives it a batch.

        What a model fixes at its first use is then not taken from a record. :meth:`backward` does
        this by itself; call it if you evaluate training data before the first step.
        """
        if not self._computation.tried:
            _, method, lam = self._present()
            self._computation.fit_or_fall_back(inputs, targets, method, lam)

    def _gradient_for_ascent(self, batch: LogicalBatch) -> Params:
        """Return g_hat for SAM's ascent; refuse it under a private plan."""
        if self.plan.private:
            raise ArgumentError(
                f"{self.method.name} asks for the batch gradient, which has no noise: ascend along "
                "the previous private gradient, or use PrivacyPlan.non_private(...)"
            )
        return self._batch_gradient(batch)

    def _batch_gradient(self, batch: LogicalBatch) -> Params:
        """Return g_hat over all ranks, neither clipped nor noised."""
        total = self.ranks.total(self._computation.plain_sum(batch))
        return {n: s / self.plan.batch_size for n, s in total.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and ``parts``, the tensors on which later steps depend; all are public.

        ``parts`` has those of clipping, filter and method, and the releases that the method uses.
        ``before`` is the ledger's name for the release that the plan has before the first step.
        """
        parts = {f"clipping/{k}": v for k, v in self.clipping.state_dict().items()}
        if self.filter is not None:
            parts |= {f"filter/{k}": v for k, v in self.filter.state_dict().items()}
        parts |= {f"method/{k}": v for k, v in self.method.state_dict().items()}
        for k, (gradient, theta) in enumerate(self._releases):
            parts |= {f"history/{k}/gradient/{n}": g for n, g in gradient.items()}
            parts |= {f"history/{k}/theta/{n}": t for n, t in theta.items()}
        state = {"step": self.step, "parts": parts}
        return state if self.plan.released_before is None else state | {"before": self.before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`. Unseeded, steps done again are new releases.

        The ledger must have the steps of the state already: it was read from its file, or the
        entries of a checkpoint were merged into it.
        """
        if "step" not in state:
            raise ArgumentError(
                f"the state has no step, but {', '.join(map(str, state)) or 'nothing'}: pass what "
                "state_dict() of an oracle has returned"
            )
        step = _validate.count("the state's step", state["step"], least=0)
        parts = state.get("parts", {})
        check_parts(self, parts)
        self._guard.resume(self, step)
        self.step, self._attempt = step, None
        self._movement.forget()
        if clipping := _below(parts, "clipping/"):
            self.clipping.load_state_dict(clipping)
        if self.filter is not None:
            self.filter.load_state_dict(_below(parts, "filter/"))
        if method := _below(parts, "method/"):
            self.method.load_state_dict(method)
        releases = [_below(parts, f"history/{k}/") for k in range(self.method.remembers)]
        self._releases = [(_below(r, "gradient/"), _below(r, "theta/")) for r in releases if r]
        self.stream = self._new_stream()
        self.before = state.get("before", self.before)

    def _new_stream(self) -> str:
        """Name the noise on the ledger; unseeded noise never repeats, and nor does its name."""
        noise = self.noise.randomness
        return f"seed-{noise.seed}" if noise.seeded else secrets.token_hex(8)


def _below(parts: Mapping[str, Tensor], prefix: str) -> Params:
    return {k.removeprefix(prefix): v for k, v in parts.items() if k.startswith(prefix)}


def _detached(parameters: Mapping[str, Tensor]) -> Params:
    return {name: p.detach() for name, p in parameters.items()}
