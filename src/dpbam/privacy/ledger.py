"""The ledger: what was spent, append-only, on disk before a result can reach the parameters.

An entry is one released step, keyed by (noise stream, step):

================================  =============================================================
the same key again                result
================================  =============================================================
the same release (seeded replay)  not charged: nothing new is released
another release (seeded)          refused: the same noise on two sums would cancel
unseeded                          cannot happen: each process has a stream of its own, so a
                                  replay after a crash is a new entry, and is charged again
================================  =============================================================

So after a crash the count may include steps since the last checkpoint twice; it is never too low.

A ledger's file has one writer at a time. From its first charge on a process holds a lock on it, and
another process is refused; objects and threads of one process share the file. Reading needs no
lock: whatever is asked of a ledger, it first reads what was added to its file. A file that no
longer begins with what was read from it or written to it, because it was deleted, cut or replaced,
is refused, and never continued.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from dpbam import _jsonl, _validate
from dpbam.errors import ArgumentError, ArgumentTypeError
from dpbam.privacy import writer_lock
from dpbam.privacy.accounting import ACCOUNTANTS, Charge, checked, total_epsilon

BEFORE = "/before"  # ends the stream of a release before the first step
_INVALID = (*_jsonl.INVALID, KeyError, TypeError, OverflowError)
_SEEN: dict[Path, list[Entry]] = {}  # what this process has read from or written to each file


class Entry(TypedDict):
    """One release, as a line of the file has it.

    Attributes:
        stream: the name of the noise.
        step: the step's number.
        noise_multiplier: sigma.
        sampling_rate: q.
        unit: the unit of privacy.
        release: a digest of what is released, of a seeded run.
    """

    stream: str
    step: int
    noise_multiplier: float
    sampling_rate: float
    unit: str
    release: str | None


class Ledger:
    """Records private releases, append-only, and computes their epsilon.

    Guarantee: with a file, a step is on disk before ``charge`` returns; its count is never too low,
    after any crash, and includes what other objects and processes wrote to the file; the same noise
    is never charged for two different releases; all entries protect the same unit of privacy.

    Assumptions: the disk keeps what was synchronised, the file system's locks work, and the file is
    not edited or deleted while no process has it open (``dpbam audit`` compares it with the
    checkpoint, the budget with both).

    Proof: append and fsync come before the entry counts; the table above; the file is locked before
    it is read for a charge, and read again whenever it has changed; crash tests in
    tests/end_to_end.

    Args:
        delta: the default of :meth:`epsilon`.
        accountant: ``"pld"`` or ``"rdp"``.
        path: a JSON-lines file to append to, created if missing; None keeps it in memory, where a
            process forked later must not charge it.

    A copy of a ledger (``copy.deepcopy``) is the ledger itself. A pickled one shares its file;
    without a file it can be read, and not charged.

    Example:
        >>> ledger = Ledger(delta=1e-5)
        >>> for step in range(1000):
        ...     ledger.charge("stream", step, noise_multiplier=1.731, sampling_rate=4096 / 50_000)
        >>> round(ledger.epsilon(), 2)
        8.0
    """

    def __init__(
        self, delta: float, accountant: str = "pld", path: Path | str | None = None
    ) -> None:
        self.delta = _validate.probability("delta", delta)
        self.accountant = _validate.one_of("accountant", accountant, ACCOUNTANTS)
        # absolute: after os.chdir a relative path would be another file
        self.path = None if path is None else Path(path).absolute()
        self._file = Path() if self.path is None else self.path.resolve()  # by whatever link
        # the entries, in the file's order. All else is computed from them: after an interrupt an
        # entry counts in full, or is not there
        self._releases: dict[tuple[str, int], Entry] = {}
        self._totals = _Totals()
        self._process: int | None = os.getpid()
        self._lock: writer_lock.WriterLock | None = None
        self._status: tuple[int, ...] | None = None  # of the file, when it was last read
        self._torn = False  # whether its last line had no line end then
        self._refresh()

    @property
    def unit(self) -> str | None:
        """The unit of privacy; None before the first entry."""
        self._refresh()
        return self._count().unit

    def charge(
        self,
        stream: str,
        step: int,
        *,
        noise_multiplier: float,
        sampling_rate: float,
        unit: str = "record",
        release: str | None = None,
    ) -> None:
        """Record one step. On return it is on disk, if the ledger has a file.

        Args:
            stream: the name of the noise; unique to a process unless seeded.
            step: the step's number.
            noise_multiplier: sigma; 0 makes epsilon infinite.
            sampling_rate: q.
            unit: what the step protects; the same for all entries.
            release: a digest of what is released, for seeded runs, to recognise a replay.
        """
        entry = _check_entry({
            "stream": stream,
            "step": step,
            "noise_multiplier": noise_multiplier,
            "sampling_rate": sampling_rate,
            "unit": unit,
            "release": release,
        })  # fmt: skip
        key = (stream, step)
        with self._writing():
            self._check_unit([entry])
            if key in self._releases:
                if release is not None and release == self._releases[key]["release"]:
                    return
                raise ArgumentError(
                    f"the noise of step {step} (stream {stream}) was already used for another "
                    "release: two sums with the same noise reveal their difference; use another "
                    "seed, or none"
                )
            self._append([entry])

    def close(self) -> None:
        """Let another process write to the file; a later charge takes the lock again.

        The end of the process does the same, and so does the end of all its objects on the file.

        Example:
            >>> import tempfile
            >>> folder = tempfile.TemporaryDirectory()
            >>> ledger = Ledger(delta=1e-5, path=Path(folder.name) / "ledger.jsonl")
            >>> ledger.charge("stream", 0, noise_multiplier=1.0, sampling_rate=0.1)
            >>> ledger.close()
            >>> folder.cleanup()
        """
        self._lock = None

    def entries(self) -> list[Entry]:
        """Return everything recorded, as plain values that a checkpoint can hold."""
        self._refresh()
        return [entry.copy() for entry in self._releases.values()]

    def merge(self, entries: Iterable[Entry]) -> None:
        """Record the entries of another ledger; those that are here already are not charged twice.

        On return they are on disk. So a run resumed from a checkpoint has the checkpoint's entries
        and those of its own file.

        Raises:
            ValueError: if an entry contradicts one that is here; then nothing has changed.
        """
        others = list(map(_check_entry, entries))
        new: dict[tuple[str, int], Entry] = {}
        with self._writing():
            self._check_unit(others)
            for entry in others:
                key = (entry["stream"], entry["step"])
                known = self._releases.get(key) or new.setdefault(key, entry)
                if known != entry:
                    raise ArgumentError(
                        f"step {key[1]} of {key[0]} is on the ledger with other values: these are "
                        "two runs, which need different names"
                    )
            self._append(list(new.values()))

    def charges(self) -> list[Charge]:
        """Return what was spent, equal steps counted together."""
        self._refresh()
        counts = self._count().charges
        return [Charge(sigma, q, count) for (sigma, q), count in sorted(counts.items())]

    def epsilon(self, delta: float | None = None) -> float:
        """Return epsilon of everything recorded; infinite if any step had no noise."""
        delta = self.delta if delta is None else delta
        return total_epsilon(self.charges(), delta, accountant=self.accountant)

    def released_before(self) -> list[str]:
        """Return the streams of releases before the first step: they end in ``/before``."""
        self._refresh()
        return [stream for stream, _ in self._releases if stream.endswith(BEFORE)]

    def entry(self, stream: str, step: int) -> Entry | None:
        """Return what was recorded of a step, or None."""
        self._refresh()
        recorded = self._releases.get((stream, step))
        return None if recorded is None else recorded.copy()

    def __len__(self) -> int:
        """Return the number of steps; releases before the first step are none."""
        self._refresh()
        return self._count().steps

    def __copy__(self) -> Ledger:
        return self  # two copies would each count a part of what was spent

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        return self

    def __getstate__(self) -> dict[str, object]:
        # the lock is this process's; a copy in memory, wherever it is read, belongs to no process:
        # it and the original would each count a part of what was spent
        return self.__dict__ | {"_lock": None, "_process": None}

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the file's lock, with everything read that is in it."""
        with writer_lock.turn:
            self._refresh()  # before the lock, which would create a file that was deleted
            if self.path is None:
                self._check_process()
            else:
                self._lock = writer_lock.hold(self.path, create=not self._releases)
                self._refresh()  # what was written before the lock was taken
                if self._torn:
                    _jsonl.repair(self.path, _is_entry)
            yield

    def _append(self, entries: list[Entry]) -> None:
        """Write entries to the file and to the disk; only then do they count."""
        written = None
        if self.path is not None and self._lock is not None and entries:
            _jsonl.append_durably(self.path, *entries)
            written = self.path.stat()
            if writer_lock.identify(written) != self._lock.identity:
                raise self._explain_loss()
        for entry in entries:
            self._remember(entry)
        if written is not None:
            # last: if Ctrl-C comes before it, the next refresh reads these lines from the file
            self._status, self._torn = _status(written), False

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ArgumentError(
                "this ledger is a pickled copy, or in the memory of another process, and the "
                "original would not know of what is charged here: give it a file, "
                "plan.ledger(path)"
            )

    def _refresh(self) -> None:
        """Read what was added to the file, if it has changed since it was last read."""
        if self.path is None:
            return
        with writer_lock.turn:
            try:
                status = _status(self.path.stat())
            except FileNotFoundError:
                status = None
            # no object of a process continues a file that was deleted, cut or replaced after the
            # process has seen its entries
            seen = _SEEN.get(self._file, [])
            if status is None and seen:
                raise self._explain_loss()
            if status == self._status:
                return
            entries, torn = _read(self.path) if status else ([], False)
            known = len(self._releases)
            if entries[:known] != list(self._releases.values()) or entries[: len(seen)] != seen:
                raise self._explain_loss()
            self._check_unit(entries)
            for entry in entries[known:]:
                self._remember(entry)
            self._status, self._torn = status, torn

    def _explain_loss(self) -> ArgumentError:
        entries = max(len(_SEEN.get(self._file, [])), len(self._releases))
        return ArgumentError(
            f"{self.path} does not hold the {entries} entries that this process has seen in it: "
            "it was deleted, cut or replaced meanwhile; restore it from a backup; without it what "
            "was spent is not known (a training on other data gets a file of its own)"
        )

    def _check_unit(self, entries: Iterable[Entry]) -> None:
        units: set[str] = {entry["unit"] for entry in entries}
        if self._releases:
            units.add(next(iter(self._releases.values()))["unit"])
        if len(units) > 1:
            raise ArgumentError(
                f"a ledger counts what is spent per unit of privacy, and these steps protect a "
                f"{' and a '.join(sorted(units))}: use a ledger for each"
            )

    def _remember(self, entry: Entry) -> None:
        self._releases[(entry["stream"], entry["step"])] = entry
        if self.path is not None:
            # all that are missing: an interrupt may have come between the line above and these
            seen = _SEEN.setdefault(self._file, [])
            seen += [each.copy() for each in self._latest(len(self._releases) - len(seen))]

    def _latest(self, count: int) -> list[Entry]:
        """Return the last ``count`` entries, in their order."""
        return list(islice(reversed(self._releases.values()), max(0, count)))[::-1]

    def _count(self) -> _Totals:
        """Return what the entries add up to; those since the last call are added, all at once."""
        totals = self._totals  # read once: a signal handler that asks meanwhile replaces them
        latest = self._latest(len(self._releases) - totals.entries)
        if not latest:
            return totals
        charges = totals.charges.copy()
        charges.update((e["noise_multiplier"], e["sampling_rate"]) for e in latest)
        steps = totals.steps + sum(not e["stream"].endswith(BEFORE) for e in latest)
        self._totals = _Totals(totals.entries + len(latest), steps, charges, latest[-1]["unit"])
        return self._totals


class _Totals(NamedTuple):
    """What the first ``entries`` entries of a ledger add up to."""

    entries: int = 0
    steps: int = 0  # without releases before the first
    charges: Counter[tuple[float, float]] = Counter()  # (sigma, q)  # noqa: RUF012
    unit: str | None = None


def _status(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes whenever a file does."""
    times = status.st_mtime_ns, status.st_ctime_ns
    return (*writer_lock.identify(status), status.st_size, *times)


def _read(path: Path) -> tuple[list[Entry], bool]:
    """Return all entries, and whether the last line has no line end.

    Such a line counts if it is an entry, whose line end an editor may have removed. Else another
    process is writing it, or has died doing so: its step was not released.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ArgumentError(f"the ledger {path} is no plain file: give a file")
    *lines, tail = path.read_bytes().split(b"\n")
    if tail and _is_entry(tail):
        lines.append(tail)
    entries: dict[tuple[str, int], Entry] = {}
    for number, line in enumerate(lines, 1):
        try:
            entry = _parse_entry(line)
            key = (entry["stream"], entry["step"])
            if key in entries:
                raise ArgumentError(f"step {key[1]} of stream {key[0]} is on an earlier line, too")
        except _INVALID as error:
            raise ArgumentError(
                f"{path} line {number} is not a ledger entry ({error}): restore the file from a "
                "backup; without it what was spent is not known"
            ) from None
        entries[key] = entry
    return list(entries.values()), bool(tail)


def _is_entry(line: bytes) -> bool:
    try:
        _parse_entry(line)
    except _INVALID:
        return False
    return True


def _parse_entry(line: bytes) -> Entry:
    return _check_entry(json.loads(line, object_pairs_hook=_object))


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object in which no name occurs twice: readers differ in which one counts."""
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ArgumentError("a name occurs twice in it")
    return names


def _check_entry(entry: Entry) -> Entry:
    """Return an entry in plain numbers if it can be accounted for; a file may have been edited."""
    if lacking := [name for name in Entry.__annotations__ if name not in entry]:
        raise ArgumentError(f"a ledger entry needs {lacking[0]}: another version wrote it")
    sigma, q, _ = checked(Charge(entry["noise_multiplier"], entry["sampling_rate"], 1))
    step = _validate.count("step", entry["step"], least=0)
    named = isinstance(entry["stream"], str) and isinstance(entry["unit"], str)
    if not named or not isinstance(entry["release"], str | None):
        raise ArgumentTypeError("stream, unit and release must be text")
    plain: Entry = {**entry, "step": step, "noise_multiplier": sigma, "sampling_rate": q}
    return plain
