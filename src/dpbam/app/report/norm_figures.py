"""Figures of the per-sample norms: how long gradients are, how many are cut, in which layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpbam.app.report.bias_figures import NOT_MEASURED, epochs, over_training
from dpbam.app.report.figure import Figure
from dpbam.app.report.groups import Group, numbers
from dpbam.app.report.panels import Lines, Matrix, Numbers, Series
from dpbam.app.report.records import Run

#: Levels of the recorded quantiles: ``dpbam.bias.record.QUANTILES``, whose package loads torch.
LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
COLUMNS = 24  # moments of training in a grid of layers
MOST_LAYERS = 40
#: Edges of the recorded histogram as multiples of C: ``dpbam.bias.record.EDGES``.
EDGES = tuple(2 ** (k / 2) for k in range(-8, 17))


def norms(groups: Sequence[Group]) -> Figure:
    """Quantiles of the norms over training, a panel a group (its first run)."""
    measured = [(g, run) for g in groups for run in g.runs[:1] if run.bias]
    return Figure(
        "norms",
        "Gradient norms of the samples",
        "Lengths of what is clipped, over training: the median, the middle half (dark) and the "
        "middle nine tenths (light) of a batch. What lies above C is cut.",
        about="training",
        panels=[_fan(g, run) for g, run in measured],
        missing=NOT_MEASURED,
        wide=True,
    )


def histogram(groups: Sequence[Group]) -> Figure:
    """Histograms of the norms over training, a panel a group (its first run)."""
    counted = [
        (g, run, [row for row in run.bias if _counts(row)]) for g in groups for run in g.runs[:1]
    ]
    return Figure(
        "histogram",
        "Histograms of the norms over training",
        "Each column is a histogram of the per-sample norms at one part of training: the stronger "
        "the colour, the more samples have norms of that size. Rows above C are cut.",
        about="training",
        panels=[
            over_time(g, run, rows, [_counts(r) for r in rows], EDGES)
            for g, run, rows in counted
            if rows
        ],
        missing=NOT_MEASURED,
        wide=True,
    )


def over_time(
    group: Group, run: Run, rows: Sequence[dict[str, Any]], counts: Sequence[Sequence[float]],
    edges: Sequence[float],
) -> Matrix:  # fmt: skip
    """Histograms side by side: [bins, the longest norms on top][parts of training], as shares.

    Args:
        group: gives the title.
        run: whose steps they are.
        rows: one a histogram, with its step.
        counts: [rows][bins]; noised ones may be negative, and count as none.
        edges: upper ends of the bins but the last, as multiples of C.
    """
    size = math.ceil(len(rows) / COLUMNS)
    starts = range(0, len(rows), size)
    parts = [[sum(c) for c in zip(*counts[k : k + size], strict=True)] for k in starts]
    shares = [
        [max(0.0, c) / (sum(max(0.0, d) for d in part) or 1.0) for c in part] for part in parts
    ]
    used = [k for k in range(len(edges) + 1) if any(share[k] > 0.001 for share in shares)]
    bins = range(max(used, default=0), min(used, default=0) - 1, -1)
    values = tuple(tuple(share[k] for share in shares) for k in bins)
    full = max((v for row in values for v in row), default=1.0) or 1.0
    shades = tuple(tuple(math.sqrt(v / full) for v in row) for row in values)  # small ones show
    names = tuple(f"≤ {edges[k]:.3g} C" if k < len(edges) else f"> {edges[-1]:.3g} C" for k in bins)
    times = epochs(run, tuple(rows[k] for k in starts))
    digits = ".0f" if times[-1] > COLUMNS else ".2g"
    moments = tuple(f"{t:{digits}}" for t in times)
    title = f"{group.label}: share of samples, at most {full:.0%}"
    return Matrix(title, "norm", "epoch", names, moments, values, shades, square=False)


def _counts(row: dict[str, Any]) -> tuple[float, ...]:
    found = (row.get("non_private_norms") or {}).get("counts") or ()
    return tuple(found) if len(found) == len(EDGES) + 1 else ()


def clip_share(groups: Sequence[Group]) -> Figure:
    """How many samples are cut."""
    series = over_training(groups, "non_private_clip_share")
    panel = Lines("", "epoch", "share of samples that are cut", series, percent=True, zero=True)
    return Figure(
        "clip-share",
        "Share of samples that are clipped",
        "Where nobody is clipped there is no bias; where everybody is, all gradients count alike.",
        about="training",
        panels=[panel] if series else (),
        missing=NOT_MEASURED,
    )


def layers(groups: Sequence[Group]) -> Figure:
    """Which layers make gradients long, and which are hurt."""
    panels = []
    for group in groups:
        run = group.runs[0]
        if any(row.get("non_private_layers") for row in run.bias):
            panels.append(_grid(group, run, "share", "share of the norm²"))
            panels.append(_grid(group, run, "cosine", "cosine"))
    return Figure(
        "layers",
        "Layer by layer",
        "The share of a sample's squared norm that a layer has: a layer of strong colour decides "
        "what is clipped. And the cosine of the clipped and unclipped gradient within each layer: "
        "a layer of faint colour has lost its direction.",
        about="training",
        panels=panels,
        missing=NOT_MEASURED,
        wide=True,
    )


def _fan(group: Group, run: Run) -> Lines:
    x = epochs(run, run.bias)
    by_level = _quantiles(run)
    log = all(v > 0 for level in (0.05, 0.5) for v in by_level[level] if math.isfinite(v))
    series = (
        Series("5% to 95%", group.colour, x, (), by_level[0.05], by_level[0.95], style="band"),
        Series("25% to 75%", group.colour, x, (), by_level[0.25], by_level[0.75], style="band"),
        Series("median", group.colour, x, by_level[0.5]),
    )
    (clip,) = numbers(run.bias[-1:], "clip_norm")  # infinite, hence no number, without clipping
    marks = ((clip, f"C = {clip:g}"),) if math.isfinite(clip) else ()
    return Lines(group.label, "epoch", "norm", series, zero=not log, log_y=log, marks=marks)


def _quantiles(run: Run) -> dict[float, Numbers]:
    """Level -> value at every measured step; NaN where a batch was empty."""
    rows = [(row.get("non_private_norms") or {}).get("quantiles") or () for row in run.bias]
    return {
        level: tuple(float(row[k]) if len(row) > k else math.nan for row in rows)
        for k, level in enumerate(LEVELS)
    }


def _grid(group: Group, run: Run, key: str, what: str) -> Matrix:
    """Means over equal parts of training, [layers][moments]."""
    rows = [row for row in run.bias if row.get("non_private_layers")]
    size = math.ceil(len(rows) / COLUMNS)
    parts = [rows[k : k + size] for k in range(0, len(rows), size)]
    names = list(rows[0]["non_private_layers"])[:MOST_LAYERS]
    times = [epochs(run, tuple(part[:1]))[0] for part in parts]
    values = tuple(tuple(_layer_mean(part, name, key) for part in parts) for name in names)
    full = max((v for row in values for v in row if math.isfinite(v)), default=1.0) or 1.0
    shades = tuple(
        tuple(max(0.0, v) / full if math.isfinite(v) else 0.0 for v in row) for row in values
    )
    title = f"{group.label}: {what}, at most {full:.2f}"
    digits = ".0f" if times[-1] > COLUMNS else ".2g"
    moments = tuple(f"{t:{digits}}" for t in times)
    return Matrix(title, "layer", "epoch", tuple(names), moments, values, shades, square=False)


def _layer_mean(rows: list[dict[str, Any]], name: str, key: str) -> float:
    found = [v for v in numbers(rows, "non_private_layers", name, key) if math.isfinite(v)]
    return sum(found) / len(found) if found else math.nan
