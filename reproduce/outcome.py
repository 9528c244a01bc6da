"""The outcome of an experiment: tables, figures, claims, and the runs that they come from.

Everything is computed from records, so that the same records give the same page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from dpbam.app.report.figure import Figure
from dpbam.app.report.groups import Group, groups
from dpbam.app.report.records import Run
from dpbam.app.runs import RunRecord
from dpbam.estimates import LEVEL, Estimate, estimate, paired_difference
from reproduce.claims import Claim
from reproduce.recipes import Recipe


@dataclass(frozen=True)
class TextTable:
    """A table of formatted text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        """Format as GitHub and mkdocs read it.

        Example:
            >>> print(TextTable(("arm", "accuracy"), [("bam", "40.1")]).to_markdown())
            | arm | accuracy |
            |---|---|
            | bam | 40.1 |
        """
        rule = "|" + "---|" * len(self.header)
        header, *rows = (f"| {' | '.join(cells)} |" for cells in (self.header, *self.rows))
        return "\n".join([header, rule, *rows])


@dataclass(frozen=True)
class Study:
    """A recipe, the records of its finished runs, and how many runs it asks for."""

    recipe: Recipe
    records: Sequence[RunRecord]
    asked: int

    def arms(self, cell: Mapping[str, Any] | None = None) -> dict[str, dict[int, RunRecord]]:
        """Return arm -> seed -> record, in the recipe's order, of one place in the grid."""
        by_arm: dict[str, dict[int, RunRecord]] = {arm: {} for arm in self.recipe.arms}
        for record in self.records:
            if cell is None or record.cell == cell:
                by_arm[record.arm][record.seed] = record
        return {arm: by_seed for arm, by_seed in by_arm.items() if by_seed}


@dataclass(frozen=True)
class Outcome:
    """The outcome of an experiment; ``seconds`` and ``machine`` are of work without a study."""

    name: str
    title: str
    tables: Sequence[TextTable] = ()
    figures: Sequence[Figure] = ()
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()
    studies: Sequence[Study] = ()
    seconds: float = 0.0
    machine: Mapping[str, Any] = field(default_factory=dict)

    def provenance(self) -> dict[str, Any]:
        """Return the number of runs, their time, machines and commits."""
        records = [record for study in self.studies for record in study.records]
        machines = [self.machine] if self.machine else []
        machines += [record.machine for record in records]
        return {
            "runs": len(records),
            "asked": sum(study.asked for study in self.studies),
            "seconds": self.seconds + sum(record.seconds for record in records),
            "processors": _distinct(f"{m['processor']}, {m['cores']} cores" for m in machines),
            "torch": _distinct(m["torch"] for m in machines),
            "commits": _distinct(m["commit"] for m in machines),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "claims": [claim.to_dict() for claim in self.claims],
            "tables": [{"header": list(t.header), "rows": list(t.rows)} for t in self.tables],
            "notes": list(self.notes),
            "provenance": self.provenance(),
        }


Reading = Callable[[RunRecord], float]
Arms = Mapping[str, Mapping[int, RunRecord]]
LAST, AVERAGED = "last weights", "averaged weights"


def accuracy(record: RunRecord) -> float:
    return record.accuracy


def last_accuracy(record: RunRecord) -> float:
    assert record.last_accuracy is not None  # asked of runs with an average only
    return record.last_accuracy


#: The two readings of a run that averages its weights: as in the paper, and of the average.
READINGS: dict[str, Reading] = {LAST: last_accuracy, AVERAGED: accuracy}


def readings(study: Study) -> dict[str, Reading]:
    """Return both readings of a study whose runs average their weights, else the accuracy."""
    if study.records and all(record.last_accuracy is not None for record in study.records):
        return READINGS
    return {"": accuracy}


def shared_seeds(cells: Sequence[Arms], *names: str) -> list[int]:
    """Return the seeds that all of these arms have in all cells."""
    return sorted(set.intersection(*(set(arms.get(a, {})) for arms in cells for a in names)))


def over_cells(cells: Sequence[Arms], one: str, other: str, reading: Reading) -> Estimate:
    """Average each seed's difference over the cells, then estimate the mean over the seeds."""
    return estimate([
        fmean(reading(arms[one][seed]) - reading(arms[other][seed]) for arms in cells)
        for seed in shared_seeds(cells, one, other)
    ])  # fmt: skip


def mean_of(by_seed: Mapping[int, RunRecord], reading: Reading = accuracy) -> Estimate:
    return estimate([reading(record) for record in by_seed.values()])


def difference_of(
    one: Mapping[int, RunRecord],
    other: Mapping[int, RunRecord],
    reading: Reading = accuracy,
    level: float = LEVEL,
) -> Estimate:
    mine, its = ({s: reading(r) for s, r in by_seed.items()} for by_seed in (one, other))
    return paired_difference(mine, its, level)


def bias_share(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the share of clipping in what turns the private gradient away, squared.

    The private gradient is a g + c, c orthogonal to g: |c|^2 without noise over |c|^2 with it.
    ``rows`` are measurements of the bias lens; the result is their mean.
    """
    each = [row["non_private_against_plain"] for row in rows]
    return fmean((row["c_norm"] / row["private_c_norm"]) ** 2 for row in each)


def as_groups(records: Iterable[RunRecord]) -> tuple[Group, ...]:
    """Convert records to what the report's figures are drawn from."""
    return groups([
        Run(
            name=f"seed {record.seed}",
            config={**record.config},
            sampling_rate=record.plan["batch_size"] / record.plan["n"],
            bias=tuple(dict(row) for row in record.non_private_bias),
        )
        for record in records
    ])  # fmt: skip


def points(share: Estimate, *, signed: bool = False, digits: int = 1) -> str:
    """Format a share in percent with its interval.

    Example:
        >>> points(estimate([0.40, 0.42]))
        '41.0 [28.3, 53.7]'
    """
    sign = "+" if signed else ""
    mean, low, high = (f"{100 * x:{sign}.{digits}f}" for x in (share.mean, share.low, share.high))
    return mean if share.count < 2 else f"{mean} [{low}, {high}]"


def _distinct(values: Iterable[Any]) -> list[str]:
    return sorted({str(value) for value in values if value})
