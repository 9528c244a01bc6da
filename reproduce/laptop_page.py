"""The laptop recipe's accuracy on CIFAR-10, and its line on docs/how-good.md."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dpbam.privacy.rounding import up
from reproduce.outcome import Outcome, Study, TextTable, mean_of, points
from reproduce.recipes import recipes_folder

_PLACE = re.compile("(<!-- table: laptop -->\n).*?(<!-- end -->)", re.DOTALL)


def laptop(studies: Sequence[Study]) -> Outcome:
    """Show the accuracy of the linear layer at each epsilon."""
    (study,) = studies
    rows = []
    for cell in study.recipe.cells():
        by_seed = study.arms(cell).get("dp-sgd")
        if by_seed:
            config, mean = next(iter(by_seed.values())).config, mean_of(by_seed)
            deviation = f"{100 * mean.deviation:.2f}" if mean.count > 1 else ""
            rows.append((up(config["epsilon"]), f"{config['lr']:g}", f"{config['clip_norm']:g}",
                         f"{config['epochs']:g}", str(mean.count), points(mean, digits=2),
                         deviation))  # fmt: skip
    header = ("epsilon", "lr", "C", "steps", "seeds", "accuracy", "SD")
    return Outcome("laptop", study.recipe.title, [TextTable(header, rows)], studies=studies)


def page(found: Outcome) -> str:
    """Return docs/how-good.md with its line made anew."""
    before = (recipes_folder().parents[1] / "docs" / "how-good.md").read_text(encoding="utf-8")
    assert _PLACE.search(before)  # else the line would be lost
    (table,) = found.tables
    reached = ", ".join(row[table.header.index("accuracy")] for row in table.rows)
    epsilons = ", ".join(row[0] for row in table.rows)
    line = f"By today's command, one seed at epsilon {epsilons}: {reached}%."
    return _PLACE.sub(rf"\1\n{line}\n\n\2", before)
