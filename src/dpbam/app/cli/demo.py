"""``dpbam demo``: the three methods and training without privacy, side by side, on digits."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import mean
from typing import Annotated

from dpbam import _validate
from dpbam.app.cli.compare import carry_out, show
from dpbam.app.cli.output import note, number, option, percent, say
from dpbam.app.compare.comparison import Comparison, Contender, plan_runs
from dpbam.app.report import write_report
from dpbam.app.report.records import read_run
from dpbam.privacy.rounding import up

SETTINGS: dict[str, object] = {
    "data": "digits",
    "model": "small-cnn",
    "epsilon": 3.0,
    "clip_norm": 1.0,
    "batch_size": 512,
    "epochs": 40.0,
    "optimizer": "nadam",
    "lr": 0.01,
    "device": "cpu",
    "measure_bias": 8,
}
LAMBDAS = {"dp-sgd": None, "dp-sat": 0.02, "bam": 0.02}  # large enough to see on digits


def demo(
    out: Annotated[Path, option("Where the results go.")] = Path("runs/demo"),
    seeds: Annotated[int, option("How many paired seeds.")] = 5,
    jobs: Annotated[int | None, option("Runs at a time; by default one per core.")] = None,
) -> None:
    """Compare DP-SGD, DP-SAT, BAM and training without privacy on digits, in a few minutes.

    Epsilon 3, a small convolutional net, five paired seeds; the bias of clipping is measured, too.
    The same command again shows the results that are there.

    Examples:
        $ dpbam demo
        $ dpbam demo --seeds 3 --out runs/three
    """
    contenders = [Contender(method, lam) for method, lam in LAMBDAS.items()]
    seeds = _validate.count("--seeds", seeds)
    runs = plan_runs(SETTINGS, contenders, range(seeds), out, include_non_private=True)
    note(
        f"Training on scikit-learn's handwritten digits: {len(runs)} runs, a few minutes. "
        "sgd is without privacy."
    )
    result = carry_out(runs, out, jobs or min(len(runs), os.cpu_count() or 1), quiet=False)
    say(headline(result))
    show(result, out)
    say(bias_sentence(result))
    say(f"Report: {write_report([out], out / 'report.html')}")


def headline(result: Comparison) -> str:
    """Return the accuracy of each method, and at which epsilon."""
    private = next(run for run in result.runs if run.arm == result.names[0])
    accuracy = {name: percent(result.mean(name).mean) for name in result.names}
    *methods, reference = (f"{value} with {name}" for name, value in accuracy.items())
    return (
        f"Test accuracy at epsilon {up(private.epsilon)}, delta {number(private.delta)}: "
        f"{', '.join(methods)}; {reference}, which gives no privacy."
    )


def bias_sentence(result: Comparison) -> str:
    """Return what BAM did to the length of the clipping bias, paired by seed. Not to be shared."""
    baseline, bam = result.names[0], next(name for name in result.names if name.startswith("bam"))
    before, after = (_biases(result, name) for name in (baseline, bam))
    change = mean(after.values()) / mean(before.values()) - 1
    fewer = sum(after[seed] < before[seed] for seed in before)
    return (
        f"Bias: with {bam} clipping moved the mean gradient by {number(mean(after.values()))}, "
        f"with {baseline} by {number(mean(before.values()))}: {abs(change):.0%} "
        f"{'less' if change < 0 else 'more'}, and less in {fewer} of {len(before)} seeds "
        "(measured on the training data without noise: not for publication)."
    )


def _biases(result: Comparison, name: str) -> dict[int | None, float]:
    """Return the mean length of the bias over the measured steps, by seed."""
    rows = {run.seed: read_run(run.out).bias for run in result.runs if run.arm == name}
    return {
        seed: mean(row["non_private_against_plain"]["bias"] for row in measured)
        for seed, measured in rows.items()
    }
