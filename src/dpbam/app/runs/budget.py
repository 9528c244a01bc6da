"""A data set's own budget over all its runs: a JSON file that refuses what would exceed it.

::

    {"epsilon": 8.0, "delta": 1e-05}

is a budget file, written by hand or by :meth:`Budget.create`. Runs add entries to it. An entry
holds what its run reserved before it began, or in its place what the run spent once it is finished,
and what its ledger is known to have held, which no change lowers: a run folder restored from an
old copy is refused. All entries together are composed by the accountant, at the budget's delta. A
run that died keeps its reservation, an upper bound, until it is resumed or settled by its ledger
(:mod:`dpbam.app.runs.spending`).

However it is reached, a budget is one file: symbolic links are followed before the file is locked,
read or replaced, and a file with several hard links is refused, since replacing it under one name
would leave the others behind.

The file does not ask whether the runs saw the same records: taking it for another data set only
counts too much. All its runs must have one unit of privacy, since epsilons of records and of
patients do not add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, PlainValidator, model_validator

from dpbam.app.runs.documents import Document, Part
from dpbam.app.runs.files import locked
from dpbam.app.runs.run import RunError
from dpbam.app.runs.settings import Positive, Probability
from dpbam.errors import ArgumentError
from dpbam.privacy.accounting import Charge, checked, total_epsilon
from dpbam.privacy.rounding import up


def _read_charge(row: Sequence[float]) -> Charge:
    """Return a charge of the file, every number checked: a count is whole, at least 0."""
    try:
        return checked(Charge(*row))  # type: ignore[arg-type]  # checked: a whole number
    except (TypeError, OverflowError) as error:
        raise ArgumentError(str(error)) from None


Charges = tuple[Annotated[Charge, PlainValidator(_read_charge)], ...]


class Entry(Part):
    """What one run took.

    Attributes:
        run: its identifier.
        label: for people, such as its folder.
        settled: False while it is a reservation.
        charges: the steps that count: those reserved, or those spent.
        spent: what its ledger is known to have held; never lowered.
    """

    run: str
    label: str
    settled: bool
    charges: Charges = Field(strict=False)
    spent: Charges = Field(default=(), strict=False)

    @model_validator(mode="before")
    @classmethod
    def _with_spent(cls, values: dict[str, object]) -> dict[str, object]:
        # of a settled entry without a record of its ledger all charges count as spent
        settled = isinstance(values, dict) and values.get("settled") is True
        return {"spent": values.get("charges"), **values} if settled else values


class BudgetFile(Document):
    """What the file holds; people write the first two fields."""

    numbered = False
    optional = ("unit",)

    epsilon: Positive
    delta: Probability
    accountant: Literal["pld", "rdp"] = "pld"
    unit: str | None = None
    entries: list[Entry] = Field(default_factory=list)

    @model_validator(mode="after")
    def _can_be_composed(self) -> BudgetFile:
        self.charges()
        return self

    def charges(self, *, without: str | None = None) -> tuple[Charge, ...]:
        """Return the steps of all runs but one, equal ones together: one composition."""
        counts = by_kind(c for e in self.entries if e.run != without for c in e.charges)
        return tuple(map(checked, _charges(counts)))

    def total_epsilon(self, charges: Sequence[Charge]) -> float:
        return total_epsilon(charges, self.delta, accountant=self.accountant)

    def entry(self, run: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.run == run), None)

    def with_entry(self, entry: Entry) -> BudgetFile:
        """Return the budget with an entry in place of the one of the same run, or added."""
        runs = [each.run for each in self.entries]
        at = runs.index(entry.run) if entry.run in runs else len(runs)
        entries = [*self.entries[:at], entry, *self.entries[at + 1 :]]
        return self.model_copy(update={"entries": entries})


class Budget:
    """The budget file at ``path``.

    Every change is made under its lock, from the file's present content, so that any number of
    runs may share it.

    Guarantee: all entries composed stay within (epsilon, delta), whatever the order in which runs
    begin, die and resume.

    Assumptions: every run on the data names this file, and it is not edited, replaced or deleted.

    Proof: a run reserves its whole cost under the file's lock before its first step; entries are
    never lowered; composition is ``accounting.total_epsilon``.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> budget = Budget.create(f"{folder.name}/digits.json", epsilon=3, delta=1e-4,
        ...                        accountant="rdp")
        >>> budget.reserve("first", [Charge(4.0, 0.1, 100)], unit="record", label="runs/first")
        >>> round(budget.epsilon(), 2)
        0.92
        >>> budget.reserve("second", [Charge(1.0, 0.1, 100)], unit="record")
        Traceback (most recent call last):
        dpbam.app.runs.run.RunError: this run would exceed epsilon 3 ... both together 6.919
        >>> folder.cleanup()
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()
        self._read()

    @classmethod
    def create(
        cls, path: str | Path, *, epsilon: float, delta: float, accountant: str = "pld"
    ) -> Budget:
        """Make a new budget file; an existing one is not replaced."""
        path = Path(path).resolve()
        values: dict[str, JsonValue] = {
            "epsilon": epsilon,
            "delta": delta,
            "accountant": accountant,
        }
        stored = BudgetFile.parse(values, path)
        with locked(_lock(path)):
            if path.exists():
                raise RunError(f"there is a budget file {path} already: it is not replaced")
            stored.write(path)
        return cls(path)

    @property
    def total(self) -> tuple[float, float]:
        """The (epsilon, delta) of the whole budget."""
        stored = self._read()
        return stored.epsilon, stored.delta

    def entries(self) -> list[Entry]:
        """Return what runs have reserved and spent, in order."""
        return self._read().entries

    def epsilon(self) -> float:
        """Return the epsilon of everything reserved and spent, at the budget's delta."""
        stored = self._read()
        return stored.total_epsilon(stored.charges())

    def reserve(
        self,
        run: str,
        charges: Sequence[Charge],
        *,
        unit: str,
        label: str = "",
        spent: Sequence[Charge] = (),
    ) -> None:
        """Reserve all steps that ``run`` may take; an entry that it has is raised, never lowered.

        Refused, with nothing changed, if all runs together would exceed the budget, or the ledger,
        which holds ``spent``, held more before.
        """
        request = _reservation(run, charges, spent, label)
        self._change(lambda stored: self._admit(stored, request, unit))

    def epsilon_with(self, run: str, charges: Sequence[Charge], *, unit: str) -> float:
        """Return the budget's epsilon if ``run`` reserved ``charges``; refuse as ``reserve`` does.

        Nothing is written.
        """
        stored = self._read()
        before = stored.entry(run) or _reservation(run)
        after = self._admit(stored, _reservation(run, charges, before.spent), unit)
        return after.total_epsilon(after.charges())

    def _admit(self, stored: BudgetFile, request: Entry, unit: str) -> BudgetFile:
        """Return the budget with the entry that a run asks for, unless that exceeds it."""
        if stored.unit not in (None, unit):
            raise RunError(
                f"the budget {self.path} counts by {stored.unit}, this run by {unit}: their "
                "epsilons do not add up; give it a budget file of its own"
            )
        before = stored.entry(request.run) or _reservation(request.run, label=request.label)
        known = self._known(before, request.spent)
        most = _most(before.charges, request.charges, known)
        entry = request.model_copy(update={"charges": most, "spent": known})
        after = stored.with_entry(entry).model_copy(update={"unit": unit})
        together = after.total_epsilon(after.charges())
        if together > stored.epsilon:
            others = stored.total_epsilon(stored.charges(without=request.run))
            raise RunError(
                f"this run would exceed epsilon {up(stored.epsilon)} of the budget {self.path}: "
                f"{up(others)} is taken, the run alone needs {up(stored.total_epsilon(most))}, and "
                f"both together {up(together)}"
            )
        return after

    def note(self, run: str, spent: Sequence[Charge]) -> None:
        """Record what the ledger of ``run`` holds: from now on it may not hold less."""

        def noted(stored: BudgetFile) -> BudgetFile:
            entry = self._entry(stored, run)
            known = self._known(entry, spent)
            charges = _most(entry.charges, known)
            return stored.with_entry(entry.model_copy(update={"charges": charges, "spent": known}))

        self._change(noted)

    def settle(self, run: str, spent: Sequence[Charge]) -> None:
        """Replace what ``run`` reserved by what its ledger holds; a settled entry is never lowered.

        Refused, with nothing changed, if the ledger held more before, or holds other steps than
        those reserved.
        """

        def settled(stored: BudgetFile) -> BudgetFile:
            entry = self._entry(stored, run)
            known = self._known(entry, spent)
            if strangers := set(by_kind(spent)) - set(by_kind(entry.charges)):
                sigma, q = min(strangers)
                raise RunError(
                    f"the ledger of {entry.label or run} holds steps at sigma {sigma:g} and "
                    f"sampling rate {q:g}, which the budget {self.path} has not reserved: it is "
                    "not that run's ledger; restore it from a backup"
                )
            charges = _most(entry.charges, known) if entry.settled else known
            update = {"settled": True, "charges": charges, "spent": known}
            return stored.with_entry(entry.model_copy(update=update))

        self._change(settled)

    def _entry(self, stored: BudgetFile, run: str) -> Entry:
        entry = stored.entry(run)
        if entry is None:
            raise RunError(f"the budget {self.path} knows no run {run}")
        return entry

    def _known(self, entry: Entry, spent: Sequence[Charge]) -> tuple[Charge, ...]:
        """Return what a ledger holds, checked against what it is known to have held."""
        before, now = by_kind(entry.spent), by_kind(checked(c) for c in spent)
        if any(now[kind] < count for kind, count in before.items()):
            raise RunError(
                f"the ledger of {entry.label or entry.run} holds {now.total()} steps, but the "
                f"budget {self.path} knows of {before.total()}: it was lost, or its folder "
                "restored from an old copy; restore the latest one, or start a new run"
            )
        return _charges(now)

    def _change(self, change: Callable[[BudgetFile], BudgetFile]) -> None:
        """Change the present content under the file's lock; write nothing if an error is raised."""
        with locked(_lock(self.path)):
            change(self._read()).write(self.path)

    def _read(self) -> BudgetFile:
        if not self.path.exists():
            raise RunError(
                f"there is no budget file {self.path}: make one that holds, for example, "
                '{"epsilon": 8.0, "delta": 1e-5}'
            )
        if not self.path.is_file():
            raise RunError(f"the budget {self.path} is no plain file: give a file")
        if (links := self.path.stat().st_nlink) > 1:
            raise RunError(
                f"the budget {self.path} has {links} hard links, which would become different "
                "files when it is written: keep one of them, and make the others symbolic links"
            )
        return BudgetFile.read(self.path)


def _reservation(
    run: str, charges: Sequence[Charge] = (), spent: Sequence[Charge] = (), label: str = ""
) -> Entry:
    return Entry(run=run, label=label, settled=False, charges=tuple(charges), spent=tuple(spent))


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")  # a second file: the first is replaced


def by_kind(charges: Iterable[Charge]) -> Counter[tuple[float, float]]:
    """Return the steps by kind (sigma, q), equal ones together.

    Guarantee: the composition of the result costs what that of the charges does.

    Assumptions: the charges are of Poisson-sampled Gaussian steps.

    Proof: the cost of such a step depends only on sigma and q; the order does not matter.
    """
    steps: Counter[tuple[float, float]] = Counter()
    for sigma, q, count in charges:
        steps[sigma, q] += count
    return steps


def _charges(counts: Counter[tuple[float, float]]) -> tuple[Charge, ...]:
    return tuple(Charge(sigma, q, count) for (sigma, q), count in sorted(counts.items()))


def _most(*sequences: Sequence[Charge]) -> tuple[Charge, ...]:
    """Return the larger count of each kind of steps."""
    most: Counter[tuple[float, float]] = Counter()
    for charges in sequences:
        most |= by_kind(checked(c) for c in charges)
    return _charges(most)
