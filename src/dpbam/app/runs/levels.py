"""What the defaults reached on public data sets, for settings like the user's.

The rows are those of the study ``reproduce/defaults.py`` (docs/how-good.md), in short: source,
features, number of units, classes, epsilon, test accuracy of the rule, and that of the best
constant. They say what to expect, and which change gained most there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import TYPE_CHECKING

from dpbam._names import SCATTERING

if TYPE_CHECKING:
    from dpbam.app.runs.config import RunConfig

_NEAR_UNITS, _NEAR_EPSILON, _NEAR_CLASSES = 3.0, 1.8, 2.5  # factors within which cells are alike
_FEW = 3  # sources without which a mean over them is not stated


@dataclass(frozen=True)
class Level:
    """The rule's test accuracy on one public source, in percent."""

    source: str
    features: str
    n: int
    classes: int
    epsilon: float
    accuracy: float
    constant: float


@cache
def recorded_levels() -> tuple[Level, ...]:
    rows = json.loads(files("dpbam.app.runs").joinpath("levels.json").read_text("utf-8"))
    return tuple(Level(**row) for row in rows)


def expectation(config: RunConfig, n: int, classes: int, task: str) -> str:
    """Return what to expect of these settings, by records of like ones, in one sentence."""
    alike = _alike(config, n, classes)
    if task != "single-label" or not config.auto_facts or not alike:
        return "no record like this: the study has classes of images, by auto's own settings"
    sources = ", ".join(sorted({level.source for level in alike}))
    units = _range([float(level.n) for level in alike])
    return (
        f"accuracy {_range([x.accuracy for x in alike])}% on {sources} with {units} units in the "
        f"study of defaults, where the best constant has {_range([x.constant for x in alike])}%; "
        "your images may be easier or harder"
    )


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.0f}", f"{max(values):.0f}"
    return least if least == most else f"{least} to {most}"


def best_change(config: RunConfig, n: int, classes: int) -> str:
    """Name the change that gained most on the study's sources from settings like these."""
    if config.epsilon is None or not config.fixed_features:
        return ""
    kind = "scattering" if config.model == SCATTERING else "mobilenet"
    near = _alike(config, n, classes) or [x for x in recorded_levels() if x.features == kind]
    changes: dict[str, Callable[[Level, Level], bool]] = {
        "more epsilon (about three times)": lambda a, b: (
            (a.features, a.n) == (b.features, b.n) and 2 < b.epsilon / a.epsilon < 4
        ),
        "more data (about four times)": lambda a, b: (
            (a.features, a.epsilon) == (b.features, b.epsilon) and 3 < b.n / a.n < 5
        ),
    }
    if kind == "scattering":
        changes["a public encoder (--encoder)"] = lambda a, b: (
            (a.n, a.epsilon) == (b.n, b.epsilon) and b.features == "mobilenet"
        )
    gains = {words: _gains(near, allowed) for words, allowed in changes.items()}
    known = {words: gain for words, gain in gains.items() if len(gain) >= _FEW}
    if not known:
        return ""
    words = max(known, key=lambda name: fmean(known[name].values()))
    gain = known[words]
    return (
        f"{words}: {fmean(gain.values()):+.0f} points in the mean over {len(gain)} sources of the "
        f"study from settings like these, {min(gain.values()):+.0f} to {max(gain.values()):+.0f}"
    )


def _alike(config: RunConfig, n: int, classes: int) -> list[Level]:
    kind = "scattering" if config.model == SCATTERING else "mobilenet"
    return [
        level for level in recorded_levels()
        if level.features == kind
        and _near(level.n, n, _NEAR_UNITS)
        and _near(level.epsilon, config.epsilon or 0.0, _NEAR_EPSILON)
        and _near(level.classes, classes, _NEAR_CLASSES)
    ]  # fmt: skip


def _near(value: float, other: float, factor: float) -> bool:
    return other > 0 and 1 / factor <= value / other <= factor


def _gains(near: Sequence[Level], allowed: Callable[[Level, Level], bool]) -> dict[str, float]:
    """Return the mean gain by source, over pairs of cells of that source."""
    by_source: dict[str, list[float]] = {}
    for before in near:
        for after in recorded_levels():
            if after.source == before.source and allowed(before, after):
                by_source.setdefault(before.source, []).append(after.accuracy - before.accuracy)
    return {source: fmean(values) for source, values in by_source.items()}
