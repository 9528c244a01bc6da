"""The opening of the page of results: the answer in a paragraph, and the paper's claims judged.

Every number comes from the claims of the outcomes, and the words follow from their verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from reproduce.accuracy_claims import LAST, paper
from reproduce.bias_claims import last_quarter
from reproduce.claims import Claim
from reproduce.outcome import Outcome, TextTable

Outcomes = Mapping[str, Outcome | None]
_PLACES = ("Table 1", "Section 6", *(f"Figure {k}" for k in range(2, 7)), "Appendix C")
_NETS = {"small CNN": "a small CNN", "MLP": "an MLP"}
_WORDS = {
    "reproduced": "gained",
    "not reproduced": "lost",
    "inconclusive": "was not shown to gain or to lose:",
}


def paragraph(desk: Outcomes) -> str:
    """Return what the paper claims, what was found, by which reading, and how far it reaches."""
    sentences = [_claimed()]
    if pooled := desk.get("pooled"):
        sentences += _gains({claim.text: claim for claim in pooled.claims})
        sentences += _longer(pooled.claims)
    if groups := desk.get("groups"):
        sentences += _groups(groups)
    if encoders := desk.get("encoders"):
        sentences += _encoders(encoders)
    if figure2 := desk.get("fig2"):
        sentences += _bias(figure2)
    sentences.append("Nets are small, runs short: full size may differ.")
    return " ".join(sentences)


def _claimed() -> str:
    gains = [
        row["bam"][0] - row["dp-sgd"][0]
        for row in paper()["table1"]
        if row["recipe"] == "table1-cifar10"
    ]
    return (
        "**The paper claims** that bias-aware minimisation (BAM) lowers the bias of clipped "
        "gradients, and so trains more accurate models than DP-SGD: on CIFAR-10 by "
        f"{min(gains):.1f} to {max(gains):.1f} points. **We found:**"
    )


def _gains(claims: Mapping[str, Claim]) -> list[str]:
    """Describe the pooled gain by both readings."""
    text = "All settings, {} (exploratory): BAM is more accurate than DP-SGD"
    last, averaged = (claims.get(text.format(f"{name} weights")) for name in ("last", "averaged"))
    if last is None or averaged is None:
        return []
    power = 100 * averaged.difference.smallest_detectable
    return [
        f"by the last weights, as in the paper, BAM {_WORDS[last.verdict]} "
        f"{last.interval()} points over {last.difference.count} settings (95% interval, pooled "
        "after the fact).",
        "With weights averaged over half of a run, free in privacy and "
        f"time, it {_WORDS[averaged.verdict]} {averaged.interval()}; {power:.2f} would have shown "
        "in four of five such studies.",
    ]


def _longer(claims: Iterable[Claim]) -> list[str]:
    """Describe each planned study of long training, once it has three pairs."""
    more = ": BAM is more accurate than DP-SGD"
    studies: dict[str, dict[str, Claim]] = {}
    for claim in claims:
        place, _, reading = claim.text.removesuffix(more).rpartition(", ")
        if " steps" in place and claim.text.endswith(more) and claim.difference.count > 2:
            studies.setdefault(place, {})[reading] = claim
    if not studies:
        return []
    texts = [
        f"{by_reading['last weights'].interval()} and {by_reading['averaged weights'].interval()} "
        f"after {place.rpartition(', ')[2]} of {_NETS[place.partition(',')[0]]} "
        f"({by_reading['last weights'].difference.count} of 8 pairs)"
        for place, by_reading in studies.items()
    ]
    return [f"In longer training (planned; last, then averaged weights): {'; '.join(texts)}."]


def _groups(outcome: Outcome) -> list[str]:
    """Describe the planned contrasts on rare classes and hard records, and clipping less."""
    primary = [claim for claim in outcome.claims if "(primary)" in claim.text]
    if not primary or primary[0].difference.count < 3:
        return []
    gains = [f"{claim.interval()} on {claim.text.rpartition(' on ')[2]}" for claim in primary]
    clip_less = next((claim for claim in outcome.claims if "rare classes: C" in claim.text), None)
    remedy = ""
    if clip_less is not None and clip_less.verdict == "reproduced":
        remedy = f"; clipping less did, by {clip_less.interval()} on rare classes"
    return [
        f"{_helped(primary)}: {' and '.join(gains)} of imbalanced data "
        f"({primary[0].difference.count} seeds){remedy}."
    ]


def _helped(claims: Sequence[Claim]) -> str:
    if any(claim.verdict == "reproduced" for claim in claims):
        return "It helped those whom clipping hurts"
    return "It was not shown to help those whom clipping hurts"


def _encoders(outcome: Outcome) -> list[str]:
    """Describe the planned contrasts for linear heads on a public encoder."""
    primary = [
        claim
        for claim in outcome.claims
        if "averaged weights (primary)" in claim.text and claim.difference.count > 2
    ]
    if not primary:
        return []
    gains = [f"{claim.interval()} on {claim.text.partition(',')[0]}" for claim in primary]
    return [
        f"For linear heads on a public encoder it is {' and '.join(gains)} "
        f"({min(claim.difference.count for claim in primary)} seeds)."
    ]


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
    name = papers.text.partition(":")[0]
    accuracy = {claim.text: claim for claim in figure2.claims}[
        f"{name}: and it is more accurate than DP-SGD"
    ]
    arms = [study for study in figure2.studies if study.records][-1].arms()
    pair = [arms[arm] for arm in (name.rpartition(", ")[2], "dp-sgd")]
    lengths, shares = (
        [fmean(last_quarter(record, key) for record in by_seed.values()) for by_seed in pair]
        for key in ("bias", "relative_bias")
    )
    return [
        f"{words[papers.verdict]}: {lengths[0]:.2g} in place of {lengths[1]:.2g}, late in 200 "
        f"steps of ResNet-9 with its batch and lambda ({papers.difference.count} seeds). But "
        f"so is the gradient: the bias is {shares[0]:.1%} of its length in place of "
        f"{shares[1]:.1%}, and accuracy differs by {accuracy.interval()}."
    ]


def paper_table(outcomes: Sequence[Outcomes]) -> TextTable:
    """Tabulate the paper's own claims, once each: from the first scale that judges it.

    A claim about accuracy has two columns: by the last weights, and by averaged ones where a study
    has them.
    """
    rows, judged = [], set()
    for by_name in outcomes:
        for name, outcome in by_name.items():
            if outcome is None or name in judged:
                continue
            claims = [claim for claim in outcome.claims if claim.paper]
            if claims:
                judged.add(name)
            rows += list(_rows(claims))
    rows.sort(key=lambda row: _PLACES.index(row[0]))
    return TextTable(("paper", "claim", "as in the paper", "with averaged weights"), rows)


def _rows(claims: Sequence[Claim]) -> Iterable[tuple[str, str, str, str]]:
    by_text = {claim.text: claim for claim in claims}
    for claim in claims:
        if LAST in claim.text:
            continue
        *place, text = claim.text.split(": ", 1)
        title, _, rest = place[0].partition(", epsilon") if place else ("", "", "")
        other = by_text.get(f"{title}{LAST}, epsilon{rest}: {text}") if rest else None
        columns = (_cell(claim), "") if other is None else (_cell(other), _cell(claim))
        yield claim.paper, claim.text, *columns


def _cell(claim: Claim) -> str:
    count = f"{claim.difference.count} {claim.over}"
    if claim.difference.count < 2:
        return f"**{claim.verdict}** ({count})"
    return f"**{claim.verdict}**: {claim.interval()}, {count}"
