"""Figures of what was released next to the gradients: noised, paid for, and public.

A row is one line of ``statistics.jsonl``; names are those of
:class:`dpbam.bias.ReleasedStatistics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dpbam.app.report.bias_figures import epochs
from dpbam.app.report.charts import Numbers, lines
from dpbam.app.report.figure import Figure, mean
from dpbam.app.report.groups import Group, curves
from dpbam.app.report.meaning import Runs, mean_of, present
from dpbam.app.report.norm_figures import over_time
from dpbam.app.report.records import Row, Rows, Run, unit_of

NOT_RELEASED = (
    "Nothing was released next to the gradients. Train with --release-norms 20 to spend a little "
    "of the budget on it: such figures may be published."
)
PARTS = 20  # of training, each one point


def norms(groups: Sequence[Group]) -> Figure:
    """Noised histograms of the norms over training."""
    panels = []
    for group in groups:
        rows = _whole(group.runs[0])
        if rows:
            edges = [t / rows[0]["clip_norm"] for t in rows[0]["thresholds"]]
            panels.append(over_time(group, rows, [row["counts"] for row in rows], edges))
    return Figure(
        "released-norms",
        "Norms of the samples, as released",
        "Histograms of the per-sample norms over training, with noise that the privacy statement "
        "covers. Rows above C are clipped.",
        "public",
        panels,
        NOT_RELEASED,
    )


def clipping(groups: Sequence[Group]) -> Figure:
    """The share above C and the bias's length, each smoothed over a twentieth of training."""
    share = curves(groups, lambda run: _smooth(run, _whole(run), _share))
    bias = curves(groups, lambda run: _smooth(run, _with_bias(run), _bias_square))
    panels = (
        lines("Share of samples above C", "epoch", "share", share, percent=True, zero=True),
        lines("Square of the bias's length", "epoch", "bias²", bias, zero=True),
    )
    return Figure(
        "released-clipping",
        "Clipping, as released",
        "The share of samples that are clipped, and the bias against the method's own unclipped "
        "gradient, of contributions bounded by B; means over a twentieth of training.",
        "public",
        [panel for panel in panels if panel.rows],
        NOT_RELEASED,
    )


def of_released(runs: Runs) -> str:
    share = mean_of(present(released_share(run) for run in runs), "{:.0%}")
    return share and (
        f"about {share} of the {unit_of(runs)} are clipped in the last part of training"
    )


def released_share(run: Run) -> float | None:
    """The share above C in the last twentieth of training, as released; None if there is none."""
    _, shares = _smooth(run, _whole(run), _share)
    return shares[-1] if shares and math.isfinite(shares[-1]) else None


def _whole(run: Run) -> Rows:
    """The rows that hold what a release writes: the file may come from anywhere."""
    rows = [row for row in run.statistics if _is_whole(row)]
    return tuple(row for row in rows if row["thresholds"] == rows[0]["thresholds"])


def _is_whole(row: Row) -> bool:
    lists = [row.get("thresholds"), row.get("counts")]
    if not all(isinstance(v, list) and all(isinstance(x, int | float) for x in v) for v in lists):
        return False
    clip_norm = row.get("clip_norm")
    sized = len(row["counts"]) == len(row["thresholds"]) + 1 > 1
    return sized and isinstance(clip_norm, int | float) and clip_norm > 0


def _with_bias(run: Run) -> Rows:
    return tuple(row for row in _whole(run) if isinstance(row.get("bias"), int | float))


def _share(row: Row) -> float:
    """Noised count above C over noised count of all, kept between 0 and 1."""
    below = sum(t <= row["clip_norm"] for t in row["thresholds"])
    total = sum(row["counts"])
    return min(1.0, max(0.0, sum(row["counts"][below:]) / total)) if total > 0 else math.nan


def _bias_square(row: Row) -> float:
    """Squares, since their noise averages out (but for those cut off at zero)."""
    return float(row["bias"]) ** 2


def _smooth(run: Run, rows: Rows, value: Callable[[Row], float]) -> tuple[Numbers, Numbers]:
    """(epochs, means over a twentieth of the steps each)."""
    if not rows:
        return (), ()
    size = math.ceil(len(rows) / PARTS)
    parts = [rows[k : k + size] for k in range(0, len(rows), size)]
    means = tuple(mean([value(row) for row in period]) for period in parts)
    return epochs(run, tuple(period[0] for period in parts)), means
