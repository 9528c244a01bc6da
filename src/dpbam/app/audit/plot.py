"""The picture of an audit: what the attacker read with and without the canary, and the bounds."""

from __future__ import annotations

from pathlib import Path

from dpbam.app.audit.attack import AuditResult


def save_plot(result: AuditResult, path: Path) -> None:
    """Two histograms of scores, and every lower bound beside the claim."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    style = {"bins": 50, "density": True, "histtype": "stepfilled", "alpha": 0.5}
    left.hist(result.absent, label="canary absent", color="#4477aa", **style)
    left.hist(result.present, label="canary present", color="#cc6677", **style)
    left.set(xlabel="what the attacker reads", ylabel="density", title=result.target.canary)
    left.legend(frameon=False)

    names = [f"{b.name}\n({b.confidence:.0%} confidence)" for b in result.bounds]
    right.barh(names, [b.epsilon for b in result.bounds], color="#4477aa", height=0.5)
    right.axvline(result.claimed, color="black", linestyle="--")
    right.set(xlabel=f"epsilon at delta {result.target.delta:g}", title="lower bounds; the claim")
    figure.savefig(path)
