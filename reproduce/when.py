"""When does BAM help? Its gain over DP-SGD against the sizes of bias and noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from dpbam.app.report.charts import Series, lines
from dpbam.app.report.figure import Figure
from dpbam.estimates import Estimate, estimate
from dpbam.privacy.rounding import up
from reproduce.claims import Claim
from reproduce.outcome import (
    READINGS,
    Arms,
    Outcome,
    Reading,
    Study,
    TextTable,
    accuracy,
    bias_share,
    difference_of,
    last_accuracy,
    mean_of,
    over_cells,
    points,
    shared_seeds,
)
from reproduce.pooled import Setting, settings

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
    """\
    Larger lambdas are no remedy: 5e-3 |theta| lost in all of five variants of the MLP, 1.5e-3
    |theta| in three, and no difference was shown for 5e-4 |theta|, also where bias dominates. The
    last table has nets and data that were not used to find this. Bias outweighs noise for the small
    CNN at batch 8,000, and noise dominates in all other rows, with a bias share of at most 0.02: no
    gain of BAM was shown in any of them. Averaging was shown to gain in one, ResNet-9 at epsilon 2;
    on PneumoniaMNIST it made the accuracy vary less from seed to seed.""",
    """\
    DP-SAT costs what DP-SGD does. With ResNet-9 on CIFAR-10 and averaged weights it gained at
    epsilon 10 and 2; no gain was shown on PneumoniaMNIST, and with the last weights it lost at
    epsilon 10 (Table 1).""",
)
#: What to do, on the first page of results; a test compares it with the records.
RULE = """\
Train with DP-SGD, the default of `dpbam train`, and average the weights (`--swa 0.5`), which costs
neither privacy nor time and with an MLP gained more than any lambda of BAM. Expect no gain from BAM
on top of that: none was shown over batch size, epsilon and width, whether bias or noise dominated
([when does BAM help?](../reproduce/pages/desk.md#when-does-bam-help)), and a step takes twice as
long. If rare classes matter, clip less: they gained from a larger C, and not from BAM ([whom
clipping hurts](../reproduce/pages/desk.md#whom-clipping-hurts)). `dpbam train --dry-run` and
`dpbam bias RUN --advise` say the same about a run, by its public settings."""
_MARGIN = 0.005  # within which two methods are called the same


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


def places(studies: Sequence[Study]) -> list[Setting]:
    """Return every variant of the study with at least two pairs of BAM and DP-SGD."""
    return [place for place in settings(studies) if place.study.recipe.name.startswith("when-")]


def others(studies: Sequence[Study]) -> list[Setting]:
    """Return the other data sets and nets with at least two pairs."""
    return [place for place in settings(studies) if place.study.recipe.name.startswith("other-")]


def by_net(variants: Sequence[Setting]) -> dict[str, list[Setting]]:
    """Return the places of each net whose variants share a seed."""
    nets = {n: [p for p in variants if _net(p) == n] for n in dict.fromkeys(map(_net, variants))}
    return {net: mine for net, mine in nets.items() if shared_seeds(_arms(mine), "bam", "dp-sgd")}


def _arms(variants: Sequence[Setting]) -> list[Arms]:
    return [place.arms for place in variants]


def averaging(variants: Sequence[Setting]) -> Estimate:
    """Estimate what averaging gains for DP-SGD: for each seed over the places, then over seeds."""
    seeds = shared_seeds(_arms(variants), "bam", "dp-sgd")
    gains = ([accuracy(p.dp_sgd[s]) - last_accuracy(p.dp_sgd[s]) for p in variants] for s in seeds)
    return estimate([fmean(each) for each in gains])


def gain(variants: Sequence[Setting], reading: Reading) -> Estimate:
    """Estimate BAM's gain over DP-SGD in the same way."""
    return over_cells(_arms(variants), "bam", "dp-sgd", reading)


def share_of_bias(place: Setting) -> float:
    """Return the share of clipping in what turns DP-SGD's private gradient away."""
    return bias_share(_measured(place))


def _measured(place: Setting) -> list[Mapping[str, Any]]:
    """What was measured in the runs of DP-SGD after the first step, or of trained models."""
    rows = (row for record in place.dp_sgd.values() for row in record.non_private_bias)
    return [row for row in rows if row["step"] > 0 or place.study.recipe.lens]


def _mean(place: Setting, name: str) -> float:
    """Return the mean over training of a field of :class:`dpbam.bias.Reading`."""
    return fmean(row["non_private_against_plain"][name] for row in _measured(place))


def _noise(place: Setting) -> float:
    """sigma sqrt(d) / l: the length of the noise on the mean gradient, over C."""
    return fmean(row["noise_norm"] / row["clip_norm"] for row in _measured(place))


def _pooled(variants: Sequence[Setting]) -> TextTable:
    """One row per net: the mean over all variants, paired by seed."""
    rows = []
    for net, mine in by_net(variants).items():
        each = [averaging(mine), *(gain(mine, reading) for reading in READINGS.values())]
        shown = (points(e, signed=True, digits=2) for e in each)
        rows.append((net, str(len(mine)), *shown, str(each[0].count)))
    header = ("net", "variants", "DP-SGD: averaging the weights",
              *(f"BAM, {name}" for name in READINGS), "seeds")  # fmt: skip
    return TextTable(header, rows)


def _claims(variants: Sequence[Setting], other: Sequence[Setting]) -> list[Claim]:
    """Judge BAM's gain over all variants of a net, and wherever bias outweighs noise."""
    judged = []
    for net, mine in by_net(variants).items():
        judged.append((f"{net}, all variants", mine))
        biased = [place for place in mine if share_of_bias(place) > 0.5]
        judged.append((f"{net}, a bias share above 0.5", biased))
    judged += [(_title(p), [p]) for p in other if share_of_bias(p) > 0.5]
    claims = []
    for where, group in judged:
        for name, reading in READINGS.items() if group else ():
            text, each = f"{where}, {name}", gain(group, reading)
            more = f"{text}: BAM is more accurate than DP-SGD"
            same = f"{text}: they differ by less than half a point"
            claims.append(Claim(more, "above", each, "points"))
            claims.append(Claim(same, "same", each, "points", margin=_MARGIN))
    return claims


def _gains(variants: Sequence[Setting]) -> TextTable:
    """One row per net and variant: what DP-SGD's gradient suffers from, and BAM's gain."""
    rows = []
    for place in sorted(variants, key=lambda p: (_net(p), -share_of_bias(p))):
        facts = (
            _noise(place),
            *(_mean(place, name) for name in ("cosine", "private_cosine")),
            share_of_bias(place),
        )
        columns = [
            text
            for reading in READINGS.values()
            for text in (points(mean_of(place.dp_sgd, reading)),
                         points(place.gain(reading), signed=True, digits=2))
        ]  # fmt: skip
        seeds = str(len(place.bam))
        rows.append((_net(place), place.cell["at"], f"{facts[0]:.3f}",
                     *(f"{x:.2f}" for x in facts[1:]), *columns, seeds))  # fmt: skip
    header = (
        "net", "variant", "noise / C", "cosine", "cosine with noise", "bias share",
        *(text for name in READINGS for text in (f"DP-SGD, {name}", "BAM against it")), "seeds",
    )  # fmt: skip
    return TextTable(header, rows)


def _shares(studies: Sequence[Study]) -> TextTable:
    """One row per net, variant and lambda: the gain over DP-SGD."""
    rows = []
    for study in (s for s in studies if s.recipe.name.startswith("share-")):
        for cell in study.recipe.cells():
            arms = study.arms(cell)
            for arm in arms:
                pairs = len(shared_seeds([arms], arm, "dp-sgd"))
                if arm == "dp-sgd" or pairs < 2:
                    continue
                config = next(iter(arms[arm].values())).config
                against = (difference_of(arms[arm], arms["dp-sgd"], r) for r in READINGS.values())
                rows.append((
                    study.recipe.title.partition(", ")[2], cell.get("at", ""),
                    _lambda(config),
                    *(points(e, signed=True, digits=2) for e in against),
                    str(pairs),
                ))  # fmt: skip
    header = ("net, data", "variant", "lambda",
              *(f"against DP-SGD, {name}" for name in READINGS), "seeds")  # fmt: skip
    return TextTable(header, rows)


def _lambda(config: Mapping[str, Any]) -> str:
    """Return BAM's share of theta's norm, or the lambda of DP-SAT."""
    if config["method"] == "dp-sat":
        return f"DP-SAT, {config['lam']:g}"
    share = config.get("method_options", {}).get("warmup")
    warm = f", reached after {share:.0%}" if share else ""
    return f"BAM, {config['lam_share']:.1e} of theta's norm{warm}"


def _others(variants: Sequence[Setting]) -> TextTable:
    """One row per other data set and net."""
    rows = []
    for place in variants:
        level = points(mean_of(place.dp_sgd))
        each = [averaging([place]), *(place.gain(r) for r in READINGS.values())]
        shown = (points(e, signed=True, digits=2) for e in each)
        rows.append(
            (_title(place), f"{share_of_bias(place):.2g}", level, *shown, str(each[0].count))
        )
    header = ("other nets and data", "bias share", "DP-SGD", "averaging the weights",
              *(f"BAM, {name}" for name in READINGS), "seeds")  # fmt: skip
    return TextTable(header, rows)


def _title(place: Setting) -> str:
    cell = (f"{key} {up(value)}" for key, value in place.cell.items())
    return ", ".join([place.study.recipe.title, *cell])


def _net(place: Setting) -> str:
    return str(place.study.recipe.setting["model"])


def _figure(variants: Sequence[Setting]) -> Figure:
    nets = list(dict.fromkeys(_net(place) for place in variants))
    panels = [
        lines(
            name, "bias share", "points above DP-SGD",
            [_series(net, k, [p for p in variants if _net(p) == net], reading)
             for k, net in enumerate(nets)],
            percent=False,
        )
        for name, reading in READINGS.items()
    ]  # fmt: skip
    caption = (
        "BAM's gain over DP-SGD, mean and 95% t interval over the seeds, against the share of "
        "clipping in what turns DP-SGD's private gradient away from the plain one."
    )
    return Figure("when", _TITLE, caption, "public", panels)


def _series(net: str, colour: int, variants: Sequence[Setting], reading: Reading) -> Series:
    ordered = sorted(variants, key=lambda place: share_of_bias(place))
    gains = [place.gain(reading) for place in ordered]
    return Series(
        net, colour, tuple(share_of_bias(place) for place in ordered),
        tuple(100 * e.mean for e in gains), tuple(100 * e.low for e in gains),
        tuple(100 * e.high for e in gains), style="points",
    )  # fmt: skip
