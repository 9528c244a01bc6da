"""Results of runs with numbers of our own choosing, to test what is made of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from dpbam.app.runs import RunConfig, RunResult, RunSpec
from dpbam.app.runs.documents import RunFacts, TestFacts
from dpbam.app.runs.files import FORMAT
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


def run_facts(config: RunConfig) -> RunFacts:
    """The facts of a run that is made by hand: it has begun, and nothing else."""
    return RunFacts(
        format=FORMAT, run="r", config=config, n=100, unit="record",
        test=TestFacts(set="digits/test", records=10, names_units=False),
        noise_multiplier=config.noise_multiplier or 0.0, delta=1e-4, sampling_rate=0.1,
        clip_norm=1.0, device="cpu", threads=1, ranks=1, versions={"torch": torch.__version__},
        public_weights=None, initial_weights="", initial_tensors={"trained": {}, "fixed": {}},
        non_private_fingerprint="", non_private_test_fingerprint="", non_private_test_records="",
    )  # fmt: skip
