"""A data set's own budget over all its runs: a JSON file that refuses what would exceed it.

::

    {"epsilon": 8.0, "delta": 1e-05}

is a budget file, written by hand or by :meth:`Budget.create`. Runs add entries to it: what they
reserved before they began, and in its place what they really spent once they are through. All
entries together are composed by the accountant, at the budget's delta. A run that died keeps its
reservation, an upper bound, until it is resumed or settled by what its ledger says.

The file does not ask whether the runs saw the same records: taking it for another data set only
counts too much. All its runs must have one unit of privacy, since epsilons of records and of
patients do not add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpbam import _validate
from dpbam.accounting import Charge, total_epsilon
from dpbam.runs.files import locked, read_json, write_json
from dpbam.runs.result import RunError


@dataclass(frozen=True)
class Entry:
    """What one run took.

    Attributes:
        run: its identifier.
        label: for people, such as its folder.
        settled: False while it is a reservation.
        charges: the steps.
    """

    run: str
    label: str
    settled: bool
    charges: tuple[Charge, ...]


class Budget:
    """The budget file at ``path``.

    Every change is made under its lock, from the file's present content, so that any number of
    runs may share it.

    Raises:
        RunError: if the file is not there or not a budget.

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
        dpbam.runs.result.RunError: this run would exceed epsilon 3 ... both together 6.919
        >>> folder.cleanup()
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._read()

    @classmethod
    def create(
        cls, path: str | Path, *, epsilon: float, delta: float, accountant: str = "pld"
    ) -> Budget:
        """A new budget file; an existing one is refused."""
        path = Path(path)
        values = {"epsilon": epsilon, "delta": delta, "accountant": accountant, "entries": []}
        _check(path, values)
        with locked(_lock(path)):
            if path.exists():
                raise RunError(f"there is a budget file {path} already: it is not replaced")
            write_json(path, values)
        return cls(path)

    @property
    def total(self) -> tuple[float, float]:
        """(epsilon, delta) of the whole budget."""
        values = self._read()
        return float(values["epsilon"]), float(values["delta"])

    def entries(self) -> list[Entry]:
        """What runs have reserved and spent, in the order they came."""
        return [_entry(e) for e in self._read()["entries"]]

    def epsilon(self) -> float:
        """Epsilon of everything reserved and spent, at the budget's delta."""
        return _epsilon(self._read())

    def reserve(self, run: str, charges: Sequence[Charge], *, unit: str, label: str = "") -> None:
        """Reserve ``charges`` for ``run``, in place of what it had.

        Raises:
            RunError: if all together would exceed the budget, with what is left; then nothing has
                changed.
        """
        with self._changing() as values:
            if values.setdefault("unit", unit) != unit:
                raise RunError(
                    f"the budget {self.path} counts by {values['unit']}, this run by {unit}: their "
                    "epsilons do not add up; give it a budget file of its own"
                )
            others = _epsilon(values, without=run)
            _put(values, Entry(run, label, False, tuple(charges)))
            together, limit = _epsilon(values), float(values["epsilon"])
            if together > limit:
                alone = total_epsilon(charges, values["delta"], accountant=values["accountant"])
                raise RunError(
                    f"this run would exceed epsilon {limit:g} of the budget {self.path}: "
                    f"{others:.4g} is taken, the run alone needs {alone:.4g}, and both together "
                    f"{together:.4g}"
                )

    def settle(self, run: str, charges: Sequence[Charge]) -> None:
        """Replace what ``run`` reserved by what it really spent.

        Raises:
            RunError: if the run has no reservation.
        """
        with self._changing() as values:
            mine = next((e for e in values["entries"] if e["run"] == run), None)
            if mine is None:
                raise RunError(f"the budget {self.path} knows no run {run}")
            _put(values, Entry(run, mine["label"], True, tuple(charges)))

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """The present values, to change; written back unless an error is raised."""
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
        values = read_json(self.path)
        values.setdefault("accountant", "pld")
        values.setdefault("entries", [])
        _check(self.path, values)
        return values


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")  # beside it: the file itself is replaced


def _check(path: Path, values: dict[str, Any]) -> None:
    try:
        _validate.positive("epsilon", values.get("epsilon"))
        _validate.probability("delta", values.get("delta"))
        _validate.one_of("accountant", values["accountant"], ("pld", "rdp"))
        for entry in values["entries"]:
            _entry(entry)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise RunError(f"{path} is not a budget file: {error}") from None


def _entry(raw: dict[str, Any]) -> Entry:
    charges = tuple(Charge(float(s), float(q), int(k)) for s, q, k in raw["charges"])
    return Entry(str(raw["run"]), str(raw["label"]), bool(raw["settled"]), charges)


def _put(values: dict[str, Any], entry: Entry) -> None:
    """Replace the entry of the same run, or add it."""
    raw = {
        "run": entry.run,
        "label": entry.label,
        "settled": entry.settled,
        "charges": [list(c) for c in entry.charges],
    }
    there = [k for k, e in enumerate(values["entries"]) if e["run"] == entry.run]
    if there:
        values["entries"][there[0]] = raw
    else:
        values["entries"].append(raw)


def _epsilon(values: dict[str, Any], without: str | None = None) -> float:
    steps: Counter[tuple[float, float]] = Counter()
    for entry in values["entries"]:
        if entry["run"] != without:
            for sigma, q, count in _entry(entry).charges:
                steps[sigma, q] += count  # equal steps together: one composition
    charges = [Charge(sigma, q, count) for (sigma, q), count in sorted(steps.items())]
    return total_epsilon(charges, values["delta"], accountant=values["accountant"])
