"""Regret of the rule, by source, from the study's records.

    python -m reproduce.defaults_page reproduce/results/defaults.jsonl

The rule is judged where its own setting was computed, next to both grids; it is one of the
alternatives, so regret is zero where validation records select it. The grids have 50 steps and the
mean of the last 60% of the weights, where the rule has 100 and 30%: an alternative tuned in those,
too, would be better than what is called the best here, and this regret is a lower bound.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from reproduce.defaults import Record

# the path, the steps and the clip come from CIFAR-10; the others were looked at when the share of
# averaged weights was chosen, so they do not count as left out
FITTED = ("cifar10", "emoji", "icons", "pneumonia")


def regrets(records: list[Record]) -> dict[tuple[str, str, int, float], float]:
    """Return points of test accuracy below the best, by (source, features, n, epsilon)."""
    cells: dict[tuple[str, str, int, float], list[Record]] = defaultdict(list)
    for record in records:
        key = record["source"], record["features"], record["n"], record["epsilon"]
        cells[key].append(record)
    return {key: _regret(found) for key, found in cells.items() if len(found) == 3}


def _regret(cell: list[Record]) -> float:
    tried = [
        (np.mean(values, axis=0), record["head"], float(setting))
        for record in cell
        for setting, values in record["scores"].items()
    ]
    best = max(tried, key=lambda t: t[0][0])[0]  # selected on validation records
    rule = next(scores for scores, head, _ in tried if head == "rule")
    return float(best[1] - rule[1])


def table(records: list[Record]) -> str:
    """Return a Markdown table: mean and worst regret by source and features."""
    found = regrets(records)
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (source, kind, _, _), value in found.items():
        groups[source, kind].append(value)
    lines = ["| source | features | cells | mean regret | worst |", "|---|---|---|---|---|"]
    for (source, kind), values in sorted(groups.items()):
        lines.append(
            f"| {source} | {kind} | {len(values)} | {np.mean(values):.1f} | {max(values):.1f} |"
        )
    others = [v for (source, *_), v in found.items() if source not in FITTED]
    error = 2 * np.std(others) / math.sqrt(len(others))
    lines.append(
        f"| all but {', '.join(FITTED)} |  | {len(others)} | {np.mean(others):.1f} ± {error:.1f} | "
        f"{max(others):.1f} |"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    print(table([json.loads(line) for line in lines]))
