"""``make prove``: plant every mistake, print what caught it, then attack the code as it is.

Exit code 1 if a mistake went uncaught, or an attack refuted the claim more often than it may. With
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
from typing import Any

import pytest
from scipy.stats import binom

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from gallery import GALLERY, ONE_STEP  # noqa: E402

from dpbam.app.audit import AuditResult, Target, audit  # noqa: E402
from dpbam.app.audit.attack import play  # noqa: E402
from dpbam.app.audit.bounds import many_runs  # noqa: E402
from dpbam.app.audit.trials import collect  # noqa: E402
from dpbam.app.cli.output import console, table  # noqa: E402
from planting import Mistake  # noqa: E402

WHOLE = Target(epsilon=4.0, n=100, batch_size=20, steps=10)
MANY = replace(ONE_STEP, canaries=100, n=104, batch_size=104)
ONE_RUN = Target(epsilon=4.0, canaries=400, n=500, batch_size=100, steps=20)
INPUTS = Target(canary="mislabelled", canaries=100, epsilon=8.0, n=500, batch_size=100, steps=20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trials", type=int, default=8000, help="of the strong audit")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--repeat-trials", type=int, default=1000, help="scores of each repeat")
    parser.add_argument("--only", default="", help="mistakes whose claim or name has this in it")
    parser.add_argument("--part", choices=("all", "gallery", "attacks"), default="all")
    parser.add_argument("--out", type=Path, help="a file for the figures; parts add up in it")
    options = parser.parse_args()
    good = True
    if options.part in ("all", "gallery"):
        began, gallery = _used(), show_gallery(options.only)
        good &= not any(row[3].startswith("NOTHING") for row in gallery)
        _keep(options.out, gallery=gallery, gallery_processor_seconds=round(_used() - began))
    if options.part in ("all", "attacks"):
        began, figures = _used(), attack_all(options)
        good &= figures["stood"]
        _keep(options.out, **figures, attacks_processor_seconds=round(_used() - began))
    return 0 if good else 1


def _used() -> float:
    """Processor seconds of this process and of those that have ended."""
    return sum(os.times()[:4])


def _keep(out: Path | None, **figures: Any) -> None:
    if out is not None:
        kept = json.loads(out.read_text()) if out.exists() else {}
        out.write_text(json.dumps({**kept, **figures}, indent=1) + "\n")


def show_gallery(only: str = "") -> list[tuple[str, str, str, str]]:
    """Print the table, and return it: claim, mistake, function, what caught it."""
    rows = list(_gallery_rows(only))
    if not rows:
        raise SystemExit(f"no planted mistake has {only!r} in its claim or name")
    header = ("claim", "planted mistake", "function replaced", "caught by")
    console().print(table(header, rows, title="planted mistakes", left=4))
    uncaught = sum(row[3].startswith("NOTHING") for row in rows)
    print(f"{len(rows)} planted, {uncaught} uncaught", flush=True)
    return rows


def _gallery_rows(only: str) -> Iterator[tuple[str, str, str, str]]:
    for section, mistakes in GALLERY.items():
        for name, mistake in mistakes.items():
            if only not in f"{section}: {name}":
                continue
            owner = getattr(mistake.owner, "__name__", "").rpartition(".")[2]
            caught = _what_catches(mistake)
            yield section, name, f"{owner}.{mistake.name}", caught


def _what_catches(mistake: Mistake) -> str:
    try:
        mistake.catch(pytest.MonkeyPatch())
    except pytest.fail.Exception:
        return "NOTHING"
    except Exception as error:
        return f"NOTHING: the check itself fails ({type(error).__name__})"
    return mistake.check.__name__.removeprefix("check_").replace("_", " ")


def attack_all(options: argparse.Namespace) -> dict[str, Any]:
    """Print the audits of the code as it is; their figures, and whether all came out right."""
    results = _audits(options)
    rows = [_row(name, result) for name, result in results.items()]
    header = ("attack", "runs", "claimed", "at least (Gaussian DP)", "at least (assuming nothing)")
    console().print(table(header, rows, title="the code as it is; 95% confidence, delta 1e-5"))
    above = _repeats(options)
    allowed = int(binom.ppf(0.999, options.repeats, 0.05))
    print(f"{options.repeats} repeats of {options.repeat_trials} scores: above the claim {above} "
          f"times; 95% confidence allows {allowed}")  # fmt: skip
    teeth = next(iter(results.values())).bounds[0].epsilon
    print(f"teeth: the strong audit shows epsilon >= {teeth:.2f} of 4 (3 is asked for)")
    stood = not any(r.violated for r in results.values()) and above <= allowed and teeth >= 3
    return {"stood": stood, "attacks": [header, *rows], "teeth": teeth,
            "repeats": {"count": options.repeats, "scores": options.repeat_trials,
                        "above": above, "allowed": allowed}}  # fmt: skip


def _audits(options: argparse.Namespace) -> dict[str, AuditResult]:
    """The strong one first."""
    strong = audit(ONE_STEP, trials=options.trials, jobs=options.jobs)
    return {
        "one step, q = 1, Dirac": strong,
        "one step, q = 1, random direction": audit(
            replace(ONE_STEP, canary="random", method="bam"),
            trials=options.trials // 4, jobs=options.jobs,
        ),
        "one step, secure noise": audit(
            replace(ONE_STEP, noise="secure"), trials=options.trials // 4, jobs=options.jobs
        ),
        "10 subsampled steps, many runs": audit(
            WHOLE, trials=options.trials // 16, jobs=options.jobs
        ),
        "20 subsampled steps, one run, 400 canaries": audit(ONE_RUN),
        "20 subsampled steps, one run, 100 mislabelled images": audit(INPUTS),
    }  # fmt: skip


def _row(name: str, result: AuditResult) -> tuple[str, ...]:
    bounds = {b.name: f"{b.epsilon:.2f}" for b in result.bounds}
    free = bounds.get("clopper-pearson") or bounds.get("one-run", "")
    claimed = f"{result.claimed:.2f}"
    return name, str(result.trials), claimed, bounds.get("gaussian", "-"), free


def _repeats(options: argparse.Namespace) -> int:
    """How often an audit refutes the code as it is.

    To have many scores at little cost, a step has many canaries, each on a coordinate of its own
    and there by a coin: in the code as it is their scores are independent, and no other is asked.
    """
    each = options.repeat_trials // 2
    steps = 2 * options.repeats * each // MANY.canaries + 20  # coins are not even: some to spare
    played = collect(play, MANY, steps, jobs=options.jobs, out=None, progress=lambda *_: None)
    scores = [(s, there) for t in played for s, there in zip(t.scores, t.present, strict=True)]
    present, absent = ([s for s, there in scores if there is kind] for kind in (True, False))
    cuts = [slice(k * each, (k + 1) * each) for k in range(options.repeats)]
    assert min(len(present), len(absent)) >= options.repeats * each
    found = [many_runs(present[c], absent[c], MANY.delta, 0.95)[0] for c in cuts]
    return sum(bound.epsilon > MANY.plan().epsilon() for bound in found)


if __name__ == "__main__":
    sys.exit(main())
