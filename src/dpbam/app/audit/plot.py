"""The picture of an attack on a released model: ROC curves, and the best that any attack can do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dpbam.app.audit.membership import Attack, MembershipResult
from dpbam.app.report.charts import Series, lines
from dpbam.app.report.figure import Figure, Panel
from dpbam.privacy.rounding import up

_FALSE_POSITIVE_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_LEAST = 0.001  # where the axes begin: what is less is drawn there


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
    rates_by_attack = [[rate for rate in result.rates(a) if rate.false_positives is not None]
             for a in result.attacks]  # fmt: skip
    levels = tuple(rate.level for rate in rates_by_attack[0])
    limits = [max(rate.least for rate in same) for same in zip(*rates_by_attack, strict=True)]
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
