"""``make prove``: plant every mistake, attack the code as it is, and print all of it in one table.

Exit code 1 if a mistake went uncaught, an attack refuted the code as it is, or an attack was weaker
than asked for. Random bits are the system's; a right implementation fails once in 10^6 runs. With
``--out`` the figures are kept as JSON, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy.stats import binom

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from attacks import AuditResult, Target, audit  # noqa: E402
from attacks.attack import _bounds  # noqa: E402
from attacks.bounds import mean_difference  # noqa: E402
from gallery import AUDITED, AUDITS, CONFIDENCE, GALLERY, MANY, ONE_STEP  # noqa: E402

from dpbam.app.cli.output import console, table  # noqa: E402
from dpbam.privacy.rounding import down, up  # noqa: E402
from planting import Mistake  # noqa: E402

HEADER = ("promise", "planted mistake", "caught by", "audit bound against claim")
EACH = 1000  # scores of a repeat


class Asked(NamedTuple):
    """An attack on the code as it is, and the bound that it has to reach.

    A bound from N scores is 4 - 38 / sqrt(N) on average, with a deviation of 10 / sqrt(N): of
    800,000 it is below 3.9 once in 10^7 times, and the others are further from what is asked.
    """

    target: Target
    trials: int = 1
    least: float = 0.0


def many(canaries: int, **settings: Any) -> Target:
    """One training with orthogonal canaries, all data in every step."""
    return replace(MANY, canaries=canaries, n=canaries + 1, batch_size=canaries + 1, **settings)


STRONG = "one step, q = 1, 800,000 canaries"
ATTACKS = {
    STRONG: Asked(many(800_000), least=3.9),
    "one step, q = 1, 800,000 canaries, BAM": Asked(many(800_000, method="bam"), least=3.9),
    "one step, q = 1, 100,000 canaries, secure noise": Asked(
        many(100_000, noise="secure"), least=3.7
    ),
    "one step, q = 1, 2,000 random directions, BAM": Asked(
        many(2000, canary="random", method="bam"), least=2.0
    ),
    "one step, q = 1, many runs": Asked(ONE_STEP, trials=2000, least=2.0),
    "20 steps, q = 1, one training, 50,000 canaries": Asked(many(50_000, steps=20), least=2.0),
    "20 steps, q = 0.2, one training, 5,000 canaries": Asked(
        Target(canaries=5000, n=10_000, batch_size=2000, steps=20)
    ),
    "20 steps, q = 0.2, one training, 100 mislabelled images": Asked(
        Target(canary="mislabelled", canaries=100, epsilon=8.0, n=500, batch_size=100, steps=20)
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="mistakes whose claim or name has this in it")
    parser.add_argument("--part", choices=("all", "gallery", "attacks"), default="all")
    parser.add_argument("--out", type=Path, help="a file for the figures; parts add up in it")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.part in ("all", "gallery"):
        began, gallery = _used(), list(_gallery_rows(options.only))
        if not gallery:
            raise SystemExit(f"no planted mistake has {options.only!r} in its claim or name")
        rows += gallery
        _keep(options.out, gallery=gallery, gallery_processor_seconds=round(_used() - began))
    repeats: dict[str, Any] = {"right": True}
    if options.part in ("all", "attacks"):
        began = _used()
        results = {name: audit(a.target, trials=a.trials, jobs=options.jobs)
                   for name, a in ATTACKS.items()}  # fmt: skip
        attacks = [_attack_row(name, result) for name, result in results.items()]
        repeats = _repeats(results[STRONG])
        rows += attacks
        seconds = round(_used() - began)
        _keep(options.out, attacks=attacks, repeats=repeats, attacks_processor_seconds=seconds)
    _show(rows, repeats)
    return 0 if all(row["right"] for row in [*rows, repeats]) else 1


def _used() -> float:
    """Processor seconds of this process and of those that have ended."""
    return sum(os.times()[:4])


def _keep(out: Path | None, **figures: Any) -> None:
    if out is not None:
        kept = json.loads(out.read_text()) if out.exists() else {}
        out.write_text(json.dumps({**kept, **figures}, indent=1) + "\n")


def _show(rows: list[dict[str, Any]], repeats: dict[str, Any]) -> None:
    """The one table."""
    cells = [[row[name] for name in HEADER] for row in rows]
    console().print(table(HEADER, cells, title="promises, mistakes and attacks", left=4))
    planted = [row for row in rows if "function replaced" in row]
    print(f"{len(planted)} planted, {sum(not row['right'] for row in planted)} uncaught")
    if "above" in repeats:
        print(f"{repeats['count']} repeats of {repeats['scores']} scores: above the claim "
              f"{repeats['above']} times; 95% confidence allows {repeats['allowed']}")  # fmt: skip


def _gallery_rows(only: str) -> Iterator[dict[str, Any]]:
    for section, mistakes in GALLERY.items():
        for name, mistake in mistakes.items():
            if only not in f"{section}: {name}":
                continue
            owner = getattr(mistake.owner, "__name__", "").rpartition(".")[2]
            caught = _what_catches(mistake)
            bound = _against(AUDITS[-1]) if mistakes is AUDITED and AUDITS else "-"
            cells = dict(zip(HEADER, (section, name, caught, bound), strict=True))
            yield {**cells, "function replaced": f"{owner}.{mistake.name}",
                   "right": not caught.startswith("NOTHING")}  # fmt: skip
            print(f"{section}: {name}: {caught}", flush=True)


def _what_catches(mistake: Mistake) -> str:
    try:
        mistake.catch(pytest.MonkeyPatch())
    except pytest.fail.Exception:
        return "NOTHING"
    except Exception as error:
        return f"NOTHING: the check itself fails ({type(error).__name__})"
    return mistake.check.__name__.removeprefix("check_").replace("_", " ")


def _against(result: AuditResult) -> str:
    best = max(result.bounds, key=lambda b: b.epsilon)
    return f"{down(best.epsilon, 3)} of {up(result.claimed, 3)} ({best.name})"


def _attack_row(name: str, result: AuditResult) -> dict[str, Any]:
    """Refuted at ``CONFIDENCE``, so that a right implementation passes; shown at 95%."""
    scores = np.array([*result.present, *result.absent])
    present = np.arange(len(scores)) < len(result.present)
    sure = _bounds(result.target, scores, present, CONFIDENCE)
    refuted = any(b.epsilon > result.claimed for b in sure)
    least, best = ATTACKS[name].least, max(b.epsilon for b in result.bounds)
    cells = (f"epsilon {result.target.epsilon:g}: {name}", "nothing",
             "REFUTED" if refuted else "-" if best >= least else f"TOO WEAK: {least} is asked for",
             _against(result))  # fmt: skip
    print(*cells, sep="; ", flush=True)
    figures = {
        "bounds": {b.name: b.epsilon for b in result.bounds},
        "expected": {b.name: b.epsilon for b in result.expected},
        "claimed": result.claimed, "runs": result.trials, "asked": least,
        "right": not refuted and best >= least,
    }  # fmt: skip
    return {**dict(zip(HEADER, cells, strict=True)), **figures}


def _repeats(result: AuditResult) -> dict[str, Any]:
    """How often an audit of 1000 scores, at 95%, refutes the code as it is.

    The strong attack's scores are independent in the code as it is, so that they are cut into
    repeats. More than are allowed happen once in 10^7 times at 5% each.
    """
    half = EACH // 2
    count = min(len(result.present), len(result.absent)) // half
    cuts = [slice(k * half, (k + 1) * half) for k in range(count)]
    found = [mean_difference(result.present[c], result.absent[c], result.target.delta, 0.95)
             for c in cuts]  # fmt: skip
    above = sum(bound.epsilon > result.claimed for bound in found)
    allowed = int(binom.isf(1e-7, count, 0.05))
    return {"count": count, "scores": EACH, "above": above, "allowed": allowed,
            "right": above <= allowed}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
