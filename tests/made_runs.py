"""Files of run folders that are made by hand."""

from __future__ import annotations

import torch

from dpbam.app.runs import RunConfig
from dpbam.app.runs.documents import RunFacts, TestFacts
from dpbam.app.runs.files import FORMAT


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
