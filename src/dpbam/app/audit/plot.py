"""The picture of an audit: the attacker's scores with and without the canary, and the bounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpbam.app.audit.attack import AuditResult
from dpbam.app.report.charts import quantity, text
from dpbam.app.report.figure import COLOURS, Figure, Panel


def save_plot(result: AuditResult, path: Path) -> None:
    """Two histograms of scores, and every lower bound next to the claim."""
    caption = "Scores of the attacker, and lower bounds on epsilon; dashed: the claim."
    Figure("audit", "Audit", caption, "public", [_scores(result), _bounds(result)]).save(path)


def _scores(result: AuditResult) -> Panel:
    title = f"Scores, {result.target.canary} canary"
    edges = np.histogram_bin_edges([*result.absent, *result.present], 50)
    rows = [
        {"panel": title, "canary": name, "score": low, "to": high, "scores": int(count)}
        for name, scores in (("absent", result.absent), ("present", result.present))
        for low, high, count in zip(
            edges[:-1].tolist(), edges[1:].tolist(), np.histogram(scores, edges)[0], strict=True
        )
    ]
    view = {
        "encoding": {
            "x": quantity("score", bin="binned", title="what the attacker reads"),
            "x2": {"field": "to"},
            "y": quantity("scores", stack=None, title="scores"),
            "color": text("canary", scale={"range": COLOURS[:2]}),
        },
        "layer": [{"mark": {"type": "bar", "opacity": 0.55}, "encoding": {}}],
    }
    return Panel(title, ("panel", "canary", "score", "to", "scores"), rows, view)


def _bounds(result: AuditResult) -> Panel:
    title = "Lower bounds; dashed: the claim"
    rows = [
        {"panel": title, "bound": f"{b.name}, {b.confidence:.0%} confidence", "epsilon": b.epsilon}
        for b in result.bounds
    ]
    x = {"title": f"epsilon at delta {result.target.delta:g}", "scale": {"zero": True}}
    claim = {"x": {"datum": result.claimed, "type": "quantitative"}, "y": {"value": 0},
             "y2": {"value": "height"}}  # fmt: skip
    view = {
        "height": {"step": 40},
        "encoding": {"y": text("bound", title=None, sort=None)},
        "layer": [
            {"mark": {"type": "bar", "color": COLOURS[0]},
             "encoding": {"x": quantity("epsilon", **x)}},
            {"mark": {"type": "rule", "strokeDash": [5, 4], "color": "currentColor"},
             "encoding": claim},
        ],
    }  # fmt: skip
    return Panel(title, ("panel", "bound", "epsilon"), rows, view)
