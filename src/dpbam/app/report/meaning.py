"""One sentence per setting on what a figure means for its runs, computed from all of them.

Numbers are means over the runs of a setting, which differ in their seed alone, with 95% t
intervals. It is understandable without the paper: words for letters, degrees for cosines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dpbam.app.report.bias_figures import best, last_mean
from dpbam.app.report.figure import mean
from dpbam.app.report.groups import Group, numbers
from dpbam.app.report.headline import unit_of
from dpbam.app.report.norm_figures import LEVELS
from dpbam.app.report.records import Run
from dpbam.app.report.released_figures import released_share
from dpbam.app.report.tables import mean_text
from dpbam.tasks.scores import metric_label, metric_text

Runs = Sequence[Run]
_MOST = 8  # settings that have a sentence
_FALSE = 0.1  # false positive rate at which ROC curves are read


def meaning(sentence: Callable[[Runs], str], groups: Sequence[Group]) -> tuple[str, ...]:
    """Return what a figure shows, a sentence per group; none if nothing is known.

    Args:
        sentence: computes it from the runs of a group, without its full stop.
        groups: the runs.
    """
    texts = {g.label: text for g in groups if (text := sentence(g.runs))}
    if len(groups) == 1:
        return tuple(f"{text}." for text in texts.values())
    return tuple(f"{label}: {text}." for label, text in texts.items())[:_MOST]


def of_accuracy(runs: Runs) -> str:
    name = runs[0].metric
    finals = [run.final for run in runs if run.final is not None]
    if not finals:
        return ""
    ending = mean_text(finals, lambda value: metric_text(name, value))
    if len(runs) > 1:
        return f"the {metric_label(name)} ends at {ending}"
    rows = [row for row in runs[0].metrics if row.get(name) is not None]
    top = max(rows, key=lambda row: row[name])
    highest = f"{metric_text(name, top[name])} at epoch {top['epoch']:.3g}"
    more = f", the highest on the way was {highest}" if top[name] > finals[0] else ", its highest"
    return f"the {metric_label(name)} ends at {ending}{more}"


def of_classes(runs: Runs) -> str:
    shares = [_values((run.evaluation or {}).get("classes")) for run in runs]
    what = "finding" if runs[0].metric == "auc" else "class"
    return _ends(what, _by_name(shares), runs[0].metric)


def of_subgroups(runs: Runs) -> str:
    by_column: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        for column, subgroups in ((run.evaluation or {}).get("groups") or {}).items():
            scores = {
                name: group_scores.get(run.metric)
                for name, group_scores in subgroups["groups"].items()
            }
            by_column.setdefault(column, []).append(_values(scores))
    texts = [_ends(column, _by_name(s), runs[0].metric) for column, s in by_column.items()]
    return "; ".join(text for text in texts if text)


def _values(shares: Any) -> dict[str, float]:
    items = shares.items() if isinstance(shares, dict) else ()
    values = {k: v.get("value") if isinstance(v, dict) else v for k, v in items}
    return {k: float(v) for k, v in values.items() if isinstance(v, int | float) and v == v}


def _by_name(values_of_runs: Iterable[dict[str, float]]) -> dict[str, list[float]]:
    by_name: dict[str, list[float]] = {}
    for values in values_of_runs:
        for name, value in values.items():
            by_name.setdefault(name, []).append(value)
    return by_name


def _ends(what: str, by_name: dict[str, list[float]], metric: str) -> str:
    """The worst and the best by their means over the runs."""
    if len(by_name) < 2:
        return ""
    means = {name: mean(values) for name, values in by_name.items()}
    if min(means.values()) == max(means.values()):
        return f"every {what} has {metric_text(metric, min(means.values()))}"
    low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    lowest, highest = (
        mean_text(by_name[name], lambda value: metric_text(metric, value)) for name in (low, high)
    )
    return f"{what} {low} does worst, {lowest}, and {high} best, {highest}"


def of_confusion(runs: Runs) -> str:
    evaluations = [run.evaluation or {} for run in runs]
    names = list(evaluations[0].get("classes") or ())
    matrices = [e["confusion"] for e in evaluations if e.get("confusion")]
    if not matrices:
        return ""
    total = np.sum(matrices, axis=0)
    wrong = [
        (int(n), i, j) for i, row in enumerate(total) for j, n in enumerate(row) if i != j and n
    ]
    if not wrong:
        return "no test record is taken for another class"
    n, i, j = max(wrong)
    of = f"{int(total[i].sum()):,} {'pixels' if runs[0].metric == 'dice' else 'records'}"
    all_runs = f", all {len(matrices)} runs together" if len(matrices) > 1 else ""
    return f"the most frequent mistake is {names[i]} taken for {names[j]}: {n:,} of {of}{all_runs}"


def of_roc(runs: Runs) -> str:
    rates = [
        {
            name: float(np.interp(_FALSE, [x for x, _ in points], [y for _, y in points]))
            for name, points in ((run.evaluation or {}).get("roc") or {}).items()
            if points
        }
        for run in runs
    ]
    by_name = _by_name(rates)
    if not by_name:
        return ""
    means = {name: mean(values) for name, values in by_name.items()}
    low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    lowest, highest = (mean_text(by_name[name], "{:.0%}".format) for name in (low, high))
    rest = f" and {highest} of those with {high}" if len(by_name) > 1 else ""
    return (
        f"where {_FALSE:.0%} of the records without a finding are reported as well, "
        f"{lowest} of those with {low}{rest} are found"
    )


def of_predicted(runs: Runs) -> str:
    evaluations = [run.evaluation or {} for run in runs]
    errors = [(e.get("scores") or {}).get("mae") for e in evaluations]
    error = _text((e for e in errors if e is not None), "{:.3g}")
    name = evaluations[0].get("value", "value")
    return error and f"the predicted {name} is {error} away from the true one on average"


def of_bias(runs: Runs) -> str:
    length, relative = _last(runs, "bias", "{:.3g}"), _last(runs, "relative_bias", "{:.0%}")
    if not length or not relative:
        return ""
    return f"at the end clipping moves the average gradient by {length}, {relative} of its length"


def of_direction(runs: Runs) -> str:
    cosines, shares = _lasts(runs, "cosine"), _lasts(runs, "direction_share")
    if not cosines or not shares:
        return ""
    share = _text(shares, "{:.0%}") if mean(shares) >= 0.01 else "less than 1%"
    angle = _text([math.degrees(math.acos(max(-1.0, min(1.0, c)))) for c in cosines], "{:.0f}°")
    noise = _last(runs, "noise_share", "{:.0%}")
    return (
        f"at the end the clipped gradient points {angle} away from the true one; {share} of the "
        "bias is direction" + (f", and {noise} of the error of a step is noise" if noise else "")
    )


def _clip_share(runs: Runs) -> str:
    shares = [_finite(numbers(run.bias, "non_private_clip_share")) for run in runs]
    firsts, lasts = ([s[k] for s in shares if s] for k in (0, -1))
    if not firsts:
        return ""
    first, last = _text(firsts, "{:.0%}"), _text(lasts, "{:.0%}")
    return f"{first} of the {unit_of(runs)} are clipped at first, {last} at last"


def of_norms(runs: Runs) -> str:
    halves, clips = [], []
    for run in runs:
        rows = [(row.get("non_private_norms") or {}).get("quantiles") for row in run.bias[-1:]]
        clip = _finite(numbers(run.bias[-1:], "clip_norm"))
        if rows and rows[0] and clip:
            halves.append(float(rows[0][LEVELS.index(0.5)]))
            clips.append(clip[0])
    if not halves:
        return ""
    shares = _clip_share(runs)
    return (f"{shares}; " if shares else "") + (
        f"the median norm ends at {_text(halves, '{:.3g}')}, and C is {mean(clips):g}"
    )


def of_loss(runs: Runs) -> str:
    firsts, lasts = [], []
    for run in runs:
        losses = _finite(numbers(run.steps, "non_private_loss"))
        tenth = max(1, len(losses) // 10)
        if losses:
            firsts.append(mean(losses[:tenth]))
            lasts.append(mean(losses[-tenth:]))
    first, last = _text(firsts, "{:.3g}"), _text(lasts, "{:.3g}")
    return first and f"the loss goes from {first} to {last}, means of a tenth of the steps each"


def of_layers(runs: Runs) -> str:
    layers = [(run.bias[-1].get("non_private_layers") or {}) if run.bias else {} for run in runs]
    by_name = _by_name(
        {k: v["share"] for k, v in one.items() if isinstance(v.get("share"), float)}
        for one in layers
    )
    if not by_name:
        return ""
    top = max(by_name, key=lambda name: mean(by_name[name]))
    share = _text(by_name[top], "{:.0%}")
    return f"at the end {top} has {share} of the gradients' squared length"


def of_released(runs: Runs) -> str:
    share = _text(_present(released_share(run) for run in runs), "{:.0%}")
    return share and (
        f"about {share} of the {unit_of(runs)} are clipped in the last part of training"
    )


def _last(runs: Runs, key: str, form: str) -> str:
    return _text(_lasts(runs, key), form)


def _lasts(runs: Runs, key: str) -> list[float]:
    """A number of the bias at the end of each private run that has it."""
    return _present(last_mean(run, best(run), key) for run in runs if run.private)


def _text(values: Iterable[float], form: str) -> str:
    """Their mean with its interval; empty without values."""
    listed = list(values)
    return mean_text(listed, form.format) if listed else ""


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
