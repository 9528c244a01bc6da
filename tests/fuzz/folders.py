"""Whole run folders, as ``dpbam audit``, ``report`` and ``plot`` read them: one file is mutated."""

from __future__ import annotations

import functools
import random
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from parsers import Parser

from app.report.synthetic import write_run
from dpbam.app.audit import accountant, check_run
from dpbam.app.report import draw, write_report
from dpbam.app.runs import RunConfig, execute
from dpbam.catalogue import FIGURES


@dataclass(frozen=True)
class FolderParser(Parser):
    """A reader of a folder; the folder that it starts from is copied next to the mutated file."""

    honest: Callable[[], Path] = Path

    def try_on(self, content: bytes, folder: Path) -> str:
        """As :meth:`Parser.try_on`, in a run folder that is otherwise whole."""
        if not (folder / "run").exists():
            shutil.copytree(self.honest(), folder / "run")
        return super().try_on(content, folder)


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def _trained() -> Path:
    """A finished run, unseeded, and the same whichever test asks first."""
    config = RunConfig(data="digits", model="mlp", method="dp-sgd", noise_multiplier=3.0, epochs=1,
                       batch_size=700, engine="functional", num_workers=0)  # fmt: skip
    entropy = random.Random(0)
    with mock.patch.multiple(
        secrets, randbits=entropy.getrandbits, token_hex=lambda n: entropy.randbytes(n).hex()
    ):
        return execute(config, Path(_home().name) / "trained").out


@functools.cache
def _written() -> Path:
    """A folder with all that a report shows."""
    return write_run(Path(_home().name) / "written", epochs=1, batch_size=500)


def _audit(path: Path) -> Any:
    """On a coarse grid: the question is whether the reader stands, not how tight it is."""
    points, accountant._POINTS = accountant._POINTS, 2**12
    try:
        return check_run(_run_of(path))
    finally:
        accountant._POINTS = points


def _report(path: Path) -> Any:
    run = _run_of(path)
    write_report([run], run.parent / "report.html")
    for name in FIGURES:
        _table(name, run)
    return write_report([run], run.parent / "public.html", publishable=True, public_test_data=True)


def _table(name: str, run: Path) -> None:
    from dpbam.app.report.records import ReportError

    try:
        draw(name, [run], run.parent / "figure.csv")
    except ReportError as error:
        if "there is no data" not in str(error):
            raise


def _run_of(path: Path) -> Path:
    return next(p for p in path.parents if p.name == "run")


def _mutating(
    what: str, read: Callable[[Path], Any], honest: Callable[[], Path], files: tuple[str, ...]
) -> dict[str, Callable[[], FolderParser]]:
    def made(file: str) -> FolderParser:
        return FolderParser(read, f"run/{file}", ((honest() / file).read_bytes(),), honest)

    return {f"{what} {file}": functools.partial(made, file) for file in files}


#: made when asked for: a run has to be trained first
FOLDERS: dict[str, Callable[[], FolderParser]] = {
    **_mutating("audit", _audit, _trained, (
        "config.toml", "ledger.jsonl", "privacy-statement.json", "non-private/run.json",
    )),
    **_mutating("report", _report, _written, (
        "config.toml", "privacy-statement.json", "metrics.jsonl", "statistics.jsonl",
        "non-private/run.json", "non-private/bias.jsonl", "non-private/evaluation-test.json",
        "non-private/training.jsonl",
    )),
}  # fmt: skip
