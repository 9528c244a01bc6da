"""What starting costs: ``dpbam --help`` and ``--version`` over typer's import, and a dry run.

    python benchmarks/startup.py
    python benchmarks/startup.py --before OTHER_CHECKOUT/src    (dry runs of another version too)

Processor seconds (user and system) of whole processes on one thread. All commands take turns, round
by round; a figure is the median of the rounds, and a ratio that of two medians. Asked for are help
and version below twice typer's import, and a dry run below a third of the one before. CIFAR-10 is
looked for where ``dpbam`` looks for it, and left out if it is not there. Figures go to
``results/startup.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import dpbam
from dpbam.data import DataError, load_pair

RESULTS = Path(__file__).with_name("results") / "startup.json"
SOURCES = Path(dpbam.__file__).parent.parent
IMPORT = ["-c", "import typer, rich.console"]
DRY_RUNS = {
    "cifar10": "--data cifar10 --model resnet9 --model-option width=0.25 --method bam --epsilon 8 "
    "--batch-size 4096 --augment-multiplicity 4",
    "digits": "--data digits --epsilon 3 --epochs 30 --lr 0.01",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="the sources of another version")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    commands = _commands(options.before)
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, (sources, arguments) in commands.items():
            seconds[name].append(_processor_seconds(sources, arguments))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = _ratios(medians)
    for name, median in medians.items():
        print(f"{name:32} {median:6.2f} s  ({', '.join(f'{s:.2f}' for s in seconds[name])})")
    for name, ratio in ratios.items():
        print(f"{name:60} {ratio:.2f}")
    figures = {"rounds": options.rounds, "processor seconds": seconds, "ratios": ratios}
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")


def _commands(before: Path | None) -> dict[str, tuple[Path, list[str]]]:
    """The sources and the arguments of Python, by the name of a figure."""
    commands = {"import typer, rich.console": (SOURCES, IMPORT)}
    for flag in ("--help", "--version"):
        commands[f"dpbam {flag}"] = (SOURCES, ["-m", "dpbam", flag])
    for data, flags in DRY_RUNS.items():
        if not _is_there(data):
            continue
        arguments = ["-m", "dpbam", "train", *flags.split(), "--dry-run"]
        commands[f"dry run, {data}"] = (SOURCES, arguments)
        if before is not None:
            commands[f"dry run before, {data}"] = (before, arguments)
    return commands


def _is_there(data: str) -> bool:
    try:
        load_pair(data, download=False)
    except DataError:
        return False
    return True


def _processor_seconds(sources: Path, arguments: list[str]) -> float:
    environment = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed under {sources}")
    return usage.ru_utime + usage.ru_stime


def _ratios(medians: dict[str, float]) -> dict[str, float]:
    base = medians["import typer, rich.console"]
    ratios = {
        f"dpbam {flag} / import typer, rich.console": medians[f"dpbam {flag}"] / base
        for flag in ("--help", "--version")
    }
    for data in DRY_RUNS:
        if f"dry run before, {data}" in medians:
            ratios[f"dry run / dry run before, {data}"] = (
                medians[f"dry run, {data}"] / medians[f"dry run before, {data}"]
            )
    return ratios


if __name__ == "__main__":
    main()
