"""The pictures of an audit: scores and bounds of canaries; ROC curves against a released model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpbam.app.audit.attack import AuditResult
from dpbam.app.audit.membership import Attack, MembershipResult
from dpbam.app.report.charts import Series, lines, quantity, text
from dpbam.app.report.figure import COLOURS, Figure, Panel
from dpbam.privacy.rounding import up

_FALSE_POSITIVE_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_LEAST = 0.001  # where the axes begin: what is less is drawn there


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


def save_roc(results: Sequence[MembershipResult], path: Path, about: str = "training") -> None:
    """One panel per released model: attacks, lower limits, chance and the best possible attack."""
    caption = (
        "Members found at each false positive rate, lower confidence limits of the best attack, "
        "and the most that the run's mechanism allows any attack. Rates below 0.1% are drawn there."
    )
    Figure("attack", "Attack", caption, about, [_roc(r) for r in results]).save(path)


def _roc(result: MembershipResult) -> Panel:
    rates = _FALSE_POSITIVE_RATES
    best = [1.0 if result.curve is None else 1 - float(result.curve(x)) for x in rates]
    found = [[rate for rate in result.rates(a) if rate.false_positives is not None]
             for a in result.attacks]  # fmt: skip
    levels = tuple(rate.level for rate in found[0])
    limits = [max(rate.least for rate in same) for same in zip(*found, strict=True)]
    series = [
        Series("best possible", 0, rates, tuple(best)),
        Series("chance", 7, rates, rates),
        *(Series(a.name, k, rates, _seen(a)) for k, a in enumerate(result.attacks, 1)),
        Series("lower limits", 5, levels, tuple(max(x, _LEAST) for x in limits), style="points"),
    ]
    title = f"epsilon {'infinite' if math.isinf(result.epsilon) else up(result.epsilon)}"
    panel = lines(title, "false positive rate", "true positive rate", series, percent=True,
                  log_x=True, log_y=True)  # fmt: skip
    panel.view["encoding"]["x"]["axis"] |= {"values": [0.001, 0.01, 0.1, 1], "format": "~%"}
    return panel


def _seen(attack: Attack) -> tuple[float, ...]:
    """The counted true positive rates; NaN where fewer than one non-member may pass."""
    n, m = len(attack.others), len(attack.members)
    return tuple(
        max(attack.true_positives(int(rate * n)) / m, _LEAST) if rate * n >= 1 else math.nan
        for rate in _FALSE_POSITIVE_RATES
    )
