"""The attack: play the real mechanism with and without canaries, and bound epsilon from below.

Nothing is simulated. A trial makes the plan, its Poisson batches, the oracle and its engine exactly
as a training does, unseeded, and reads what they release.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import secrets
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks import bounds
from attacks.bounds import Bound, Scores
from attacks.canaries import GRADIENT_CANARIES, INPUT_CANARIES, World, make_world
from attacks.one_run import best_guesses, one_run
from dpbam import Compute, _validate
from dpbam.errors import ArgumentError
from dpbam.methods import BAM, DPSAT, DPSGD, Method
from dpbam.oracle import PrivateGradientOracle
from dpbam.privacy.plan import PrivacyPlan
from dpbam.privacy.rounding import down, up

_CHUNK = 50  # trials per task of a process
CANARIES = (*GRADIENT_CANARIES, *INPUT_CANARIES)
_METHODS: dict[str, Callable[[float], Method]] = {
    "dp-sgd": lambda lam: DPSGD(),
    "dp-sat": DPSAT,
    "bam": BAM,
}


class Trial(NamedTuple):
    """Which canaries were present, and the attacker's score of each."""

    present: list[bool]
    scores: list[float]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is attacked, and how.

    Attributes:
        canary: "dirac" or "random" (gradients), "mislabelled" or "blank" (images).
        canaries: 1: many runs, the canary in half of them. More: one run, each in with chance 1/2.
        epsilon: the claim; the noise is calibrated to it, as a training's is.
        delta: its delta.
        n: units of privacy.
        batch_size: expected; q = batch_size / n.
        steps: T.
        clip_norm: C.
        clipping: "flat", "automatic" or "per-layer".
        method: "dp-sgd", "dp-sat" or "bam".
        lam: its lambda.
        engine: "auto", "fused" or "functional".
        physical_batch_size: rows computed at once; None: all.
        lr: of the training between the steps.
        noise: "standard" or "secure".

    Example:
        >>> target = Target(epsilon=4.0, delta=1e-5)
        >>> round(target.plan().noise_multiplier, 3)
        1.081
    """

    canary: str = "dirac"
    canaries: int = 1
    epsilon: float = 4.0
    delta: float = 1e-5
    n: int = 4
    batch_size: int = 4
    steps: int = 1
    clip_norm: float = 1.0
    clipping: str = "flat"
    method: str = "dp-sgd"
    lam: float = 0.02
    engine: str = "auto"
    physical_batch_size: int | None = None
    lr: float = 0.5
    noise: str = "standard"

    def __post_init__(self) -> None:
        _validate.one_of("canary", self.canary, CANARIES)
        _validate.one_of("method", self.method, tuple(_METHODS))
        _validate.count("canaries", self.canaries)
        if self.canaries >= self.n:
            raise ArgumentError(f"n must exceed the {self.canaries} canaries, got {self.n}")

    def plan(self) -> PrivacyPlan:
        """The plan, calibrated to the claim."""
        return _plan(self)

    @property
    def normal(self) -> bool:
        """Whether a right mechanism's scores are Gaussian: gradients, and no subsampling."""
        return self.canary in GRADIENT_CANARIES and self.batch_size == self.n

    def world(self) -> World:
        """Records and canaries."""
        return make_world(self.canary, self.n, self.canaries, self.clip_norm)


@lru_cache(maxsize=64)
def _plan(target: Target) -> PrivacyPlan:
    """Return the calibrated plan; cached, since every trial needs it."""
    with warnings.catch_warnings():  # the claim is attacked, and protects no record
        warnings.filterwarnings("ignore", message="delta .* is above 1/n")
        return PrivacyPlan.calibrate(
            epsilon=target.epsilon, delta=target.delta, n=target.n, batch_size=target.batch_size,
            steps=target.steps, clip_norm=target.clip_norm, clipping=target.clipping,
        )  # fmt: skip


@dataclass(frozen=True)
class AuditResult:
    """The outcome of an attack.

    Attributes:
        target: what was attacked.
        claimed: the epsilon that the accountant gives the plan.
        bounds: lower bounds on epsilon, which all hold with their confidence together.
        trials: how many were played.
        present: scores with the canary.
        absent: scores without.
    """

    target: Target
    claimed: float
    bounds: list[Bound]
    trials: int
    present: list[float] = field(repr=False)
    absent: list[float] = field(repr=False)

    @property
    def violated(self) -> bool:
        """Whether a lower bound lies above the claim: then there is a bug."""
        return any(b.epsilon > self.claimed for b in self.bounds)

    @property
    def expected(self) -> list[Bound]:
        """The bounds that a perfect attack of this size shows."""
        confidence = self.bounds[0].confidence
        return expected_bounds(self.target, trials=self.trials, confidence=confidence)

    @property
    def verdict(self) -> str:
        """One sentence."""
        best = max(self.bounds, key=lambda b: b.epsilon)
        if self.violated:
            return (
                f"the claim is refuted: epsilon is at least {down(best.epsilon, 3)} with "
                f"confidence {best.confidence:g} ({best.name}), and {up(self.claimed, 3)} was "
                "claimed"
            )
        return (
            f"no attack refuted the claim: epsilon is at least {down(best.epsilon, 3)} with "
            f"confidence {best.confidence:g} ({best.name}), and {up(self.claimed, 3)} is claimed"
        )

    @property
    def meaning(self) -> str:
        """What the verdict shows, and what it does not."""
        if self.violated:
            return "the code leaks more than it claims: do not release what it trained"
        best = max(b.epsilon for b in self.expected)
        return (
            "this attack found no mistake in the code. A perfect attack of this size shows about "
            f"{down(best, 3)}, so a lower bound means a weak attack and not a safer model; that "
            "epsilon is at most the claim is shown by the proof, not by an audit"
        )


def audit(
    target: Target,
    *,
    trials: int = 8000,
    confidence: float = 0.95,
    jobs: int = 1,
) -> AuditResult:
    """Attack the mechanism of ``target``.

    Args:
        target: what to attack, and how.
        trials: how many runs, half of them with the canary; with many canaries, one run.
        confidence: of all bounds together.
        jobs: processes.

    Example:
        >>> result = audit(Target(epsilon=1.0), trials=40)
        >>> result.violated, [b.name for b in result.bounds]
        (False, ['mean-difference', 'gaussian', 'clopper-pearson'])
    """
    trials = _validate.count("trials", trials) if target.canaries == 1 else 1
    played = _play_all(target, trials, jobs)
    scores = np.array([s for t in played for s in t.scores])
    present = np.array([there for t in played for there in t.present])
    found = _bounds(target, scores, present, confidence)
    return AuditResult(target, target.plan().epsilon(), found, trials,
                       scores[present].tolist(), scores[~present].tolist())  # fmt: skip


def _play_all(target: Target, trials: int, jobs: int) -> list[Trial]:
    if jobs <= 1 or trials <= _CHUNK:
        return [play(target, number) for number in range(trials)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread) as pool:
        return list(pool.map(partial(play, target), range(trials), chunksize=_CHUNK))


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is loaded


def expected_bounds(
    target: Target, *, trials: int = 8000, confidence: float = 0.95
) -> list[Bound]:  # fmt: skip
    """The bounds that a perfect attack of this size would show, known before the run.

    It reads one number per canary, the sum over the steps of N(0, sigma^2) plus 1 where the canary
    is there and sampled; each bound is the median of three simulated attacks, seeded.

    Example:
        >>> target = Target(canaries=1000, n=1001, batch_size=1001)
        >>> [(b.name, round(b.epsilon, 1)) for b in expected_bounds(target)]
        [('mean-difference', 3.0), ('one-run f-DP', 2.4), ('one-run', 1.7)]
    """
    return list(_expected(target, trials, confidence))


@lru_cache(maxsize=64)
def _expected(target: Target, trials: int, confidence: float) -> tuple[Bound, ...]:
    found = [_bounds(target, *_ideal(target, trials, seed), confidence) for seed in range(3)]
    return tuple(sorted(same, key=lambda b: b.epsilon)[1] for same in zip(*found, strict=True))


def _ideal(target: Target, trials: int, seed: int) -> tuple[Scores, NDArray[np.bool_]]:
    """Scores of a perfect attack, and which canaries were present."""
    rng, plan = np.random.default_rng(seed), target.plan()
    count = trials if target.canaries == 1 else target.canaries
    present = np.arange(count) % 2 == 1 if target.canaries == 1 else rng.random(count) < 0.5
    sampled = rng.binomial(plan.steps, plan.sampling_rate, count)
    noise = plan.noise_multiplier * math.sqrt(plan.steps) * rng.normal(size=count)
    return present * sampled + noise, present


def _bounds(
    target: Target, scores: Scores, present: NDArray[np.bool_], confidence: float
) -> list[Bound]:
    if target.canaries == 1:
        return bounds.many_runs(
            scores[present], scores[~present], target.delta, confidence, normal=target.normal
        )
    count, failure = 2 + target.normal, 1 - confidence
    guesses = _guesses(target, confidence)
    found = one_run(scores, present, target.delta, 1 - 2 * failure / count, guesses)
    if target.normal:
        both = scores[present], scores[~present]
        found = [bounds.mean_difference(*both, target.delta, 1 - failure / count), *found]
    return [replace(b, confidence=confidence) for b in found]


@lru_cache(maxsize=64)
def _guesses(target: Target, confidence: float) -> int:
    """The number of guesses, from the plan alone: the best for a simulated perfect attack."""
    attacks = [_ideal(target, 1, seed) for seed in range(3, 8)]  # others than expected_bounds'
    return best_guesses(attacks, target.delta, confidence)


def play(target: Target, index: int) -> Trial:
    """One trial: a training with or without the canaries.

    A single canary is present in every second trial; each of many, with probability 1/2.
    """
    if target.canaries == 1:
        present = torch.tensor([index % 2 == 1])
    else:
        present = torch.tensor([secrets.randbits(1) == 1 for _ in range(target.canaries)])
    scores = train(target, present)
    return Trial(present.tolist(), scores.tolist())


def train(target: Target, present: Tensor) -> Tensor:
    """Train with the canaries that are present; return the scores [m] of all of them."""
    world, plan = target.world(), target.plan()
    there = torch.cat([torch.ones(plan.n - target.canaries, dtype=torch.bool), present])
    oracle = PrivateGradientOracle(
        world.model, world.loss, plan, _METHODS[target.method](target.lam), noise=target.noise,
        compute=Compute(
            engine=target.engine, physical_batch_size=target.physical_batch_size or plan.n
        ),
        # with many canaries, many may be absent at once
        sampling="poisson-elsewhere" if target.canaries == 1 else "unchecked",
    )  # fmt: skip
    optimizer = torch.optim.SGD(world.model.parameters(), lr=target.lr)
    scores = torch.zeros(target.canaries)
    batches = oracle.batches((world.inputs, world.targets))
    with warnings.catch_warnings():  # which engine serves does not matter here
        warnings.filterwarnings("ignore", message="the fused engine does not support")
        for inputs, targets, units in batches:
            keep = there[units]
            oracle.backward(inputs[keep], targets[keep], units[keep])
            scores = world.read(scores)
            optimizer.step()
    return world.end(scores)
