"""When does BAM help? Its gain over DP-SGD against the sizes of bias and noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from dpbam.app.compare.statistics import Estimate, estimate
from dpbam.app.report.charts import Series, lines
from dpbam.app.report.figure import Figure
from dpbam.app.runs import RunRecord
from dpbam.privacy.rounding import up
from reproduce.accuracy_claims import last_accuracy
from reproduce.claims import Claim
from reproduce.outcome import (
    Outcome,
    Reading,
    Study,
    TextTable,
    accuracy,
    bias_share,
    difference_of,
    mean_of,
    points,
)

_TITLE = "When does BAM help?"
_NOTES = (
    """\
    An MLP on CIFAR-10 at 8x8, which is trained in seconds; batch size 2,000, epsilon 10, 6 epochs
    and NAdam with a constant learning rate at the centre, one of batch size, epsilon and width
    varied at a time. The learning rate is the best of six trials of DP-SGD at the centre, and is
    used for both methods and all variants. BAM has its default lambda, 1.5e-4 |theta|. Each
    variant has two readings: the weights averaged over the second half of the run (`--swa 0.5`),
    and the last weights of the same run. The first table has the mean over all variants, paired
    by seed; averaging is what the first reading gains over the second.""",
    """\
    noise / C is sigma sqrt(d) / l, the length of the noise on the mean gradient in units of C: a
    public number. The other columns are means over the runs of DP-SGD after the first step,
    measured without noise on public data, against the plain gradient g of the same batch: the
    cosine of the clipped and of the private gradient with it, and the bias share. The private
    gradient is a g + c with c orthogonal to g; the share is |c|^2 without noise over |c|^2 with
    it: 1 if only clipping turns the gradient away, 0 if only noise does. In the last of the
    tables, rows that say how lambda was tuned have the share of two trained models.""",
)
#: On the first page of results; a test holds it against the records.
RULE = (
    """\
    Expect no gain from BAM: with averaged weights none was shown over batch size, epsilon and
    width, whether bias or noise dominated, and a step takes twice as long. Larger lambdas are
    no remedy: 5e-3 |theta| lost in all of five variants of an MLP, 1.5e-3 |theta| in three, and
    no difference was shown for 5e-4 |theta|, also where bias dominates. Nor was a gain shown on
    rare classes, on hard records, or for heads on a public encoder; rare classes gained from a
    larger C. For this reason DP-SGD is the default method of `dpbam train`. Try averaged
    weights (`--swa 0.5`), which cost neither privacy nor time: with the MLP they gained more
    than any lambda of BAM. `dpbam train --dry-run` and `dpbam bias RUN --advise` apply the rule
    to a run's settings, which are public.""",
    """\
    The rule was found on the MLP, and tested on nets and data that were not used to find it
    ([the last table](../reproduce/pages/desk.md#when-does-bam-help)). Bias outweighs noise for the
    small CNN at batch 8,000, and noise dominates in all other rows, with a bias share of at most
    0.02: no gain of BAM was shown in any of them. Averaging was shown to gain in one, ResNet-9 at
    epsilon 2; on PneumoniaMNIST it made the accuracy vary less from seed to seed. A learning rate
    that decays may leave less to gain for averaging; it was not tried.""",
    """\
    DP-SAT costs what DP-SGD does, and is no part of the rule. With ResNet-9 on CIFAR-10 and
    averaged weights it gained at epsilon 10 and 2; no gain was shown on PneumoniaMNIST, and with
    the last weights it lost at epsilon 10.""",
)
_MARGIN = 0.005  # within which two methods are called the same
_READINGS = {"averaged weights": accuracy, "last weights": last_accuracy}
Arms = Mapping[str, Mapping[int, RunRecord]]


class Place(NamedTuple):
    """DP-SGD and BAM with its default lambda, at one variant of a recipe."""

    study: Study
    variant: str
    arms: Arms

    def gain(self, reading: Reading) -> Estimate:
        return difference_of(self.arms["bam"], self.arms["dp-sgd"], reading)

    @property
    def bias(self) -> list[Mapping[str, Any]]:
        """What was measured in the runs of DP-SGD after the first step, or of trained models."""
        rows = (row for record in self.arms["dp-sgd"].values() for row in record.non_private_bias)
        return [row for row in rows if row["step"] > 0 or self.study.recipe.lens]

    def mean(self, name: str) -> float:
        """Return the mean over training of a field of :class:`dpbam.bias.Reading`."""
        return fmean(row["non_private_against_plain"][name] for row in self.bias)

    @property
    def noise(self) -> float:
        """sigma sqrt(d) / l: the length of the noise on the mean gradient, over C."""
        return fmean(row["noise_norm"] / row["clip_norm"] for row in self.bias)

    @property
    def bias_share(self) -> float:
        return bias_share(self.bias)


def when(studies: Sequence[Study]) -> Outcome:
    """Show the gain of BAM's default lambda over batch size, epsilon and width; other lambdas."""
    variants, other = places(studies), others(studies)
    return Outcome(
        "when",
        _TITLE,
        tables=[
            table
            for table in (_pooled(variants), _gains(variants), _shares(studies), _others(other))
            if table.rows
        ],
        figures=[_figure(variants)] if variants else [],
        claims=_claims(variants, other),
        notes=_NOTES,
        studies=studies,
    )


def places(studies: Sequence[Study]) -> list[Place]:
    """Return every variant with at least two pairs of BAM and DP-SGD."""
    return [
        Place(study, cell["at"], _paired(arms, "bam"))
        for study in studies
        if study.recipe.name.startswith("when-")
        for cell in study.recipe.cells()
        if len(_pairs(arms := study.arms(cell), "bam")) > 1
    ]


def _pairs(arms: Arms, arm: str) -> set[int]:
    return set(arms.get(arm, {})) & set(arms.get("dp-sgd", {}))


def _paired(arms: Arms, arm: str) -> Arms:
    """Return DP-SGD and the arm with the seeds that both have."""
    seeds = sorted(_pairs(arms, arm))
    return {name: {s: arms[name][s] for s in seeds} for name in ("dp-sgd", arm) if seeds}


def by_net(variants: Sequence[Place]) -> dict[str, list[Place]]:
    """Return the places of each net whose variants share a seed."""
    nets = {n: [p for p in variants if _net(p) == n] for n in dict.fromkeys(map(_net, variants))}
    return {net: mine for net, mine in nets.items() if _shared(mine)}


def averaging(variants: Sequence[Place]) -> Estimate:
    """Estimate what averaging gains for DP-SGD: for each seed over the places, then over seeds."""
    return _over(variants, lambda arms, seed: accuracy(arms["dp-sgd"][seed])
                 - last_accuracy(arms["dp-sgd"][seed]))  # fmt: skip


def gain(variants: Sequence[Place], reading: Reading) -> Estimate:
    """Estimate BAM's gain over DP-SGD in the same way."""
    return _over(variants, lambda arms, seed: reading(arms["bam"][seed])
                 - reading(arms["dp-sgd"][seed]))  # fmt: skip


def _over(variants: Sequence[Place], of: Callable[[Arms, int], float]) -> Estimate:
    seeds = sorted(_shared(variants))
    return estimate([fmean(of(p.arms, seed) for p in variants) for seed in seeds])


def _shared(variants: Sequence[Place]) -> set[int]:
    return set.intersection(*(set(place.arms["bam"]) for place in variants))


def _pooled(variants: Sequence[Place]) -> TextTable:
    """One row per net: the mean over all variants, paired by seed."""
    rows = []
    for net, mine in by_net(variants).items():
        each = [averaging(mine), *(gain(mine, reading) for reading in _READINGS.values())]
        shown = (points(e, signed=True, digits=2) for e in each)
        rows.append((net, str(len(mine)), *shown, str(each[0].count)))
    header = ("net", "variants", "DP-SGD: averaging the weights",
              *(f"BAM, {name}" for name in _READINGS), "seeds")  # fmt: skip
    return TextTable(header, rows)


def _claims(variants: Sequence[Place], other: Sequence[Place]) -> list[Claim]:
    """Judge BAM's gain over all variants of a net, and wherever bias outweighs noise."""
    judged = []
    for net, mine in by_net(variants).items():
        judged.append((f"{net}, all variants", mine))
        judged.append((f"{net}, a bias share above 0.5", [p for p in mine if p.bias_share > 0.5]))
    judged += [(_title(p), [p]) for p in other if p.bias_share > 0.5]
    claims = []
    for where, group in judged:
        for name, reading in _READINGS.items() if group else ():
            text, each = f"{where}, {name}", gain(group, reading)
            more = f"{text}: BAM is more accurate than DP-SGD"
            same = f"{text}: they differ by less than half a point"
            claims.append(Claim(more, "above", each, "points"))
            claims.append(Claim(same, "same", each, "points", margin=_MARGIN))
    return claims


def _gains(variants: Sequence[Place]) -> TextTable:
    """One row per net and variant: what DP-SGD's gradient suffers from, and BAM's gain."""
    rows = []
    for place in sorted(variants, key=lambda p: (_net(p), -p.bias_share)):
        facts = (place.noise, place.mean("cosine"), place.mean("private_cosine"), place.bias_share)
        columns = [
            text
            for reading in _READINGS.values()
            for text in (points(mean_of(place.arms["dp-sgd"], reading)),
                         points(place.gain(reading), signed=True, digits=2))
        ]  # fmt: skip
        seeds = str(len(_pairs(place.arms, "bam")))
        rows.append((_net(place), place.variant, f"{facts[0]:.3f}",
                     *(f"{x:.2f}" for x in facts[1:]), *columns, seeds))  # fmt: skip
    header = (
        "net", "variant", "noise / C", "cosine", "cosine with noise", "bias share", "DP-SGD",
        "BAM against it", "DP-SGD, last weights", "BAM against it", "seeds",
    )  # fmt: skip
    return TextTable(header, rows)


def _shares(studies: Sequence[Study]) -> TextTable:
    """One row per net, variant and lambda: the gain over DP-SGD."""
    rows = []
    for study in (s for s in studies if s.recipe.name.startswith("share-")):
        for cell in study.recipe.cells():
            arms = study.arms(cell)
            for arm in (a for a in arms if a != "dp-sgd" and len(_pairs(arms, a)) > 1):
                config = next(iter(arms[arm].values())).config
                against = (difference_of(arms[arm], arms["dp-sgd"], r) for r in _READINGS.values())
                rows.append((
                    study.recipe.title.partition(", ")[2], cell.get("at", ""),
                    _lambda(config),
                    *(points(e, signed=True, digits=2) for e in against),
                    str(len(_pairs(arms, arm))),
                ))  # fmt: skip
    header = ("net, data", "variant", "lambda",
              *(f"against DP-SGD, {name}" for name in _READINGS), "seeds")  # fmt: skip
    return TextTable(header, rows)


def _lambda(config: Mapping[str, Any]) -> str:
    """Return BAM's share of theta's norm, or the lambda of DP-SAT."""
    if config["method"] == "dp-sat":
        return f"DP-SAT, {config['lam']:g}"
    share = config.get("method_options", {}).get("warmup")
    warm = f", reached after {share:.0%}" if share else ""
    return f"BAM, {config['lam_share']:.1e} of theta's norm{warm}"


def others(studies: Sequence[Study]) -> list[Place]:
    """Return the other data sets and nets with at least two pairs of BAM and DP-SGD."""
    return [
        Place(study, ", ".join(f"{key} {up(value)}" for key, value in cell.items()), pairs)
        for study in studies
        if study.recipe.name.startswith("other-")
        for cell in study.recipe.cells()
        if len((pairs := _paired(study.arms(cell), "bam")).get("bam", {})) > 1
    ]


def _others(variants: Sequence[Place]) -> TextTable:
    """One row per other data set and net."""
    rows = []
    for place in variants:
        level = points(mean_of(place.arms["dp-sgd"]))
        each = [averaging([place]), *(place.gain(r) for r in _READINGS.values())]
        shown = (points(e, signed=True, digits=2) for e in each)
        rows.append((_title(place), f"{place.bias_share:.2g}", level, *shown, str(each[0].count)))
    header = ("other nets and data", "bias share", "DP-SGD", "averaging the weights",
              *(f"BAM, {name}" for name in _READINGS), "seeds")  # fmt: skip
    return TextTable(header, rows)


def _title(place: Place) -> str:
    title = place.study.recipe.title
    return f"{title}, {place.variant}" if place.variant else title


def _net(place: Place) -> str:
    return str(place.study.recipe.setting["model"])


def _figure(variants: Sequence[Place]) -> Figure:
    nets = list(dict.fromkeys(_net(place) for place in variants))
    panels = [
        lines(
            name, "bias share", "points above DP-SGD",
            [_series(net, k, [p for p in variants if _net(p) == net], reading)
             for k, net in enumerate(nets)],
            percent=False,
        )
        for name, reading in _READINGS.items()
    ]  # fmt: skip
    caption = (
        "BAM's gain over DP-SGD, mean and 95% t interval over the seeds, against the share of "
        "clipping in what turns DP-SGD's private gradient away from the plain one."
    )
    return Figure("when", _TITLE, caption, "public", panels)


def _series(net: str, colour: int, variants: Sequence[Place], reading: Reading) -> Series:
    ordered = sorted(variants, key=lambda place: place.bias_share)
    gains = [place.gain(reading) for place in ordered]
    return Series(
        net, colour, tuple(place.bias_share for place in ordered),
        tuple(100 * e.mean for e in gains), tuple(100 * e.low for e in gains),
        tuple(100 * e.high for e in gains), style="points",
    )  # fmt: skip
