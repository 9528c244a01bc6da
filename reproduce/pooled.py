"""BAM against DP-SGD over all settings at once: a random-effects meta-analysis.

Setting i has k_i paired seeds: a mean difference d_i with the variance v_i = s_i^2 / k_i. The
settings differ, so their true differences may, too: d_i ~ N(mu, tau^2 + v_i). With weights
w_i = 1 / (v_i + tau^2),

    mu = sum w_i d_i / sum w_i,        Q(tau^2) = sum w_i (d_i - mu)^2,

tau^2 >= 0 solves Q(tau^2) = m - 1 for m settings (Paule and Mandel 1982), and the interval of mu is
that of Hartung and Knapp (2001): t with m - 1 degrees of freedom, variance
max(1, Q / (m - 1)) / sum w_i. The factor is never taken below one, which would make the interval
shorter than with tau^2 = 0 and known v_i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from dpbam.app.report.charts import Series, dots
from dpbam.app.report.figure import Figure
from dpbam.app.runs import RunRecord
from dpbam.errors import ArgumentError
from dpbam.estimates import LEVEL, Estimate, estimate, paired_difference
from dpbam.privacy.rounding import up
from reproduce.claims import Claim
from reproduce.drawings import with_zero_line
from reproduce.outcome import (
    AVERAGED,
    READINGS,
    Arms,
    Outcome,
    Reading,
    Study,
    TextTable,
    accuracy,
    difference_of,
    last_accuracy,
    points,
    shared_seeds,
)

ALL_SETTINGS = "All settings, pooled after the fact"
_NETS = {"resnet9": "ResNet-9", "small-cnn": "small CNN", "mlp": "MLP"}
_DATA = {
    "cifar10": "CIFAR-10",
    "cifar10_8x8": "CIFAR-10 8x8",
    "pneumonia": "Pneumonia",
    "pneumonia_14x14": "Pneumonia",
    "digits": "digits",
}
_PLANNED = "long-"  # recipes whose plan stands in them: judged alone, not pooled
_SAME = 0.005  # the margin within which two ways to train are the same
_NOTES = (
    """\
    Exploratory: that the settings would be pooled, and by which reading, was decided after their
    accuracies had been seen. The settings are all those at desk scale in which BAM, with its
    default or its tuned lambda, was trained with the seeds of DP-SGD. They share data and nets, so
    they are not independent. Random effects: the mean of the settings' true differences, its 95%
    interval by Hartung and Knapp, and tau, the standard deviation of the true differences between
    settings, by Paule and Mandel. I^2 is the share of the variance between settings that chance
    within them does not explain.""",
    """\
    Last weights are what the paper reads; averaged weights are those of the same runs, averaged
    over the second half, which costs neither privacy nor time. SD is from seed to seed.""",
    """\
    Longer training, 600 and 900 steps, was planned before its runs: the plans stand in the recipes
    `long-*`. A decaying rate falls to 0 by half a cosine. Tuned rates: for each method and each
    reading the best of four, by two other seeds on held-out training records.""",
)


class Setting(NamedTuple):
    """DP-SGD and BAM with the same seeds, at one place of a recipe.

    Attributes:
        study: the recipe and its records.
        cell: the place.
        dp_sgd: by seed.
        bam: by seed.
        dp_sgd_averaged: where the learning rate is tuned by each reading, the runs of DP-SGD that
            averaged weights are read from; empty if the same runs serve both readings.
    """

    study: Study
    cell: Mapping[str, Any]
    dp_sgd: dict[int, RunRecord]
    bam: dict[int, RunRecord]
    dp_sgd_averaged: dict[int, RunRecord]

    @property
    def is_planned(self) -> bool:
        return self.study.recipe.name.startswith(_PLANNED)

    @property
    def name(self) -> str:
        """The net, the data, and the place in the grid."""
        setting = self.study.recipe.setting
        data = _DATA[str(setting["data"]).rpartition(":")[2]]
        net = f"{_NETS[str(setting['model'])]}, {data}"
        variant = str(self.cell.get("at", "")).replace("-", " ")
        if self.is_planned:
            steps = f"{next(iter(self.bam.values())).plan['steps']} steps"
            return ", ".join(filter(None, [net, steps, variant]))
        epsilon = self.cell.get("epsilon", setting.get("epsilon"))
        return f"{net}, {variant or f'epsilon {up(float(str(epsilon)))}'}"

    @property
    def arms(self) -> Arms:
        return {"dp-sgd": self.dp_sgd, "bam": self.bam}

    def base(self, reading: Reading) -> dict[int, RunRecord]:
        """Return the runs of DP-SGD that a reading is about."""
        return self.dp_sgd_averaged if reading is accuracy and self.dp_sgd_averaged else self.dp_sgd

    def gain(self, reading: Reading) -> Estimate:
        return difference_of(self.bam, self.base(reading), reading)

    def gains(self, reading: Reading) -> dict[int, float]:
        """Return each seed's difference."""
        base = self.base(reading)
        return {seed: reading(bam) - reading(base[seed]) for seed, bam in self.bam.items()}

    def spreads(self, reading: Reading) -> tuple[float, float]:
        """Return the standard deviation over the seeds of DP-SGD, and of BAM."""
        by_arm = ([reading(r) for r in arm.values()] for arm in (self.base(reading), self.bam))
        first, second = map(stdev, by_arm)
        return first, second


def settings(studies: Sequence[Study]) -> list[Setting]:
    """Return every place of the recipes with two or more pairs of BAM and DP-SGD."""
    places = []
    for study in studies:
        for cell in study.recipe.cells():
            arms = study.arms(cell)
            by_reading = ["dp-sgd-averaged"] if "dp-sgd-averaged" in study.recipe.arms else []
            names = ["dp-sgd", "bam", *by_reading]
            seeds = shared_seeds([arms], *names)
            if len(seeds) > 1:
                dp_sgd, bam, *averaged = (
                    {seed: arms[name][seed] for seed in seeds} for name in names
                )
                places.append(Setting(study, cell, dp_sgd, bam, averaged[0] if averaged else {}))
    return places


class Pooled(NamedTuple):
    """The mean true difference over settings, with its interval and their heterogeneity.

    Attributes:
        mean: mu.
        low: the lower end of its 95% interval.
        high: the upper end.
        tau: the standard deviation of the true differences between settings.
        q: Cochran's Q = Q(0).
        p_value: of Q under tau = 0.
        i_squared: max(0, (Q - (m - 1)) / Q).
        settings: m.
    """

    mean: float
    low: float
    high: float
    tau: float
    q: float
    p_value: float
    i_squared: float
    settings: int

    def as_estimate(self) -> Estimate:
        """Return what a claim is judged by; its deviation is that of one setting of average weight.

        Example:
            >>> pool([0.1, 0.3, 0.2], [0.01, 0.01, 0.01]).as_estimate().count
            3
        """
        from scipy.stats import t

        half = (self.high - self.low) / 2
        error = half / float(t.ppf((1 + LEVEL) / 2, self.settings - 1))
        return Estimate(
            self.mean, error * math.sqrt(self.settings), self.low, self.high, self.settings
        )


def pool(differences: Sequence[float], variances: Sequence[float]) -> Pooled:
    """Combine the settings' mean differences d_i, of variances v_i > 0, by random effects.

    Example: three settings that agree within their errors.
        >>> found = pool([0.1, 0.3, 0.2], [0.01, 0.01, 0.01])
        >>> round(found.mean, 6), found.tau, round(found.q, 6)
        (0.2, 0.0, 2.0)
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2, t

    count = len(differences)
    if count < 2 or len(variances) != count or min(variances) <= 0:
        raise ArgumentError("pooling needs two or more settings, each with a variance above zero")

    def weighted(tau_squared: float) -> tuple[float, float, float]:
        weights = [1 / (v + tau_squared) for v in variances]
        mean = math.fsum(w * d for w, d in zip(weights, differences, strict=True)) / sum(weights)
        q = math.fsum(w * (d - mean) ** 2 for w, d in zip(weights, differences, strict=True))
        return mean, q, sum(weights)

    q = weighted(0.0)[1]
    tau_squared = 0.0
    if q > count - 1:  # Q falls with tau^2, and is below m - 1 once tau^2 exceeds the whole spread
        beyond = sum((d - fmean(differences)) ** 2 for d in differences) + max(variances)
        tau_squared = float(brentq(lambda x: weighted(x)[1] - (count - 1), 0.0, beyond, xtol=1e-18))
    mean, q_at_tau, total = weighted(tau_squared)
    error = math.sqrt(max(1.0, q_at_tau / (count - 1)) / total)
    half = float(t.ppf((1 + LEVEL) / 2, count - 1)) * error
    return Pooled(
        mean, mean - half, mean + half, math.sqrt(tau_squared),
        q, float(chi2.sf(q, count - 1)), max(0.0, 1 - (count - 1) / q) if q else 0.0, count,
    )  # fmt: skip


def pooled(studies: Sequence[Study]) -> Outcome:
    """Pool BAM's gain over DP-SGD by both readings; judge planned studies by themselves."""
    explored = [place for place in settings(studies) if not place.is_planned]
    planned = [place for place in settings(studies) if place.is_planned]
    return Outcome(
        "pooled",
        "BAM against DP-SGD over all settings",
        tables=[table for table in (_means(explored), _each([*explored, *planned])) if table.rows],
        figures=[_forest(explored, planned)] if explored else [],
        claims=[
            *_pooled_claims(explored),
            *_planned_claims(planned),
            *_growth(explored, planned),
            *_decay(planned),
        ],
        notes=_NOTES,
        studies=studies,
    )


def combine(places: Sequence[Setting], reading: Reading) -> Pooled:
    gains = [place.gain(reading) for place in places]
    return pool([e.mean for e in gains], [e.deviation**2 / e.count for e in gains])


def spread_ratio(places: Sequence[Setting], reading: Reading) -> Estimate:
    """Estimate the mean over the settings of ln(SD of BAM / SD of DP-SGD)."""
    ratios = [bam / dp_sgd for dp_sgd, bam in (p.spreads(reading) for p in places)]
    return estimate([math.log(ratio) for ratio in ratios])


def _means(places: Sequence[Setting]) -> TextTable:
    """One row per reading: the pooled gain, its heterogeneity, the spread over seeds."""
    rows = []
    for name, reading in READINGS.items() if len(places) > 1 else ():
        gain, spread = combine(places, reading), spread_ratio(places, reading)
        smaller = sum(bam < dp_sgd for dp_sgd, bam in (p.spreads(reading) for p in places))
        rows.append((
            name, points(gain.as_estimate(), signed=True, digits=2), f"{100 * gain.tau:.2f}",
            f"{gain.q:.1f} ({gain.p_value:.2g})", f"{100 * gain.i_squared:.0f}%",
            "{:.2f} [{:.2f}, {:.2f}]".format(
                *(math.exp(x) for x in (spread.mean, spread.low, spread.high))),
            f"{smaller} of {len(places)}", str(sum(len(p.bam) for p in places)),
        ))  # fmt: skip
    header = ("reading", "BAM against DP-SGD", "tau", "Q (p)", "I^2", "SD of BAM / SD of DP-SGD",
              "smaller in", "pairs")  # fmt: skip
    return TextTable(header, rows)


def _each(places: Sequence[Setting]) -> TextTable:
    """One row per setting: gain and spreads by both readings."""
    rows = []
    for place in places:
        columns: list[str] = []
        for reading in READINGS.values():
            spreads = " / ".join(f"{100 * s:.2f}" for s in place.spreads(reading))
            columns += [points(place.gain(reading), signed=True, digits=2), spreads]
        rows.append((place.name, *columns, str(len(place.bam))))
    header = ["setting"]
    for name in READINGS:
        header += [f"BAM against DP-SGD, {name}", "SD of DP-SGD / BAM"]
    return TextTable((*header, "seeds"), rows)


def _pooled_claims(places: Sequence[Setting]) -> list[Claim]:
    if len(places) < 2:
        return []
    claims = []
    for name, reading in READINGS.items():
        text = f"All settings, {name} (exploratory): BAM is more accurate than DP-SGD"
        gain = combine(places, reading).as_estimate()
        claims.append(Claim(text, "above", gain, "points", over="settings", reading=name,
                            headline=ALL_SETTINGS))  # fmt: skip
        if name == AVERAGED:
            text = f"All settings, {name} (exploratory): they differ by less than half a point"
            claims.append(Claim(text, "same", gain, "points", margin=_SAME, over="settings"))
    return claims


def _planned_claims(places: Sequence[Setting]) -> list[Claim]:
    """Judge both readings of a planned study, and whether averaging takes away the gain."""
    claims = []
    for place in places:
        for name, reading in READINGS.items():
            text = f"{place.name}, {name}: BAM is more accurate than DP-SGD"
            claims.append(Claim(text, "above", place.gain(reading), "points", reading=name,
                                headline=place.name))  # fmt: skip
        text = f"{place.name}: BAM gains more with the last than with averaged weights"
        lost = paired_difference(place.gains(last_accuracy), place.gains(accuracy))
        claims.append(Claim(text, "above", lost, "points"))
    return claims


def _growth(explored: Sequence[Setting], planned: Sequence[Setting]) -> list[Claim]:
    """Judge whether the MLP's gain is larger after 600 steps than after the 150 of when-mlp."""
    short = _place(explored, "when-mlp", "centre")
    long = _place(planned, "long-mlp")
    if short is None or long is None:
        return []
    claims = []
    for name, reading in READINGS.items():
        text = f"{long.name}, {name}: BAM gains more than after 150 steps"
        growth = paired_difference(long.gains(reading), short.gains(reading))
        claims.append(Claim(text, "above", growth, "points"))
    return claims


def _decay(planned: Sequence[Setting]) -> list[Claim]:
    """Judge whether a decaying rate gives DP-SGD what averaging the weights gives it."""
    claims = []
    for recipe in ("long-mlp", "long-small-cnn"):
        constant = _place(planned, recipe)
        decaying = _place(planned, f"{recipe}-more", "decaying-rate")
        if constant is None or decaying is None:
            continue
        last = {seed: last_accuracy(record) for seed, record in decaying.dp_sgd.items()}
        averaged = {seed: accuracy(record) for seed, record in constant.dp_sgd.items()}
        text = (
            f"{constant.name}: DP-SGD's last weights with a decaying rate are as accurate as its "
            "averaged weights with a constant one, to within half a point"
        )
        difference = paired_difference(last, averaged)
        claims.append(Claim(text, "same", difference, "points", margin=_SAME))
    return claims


def _place(places: Sequence[Setting], recipe: str, variant: str = "") -> Setting | None:
    return next(
        (
            place
            for place in places
            if place.study.recipe.name == recipe and place.cell.get("at", "") == variant
        ),
        None,
    )


def _forest(explored: Sequence[Setting], planned: Sequence[Setting]) -> Figure:
    """Draw each setting's paired difference and, below, the pooled one, by both readings."""
    series = []
    for colour, (name, reading) in enumerate(READINGS.items()):
        rows = [(f"{p.name} ({len(p.bam)})", p.gain(reading)) for p in explored]
        if len(explored) > 1:
            rows.append(("pooled, random effects", combine(explored, reading).as_estimate()))
        rows += [(f"{p.name} ({len(p.bam)})", p.gain(reading)) for p in planned]
        series.append(Series(
            name, colour, [label for label, _ in rows], tuple(100 * e.mean for _, e in rows),
            tuple(100 * e.low for _, e in rows), tuple(100 * e.high for _, e in rows),
        ))  # fmt: skip
    panel = dots("", "points above DP-SGD", series, percent=False)
    return Figure(
        "pooled", "BAM against DP-SGD, setting by setting",
        "Paired differences in test accuracy, mean and 95% interval, number of seeds in brackets; "
        "by the last weights, as in the paper, and by weights averaged over the second half. Below "
        "the pooled rows: longer training, planned beforehand.",
        "public", [with_zero_line(panel)],
    )  # fmt: skip
