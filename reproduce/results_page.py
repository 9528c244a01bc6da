"""Writes outcomes as JSON, Markdown and figures, and the pages of results.

Nothing is edited by hand: the pages are a function of the committed records, and a test generates
them again and compares.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from dpbam.app.report.figure import Figure
from dpbam.app.runs.files import write_atomic, write_json
from reproduce.claims import Claim, count_verdicts
from reproduce.outcome import Outcome, TextTable
from reproduce.summary import figures, headlines, paper_table, paragraph, question_table
from reproduce.when import RULE

FORMATS = (".svg", ".png")

_TITLE = "# What BAM is worth: the paper's claims, measured"
_CLAIMS = """\
[How a verdict is read](#how-a-verdict-is-read) is below. Accuracies are in points. Figures 4 to 6
are of an MLP, Appendix C of a test of the machinery; the rest of ResNet-9 at a quarter of its
width."""
_QUESTIONS = """\
Differences in accuracy, in points. All but the first row were planned before their runs: the plans
stand in the recipes. *Not shown* means that the interval contains 0."""
_READING = """\
## How a verdict is read
Runs of one seed share training data, initial weights and batches, which is checked, but not noise.
A verdict is read from the 95% t interval of the paired difference:

| claim | reproduced | not reproduced | inconclusive |
|---|---|---|---|
| one is above (below) the other | it is above (below) 0 | it is on the other side | it contains 0 |
| two are the same | it lies within the margin | it lies outside | neither |
| two are different | it excludes 0 | | it contains 0 |

`visible from` is the smallest true difference that this number of seeds would have shown in 80% of
repetitions; `d_z` is the mean over the standard deviation of the paired differences. Each claim is
judged by itself: of twenty at 95%, one may fail by chance. At desk scale a verdict needs power: an
interval that extends further than half a point to either side of its mean is inconclusive.
"""
_DETAILS = """\
## Details
| page | what |
|---|---|
| [desk scale](../reproduce/pages/desk.md) | every table, figure and verdict; when BAM helps |
| [pocket scale](../reproduce/pages/pocket.md) | a test of the machinery, too small to judge |
| [methods compared](../reproduce/pages/bias-methods.md) | other methods against clipping bias |
| [reproducing](reproduce.md) | the commands, and recipes of your own |

This page and its details are generated from the records in `reproduce/results`; nothing is edited
by hand. CIFAR-100, ImageNet32 and the recipes for the paper's own size (`reproduce/recipes/full`)
were not trained.
"""
_SCALES = {
    "full": """\
# Results at full scale
The paper's own settings, trained on a GPU. Verdicts of this scale replace those of the others on
the [first page](../../docs/results.md), where they are explained.
""",
    "desk": """\
# Results at desk scale
The study: what two cores train in days, with enough seeds to tell methods apart. Its answer is on
the [first page](../../docs/results.md), where the verdicts are explained.

CIFAR-10 halved to 16x16, all 50,000 images, ResNet-9 at a quarter of its width, 150 steps of 2,000
images with NAdam, delta 1e-5, no augmented views; the model is the mean of the weights over the
second half of the run. PneumoniaMNIST halved to 14x14, all 5,232 images, a small convolutional net,
153 steps of 512 images, the rest as on CIFAR-10. Seeds are paired; the tables show how many were
trained. Figures 4 to 7 and lambda: an MLP of 48 units on CIFAR-10 at 8x8, with its own learning
rate; the runs are those of [when BAM helps](#when-does-bam-help). Figure 2 has these, too, and the
first 200 steps of ResNet-9 at a quarter of its width, with the paper's batch size, noise and
lambda.

Three things were decided after test accuracies had been seen: the pooled analysis; averaged weights
and 150 steps in place of 250 steps and the last weights, which differ by points from seed to seed
(both readings are shown); and more seeds where eight left an interval wider than half a point, at
epsilon 2 and for DP-SAT at epsilon 10, by its width alone. Figure 2 with ResNet-9, longer training,
imbalanced data and public encoders were planned before their runs: the plans stand in the recipes.

The recipes ask for more than was trained: on CIFAR-10 five more seeds at epsilon 1, two of BAM at
epsilon 10, and exact BAM at epsilon 2 and 1; PneumoniaMNIST at epsilon 2, and exact BAM there; a
small CNN for 900 steps at epsilon 2 and with a decaying rate.
""",
    "pocket": """\
# Results at pocket scale: a test of the machinery
Small images, a narrow network, few steps and five seeds: enough to test every step from recipe to
verdict, and too small to judge the methods, which the
[first page](../../docs/results.md) does. `visible from` shows how large a
difference would have to be.
""",
}
PAGE_SCALES = tuple(_SCALES)
#: The folder of the study pages, next to the documentation's.
STUDIES = "reproduce/pages"
#: Scales whose page has pictures; that of a test of the machinery has tables alone.
PICTURED = ("desk",)
Outcomes = Mapping[str, Outcome | None]


def write_outcome(outcome: Outcome, folder: Path, scale: str = "pocket") -> list[Path]:
    """Write ``NAME.json``, ``NAME.md`` and the figures as SVG and PNG; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / f"{outcome.name}.json", folder / f"{outcome.name}.md"
    write_json(data, outcome.to_dict())
    pictures = write_figures(outcome.figures, folder)
    write_atomic(text, section(outcome, "", scale))
    return [data, text, *pictures]


def write_pages(by_scale: Mapping[str, Outcomes], docs: Path) -> list[Path]:
    """Write ``DOCS/results.md``, and next to ``DOCS`` the study pages with their figures."""
    studies = docs.parent / STUDIES
    for scale in PICTURED:
        for outcome in by_scale.get(scale, {}).values():
            if outcome is not None:
                write_figures(outcome.figures, studies / scale, formats=(".svg",))
    write_figures(figures(by_scale.get("desk", {})), studies, formats=(".svg",))
    paths = []
    for name, text in pages(by_scale).items():
        paths.append(docs.parent / name)
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        write_atomic(paths[-1], text)
    return paths


def write_figures(
    drawn: Sequence[Figure], folder: Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    return [f.save(folder / f"{f.name}{end}") for f in drawn for end in formats]


def pages(by_scale: Mapping[str, Outcomes]) -> dict[str, str]:
    """Return every page by its path in the repository; experiments without a run are listed.

    A scale without any run has no page: records of full scale join when there are some.
    """
    trained = {scale: each for scale, each in by_scale.items() if any(each.values())}
    return {
        "docs/results.md": first_page(trained),
        **{f"{STUDIES}/{scale}.md": _of_scale(scale, each) for scale, each in trained.items()},
    }


def first_page(by_scale: Mapping[str, Outcomes]) -> str:
    """Return the answer in a paragraph, two figures, the paper's claims, and our own questions."""
    desk = by_scale.get("desk", {})
    claims = headlines(list(by_scale.values()))
    parts = [_TITLE, _wrapped(paragraph(desk))]
    for figure in figures(desk):
        picture = f"![{figure.title}](../{STUDIES}/{figure.name}.svg)"
        parts += [picture, _wrapped(f"*{figure.caption}*")]
    parts += ["## The paper's claims", _CLAIMS, paper_table(claims).to_markdown()]
    questions = question_table(claims)
    if questions.rows:
        parts += ["## Where BAM might gain", _QUESTIONS, questions.to_markdown()]
    if desk.get("when"):
        parts += ["## What to do", RULE]
    return "\n\n".join([*parts, _READING + "\n" + _DETAILS])


def _of_scale(scale: str, outcomes: Outcomes) -> str:
    reported = [one for one in outcomes.values() if one is not None]
    empty = [f"`{name}`" for name, one in outcomes.items() if one is None]
    parts = [_SCALES[scale]]
    if empty:
        parts.append(f"No record yet: {', '.join(empty)}.\n")
    folder = f"{scale}/" if scale in PICTURED else None
    parts += [section(one, folder, scale) for one in reported]
    if any(one.claims for one in reported):
        parts.append(_verdicts({one.name: list(one.claims) for one in reported}))
    return "\n".join(parts)


def _verdicts(claims: Mapping[str, list[Claim]]) -> str:
    count = count_verdicts(claims)
    total = ", ".join(f"{number} {verdict}" for verdict, number in count.items())
    return f"## All verdicts\nOf {sum(count.values())} claims: {total}.\n\n{claims_table(claims)}\n"


def claims_table(claims: Mapping[str, list[Claim]]) -> str:
    rows = [
        (name, claim.text, f"**{claim.verdict}**", claim.sentence())
        for name, group in claims.items()
        for claim in group
    ]
    return TextTable(("", "claim", "verdict", "difference"), rows).to_markdown()


def section(outcome: Outcome, folder: str | None, scale: str = "pocket") -> str:
    """Return the part of one experiment.

    ``folder`` is the path from the page to its figures; None leaves them out. A page of its own,
    with the figures next to it, also has the claims.
    """
    parts = [f"## {outcome.title}"]
    if folder is not None:
        parts += [f"![{figure.caption}]({folder}{figure.name}.svg)" for figure in outcome.figures]
    parts += [table.to_markdown() for table in outcome.tables]
    if outcome.claims and folder == "":
        parts.append(claims_table({outcome.name: list(outcome.claims)}))
    parts += [_wrapped(note) for note in outcome.notes]
    parts.append(_provenance(outcome, scale))
    return "\n\n".join(parts) + "\n"


def _provenance(outcome: Outcome, scale: str) -> str:
    """Return the command, and number, time, machine and commits of its runs."""
    option = "" if scale == "pocket" else f" --scale {scale}"
    facts, command = outcome.provenance(), f"`python -m reproduce {outcome.name}{option}`"
    if not facts["processors"]:
        return f"{command}."
    runs = f"{facts['runs']} of {facts['asked']} runs, " if facts["asked"] else ""
    where = "; ".join(facts["processors"])
    commits = ", ".join(facts["commits"])
    text = (
        f"{command}: {runs}{facts['seconds'] / 60:.1f} minutes in total, on {where}, "
        f"torch {', '.join(facts['torch'])}, at {commits}."
    )
    return _wrapped(text)


def _wrapped(text: str, width: int = 100) -> str:
    text = " ".join(text.split())
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))
