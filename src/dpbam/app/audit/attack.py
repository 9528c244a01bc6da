"""The attack: play the real mechanism with and without canaries, and bound epsilon from below.

Nothing is simulated. A trial makes the plan, its Poisson batches, the oracle and its engine exactly
as a training does, unseeded, and reads what they release.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpbam import Compute, _validate
from dpbam.app.audit import bounds
from dpbam.app.audit.canaries import GRADIENT_CANARIES, INPUT_CANARIES, World, make_world
from dpbam.app.audit.trials import Trial, collect
from dpbam.errors import ArgumentError
from dpbam.methods import BAM, DPSAT, DPSGD, Method
from dpbam.oracle import PrivateGradientOracle
from dpbam.privacy.plan import PrivacyPlan
from dpbam.privacy.rounding import down, up

CANARIES = (*GRADIENT_CANARIES, *INPUT_CANARIES)
_METHODS: dict[str, Callable[[float], Method]] = {
    "dp-sgd": lambda lam: DPSGD(),
    "dp-sat": DPSAT,
    "bam": BAM,
}


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
        coordinate: which one a single Dirac canary moves.

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
    coordinate: int = 0

    def __post_init__(self) -> None:
        _validate.one_of("canary", self.canary, CANARIES)
        _validate.one_of("method", self.method, tuple(_METHODS))
        _validate.count("canaries", self.canaries)
        if self.canaries >= self.n:
            raise ArgumentError(f"n must exceed the {self.canaries} canaries, got {self.n}")

    def plan(self) -> PrivacyPlan:
        """The plan, calibrated to the claim."""
        return _plan(self)

    def world(self) -> World:
        """Records and canaries."""
        return make_world(self.canary, self.n, self.canaries, self.clip_norm, self.coordinate)


@lru_cache(maxsize=64)
def _plan(target: Target) -> PrivacyPlan:
    """Calibrating takes a while, and every trial asks."""
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
        bounds: lower bounds on epsilon.
        trials: how many were played.
        present: scores with the canary.
        absent: scores without.
    """

    target: Target
    claimed: float
    bounds: list[bounds.Bound]
    trials: int
    present: list[float] = field(repr=False)
    absent: list[float] = field(repr=False)

    @property
    def violated(self) -> bool:
        """Whether a lower bound lies above the claim: then there is a bug."""
        return any(b.epsilon > self.claimed for b in self.bounds)

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

    def to_dict(self) -> dict[str, Any]:
        """Everything but the scores, as plain values."""
        return {
            "target": asdict(self.target),
            "claimed_epsilon": self.claimed,
            "delta": self.target.delta,
            "trials": self.trials,
            "lower_bounds": [asdict(b) for b in self.bounds],
            "violated": self.violated,
            "verdict": self.verdict,
        }


def audit(
    target: Target,
    *,
    trials: int = 8000,
    confidence: float = 0.95,
    jobs: int = 1,
    out: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, trials: None,
) -> AuditResult:
    """Attack the mechanism of ``target``.

    Args:
        target: what to attack, and how.
        trials: how many runs, half of them with the canary; with many canaries, one run.
        confidence: of each bound.
        jobs: processes.
        out: a folder that keeps the trials; the same audit again resumes where it stopped.
        progress: called with (done, trials).

    Example:
        >>> result = audit(Target(epsilon=1.0), trials=40)
        >>> result.violated, [b.name for b in result.bounds]
        (False, ['gaussian', 'clopper-pearson'])
    """
    trials = _validate.count("trials", trials) if target.canaries == 1 else 1
    played = collect(play, target, trials, jobs=jobs, out=out, progress=progress)
    present = [s for t in played for s, there in zip(t.scores, t.present, strict=True) if there]
    absent = [s for t in played for s, there in zip(t.scores, t.present, strict=True) if not there]
    if target.canaries == 1:
        found = bounds.many_runs(present, absent, target.delta, confidence)
    else:
        found = [bounds.one_run(played[0].scores, played[0].present, target.delta, confidence)]
    return AuditResult(target, target.plan().epsilon(), found, trials, present, absent)


def play(target: Target, index: int) -> Trial:
    """One trial: a training with or without the canaries.

    A single canary is present in every second trial; each of many, with probability 1/2.
    """
    if target.canaries == 1:
        present = torch.tensor([index % 2 == 1])
    else:
        present = torch.tensor([secrets.randbits(1) == 1 for _ in range(target.canaries)])
    scores = train(target, present)
    return Trial(index, present.tolist(), scores.tolist())


def train(target: Target, present: Tensor) -> Tensor:
    """Train with the canaries that are present; return the scores [m] of all of them."""
    world, plan = target.world(), target.plan()
    there = torch.cat([torch.ones(plan.n - target.canaries, dtype=torch.bool), present])
    oracle = PrivateGradientOracle(
        world.model, world.loss, plan, _METHODS[target.method](target.lam), noise=target.noise,
        compute=Compute(
            engine=target.engine, physical_batch_size=target.physical_batch_size or plan.n
        ),
        sampling="poisson" if target.canaries == 1 else "unchecked",  # many may be absent at once
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
