"""Results of runs with numbers of our own choosing, to test what is made of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from dpbam.app.runs import RunConfig, RunResult, RunSpec
from dpbam.privacy.plan import PrivacyPlan
from dpbam.training.events import EvaluationReport


def finished(arm: str, seed: int, accuracy: float) -> RunResult:
    evaluation = EvaluationReport(
        step=10, epoch=1.0, epsilon=3.0, scores={"accuracy": accuracy}, loss=1.0, records=100
    )
    return RunResult(
        spec=RunSpec(arm, _config(seed), Path("out")), status="complete", plan=_plan(), steps=10,
        charged=10, epsilon=3.0, delta=1e-4, evaluations=(evaluation,), seconds=1.0, pairing={},
    )  # fmt: skip


@cache
def _config(seed: int) -> RunConfig:
    return RunConfig(epsilon=3.0, seed=seed)


@cache
def _plan() -> PrivacyPlan:
    return PrivacyPlan(n=1000, batch_size=100, steps=10, noise_multiplier=1.0, delta=1e-4)
