"""Figures of the per-sample norms: how long gradients are, how many are clipped, in which layers.

They are measured without noise, so they are not to be shared; but for the figures at the end, which
show what was released next to the gradients: noised, paid for, and public. A row of those is one
line of ``statistics.jsonl``; names are those of :class:`dpbam.bias.ReleasedStatistics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dpbam.app.report.charts import Numbers, Series, grid, lines
from dpbam.app.report.figure import Figure, Panel, mean
from dpbam.app.report.groups import (
    Group,
    Runs,
    curves,
    finite,
    gather_by_name,
    mean_of,
    numbers,
    present,
)
from dpbam.app.report.records import Row, Rows, Run, unit_of
from dpbam.app.report.training_figures import NOT_MEASURED, epochs

#: Levels of the recorded quantiles: ``dpbam.bias.record.QUANTILES``, whose package loads torch.
LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
COLUMNS = 24  # moments of training in a grid
MOST_LAYERS = 40

RowList = Sequence[Row]
NOT_RELEASED = (
    "Nothing was released next to the gradients. Train with --release-norms 20 to spend a little "
    "of the budget on it: such figures may be published."
)
PARTS = 20  # of training, each one point


def norms(groups: Sequence[Group]) -> Figure:
    """Quantiles of the norms over training, a panel per group (its first run)."""
    return Figure(
        "norms",
        "Gradient norms of the samples",
        "Lengths of what is clipped, over training: the median, the middle half (dark) and the "
        "middle nine tenths (light) of a batch. What lies above C is clipped.",
        "training",
        [_fan(g, g.runs[0]) for g in groups if g.runs[0].bias],
        NOT_MEASURED,
        {"y": "shared"},
    )


def of_norms(runs: Runs) -> str:
    halves, clips = [], []
    for run in runs:
        rows = [(row.get("non_private_norms") or {}).get("quantiles") for row in run.bias[-1:]]
        clip = finite(numbers(run.bias[-1:], "clip_norm"))
        if rows and rows[0] and clip:
            halves.append(float(rows[0][LEVELS.index(0.5)]))
            clips.append(clip[0])
    if not halves:
        return ""
    shares = _clip_share(runs)
    return (f"{shares}; " if shares else "") + (
        f"the median norm ends at {mean_of(halves, '{:.3g}')}, and C is {mean(clips):g}"
    )


def _clip_share(runs: Runs) -> str:
    shares = [finite(numbers(run.bias, "non_private_clip_share")) for run in runs]
    firsts, lasts = ([s[k] for s in shares if s] for k in (0, -1))
    if not firsts:
        return ""
    first, last = mean_of(firsts, "{:.0%}"), mean_of(lasts, "{:.0%}")
    return f"{first} of the {unit_of(runs)} are clipped at first, {last} at last"


def over_time(
    group: Group, rows: RowList, counts: Sequence[Sequence[float]], edges: Sequence[float]
) -> Panel:
    """Histograms side by side, the longest norms on top, as shares.

    Args:
        group: its first run's steps.
        rows: one per histogram, with its step.
        counts: [rows][bins]; noised ones may be negative, and count as zero.
        edges: upper ends of the bins but the last, as multiples of C.
    """
    size = math.ceil(len(rows) / COLUMNS)
    starts = range(0, len(rows), size)
    parts = [[sum(c) for c in zip(*counts[k : k + size], strict=True)] for k in starts]
    shares = [
        [
            max(0.0, c) / (sum(max(0.0, d) for d in counts_of_period) or 1.0)
            for c in counts_of_period
        ]
        for counts_of_period in parts
    ]
    used = [k for k in range(len(edges) + 1) if any(share[k] > 0.001 for share in shares)]
    bins = range(max(used, default=0), min(used, default=0) - 1, -1)
    names = [f"≤ {edge:.3g} C" for edge in edges] + [f"> {edges[-1]:.3g} C"]
    moments = _moments(group.runs[0], [rows[k] for k in starts])
    columns = list(zip(moments, shares, strict=True))
    cells = [(names[k], moment, share[k]) for k in bins for moment, share in columns]
    return grid(group.label, "norm", cells, "share of samples", root=True)


def _moments(run: Run, rows: RowList) -> list[str]:
    """The epochs of rows as text, with as few digits as tell them apart."""
    times = epochs(run, tuple(rows))
    for digits in range(4):
        texts = [f"{t:.{digits}f}" for t in times]
        if len(set(texts)) == len(texts):
            return texts
    return [f"{t:.4f} ({k})" for k, t in enumerate(times)]


def layers(groups: Sequence[Group]) -> Figure:
    """Which layers make gradients long, and which lose their direction."""
    panels = []
    for group in groups:
        rows = [row for row in group.runs[0].bias if row.get("non_private_layers")]
        if rows:
            panels.append(_grid(group, rows, "share", "share of the norm²"))
            panels.append(_grid(group, rows, "cosine", "cosine"))
    return Figure(
        "layers",
        "Layer by layer",
        "The share of a sample's squared norm that a layer has: a layer of strong colour decides "
        "what is clipped. And the cosine of the clipped and unclipped gradient within each layer: "
        "a layer of faint colour has lost its direction.",
        "training",
        panels,
        NOT_MEASURED,
        {"color": "independent"},
    )


def of_layers(runs: Runs) -> str:
    layers = [(run.bias[-1].get("non_private_layers") or {}) if run.bias else {} for run in runs]
    by_name = gather_by_name(
        {k: v["share"] for k, v in one.items() if isinstance(v.get("share"), float)}
        for one in layers
    )
    if not by_name:
        return ""
    top = max(by_name, key=lambda name: mean(by_name[name]))
    share = mean_of(by_name[top], "{:.0%}")
    return f"at the end {top} has {share} of the gradients' squared length"


def _fan(group: Group, run: Run) -> Panel:
    x = epochs(run, run.bias)
    low, lower, median, upper, high = (_quantile(run, q) for q in (0.05, 0.25, 0.5, 0.75, 0.95))
    log = all(v > 0 for level in (low, median) for v in level if math.isfinite(v))
    series = (
        Series("5% to 95%", group.colour, x, (), low, high, group=group.label),
        Series("25% to 75%", group.colour, x, (), lower, upper, group=group.label),
        Series("median", group.colour, x, median, group=group.label),
    )
    (clip,) = numbers(run.bias[-1:], "clip_norm")  # infinite, hence no number, without clipping
    marks = ((clip, f"C = {clip:g}"),) if math.isfinite(clip) else ()
    return lines(group.label, "epoch", "norm", series, zero=not log, log_y=log, marks=marks)


def _quantile(run: Run, level: float) -> Numbers:
    """One quantile at every measured step; NaN where a batch was empty."""
    k = LEVELS.index(level)
    rows = [(row.get("non_private_norms") or {}).get("quantiles") or () for row in run.bias]
    return tuple(float(row[k]) if len(row) > k else math.nan for row in rows)


def _grid(group: Group, rows: RowList, key: str, value: str) -> Panel:
    """Means over equal parts of training, layers over moments."""
    size = math.ceil(len(rows) / COLUMNS)
    parts = [rows[k : k + size] for k in range(0, len(rows), size)]
    moments = _moments(group.runs[0], [period[0] for period in parts])
    names = list(rows[0]["non_private_layers"])[:MOST_LAYERS]
    cells = [
        (name, moment, mean(numbers(period, "non_private_layers", name, key)))
        for name in names
        for moment, period in zip(moments, parts, strict=True)
    ]
    return grid(f"{group.label}: {value}", "layer", cells, value)


def released_norms(groups: Sequence[Group]) -> Figure:
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


def released_clipping(groups: Sequence[Group]) -> Figure:
    """The share above C and the bias's length, each smoothed over a twentieth of training."""
    share = curves(groups, lambda run: _smooth(run, _whole(run), _share))

    def bias_squares(run: Run) -> tuple[Numbers, Numbers]:
        """Squares, since their noise averages out (but for those cut off at zero)."""
        rows = tuple(row for row in _whole(run) if isinstance(row.get("bias"), int | float))
        return _smooth(run, rows, lambda row: float(row["bias"]) ** 2)

    bias = curves(groups, bias_squares)
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


def _share(row: Row) -> float:
    """Noised count above C over noised count of all, kept between 0 and 1."""
    below = sum(t <= row["clip_norm"] for t in row["thresholds"])
    total = sum(row["counts"])
    return min(1.0, max(0.0, sum(row["counts"][below:]) / total)) if total > 0 else math.nan


def _smooth(run: Run, rows: Rows, value: Callable[[Row], float]) -> tuple[Numbers, Numbers]:
    """(epochs, means over a twentieth of the steps each)."""
    if not rows:
        return (), ()
    size = math.ceil(len(rows) / PARTS)
    parts = [rows[k : k + size] for k in range(0, len(rows), size)]
    means = tuple(mean([value(row) for row in period]) for period in parts)
    return epochs(run, tuple(period[0] for period in parts)), means
