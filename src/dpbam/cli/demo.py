"""``dpbam demo``: the three methods and training without privacy, side by side, on digits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dpbam.cli.compare import carry_out, show
from dpbam.cli.output import console, examples

EXAMPLES = examples("dpbam demo", "dpbam demo --seeds 3 --out runs/three")

SETTINGS: dict[str, Any] = {
    "data": "digits",
    "model": "small-cnn",
    "epsilon": 3.0,
    "delta": 1e-4,
    "clip_norm": 1.0,
    "batch_size": 512,
    "epochs": 40.0,
    "optimizer": "nadam",
    "lr": 0.01,
    "device": "cpu",
}
LAMBDAS = {"dp-sgd": None, "dp-sat": 0.02, "bam": 0.02}


def run(
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(help="How many paired seeds.")] = 5,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time; by default a core each.")
    ] = None,
) -> None:
    """Compare DP-SGD, DP-SAT, BAM and training without privacy on digits, in a few minutes.

    Epsilon 3, a small convolutional net, five paired seeds. The same command again shows the
    results that are there.
    """
    from dpbam import _validate
    from dpbam.experiments.compare import Contender, plan_runs

    contenders = [Contender(method, lam) for method, lam in LAMBDAS.items()]
    seeds = _validate.count("--seeds", seeds)
    runs = plan_runs(SETTINGS, contenders, range(seeds), out, include_non_private=True)
    console(stderr=True).print(
        f"Training on scikit-learn's handwritten digits: {len(runs)} runs, a few minutes. "
        "sgd is without privacy.",
        soft_wrap=True,
    )
    result = carry_out(runs, out, jobs or min(len(runs), os.cpu_count() or 1), quiet=False)
    show(result, out)
    from dpbam.report import write_report

    page = write_report([out], out / "report.html")
    console().print(f"Report: {page}", markup=False, soft_wrap=True)
