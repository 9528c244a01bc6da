"""Writes outcomes down: a JSON, Markdown and figures each, and one page for the documentation.

Nothing is edited by hand: the page is a function of the committed records, and a test makes it anew
and compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dpbam.experiments.paper.claims import Claim, count_verdicts
from dpbam.experiments.paper.outcome import Outcome, TextTable
from dpbam.runs.files import write_atomic, write_json

FORMATS = (".svg", ".png")

INTRODUCTION = """\
# The paper's claims, measured

This page is written by `dpbam reproduce all --docs docs` from the records under `results/`, one
small file a finished run; nothing on it is edited by hand, and a test makes it anew and compares.
Everything is at pocket scale, on two cores: small images, a narrow network, few steps. It says
whether a claim shows at that size, not what the paper's own training would give; the recipes for
that are in `recipes/full`, and `dpbam reproduce table1 --scale full --dry-run` says what it costs.

Runs of one seed share training data, initial weights and batches, which is checked, and not their
noise. A verdict is read from the 95% t interval of the paired difference over the seeds:

| claim | reproduced | not reproduced | inconclusive |
|---|---|---|---|
| one is above (below) the other | it is above (below) 0 | it is on the other side | it holds 0 |
| two are the same | it lies within the margin | it lies outside | neither |
| two are different | it excludes 0 | | it holds 0 |

`visible from` is the smallest true difference that so many seeds would have shown in 80% of
repetitions; `d_z` is the mean over the standard deviation of the paired differences. Each claim is
judged by itself: of twenty at 95%, one may fall by chance.
"""


def write_outcome(found: Outcome, folder: Path) -> list[Path]:
    """``NAME.json``, ``NAME.md`` and the figures as SVG and PNG; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / f"{found.name}.json", folder / f"{found.name}.md"
    write_json(data, found.to_dict())
    figures = write_figures(found, folder)
    write_atomic(text, section(found, ""))
    return [data, text, *figures]


def write_page(outcomes: Sequence[Outcome], docs: Path) -> Path:
    """``DOCS/results.md`` and its figures in ``DOCS/results/``."""
    for found in outcomes:
        write_figures(found, docs / "results", formats=(".svg",))
    path = docs / "results.md"
    write_atomic(path, page(outcomes))
    return path


def write_figures(found: Outcome, folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Every figure in every format."""
    if not found.figures:
        return []
    from dpbam.report import plots

    return [plots.save(f, folder / f"{f.name}{end}") for f in found.figures for end in formats]


def page(outcomes: Sequence[Outcome]) -> str:
    """The whole page."""
    parts = [INTRODUCTION, _verdicts({o.name: list(o.claims) for o in outcomes})]
    return "\n".join([*parts, *(section(found, "results/") for found in outcomes)])


def _verdicts(claims: Mapping[str, list[Claim]]) -> str:
    count = count_verdicts(claims)
    total = ", ".join(f"{number} {verdict}" for verdict, number in count.items())
    return f"## Verdicts\nOf {sum(count.values())} claims: {total}.\n\n{_claims(claims)}\n"


def _claims(claims: Mapping[str, list[Claim]]) -> str:
    rows = [
        (name, claim.text, f"**{claim.verdict}**", claim.sentence())
        for name, several in claims.items()
        for claim in several
    ]
    return TextTable(("", "claim", "verdict", "difference"), rows).to_markdown()


def section(found: Outcome, figures: str) -> str:
    """One experiment; ``figures`` is the way from the page to them."""
    parts = [f"## {found.title}"]
    parts += [f"![{figure.caption}]({figures}{figure.name}.svg)" for figure in found.figures]
    parts += [table.to_markdown() for table in found.tables]
    if found.claims and not figures:
        parts.append(_claims({found.name: list(found.claims)}))
    parts += [_wrapped(note) for note in found.notes]
    parts.append(_provenance(found))
    return "\n\n".join(parts) + "\n"


def _provenance(found: Outcome) -> str:
    """The command, and what there is to know about how it was done."""
    facts, command = found.provenance(), f"`dpbam reproduce {found.name}`"
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
    """Lines of a readable length."""
    import textwrap

    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))
