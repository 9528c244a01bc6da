"""Writes outcomes as JSON, Markdown and figures, and one page of the documentation.

Nothing is edited by hand: the page is a function of the committed records, and a test generates it
again and compares.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from dpbam.app.runs.files import write_atomic, write_json
from reproduce.claims import Claim, count_verdicts
from reproduce.outcome import Outcome, TextTable

FORMATS = (".svg", ".png")

INTRODUCTION = """\
# The paper's claims, measured

This page is written by `python -m reproduce all --docs docs` from the records under `results/`, one
small file a finished run; nothing on it is edited by hand, and a test makes it anew and compares.
Two scales are trained on two cores. The desk scale comes first: it is the study. The pocket scale
is a test of the machinery, from recipe to verdict, and too small to judge the methods. Neither says
what the paper's own training would give; the recipes for that are in `recipes/full`, and
`python -m reproduce table1 --scale full --dry-run` reports what it costs.

Runs of one seed share training data, initial weights and batches, which is checked, and not their
noise. A verdict is read from the 95% t interval of the paired difference over the seeds:

| claim | reproduced | not reproduced | inconclusive |
|---|---|---|---|
| one is above (below) the other | it is above (below) 0 | it is on the other side | it holds 0 |
| two are the same | it lies within the margin | it lies outside | neither |
| two are different | it excludes 0 | | it holds 0 |

`visible from` is the smallest true difference that so many seeds would have shown in 80% of
repetitions; `d_z` is the mean over the standard deviation of the paired differences. Each claim is
judged by itself: of twenty at 95%, one may fall by chance. At desk scale a verdict needs power:
an interval that extends further than half a point to either side of its mean is inconclusive.
"""

_SCALES = {
    "desk": """\
## Desk scale
CIFAR-10 halved to 16x16, all 50,000 images, ResNet-9 at a quarter of its width, 250 steps of 2,000
images with NAdam, delta 1e-5, no augmented views, no averaging of weights; eight paired seeds.
""",
    "pocket": """\
## Pocket scale: a test of the machinery
Small images, a narrow network, few steps and five seeds: enough to test the way from recipe to
verdict. `visible from` shows how large a difference would have to be.
""",
}
PAGE_SCALES = tuple(_SCALES)
Outcomes = Mapping[str, Outcome | None]


def write_outcome(found: Outcome, folder: Path, scale: str = "pocket") -> list[Path]:
    """Write ``NAME.json``, ``NAME.md`` and the figures as SVG and PNG; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / f"{found.name}.json", folder / f"{found.name}.md"
    write_json(data, found.to_dict())
    figures = write_figures(found, folder)
    write_atomic(text, section(found, "", scale))
    return [data, text, *figures]


def write_page(by_scale: Mapping[str, Outcomes], docs: Path) -> Path:
    """Write ``DOCS/results.md`` and its figures into ``DOCS/results/SCALE/``; return its path."""
    for scale, outcomes in by_scale.items():
        for found in outcomes.values():
            if found is not None:
                write_figures(found, docs / "results" / scale, formats=(".svg",))
    path = docs / "results.md"
    write_atomic(path, page(by_scale))
    return path


def write_figures(found: Outcome, folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    return [f.save(folder / f"{f.name}{end}") for f in found.figures for end in formats]


def page(by_scale: Mapping[str, Outcomes]) -> str:
    """Return the page; experiments without a finished run (None) are listed."""
    parts = [_of_scale(scale, outcomes) for scale, outcomes in by_scale.items() if outcomes]
    return "\n".join([INTRODUCTION, *parts])


def _of_scale(scale: str, outcomes: Outcomes) -> str:
    found = [one for one in outcomes.values() if one is not None]
    empty = [f"`{name}`" for name, one in outcomes.items() if one is None]
    parts = [_SCALES[scale]]
    if empty:
        parts.append(f"No record yet: {', '.join(empty)}.\n")
    if any(one.claims for one in found):
        parts.append(_verdicts({one.name: list(one.claims) for one in found}))
    return "\n".join([*parts, *(section(one, f"results/{scale}/", scale) for one in found)])


def _verdicts(claims: Mapping[str, list[Claim]]) -> str:
    count = count_verdicts(claims)
    total = ", ".join(f"{number} {verdict}" for verdict, number in count.items())
    return f"### Verdicts\nOf {sum(count.values())} claims: {total}.\n\n{_claims(claims)}\n"


def _claims(claims: Mapping[str, list[Claim]]) -> str:
    rows = [
        (name, claim.text, f"**{claim.verdict}**", claim.sentence())
        for name, several in claims.items()
        for claim in several
    ]
    return TextTable(("", "claim", "verdict", "difference"), rows).to_markdown()


def section(found: Outcome, figures: str, scale: str = "pocket") -> str:
    """Return the part of one experiment; ``figures`` is the path from the page to its figures."""
    parts = [f"### {found.title}"]
    parts += [f"![{figure.caption}]({figures}{figure.name}.svg)" for figure in found.figures]
    parts += [table.to_markdown() for table in found.tables]
    if found.claims and not figures:
        parts.append(_claims({found.name: list(found.claims)}))
    parts += [_wrapped(note) for note in found.notes]
    parts.append(_provenance(found, scale))
    return "\n\n".join(parts) + "\n"


def _provenance(found: Outcome, scale: str) -> str:
    """Return the command, and number, time, machine and commits of its runs."""
    option = "" if scale == "pocket" else f" --scale {scale}"
    facts, command = found.provenance(), f"`python -m reproduce {found.name}{option}`"
    if not facts["processors"]:
        return f"{command}."
    runs = f"{facts['runs']} of {facts['asked']} runs, " if facts["asked"] else ""
    where = "; ".join(facts["processors"])
    commits = ", ".join(facts["commits"])
    text = (
        f"{command}: {runs}{facts['seconds'] / 60:.1f} minutes in all, on {where}, "
        f"torch {', '.join(facts['torch'])}, at {commits}."
    )
    return _wrapped(text)


def _wrapped(text: str, width: int = 100) -> str:
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))
