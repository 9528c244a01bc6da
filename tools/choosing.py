"""Write the tables of docs/choosing.md: ``python tools/choosing.py``, again when there are records.

One is the accountant's, the others are read from the records in results/pocket.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dpbam import PrivacyPlan  # noqa: E402
from reproduce.bias_claims import overview  # noqa: E402
from reproduce.outcome import Study  # noqa: E402
from reproduce.recipes import load_recipe  # noqa: E402
from reproduce.records import finished  # noqa: E402

PAGE = ROOT / "docs" / "choosing.md"
N, DELTA, EPOCHS = 50_000, 1e-5, 30
#: What matters less for a choice.
_LEFT_OUT = {"bias / gradient", "length's share", "largest eigenvalue"}
EPSILONS, SIZES = (1, 2, 4, 8), (64, 256, 1024, 4096)


def noise_table() -> str:
    """sigma / l, in thousandths of C: the noise on each coordinate of the mean gradient."""
    rows = ["| l | steps | " + " | ".join(f"epsilon {e}" for e in EPSILONS) + " |"]
    rows.append("|---" * (2 + len(EPSILONS)) + "|")
    for size in SIZES:
        plans = [
            PrivacyPlan.calibrate(epsilon=e, delta=DELTA, n=N, batch_size=size, epochs=EPOCHS)
            for e in EPSILONS
        ]
        cells = [
            f"{p.noise_multiplier:.2f} ({1000 * p.noise_multiplier / size:.2f})" for p in plans
        ]
        rows.append(f"| {size} | {plans[0].steps} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def study_table(name: str, arms: tuple[str, ...] | None = None) -> str:
    """What was measured of a recipe's runs, from the records there are; ``arms`` names some."""
    recipe = load_recipe(name)
    found = Study(recipe, finished(recipe, ROOT / "results"), len(recipe.runs())).arms()
    wanted = {arm: by_seed for arm, by_seed in found.items() if arms is None or arm in arms}
    if not wanted:
        return "No records yet."
    return _without(overview(wanted).to_markdown(), _LEFT_OUT)


def _without(table: str, columns: set[str]) -> str:
    """A table without some of its columns."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    kept = [k for k, name in enumerate(rows[0]) if name not in columns]
    return "\n".join("| " + " | ".join(row[k] for k in kept) + " |" for row in rows)


def filled(page: str) -> str:
    """The page with its tables made anew."""
    tables = {
        "noise": noise_table(),
        "clip-norm": study_table("methods", ("dp-sgd", "dp-sgd-c4")),
        "lambda": study_table("methods", ("dp-sgd", "bam-0.005", "bam-0.02")),
        "batch-size": study_table("batch-size"),
    }
    for name, table in tables.items():
        start, end = f"<!-- table: {name} -->", "<!-- end -->"
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"{PAGE.name} has no place for the table {name}")
        page = pattern.sub(lambda _, a=start, t=table, b=end: f"{a}\n\n{t}\n\n{b}", page)
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
