"""Show each defect that newcomers and attackers once reported, as it is now.

    python tools/defects.py [WORD...]     only those whose title has one of the words

Each entry is what the reporter saw then, and did: commands and scripts in an empty folder, with
real processes, and what has to be seen now. The exit code is 1 if one of them is seen again.
Defects that only a test can show (a kill, two processes, a generator) name their tests, which run
with pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Check = Callable[[Path], str]
DEFECTS: dict[str, Check] = {}

#: What the reports say was seen.
REPORTED = {
    "the browser test fails in one order": "NaN in the page after another test has used it",
    "a record is seen before the guard": "a number fixed at first use, by the first row: 129 C",
    "a pass moves a global generator": "it counts passes: 8 C in the next step, public seed",
    "user code raises after the charge": "every later backward is refused",
    "two processes write one ledger": "each reports 4.64 where the file holds 6.55",
    "Hugging Face and Lightning overrides": "an own training_step trains without noise: epsilon 0",
    "names reach published text unescaped": "escape bytes, newlines and <script> in README.md",
    "sign, digest, audit": "a statement is signed unchecked; a digest contains paths",
    "an overridden part is not called": "the statement names Neg; the fused engine never calls it",
    "the plain gradient is taken at shifted weights": "0.118 where |g_hat(theta)| is 0.282",
    "a kill before the first checkpoint": "--resume ends 40 steps early without a word on why",
    "the log shows the epsilon of another step": "epsilon 2.873, and a line later 2.814",
    "refusals that give a wrong reason": "torch.compile: 'kept a tensor'; complex: 'clamp'",
    "the unit is guessed: labels.csv with a patient column": "trained per record without a word",
    "minus the gradient trains": "84.1% by the fused engine, 10.0% by the functional one",
    "evaluate refuses data that train accepts; class names in a list": "a traceback",
    "the default batch is refused on few images": "512 is refused for 321 images",
    "data check passes dark and 12-bit images, and counts records for lines": "both pass",
    "predict gives up at the first damaged file": "nothing is written",
    "help says 'not private' where it means 'do not share'": "None of what is shown is private",
    "a useless model is not called useless; an audit hides what is missing": "dozens of rows right",
    "--dry-run estimates no time": "no estimate",
    "calibrating to a tiny epsilon ends in scipy's words": "f(a) and f(b) have different signs",
}

_MINE = """
import numpy as np, torch
from dpbam.data import DataSet, from_arrays
from dpbam.data.base import ArrayImages
from dpbam.methods import DPSGD

def wide(split, names=("a", "b")):
    r = np.random.default_rng(0 if split == "train" else 1)
    y = r.integers(0, 2, 300)
    x = (r.integers(0, 100, (300, 24, 8, 8)) + 80 * y[:, None, None, None]).astype(np.uint8)
    return DataSet("wide", ArrayImages(x), y, names)

def listed(split):
    return wide(split, ["a", "b"])

def of(n):
    r = np.random.default_rng(0)
    return lambda split: from_arrays(r.integers(0, 255, (n, 8, 8)).astype(np.uint8),
                                     r.integers(0, 2, n))

few, some, noise = of(321), of(546), of(200)

class Neg(DPSGD):
    def direction(self, grad, theta, lam):
        return {n: -t for n, t in super().direction(grad, theta, lam).items()}
"""
_IMAGES = """
import csv, numpy as np
from pathlib import Path
from PIL import Image
r = np.random.default_rng(0)
for name in ("scans", "dark", "deep"):
    folder = Path(name)
    folder.mkdir()
    rows = []
    for i in range(40):
        pixels = r.integers(0, 255, (8, 8)).astype(np.uint8)
        if name == "dark" and i == 27:
            pixels = pixels // 100
        if name == "deep":
            pixels = pixels.astype(np.uint16) * 16
        Image.fromarray(pixels).save(folder / f"{i}.png")
        rows.append([f"{i}.png", i % 2, f"p{i // 4}"])
    header = ["file", "label"] + (["Patient ID"] if name == "scans" else [])
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([header, *(row[: len(header)] for row in rows)])
"""


class SeenError(AssertionError):
    """A defect is there again."""


def defect(title: str) -> Callable[[Check], Check]:
    """Register a check under its title."""

    def keep(check: Check) -> Check:
        DEFECTS[title] = check
        return check

    return keep


def run(folder: Path, *command: str) -> tuple[int, str]:
    """Run a command; return its exit code and all that it printed, in one line."""
    ended = subprocess.run(
        command, cwd=folder, env={**os.environ, "COLUMNS": "300", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return ended.returncode, " ".join(ended.stdout.split())


def dpbam(folder: Path, line: str, *, code: int = 0, says: str = "", not_says: str = "") -> str:
    """Run ``dpbam LINE``; check its exit code and its words."""
    got, text = run(folder, sys.executable, "-m", "dpbam", *line.split())
    if got != code or says not in text or (not_says and not_says in text):
        raise SeenError(
            f"dpbam {line}: exit {got}, not {code}, or other words than {says!r}: {text}"
        )
    return f"$ dpbam {line}\n  exit {got}: {text[-160:]}"


def script(folder: Path, text: str, *, says: str) -> str:
    """Run a script; check its words."""
    got, printed = run(folder, sys.executable, "-W", "ignore", "-c", text)
    if says not in printed:
        raise SeenError(f"exit {got}, without {says!r}: {printed}")
    return f"  {printed[-200:]}"


def run_tests(*names: str) -> Check:
    """Run tests of the repository that are not slow."""

    def check(_: Path) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        code, text = run(
            ROOT,
            *command,
            *(f"tests/{name}" if not name.startswith("-") else name for name in names),
        )
        if code:
            raise SeenError(text[-600:])
        return f"$ pytest {' '.join(names)}\n  {text.rpartition(']')[2][-60:].strip()}"

    return check


DEFECTS["the browser test fails in one order"] = run_tests(
    "app/report/test_browser.py", "--randomly-seed=2272357155"
)
DEFECTS["a record is seen before the guard"] = run_tests(
    "claims/test_first_use_claims.py", "bias/test_first_rows.py"
)
DEFECTS["a pass moves a global generator"] = run_tests("claims/test_generator_claims.py")
DEFECTS["user code raises after the charge"] = run_tests("claims/test_interruption_claims.py")
DEFECTS["two processes write one ledger"] = run_tests("privacy/test_writer_lock.py")
DEFECTS["Hugging Face and Lightning overrides"] = run_tests(
    "interop/test_huggingface.py", "interop/test_lightning.py"
)
DEFECTS["names reach published text unescaped"] = run_tests("app/runs/test_escaping.py")
DEFECTS["sign, digest, audit"] = run_tests("app/audit/test_check.py")
DEFECTS["an overridden part is not called"] = run_tests("test_overriding.py")
DEFECTS["the plain gradient is taken at shifted weights"] = run_tests(
    "bias/test_lens.py::test_the_plain_gradient_is_at_theta_for_every_method"
)
DEFECTS["a kill before the first checkpoint"] = run_tests("app/runs/test_resume.py")
DEFECTS["the log shows the epsilon of another step"] = run_tests("app/cli/test_progress_private.py")
DEFECTS["refusals that give a wrong reason"] = run_tests("test_refused_models.py")


@defect("the unit is guessed: labels.csv with a patient column")
def _(folder: Path) -> str:
    return "\n".join([
        dpbam(folder, "train --data scans --epsilon 8 --dry-run", code=2, says="--unit"),
        dpbam(folder, "train --data scans --epsilon 8 --dry-run --unit record"),
    ])  # fmt: skip


@defect("minus the gradient trains")
def _(folder: Path) -> str:
    flags = "--data digits --method mine:Neg --epochs 3 --epsilon 8 --seed 0 --lr 0.01"
    lines, accuracies = [], []
    for engine in ("auto", "functional"):
        lines.append(dpbam(folder, f"train {flags} --engine {engine} --out neg-{engine}"))
        last = (folder / f"neg-{engine}" / "metrics.jsonl").read_text().splitlines()[-1]
        accuracies.append(json.loads(last)["accuracy"])
    if max(accuracies) > 0.2:
        raise SeenError(f"the accuracies are {accuracies}")
    return "\n".join([*lines, f"  accuracies {accuracies}"])


@defect("evaluate refuses data that train accepts; class names in a list")
def _(folder: Path) -> str:
    lines = []
    for name in ("wide", "listed"):
        flags = f"--data mine:{name} --epochs 3 --epsilon 8 --seed 0 --out {name}"
        lines += [
            dpbam(folder, f"train {flags}"),
            dpbam(folder, f"evaluate {name} --data mine:{name}"),
        ]
        lines += [dpbam(folder, f"export {name} --to safetensors --out {name}-export")]
    return "\n".join(lines)


@defect("the default batch is refused on few images")
def _(folder: Path) -> str:
    return "\n".join([
        dpbam(folder, f"train --data mine:{name} --epsilon 8 {model}--dry-run", says=words)
        for name, model, words in [
            ("few", "", "batch size 321"),  # a head on fixed features: all records in every step
            ("few", "--model small-cnn ", "batch size 64"),
            ("some", "--model small-cnn ", "batch size 128"),
        ]
    ])  # fmt: skip


@defect("data check passes dark and 12-bit images, and counts records for lines")
def _(folder: Path) -> str:
    return "\n".join([
        dpbam(folder, "data check dark", says="27.png", code=2),
        dpbam(folder, "data check deep", says="only 12 in use", code=2),
    ])  # fmt: skip


@defect("predict gives up at the first damaged file")
def _(folder: Path) -> str:
    lines = [dpbam(folder, "train --data scans --unit record --epochs 3 --epsilon 8 --out seen")]
    (folder / "scans" / "3.png").write_bytes(b"no image")
    lines.append(dpbam(folder, "predict seen scans --out seen.csv", code=1, says="3.png"))
    rows = (folder / "seen.csv").read_text().splitlines()
    if len(rows) != 40:
        raise SeenError(f"{len(rows)} lines of 40")
    return "\n".join(lines)


@defect("help says 'not private' where it means 'do not share'")
def _(folder: Path) -> str:
    return dpbam(folder, "bias --help", says="do not share", not_says="None of what is shown")


@defect("a useless model is not called useless; an audit hides what is missing")
def _(folder: Path) -> str:
    flags = "--data mine:noise --epochs 3 --epsilon 8 --seed 0 --out noise"
    return "\n".join([
        dpbam(folder, f"train {flags}", says="constant"),
        dpbam(folder, "audit noise --all", not_says="the statement is signed"),  # nothing was
        f"{(folder / 'noise' / 'README.md').write_text('epsilon = 0.001')} letters of a card",
        dpbam(folder, "audit noise", code=1, says="README.md"),
    ])  # fmt: skip


@defect("--dry-run estimates no time")
def _(folder: Path) -> str:
    return dpbam(folder, "train --data digits --epsilon 8 --dry-run", says="estimated time")


@defect("calibrating to a tiny epsilon ends in scipy's words")
def _(folder: Path) -> str:
    text = (
        "from dpbam import PrivacyPlan\n"
        "try: PrivacyPlan.calibrate(n=1000, batch_size=100, epochs=5, epsilon=1e-6, delta=1e-9)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "else: print('calibrated')"
    )
    return script(folder, text, says="epsilon")


def main() -> int:
    """Show them; list what is seen again."""
    words = sys.argv[1:]
    again = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mine.py").write_text(_MINE, encoding="utf-8")
        subprocess.run([sys.executable, "-c", _IMAGES], cwd=folder, check=True)
        for title, check in DEFECTS.items():
            if words and not any(word in title for word in words):
                continue
            begun, reported = time.monotonic(), REPORTED[title]
            try:
                shown = check(folder)
            except SeenError as error:
                shown = f"  SEEN AGAIN: {error}"
                again.append(title)
            seconds = time.monotonic() - begun
            print(f"{title} ({seconds:.0f} s)\n  reported: {reported}\n{shown}", flush=True)
    print(f"seen again: {again or 'none'}")
    return int(bool(again))


if __name__ == "__main__":
    sys.exit(main())
