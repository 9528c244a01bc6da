"""Write the tables of docs/training.md: ``python tools/choosing.py``, again when there are records.

One is the accountant's, the other is read from the records in reproduce/results/pocket. ``python
tools/choosing.py shares`` prints every comparison of BAM with DP-SGD by its share of the norm.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dpbam import PrivacyPlan  # noqa: E402
from dpbam.nn import build_model  # noqa: E402
from dpbam.params import norm, trainable  # noqa: E402
from reproduce.bias_claims import overview  # noqa: E402
from reproduce.outcome import Study, TextTable, difference_of, points  # noqa: E402
from reproduce.recipes import Recipe, load_recipe  # noqa: E402
from reproduce.records import finished  # noqa: E402

PAGE = ROOT / "docs" / "training.md"
N, DELTA, EPOCHS = 50_000, 1e-5, 30
#: What matters less for a choice.
_LEFT_OUT = {"bias / gradient", "length's share", "largest eigenvalue"}
EPSILONS, SIZES = (1, 2, 4, 8), (64, 256, 1024, 4096)
#: Recipes with BAM and DP-SGD on the same seeds, at the same learning rate or each at its best.
_WITH_BAM = (
    ("desk", "table1-cifar10"), ("desk", "table1-pneumonia"), ("desk", "bias-methods"),
    ("pocket", "methods"), ("pocket", "table1-cifar10"), ("pocket", "lambda"),
    ("pocket", "table1-pneumonia"),
)  # fmt: skip


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


def study_table(name: str) -> str:
    """Return what was measured of a recipe's runs, from the records there are."""
    recipe = load_recipe(name)
    records = finished(recipe, ROOT / "reproduce" / "results")
    arms = Study(recipe, records, len(recipe.runs())).arms()
    return _without(overview(arms).to_markdown(), _LEFT_OUT) if arms else "No records yet."


def share_table() -> str:
    """Every comparison of BAM with DP-SGD that was recorded, by lambda / |theta| at the start."""
    rows = {}
    for scale, name in _WITH_BAM:
        recipe = load_recipe(name, scale)
        length = _initial_norm(recipe)
        study = Study(recipe, finished(recipe, ROOT / "reproduce" / "results"), len(recipe.runs()))
        for cell in recipe.cells():
            arms = study.arms(cell)
            for arm, by_seed in arms.items():
                fields = {**recipe.setting, **cell, **recipe.arms[arm]}
                if fields["method"] != "bam" or "clipping" in fields or "correct_noise" in fields:
                    continue
                found = difference_of(by_seed, arms["dp-sgd"])
                key = (scale, recipe.records, fields["epsilon"], fields["lam"])
                rows[key] = (
                    fields["lam"] / length, _net(fields), f"{fields['epsilon']:g}",
                    f"{fields['lam']:g}", points(found, signed=True), str(found.count),
                )  # fmt: skip
    ordered = sorted(rows.values(), key=lambda row: (row[0], row[1:]))
    shown = [(f"{share:.1e}", *rest) for share, *rest in ordered]
    header = ("share", "data, net", "epsilon", "lambda", "against DP-SGD", "seeds")
    return TextTable(header, shown).to_markdown()


def _net(fields: Mapping[str, Any]) -> str:
    data = str(fields["data"]).rpartition(":")[2]
    options = (f"{k} {v}" for k, v in fields.get("model_options", {}).items())
    return f"{data}, {' '.join([fields['model'], *options])}, batch {fields['batch_size']}"


def _initial_norm(recipe: Recipe) -> float:
    """|theta| of the recipe's net with the weights of seed 0, before training."""
    model = build_model(
        recipe.setting["model"], in_channels=recipe.shape[0], image_size=tuple(recipe.shape[1:]),
        num_classes=recipe.classes, seed=0, **recipe.setting.get("model_options", {}),
    )  # fmt: skip
    return float(norm({name: p.detach() for name, p in trainable(model).items()}))


def _without(table: str, columns: set[str]) -> str:
    """A table without some of its columns."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    kept = [k for k, name in enumerate(rows[0]) if name not in columns]
    return "\n".join("| " + " | ".join(row[k] for k in kept) + " |" for row in rows)


def filled(page: str) -> str:
    """The page with its tables made anew."""
    tables = {
        "noise": noise_table(),
        "batch-size": study_table("batch-size"),
    }
    for name, table in tables.items():
        start, end = f"<!-- table: {name} -->", "<!-- end -->"
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"{PAGE.name} has no place for the table {name}")
        page = pattern.sub(lambda _, a=start, t=table, b=end: f"{a}\n\n{t}\n\n{b}", page)
    return page


if __name__ == "__main__" and "shares" in sys.argv:
    print(share_table())
elif __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
