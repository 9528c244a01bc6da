"""One sentence per figure on what it means for these runs, computed from them.

It is understandable without the paper: words for letters, degrees for cosines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpbam.app.report.bias_figures import best, last_mean
from dpbam.app.report.groups import Group, numbers
from dpbam.app.report.headline import unit_of
from dpbam.app.report.norm_figures import LEVELS
from dpbam.app.report.records import Run
from dpbam.app.report.released_figures import released_share
from dpbam.training.events import metric_label, metric_text

_MOST = 4  # groups in a sentence
_FALSE = 0.1  # false positive rate at which ROC curves are read


def meaning(name: str, groups: Sequence[Group]) -> str:
    """Return what the figure ``name`` shows of the first run of each group; empty if nothing."""
    of = _SENTENCES.get(name)
    found = [(g.label, text) for g in groups if of and (text := of(g.runs[0]))]
    if len(found) == 1 and len(groups) == 1:
        return f"{found[0][1]}."
    return "; ".join(f"{label}: {text}" for label, text in found[:_MOST]) + ("." if found else "")


def _accuracy(run: Run) -> str:
    name = run.metric
    rows = [row for row in run.metrics if row.get(name) is not None]
    if not rows:
        return ""
    top, end = max(rows, key=lambda row: row[name]), rows[-1]
    highest = f"{metric_text(name, top[name])} at epoch {top['epoch']:.3g}"
    more = f", the highest on the way was {highest}" if top[name] > end[name] else ", its highest"
    return f"the {metric_label(name)} ends at {metric_text(name, end[name])}{more}"


def _classes(run: Run) -> str:
    shares = _values((run.evaluation or {}).get("classes"))
    return _ends("finding" if run.metric == "auc" else "class", shares, run.metric)


def _subgroups(run: Run) -> str:
    columns = (run.evaluation or {}).get("groups") or {}
    found = {
        column: {name: scores.get(run.metric) for name, scores in part["groups"].items()}
        for column, part in columns.items()
    }
    texts = [_ends(column, _values(shares), run.metric) for column, shares in found.items()]
    return "; ".join(text for text in texts if text)


def _values(shares: Any) -> dict[str, float]:
    items = shares.items() if isinstance(shares, dict) else ()
    found = {k: v.get("value") if isinstance(v, dict) else v for k, v in items}
    return {k: float(v) for k, v in found.items() if isinstance(v, int | float) and v == v}


def _ends(what: str, values: dict[str, float], metric: str) -> str:
    if len(values) < 2:
        return ""
    if min(values.values()) == max(values.values()):
        return f"every {what} has {metric_text(metric, min(values.values()))}"
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    lowest, highest = (metric_text(metric, values[name]) for name in (low, high))
    return f"{what} {low} does worst, {lowest}, and {high} best, {highest}"


def _confusion(run: Run) -> str:
    evaluation = run.evaluation or {}
    names, rows = list(evaluation.get("classes") or ()), evaluation.get("confusion") or ()
    wrong = [(n, i, j) for i, row in enumerate(rows) for j, n in enumerate(row) if i != j and n]
    if not wrong:
        return "no test record is taken for another class" if rows else ""
    n, i, j = max(wrong)
    of = f"{sum(rows[i]):,} {'pixels' if run.metric == 'dice' else 'records'}"
    return f"the most frequent mistake is {names[i]} taken for {names[j]}: {n:,} of {of}"


def _roc(run: Run) -> str:
    curves = (run.evaluation or {}).get("roc") or {}
    found = {
        name: float(np.interp(_FALSE, [x for x, _ in points], [y for _, y in points]))
        for name, points in curves.items()
        if points
    }
    if not found:
        return ""
    low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    rest = f" and {found[high]:.0%} of those with {high}" if len(found) > 1 else ""
    return (
        f"where {_FALSE:.0%} of the records without a finding are reported as well, "
        f"{found[low]:.0%} of those with {low}{rest} are found"
    )


def _predicted(run: Run) -> str:
    evaluation = run.evaluation or {}
    error, name = (evaluation.get("scores") or {}).get("mae"), evaluation.get("value", "value")
    if error is None:
        return ""
    return f"the predicted {name} is {error:.3g} away from the true one on average"


def _bias(run: Run) -> str:
    length, relative = _last(run, "bias"), _last(run, "relative_bias")
    if length is None or relative is None:
        return ""
    return (
        f"at the end clipping moves the average gradient by {length:.3g}, which is {relative:.0%} "
        "of its length"
    )


def _relative(run: Run) -> str:
    share = _last(run, "relative_bias")
    if share is None:
        return ""
    verdict = "most of the gradient is lost" if share > 0.5 else "most of the gradient is kept"
    return f"at the end the error from clipping is {share:.0%} of the gradient: {verdict}"


def _decomposition(run: Run) -> str:
    kept = _last(run, "a")
    return "" if kept is None else f"clipping leaves {kept:.1%} of the gradient's length"


def _direction(run: Run) -> str:
    cosine, share = _last(run, "cosine"), _last(run, "direction_share")
    if cosine is None or share is None:
        return ""
    part = f"{share:.0%}" if share >= 0.01 else "less than 1%"
    angle = math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
    return (
        f"at the end the clipped gradient points {angle:.0f}° away from the true one; {part} of "
        "the error is of direction, which no learning rate makes up for, and the rest of length"
    )


def _noise(run: Run) -> str:
    share = _last(run, "noise_share")
    if share is None:
        return ""
    advice = "less bias would gain little" if share > 0.5 else "less bias would gain more"
    return f"at the end {share:.0%} of the error is noise and the rest is bias: {advice}"


def _alignment(run: Run) -> str:
    cosine = last_mean(run, "non_private_alignment")
    if cosine is None:
        return ""
    side = "along" if cosine > 0.1 else "hardly along" if cosine > -0.1 else "against"
    return f"the method's ascent step goes {side} the current gradient (cosine {cosine:.2f})"


def _clip_share(run: Run) -> str:
    shares = [x for x in numbers(run.bias, "non_private_clip_share") if math.isfinite(x)]
    if not shares:
        return ""
    return f"{shares[0]:.0%} of the {unit_of([run])} are clipped at first, {shares[-1]:.0%} at last"


def _norms(run: Run) -> str:
    rows = [(row.get("non_private_norms") or {}).get("quantiles") for row in run.bias[-1:]]
    clip = numbers(run.bias[-1:], "clip_norm")
    if not rows or not rows[0] or not math.isfinite(clip[0]):
        return ""
    half = float(rows[0][LEVELS.index(0.5)])
    return (
        f"at the end half of the {unit_of([run])} have a gradient longer than {half:.3g}, and "
        f"everything above {clip[0]:g} is cut"
    )


def _loss(run: Run) -> str:
    found = [x for x in numbers(run.steps, "non_private_loss") if math.isfinite(x)]
    part = max(1, len(found) // 10)
    if not found:
        return ""
    first, last = sum(found[:part]) / part, sum(found[-part:]) / part
    return f"the loss goes from {first:.3g} to {last:.3g}, means of a tenth of the steps each"


def _layers(run: Run) -> str:
    layers = (run.bias[-1].get("non_private_layers") or {}) if run.bias else {}
    shares = {k: v.get("share") for k, v in layers.items() if isinstance(v.get("share"), float)}
    if not shares:
        return ""
    top = max(shares, key=shares.__getitem__)
    return f"at the end {top} has {shares[top]:.0%} of the gradients' squared length"


def _flatness(run: Run) -> str:
    slack = last_mean(run, "non_private_flatness_slack")
    return "" if slack is None else f"at the end the bound is {slack:.2g} above what it bounds"


def _released(run: Run) -> str:
    share = released_share(run)
    if share is None:
        return ""
    return f"about {share:.0%} of the {unit_of([run])} are clipped in the last part of training"


def _last(run: Run, key: str) -> float | None:
    return last_mean(run, best(run), key)


_SENTENCES: dict[str, Callable[[Run], str]] = {
    "accuracy": _accuracy, "classes": _classes, "groups": _subgroups, "confusion": _confusion,
    "roc": _roc, "predicted": _predicted,
    "bias": _bias, "relative-bias": _relative, "decomposition": _decomposition,
    "direction": _direction, "noise": _noise, "alignment": _alignment,
    "clip-share": _clip_share, "norms": _norms, "histogram": _norms, "loss": _loss,
    "layers": _layers, "flatness": _flatness, "released-norms": _released,
    "released-clipping": _released,
}  # fmt: skip
