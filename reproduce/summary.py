"""The opening of the page of results: the answer in a paragraph, a figure, and two tables.

Every number comes from the claims of the outcomes, and the words follow from their verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from dpbam.app.report.charts import Series, dots
from dpbam.app.report.figure import Figure
from dpbam.app.report.training_figures import PLAIN, Reading, measured
from reproduce.accuracy_claims import paper
from reproduce.bias_claims import last_quarter
from reproduce.claims import Claim
from reproduce.drawings import with_zero_line
from reproduce.outcome import AVERAGED, LAST, Outcome, Study, TextTable, as_groups
from reproduce.pooled import ALL_SETTINGS

Outcomes = Mapping[str, Outcome | None]
_PARTS = ("Table 1", "Section 6", *(f"Figure {k}" for k in range(2, 7)), "Appendix C")
_LAST_COLUMN, _AVERAGED_COLUMN = "last weights, as in the paper", "averaged weights"
_FIGURE2_ARMS = ("dp-sgd", "dp-sat", "bam-0.02")
_ENOUGH = 3  # pairs, below which a planned study is not on the first page


def headlines(outcomes: Sequence[Outcomes]) -> list[Claim]:
    """Return the claims of the first page, those of an experiment from the first scale that has it.

    A study of this project needs three pairs; a claim of the paper is shown however few there are.
    """
    claims: list[Claim] = []
    judged: set[str] = set()
    for by_name in outcomes:
        for name, outcome in by_name.items():
            if outcome is None or name in judged:
                continue
            of_page = [claim for claim in outcome.claims if claim.headline]
            if of_page:
                judged.add(name)
            claims += [c for c in of_page if c.paper or c.difference.count >= _ENOUGH]
    return claims


def paper_table(claims: Iterable[Claim]) -> TextTable:
    """Tabulate the paper's own claims in its order."""
    of_paper = [claim for claim in claims if claim.paper]
    ordered = sorted(of_paper, key=lambda claim: _PARTS.index(claim.paper))
    rows = [(by_reading[0].paper, *_row(by_reading)) for by_reading in _by_headline(ordered)]
    return TextTable(("paper", "claim", "as in the paper", "with averaged weights"), rows)


def question_table(claims: Iterable[Claim]) -> TextTable:
    """Tabulate the questions of this study: does BAM gain on DP-SGD?"""
    rows = [_row(by_reading) for by_reading in _by_headline([c for c in claims if not c.paper])]
    return TextTable(("BAM against DP-SGD", _LAST_COLUMN, _AVERAGED_COLUMN), rows)


def _by_headline(claims: Iterable[Claim]) -> list[list[Claim]]:
    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        groups.setdefault(claim.headline, []).append(claim)
    return list(groups.values())


def _row(by_reading: Sequence[Claim]) -> tuple[str, str, str]:
    """Return the headline, the verdict as in the paper, and that of the averaged weights."""
    averaged = [claim for claim in by_reading if claim.reading == AVERAGED]
    others = [claim for claim in by_reading if claim.reading != AVERAGED]
    first, second = (_cell(claims[0]) if claims else "" for claims in (others, averaged))
    return by_reading[0].headline, first, second


def _cell(claim: Claim) -> str:
    count = f"{claim.difference.count} {claim.over}"
    if claim.difference.count < 2:
        return f"**{claim.verdict}** ({count})"
    verdict = _WORDS[claim.verdict] if not claim.paper else claim.verdict
    return f"**{verdict}**: {claim.interval()}, {count}"


_WORDS = {"reproduced": "gains", "not reproduced": "loses", "inconclusive": "not shown"}


def paragraph(desk: Outcomes) -> str:
    """Return what the paper claims, what was found, by which reading, and how far it reaches."""
    claims = headlines([desk])
    sentences = [_claimed(), *_gains(claims), *_planned(claims)]
    if figure2 := desk.get("fig2"):
        sentences += _bias(figure2)
    sentences.append("Nets are small and runs short here: at the paper's size it may be otherwise.")
    return " ".join(sentences)


def _claimed() -> str:
    gains = [row["bam"][0] - row["dp-sgd"][0] for row in _papers_rows()]
    return (
        "**The paper claims** that bias-aware minimisation (BAM) lowers the bias of clipped "
        "gradients, and so trains more accurate models than DP-SGD: on CIFAR-10 by "
        f"{min(gains):.1f} to {max(gains):.1f} points. **We found:**"
    )


def _papers_rows() -> list[dict[str, list[float]]]:
    return [row for row in paper()["table1"] if row["recipe"] == "table1-cifar10"]


def _gains(claims: Sequence[Claim]) -> list[str]:
    """Describe the pooled gain by both readings."""
    by_reading = {claim.reading: claim for claim in claims if claim.headline == ALL_SETTINGS}
    if not by_reading:
        return []
    last, averaged = by_reading[LAST], by_reading[AVERAGED]
    words = {"reproduced": "gains", "not reproduced": "loses", "inconclusive": "differs by"}
    power = 100 * averaged.difference.smallest_detectable
    return [
        f"by the last weights of a run, which the paper reads, BAM {words[last.verdict]} "
        f"{last.interval()} points on DP-SGD (95% interval over {last.difference.count} settings, "
        "pooled after the fact).",
        "By weights averaged over the second half of the same runs, which costs neither privacy "
        f"nor time, it {words[averaged.verdict]} {averaged.interval()}; a gain of {power:.2f} "
        "would have shown in four of five such studies.",
    ]


def _planned(claims: Sequence[Claim]) -> list[str]:
    """Say in how many of the planned studies a gain was shown, by each reading."""
    planned = [c for c in claims if not c.paper and c.headline != ALL_SETTINGS]
    count = len({claim.headline for claim in planned})
    if not count:
        return []
    last, averaged = (_gained(planned, reading) for reading in (LAST, AVERAGED))
    return [
        f"Of {count} studies planned beforehand, with longer training, other budgets and learning "
        "rates, rare classes and hard records, and public encoders, BAM was shown to gain in "
        f"{last} by the last weights, and in {averaged} by averaged ones."
    ]


def _gained(claims: Sequence[Claim], reading: str) -> str:
    """Count and name the studies in which a gain was shown by a reading."""
    shown = [c for c in claims if c.reading == reading and c.verdict == "reproduced"]
    names = "; ".join(
        f"{claim.headline}: {claim.interval()}, {claim.difference.count} pairs" for claim in shown
    )
    return f"{len(shown)} ({names})" if shown else "none"


def _bias(figure2: Outcome) -> list[str]:
    """Describe the bias during training in the setting nearest to the paper's."""
    papers = next((c for c in figure2.claims if c.paper and "BAM" in c.text), None)
    if papers is None or papers.difference.count < 2:
        return []
    words = {
        "reproduced": "The bias itself is smaller with BAM",
        "not reproduced": "The bias itself is larger with BAM, which the paper denies",
        "inconclusive": "That the bias itself is smaller with BAM was not shown",
    }
    arms = nearest_to_paper(figure2).arms()
    pair = [arms[arm] for arm in (papers.text.partition(":")[0].rpartition(", ")[2], "dp-sgd")]
    lengths, shares = (
        [fmean(last_quarter(record, key) for record in by_seed.values()) for by_seed in pair]
        for key in ("bias", "relative_bias")
    )
    return [
        f"{words[papers.verdict]}, {lengths[0]:.2g} in place of {lengths[1]:.2g}, but so is the "
        f"gradient: clipping removes {shares[0]:.0%} of it in place of {shares[1]:.0%}."
    ]


def nearest_to_paper(figure2: Outcome) -> Study:
    return [study for study in figure2.studies if study.records][-1]


def figures(desk: Outcomes) -> list[Figure]:
    """Return the two figures of the opening: what BAM gains, and what it does to the bias."""
    claims = headlines([desk])
    drawn = [_gain_figure(claims)] if any(not claim.paper for claim in claims) else []
    figure2 = desk.get("fig2")
    if figure2 is not None and figure2.studies and nearest_to_paper(figure2).records:
        drawn.append(_bias_figure(nearest_to_paper(figure2)))
    return drawn


def _gain_figure(claims: Sequence[Claim]) -> Figure:
    """Draw BAM's gains: of the paper's Table 1, of the same cells here, and of all else."""
    names = {
        row["epsilon"]: f"CIFAR-10, epsilon {row['epsilon']:g}: BAM is more accurate than DP-SGD"
        for row in _papers_rows()
    }
    shown = [c for c in claims if not c.paper or c.headline in names.values()]
    labels = {claim.headline: _label(claim) for claim in shown}
    order = dict.fromkeys(labels.values())
    series = [Series(
        "the paper", 2, [labels[name] for name in names.values() if name in labels],
        tuple(row["bam"][0] - row["dp-sgd"][0] for row in _papers_rows()
              if names[row["epsilon"]] in labels),
    )]  # fmt: skip
    for colour, reading in enumerate((LAST, AVERAGED)):
        mine = {labels[c.headline]: c.difference for c in shown if c.reading == reading}
        rows = [(label, mine[label]) for label in order if label in mine]
        series.append(Series(
            f"here, {reading}", colour, [label for label, _ in rows],
            tuple(100 * e.mean for _, e in rows), tuple(100 * e.low for _, e in rows),
            tuple(100 * e.high for _, e in rows),
        ))  # fmt: skip
    panel = dots("", "points above DP-SGD", series, percent=False)
    return Figure(
        "gain", "What BAM gains on DP-SGD",
        "What BAM gains on DP-SGD in test accuracy: paired differences, mean and 95% interval, "
        "number of pairs in brackets. The first three rows are the paper's Table 1.",
        "public", [with_zero_line(panel)],
    )  # fmt: skip


def _label(claim: Claim) -> str:
    name = claim.headline.partition(":")[0]
    name = f"ResNet-9, {name}" if claim.paper else name
    count = claim.difference.count
    return f"{name} ({count})" if claim.over == "seeds" else f"{count} settings, pooled"


def _bias_figure(study: Study) -> Figure:
    """Draw the bias over training, and the share of the gradient that it is."""
    records = [record for record in study.records if record.arm in _FIGURE2_ARMS]
    draw = measured(
        "bias", "Bias over training",
        "The paper's Figure 2, the first 200 steps of ResNet-9 (faint: each seed). Left: the "
        "length of the bias, smaller with BAM. Right: the bias over the length of the gradient. "
        "Clipping removes nearly all of the gradient with every method.",
        Reading("Length of the bias", "|bias|", PLAIN, "bias", zero=True),
        Reading("Bias over the gradient's length", "|bias| / |gradient|", PLAIN, "relative_bias",
                percent=True, zero=True),
    )  # fmt: skip
    return replace(draw(as_groups(records)), about="public")
