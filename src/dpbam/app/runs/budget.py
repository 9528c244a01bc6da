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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dpbam import _validate
from dpbam.app.runs.files import locked, read_json, write_json
from dpbam.app.runs.run import RunError
from dpbam.errors import ArgumentTypeError
from dpbam.privacy.accounting import Charge, checked, total_epsilon
from dpbam.privacy.rounding import up


@dataclass(frozen=True)
class Entry:
    """What one run took."""

    run: str  # its identifier
    label: str  # for people, such as its folder
    settled: bool  # False while it is a reservation
    charges: tuple[Charge, ...]  # the steps that count: those reserved, or those spent
    spent: tuple[Charge, ...] = ()  # what its ledger is known to have held; never lowered


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
        values = {"epsilon": epsilon, "delta": delta, "accountant": accountant, "entries": []}
        _check(path, values)
        with locked(_lock(path)):
            if path.exists():
                raise RunError(f"there is a budget file {path} already: it is not replaced")
            write_json(path, values)
        return cls(path)

    @property
    def total(self) -> tuple[float, float]:
        """The (epsilon, delta) of the whole budget."""
        values = self._read()
        return float(values["epsilon"]), float(values["delta"])

    def entries(self) -> list[Entry]:
        """Return what runs have reserved and spent, in order."""
        return [_entry(e) for e in self._read()["entries"]]

    def epsilon(self) -> float:
        """Return the epsilon of everything reserved and spent, at the budget's delta."""
        return _epsilon(self._read())

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
        with self._changing() as values:
            self._admit(values, Entry(run, label, False, tuple(charges), tuple(spent)), unit)

    def epsilon_with(self, run: str, charges: Sequence[Charge], *, unit: str) -> float:
        """Return the budget's epsilon if ``run`` reserved ``charges``; refuse as ``reserve`` does.

        Nothing is written.
        """
        values = self._read()
        mine = self._find(values, run) or Entry(run, "", False, ())
        self._admit(values, replace(mine, charges=tuple(charges)), unit)
        return _epsilon(values)

    def _admit(self, values: dict[str, Any], asked: Entry, unit: str) -> None:
        """Put the entry that a run asks for into ``values``, unless that exceeds the budget."""
        if values.setdefault("unit", unit) != unit:
            raise RunError(
                f"the budget {self.path} counts by {values['unit']}, this run by {unit}: their "
                "epsilons do not add up; give it a budget file of its own"
            )
        mine = self._find(values, asked.run) or Entry(asked.run, asked.label, False, ())
        known = self._known(mine, asked.spent)
        most = _most(mine.charges, asked.charges, known)
        others = _epsilon(values, without=asked.run)
        _put(values, Entry(asked.run, asked.label, False, most, known))
        together, limit = _epsilon(values), float(values["epsilon"])
        if together > limit:
            alone = total_epsilon(most, values["delta"], accountant=values["accountant"])
            raise RunError(
                f"this run would exceed epsilon {up(limit)} of the budget {self.path}: "
                f"{up(others)} is taken, the run alone needs {up(alone)}, and both together "
                f"{up(together)}"
            )

    def note(self, run: str, spent: Sequence[Charge]) -> None:
        """Record what the ledger of ``run`` holds: from now on it may not hold less."""
        with self._changing() as values:
            mine = self._entry(values, run)
            known = self._known(mine, spent)
            _put(values, replace(mine, charges=_most(mine.charges, known), spent=known))

    def settle(self, run: str, spent: Sequence[Charge]) -> None:
        """Replace what ``run`` reserved by what its ledger holds; a settled entry is never lowered.

        Refused, with nothing changed, if the ledger held more before, or holds other steps than
        those reserved.
        """
        with self._changing() as values:
            mine = self._entry(values, run)
            known = self._known(mine, spent)
            if strangers := set(by_kind(spent)) - set(by_kind(mine.charges)):
                sigma, q = min(strangers)
                raise RunError(
                    f"the ledger of {mine.label or run} holds steps at sigma {sigma:g} and "
                    f"sampling rate {q:g}, which the budget {self.path} has not reserved: it is "
                    "not that run's ledger; restore it from a backup"
                )
            charges = _most(mine.charges, known) if mine.settled else known
            _put(values, replace(mine, settled=True, charges=charges, spent=known))

    def _entry(self, values: dict[str, Any], run: str) -> Entry:
        mine = self._find(values, run)
        if mine is None:
            raise RunError(f"the budget {self.path} knows no run {run}")
        return mine

    def _find(self, values: dict[str, Any], run: str) -> Entry | None:
        return next((_entry(e) for e in values["entries"] if e["run"] == run), None)

    def _known(self, mine: Entry, spent: Sequence[Charge]) -> tuple[Charge, ...]:
        """Return what a ledger holds, checked against what it is known to have held."""
        before, now = by_kind(mine.spent), by_kind(checked(c) for c in spent)
        if any(now[kind] < count for kind, count in before.items()):
            raise RunError(
                f"the ledger of {mine.label or mine.run} holds {now.total()} steps, but the budget "
                f"{self.path} knows of {before.total()}: it was lost, or its folder restored from "
                "an old copy; restore the latest one, or start a new run"
            )
        return _charges(now)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """Yield the present values, to change; write them back unless an error is raised."""
        with locked(_lock(self.path)):
            values = self._read()
            yield values
            write_json(self.path, values)

    def _read(self) -> dict[str, Any]:
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
        values = read_json(self.path)
        values.setdefault("accountant", "pld")
        values.setdefault("entries", [])
        _check(self.path, values)
        return values


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")  # a second file: the first is replaced


def _check(path: Path, values: dict[str, Any]) -> None:
    try:
        _validate.positive("epsilon", values.get("epsilon"))
        _validate.probability("delta", values.get("delta"))
        _validate.one_of("accountant", values["accountant"], ("pld", "rdp"))
        if not isinstance(values["entries"], list):
            raise ArgumentTypeError("entries must be a list")
        for entry in values["entries"]:
            _entry(entry)
        _epsilon_charges(values, None)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise RunError(f"{path} is not a budget file: {error}; restore it from a backup") from None


def _entry(raw: dict[str, Any]) -> Entry:
    """Return an entry of the file, every number checked: a count is whole, at least 0."""
    if not isinstance(raw, dict) or not isinstance(raw["settled"], bool):
        raise ArgumentTypeError(
            "an entry must have run, label, settled (true or false) and charges"
        )
    charges = _read_charges(raw["charges"])
    spent = _read_charges(raw["spent"]) if "spent" in raw else charges if raw["settled"] else ()
    return Entry(str(raw["run"]), str(raw["label"]), raw["settled"], charges, spent)


def _read_charges(rows: Any) -> tuple[Charge, ...]:
    return tuple(checked(Charge(sigma, q, steps)) for sigma, q, steps in rows)


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


def _most(*parts: Sequence[Charge]) -> tuple[Charge, ...]:
    """Return the larger count of each kind of steps."""
    most: Counter[tuple[float, float]] = Counter()
    for part in parts:
        most |= by_kind(checked(c) for c in part)
    return _charges(most)


def _put(values: dict[str, Any], entry: Entry) -> None:
    """Replace the entry of the same run, or add it."""
    rows = {name: [list(c) for c in getattr(entry, name)] for name in ("charges", "spent")}
    raw = asdict(entry) | rows
    there = [k for k, e in enumerate(values["entries"]) if e["run"] == entry.run]
    if there:
        values["entries"][there[0]] = raw
    else:
        values["entries"].append(raw)


def _epsilon(values: dict[str, Any], without: str | None = None) -> float:
    charges = _epsilon_charges(values, without)
    return total_epsilon(charges, values["delta"], accountant=values["accountant"])


def _epsilon_charges(values: dict[str, Any], without: str | None) -> tuple[Charge, ...]:
    """Return all entries' steps, equal ones together: one composition."""
    entries = [_entry(e) for e in values["entries"] if e["run"] != without]
    counts = by_kind(charge for entry in entries for charge in entry.charges)
    return tuple(checked(c) for c in _charges(counts))
