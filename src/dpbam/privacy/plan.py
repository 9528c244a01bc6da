"""The privacy plan: public facts from which sampler, noise and accountant are derived.

q, the sampler, the standard deviation of the noise and the accountant's event are derived here and
nowhere else, so that they cannot disagree.

Symbols: n units of privacy, l the expected batch size, q = l / n, T steps, C the clipping norm,
sigma the noise multiplier.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from dpbam import _validate
from dpbam.catalogue import CLIPPINGS
from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.privacy import accounting, calibration
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.randomness import Randomness, SecureRandomness
from dpbam.privacy.sampling import PoissonSampler

if TYPE_CHECKING:
    from pathlib import Path

    from dpbam.privacy.clipping import Clipping

RELATION = "add or remove one unit"
MOST_PHASES = 8  # of a schedule: an accountant takes seconds for each kind of step
_LEAST_NORM = 1e-10  # as of dpbam.privacy.clipping, which imports torch


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """What a training does that bears on privacy.

    Guarantee: sampler, noise, divisor and accountant follow from the same numbers.

    Assumptions: n, the size of the data set, is public.

    Proof: each is a function of these fields, and of nothing else.

    Attributes:
        n: number of units of privacy (records, or patients), a public fact.
        batch_size: l, the expected number of units per step. The sum is divided by it, not by the
            realised number.
        steps: T.
        noise_multiplier: sigma; the noise's standard deviation is sigma times the sensitivity.
        delta: the delta of (epsilon, delta); above 1/n there is a warning.
        clip_norm: C.
        clipping: ``"flat"`` (the paper's), or another name of
            :data:`dpbam.catalogue.CLIPPINGS`, or ``module:Name`` of the user's own,
            which is then passed to the oracle.
        unit: ``"record"``, or the name of what owns several records, such as ``"patient"``.
        max_records: the most records of one unit that enter a step; 1 for records.
        accountant: ``"pld"`` (tight) or ``"rdp"``.
        private: False only by :meth:`non_private`; then epsilon is infinite.
        joint_noise_multipliers: of statistics that are released next to each gradient, from the
            same batch (:class:`dpbam.bias.PrivateStatistics`). Each step is then charged at
            1 / sigma_joint^2 = 1 / sigma^2 + sum_k 1 / sigma_k^2.
        noise_schedule: factors on sigma, one for each of equally long phases of the training. The
            accountant composes the phases.
        clip_schedule: factors on C likewise. The noise follows C, so that they cost nothing.
        released_before: sigma of a Gaussian release from all units before the first step, such as
            class counts; with q = 1 it is part of every :meth:`epsilon`.
            ``oracle.release_before(sums, std)`` adds the noise and charges it; the oracle refuses
            to step until it is on the ledger.

    Example:
        >>> plan = PrivacyPlan(n=50_000, batch_size=4096, steps=1000, noise_multiplier=1.731,
        ...                    delta=1e-5, clip_norm=1.0)
        >>> plan.sampling_rate, round(plan.epsilon(), 2)
        (0.08192, 8.0)
    """

    n: int
    batch_size: int
    steps: int
    noise_multiplier: float
    delta: float
    clip_norm: float = 1.0
    clipping: str = "flat"
    unit: str = "record"
    max_records: int = 1
    accountant: str = "pld"
    private: bool = True
    joint_noise_multipliers: tuple[float, ...] = ()
    noise_schedule: tuple[float, ...] = (1.0,)
    clip_schedule: tuple[float, ...] = (1.0,)
    released_before: float | None = None

    def __post_init__(self) -> None:
        self._make_plain()
        _validate.count("n", self.n)
        _validate.count("batch_size", self.batch_size)
        _validate.count("steps", self.steps)
        _validate.count("max_records", self.max_records)
        _validate.one_of("accountant", self.accountant, accounting.ACCOUNTANTS)
        if ":" not in self.clipping:  # else the user's own
            CLIPPINGS.find(self.clipping)
        _validate.probability("delta", self.delta)
        self._check_sizes()
        self._check_noise()
        for sigma in self.joint_noise_multipliers:
            _validate.positive("each of joint_noise_multipliers", sigma)
        self._check_schedules()
        if self.released_before is not None:
            _validate.positive("released_before", self.released_before)

    def _make_plain(self) -> None:
        """Convert NumPy's numbers and others to int and float, lists and iterators to tuples.

        Half precision would round sigma C, by a quarter where C is 8e-8, and the noise would be
        less than what is charged.
        """
        for name, value in vars(self).items():
            # an iterator would be empty when its numbers are charged
            is_sequence = isinstance(value, Iterable) and not isinstance(value, str)
            plain = tuple(map(_plain, value)) if is_sequence else _plain(value)
            object.__setattr__(self, name, plain)

    def _check_schedules(self) -> None:
        for name in ("noise_schedule", "clip_schedule"):
            factors: tuple[float, ...] = getattr(self, name)
            if not 1 <= len(factors) <= min(self.steps, MOST_PHASES):
                raise ArgumentError(
                    f"{name} must have from 1 to {min(self.steps, MOST_PHASES)} factors, one per "
                    f"phase, got {len(factors)}"
                )
            for factor in factors:
                _validate.positive(f"each factor of {name}", factor)
        least = self.clip_norm * min(self.clip_schedule)
        if self.private and least < _LEAST_NORM:
            raise ArgumentError(
                f"clip_norm times the least factor of clip_schedule must be at least "
                f"{_LEAST_NORM:g}, got {least:g}: a norm so small can vanish in float32, and would "
                "not be clipped"
            )
        if self.joint_noise_multipliers and self.noise_schedule != (1.0,):
            raise ArgumentError(
                "statistics that are released next to the gradients need constant noise: leave "
                "noise_schedule out"
            )

    def _check_sizes(self) -> None:
        if self.batch_size > self.n:
            raise ArgumentError(
                f"batch_size {self.batch_size} exceeds the {self.n} units of the data set: the "
                "expected batch is at most everything (batch_size = n is full-batch training)"
            )
        if self.unit == "record" and self.max_records != 1:
            raise ArgumentError(
                f"max_records is {self.max_records} but the unit is a record: name what owns "
                "several records, for example unit='patient'"
            )
        if self.private and self.delta > 1 / self.n:
            warnings.warn(
                f"delta {self.delta:g} is above 1/n = {1 / self.n:.2g}: such a delta allows "
                "publishing a whole record; choose one well below 1/n",
                stacklevel=4,
            )

    def _check_noise(self) -> None:
        if self.private:
            hint = "training without noise is PrivacyPlan.non_private(...)"
            _validate.positive("noise_multiplier", self.noise_multiplier, hint=hint)
            hint = "training without clipping is PrivacyPlan.non_private(...)"
            _validate.positive("clip_norm", self.clip_norm, hint=hint)
            return
        _validate.non_negative("noise_multiplier", self.noise_multiplier)
        if self.clip_norm != math.inf:
            _validate.positive("clip_norm", self.clip_norm)
        elif self.noise_multiplier:
            raise ArgumentError("noise is scaled by clip_norm: without clipping there can be none")

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: float,
        delta: float,
        n: int,
        batch_size: int,
        epochs: float | None = None,
        steps: int | None = None,
        spent: Sequence[accounting.Charge] = (),
        **fields: Any,
    ) -> PrivacyPlan:
        """Return the plan with the least noise that stays within (epsilon, delta).

        Give ``epochs`` or ``steps``; an epoch is n / batch_size steps. ``spent`` is what earlier
        training on the same data cost (a ledger's ``charges()``): it and the plan together stay
        within epsilon; the plan's own :meth:`epsilon` is then less. ``fields`` are other fields of
        the plan. Statistics that are released next to the gradients get their share of the
        budget first: sigma grows until all together stay within it.

        Example:
            >>> plan = PrivacyPlan.calibrate(epsilon=3, delta=1e-4, n=1437, batch_size=512,
            ...                              epochs=20)
            >>> plan.steps, plan.epsilon() <= 3
            (56, True)
        """
        steps = _steps(n, batch_size, epochs, steps)
        _validate.positive("epsilon", epsilon)
        draft = cls(
            n=n, batch_size=batch_size, steps=steps, noise_multiplier=1.0, delta=delta,
            private=True, **fields,
        )  # fmt: skip
        phases = [(c.noise_multiplier, c.steps) for c in draft._step_charges(steps, 0)]
        joint = calibration.noise_multiplier(
            epsilon, delta, draft.sampling_rate, steps, accountant=draft.accountant,
            spent=(*spent, *draft._before()),
            phases=phases if draft.noise_schedule != (1.0,) else (),
        )  # fmt: skip
        sigma = calibration.remaining_noise_multiplier(joint, draft.joint_noise_multipliers)
        return replace_quietly(draft, noise_multiplier=sigma)

    @classmethod
    def non_private(
        cls,
        *,
        n: int,
        batch_size: int,
        epochs: float | None = None,
        steps: int | None = None,
        delta: float | None = None,
        clip_norm: float = math.inf,
        noise_multiplier: float = 0.0,
        **fields: Any,
    ) -> PrivacyPlan:
        """Return a plan without a guarantee: by default no clipping and no noise; epsilon infinite.

        For references, and research on clipping without noise. ``fields`` are other fields of the
        plan.

        Example:
            >>> PrivacyPlan.non_private(n=100, batch_size=10, steps=5).epsilon()
            inf
        """
        return cls(
            n=n, batch_size=batch_size, steps=_steps(n, batch_size, epochs, steps),
            delta=default_delta(n) if delta is None else delta, private=False,
            clip_norm=clip_norm, noise_multiplier=noise_multiplier, **fields,
        )  # fmt: skip

    @property
    def sampling_rate(self) -> float:
        """q = l / n."""
        return self.batch_size / self.n

    @property
    def epochs(self) -> float:
        """Expected passes over the data: T q."""
        return self.steps * self.sampling_rate

    @property
    def charged_noise_multiplier(self) -> float:
        """The sigma that a step is charged at, joint with the statistics'; 0 without privacy."""
        if not self.private:
            return 0.0
        return accounting.joint_noise_multiplier(
            (self.noise_multiplier, *self.joint_noise_multipliers)
        )

    def noise_multiplier_at(self, step: int) -> float:
        """Return sigma at ``step``, from 0."""
        return self.noise_multiplier * _factor(self.noise_schedule, step, self.steps)

    def clip_factor_at(self, step: int) -> float:
        """Return the factor on C at ``step``."""
        return _factor(self.clip_schedule, step, self.steps)

    def charged_at(self, step: int) -> float:
        """Return the sigma that ``step`` is charged at, joint with the statistics'."""
        factor = _factor(self.noise_schedule, step, self.steps)  # there are no statistics if not 1
        return self.charged_noise_multiplier * factor

    def charges(self, steps: int, replays: int = 0) -> list[accounting.Charge]:
        """Return what the first ``steps`` steps cost, statistics and what came before included.

        ``replays`` are steps that were lost in a crash and repeated with new noise; which ones is
        not known here, so each counts as one of the step with the least noise.

        Example:
            >>> plan = PrivacyPlan(n=9, batch_size=3, steps=5, noise_multiplier=2.0, delta=1e-3,
            ...                    noise_schedule=(1.5, 1.0))
            >>> [(c.noise_multiplier, c.steps) for c in plan.charges(5)]
            [(2.0, 2), (3.0, 3)]
        """
        _validate.count("steps", steps, least=0)
        _validate.count("replays", replays, least=0)
        return [*self._before(), *self._step_charges(steps, replays)]

    def _before(self) -> list[accounting.Charge]:
        sigma = self.released_before if self.private else None
        return [] if sigma is None else [accounting.Charge(sigma, 1.0, 1)]

    def _step_charges(self, steps: int, replays: int) -> list[accounting.Charge]:
        counts = Counter(self.charged_at(step) for step in range(min(steps, self.steps)))
        beyond = max(0, steps - self.steps) + replays
        if beyond:
            counts[self.charged_noise_multiplier * min(self.noise_schedule)] += beyond
        return [accounting.Charge(s, self.sampling_rate, k) for s, k in sorted(counts.items())]

    def epsilon(self, steps: int | None = None, replays: int = 0) -> float:
        """Return epsilon after ``steps`` steps (default: all) at the plan's delta.

        ``replays``: as for :meth:`charges`.
        """
        if not self.private:
            return math.inf
        spent = self.charges(self.steps if steps is None else steps, replays)
        return accounting.total_epsilon(spent, self.delta, accountant=self.accountant)

    def check_step(self, step: int) -> None:
        """Refuse a step beyond the plan, whose epsilon would be exceeded.

        Guarantee: no training takes more steps than its plan's epsilon counts.

        Assumptions: the ledger's steps are the oracle's.

        Proof: epsilon grows with the number of steps.
        """
        if step >= self.steps:
            raise PlanViolationError(
                f"all {self.steps} steps of the plan are taken: another one would cost more than "
                "the plan's epsilon; make a plan with more steps"
            )

    def check_before(self, ledger: Ledger, stream: str) -> None:
        """Refuse a step until the release that the plan has before it is on the ledger.

        Guarantee: the ledger's epsilon includes the release before the first step, once for each
        oracle that has one, also where several share the ledger.

        Assumptions: the release was made with the plan's sigma, on all units; an oracle that
        resumes another's state continues its training.

        Proof: no step is taken while the ledger has no entry under the oracle's own name,
        ``stream``, at the plan's sigma or less and q = 1.
        """
        sigma = self.released_before
        if not self.private or sigma is None:
            return
        entry = ledger.entry(stream, 0)
        if entry is None or entry["noise_multiplier"] > sigma or entry["sampling_rate"] < 1:
            raise PlanViolationError(
                f"the plan's release before the first step (sigma {sigma:g}) is not on the ledger: "
                "make it with oracle.release_before(sums, std), which charges it, or leave "
                "released_before out of the plan"
            )

    def check_resumed(self, ledger: Ledger, step: int) -> None:
        """Refuse a ledger without the steps before ``step``.

        Guarantee: a training resumes only on a ledger with at least as many steps as its parameters
        have seen, so its epsilon covers them.

        Assumptions: the entries are those of this training.

        Proof: every step is charged before it changes the parameters.
        """
        if self.private and len(ledger) < step:
            raise PlanViolationError(
                f"the state is at step {step}, but its ledger has {len(ledger)} steps: give the "
                "oracle the ledger of that run (ledger=plan.ledger(path), or ledger.merge(entries) "
                "of a checkpoint) before its state"
            )

    def clipper(self) -> Clipping:
        """Return the clipping object."""
        from dpbam.privacy.clipping import make_clipping

        return make_clipping(self.clipping, self.clip_norm)

    def ledger(self, path: Path | None = None) -> Ledger:
        """Return a ledger with this plan's delta and accountant."""
        return Ledger(self.delta, self.accountant, path)

    def sampler(
        self, *, seed: int | None = None, start: int = 0, secure: bool = False
    ) -> PoissonSampler:
        """Return the Poisson sampler of this plan's units: a DataLoader's ``batch_sampler``."""
        if secure and seed is not None:
            raise ArgumentError("secure draws cannot have a seed: leave one of the two out")
        randomness = SecureRandomness() if secure else Randomness(seed)
        return PoissonSampler(self.n, self.sampling_rate, self.steps, randomness, start=start)


def replace_quietly(plan: PrivacyPlan, **changes: Any) -> PrivacyPlan:
    """Return the plan with changes, without its warnings again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return replace(plan, **changes)


def _plain(value: object) -> object:
    """Return a number as int or float, and anything else as it is: it is refused later."""
    if isinstance(value, int | float | str | None) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _steps(n: int, batch_size: int, epochs: float | None, steps: int | None) -> int:
    _validate.count("n", n)
    _validate.count("batch_size", batch_size)
    if (epochs is None) == (steps is None):
        both = "" if epochs is None else ", not both"
        raise ArgumentError(f"give epochs or steps{both}: how long the training is")
    if steps is not None:
        return _validate.count("steps", steps)
    return epoch_steps(n, batch_size, _validate.positive("epochs", epochs))


def epoch_steps(n: int, batch_size: int, epochs: float) -> int:
    """Return the steps of ``epochs`` expected passes: epochs * n / l, rounded, at least one.

    Example:
        >>> epoch_steps(50_000, 4096, 75)
        916
    """
    return max(1, round(epochs * n / batch_size))


def _factor(schedule: Sequence[float], step: int, steps: int) -> float:
    """Return the factor of the phase in which ``step`` lies; phases are equally long."""
    return schedule[min(step * len(schedule) // steps, len(schedule) - 1)]


def default_delta(n: int) -> float:
    """Return the delta of a plan that names none: the largest power of ten at most 1/(100 n).

    With probability delta anything may be revealed. Publishing each unit whole with probability
    delta would satisfy (0, delta), and then reveal n delta <= 1/100 of a unit on average.

    Example:
        >>> default_delta(50_000), default_delta(1438)
        (1e-07, 1e-06)
    """
    digits = len(str(100 * _validate.count("n", n) - 1))  # the least k with 10^k >= 100 n
    return float(f"1e-{digits}")
