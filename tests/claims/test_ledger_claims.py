"""A ledger's file: one writer at a time, never continued without what it held, no line twice."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from dpbam import Ledger
from dpbam.errors import ArgumentError
from dpbam.privacy import ledger as ledger_module
from dpbam.privacy import writer_lock
from interrupts import interrupt_at
from planting import Mistake, catches

STEP = {"noise_multiplier": 1.0, "sampling_rate": 0.1}
PATIENCE = 60.0  # seconds; a loaded machine is slow


def write_and_wait(path: Path, pipe: Connection) -> None:
    """The work of another process: charge a step, report the count, and live until it is killed."""
    ledger = Ledger(1e-5, path=path)
    ledger.charge("other", 0, **STEP)
    pipe.send(len(ledger))
    pipe.recv()


@contextmanager
def another_writer(path: Path) -> Iterator[int]:
    """Yield what another process reports that it has written; at the end it is killed."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=write_and_wait, args=(path, there), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of every fork
        process.start()
    try:
        assert here.poll(PATIENCE), "the other process gave no answer"
        yield here.recv()
    finally:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(PATIENCE)


@contextmanager
def new_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "ledger.jsonl"


def check_one_process_writes_at_a_time() -> None:
    """What a writer reports is what the file holds; the next one counts it, though killed."""
    with new_file() as path:
        ledger = Ledger(1e-5, path=path)  # opened before the other process writes
        with another_writer(path) as reported:
            with suppress(ArgumentError):
                ledger.charge("here", 0, **STEP)
            assert len(path.read_text().splitlines()) == reported, "two writers"
            assert len(ledger) == reported, "it was not read again"
        ledger.charge("here", 0, **STEP)  # the lock has died with the process
        assert len(ledger) == len(Ledger(1e-5, path=path)) == reported + 1


def check_a_forked_child_does_not_write_for_its_parent() -> None:
    """The parent has written, and its child has inherited the ledger, and the lock's descriptor."""
    with new_file() as path:
        ledger = Ledger(1e-5, path=path)
        ledger.charge("here", 0, **STEP)
        child = os.fork()
        if not child:
            with suppress(ArgumentError):
                ledger.charge("child", 0, **STEP)
            os._exit(0)
        os.waitpid(child, 0)
        assert len(path.read_text().splitlines()) == 1, "parent and child write"


def check_a_lost_file_is_not_continued() -> None:
    """Deleted, cut or replaced by an old copy under a process that goes on."""
    for lose in (Path.unlink, lambda path: path.write_text(""), cut):
        with new_file() as path:
            ledger = Ledger(1e-5, path=path)
            for step in range(3):
                ledger.charge("here", step, **STEP)
            lose(path)
            with suppress(ArgumentError, OSError):
                ledger.charge("here", 3, **STEP)
                lines = path.read_text().splitlines()  # a ledger of this process would refuse it
                assert len(lines) == 4, "continued without what was spent"


def cut(path: Path) -> None:
    copy = path.with_suffix(".old")
    copy.write_text(path.read_text().splitlines(keepends=True)[0])
    copy.replace(path)


def check_a_line_counts_once_and_says_one_thing() -> None:
    with new_file() as path:
        Ledger(1e-5, path=path).charge("here", 0, **STEP)
        line = path.read_text()
        twice, two_values = line + line, line.replace("}", ', "noise_multiplier": 9.0}')
        for name, content in (("twice", twice), ("two_values", two_values)):
            unseen_file = path.with_suffix(f".{name}")  # the process knows what is in the first
            unseen_file.write_text(content)
            try:
                entries = Ledger(1e-5, path=unseen_file).entries()
            except ArgumentError:
                continue
            raise AssertionError(f"read as {entries}")


def check_a_reader_changes_nothing() -> None:
    """A writer is in the middle of a line when another process looks at its ledger."""
    with new_file() as path:
        Ledger(1e-5, path=path).charge("here", 0, **STEP)
        line = path.read_bytes().replace(b'"step": 0', b'"step": 1')
        with path.open("ab", buffering=0) as file:
            file.write(line[:30])
            reader = Ledger(1e-5, path=path)
            assert len(reader) == 1
            file.write(line[30:])
        assert path.read_bytes().endswith(line), "the reader has cut what was being written"
        assert len(reader) == 2


def check_a_pickled_copy_in_memory_is_not_charged() -> None:
    """It and the original would each count a part; one with a file shares the file."""
    ledger = Ledger(1e-5)
    ledger.charge("s", 0, **STEP)
    copied = pickle.loads(pickle.dumps(ledger))
    with suppress(ArgumentError):
        copied.charge("s", 1, **STEP)
    assert (len(copied), len(ledger)) == (1, 1), "each counts a part of what was spent"
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(1e-5, path=Path(folder) / "ledger.jsonl")
        copied = pickle.loads(pickle.dumps(ledger))
        ledger.charge("s", 0, **STEP)
        copied.charge("s", 1, **STEP)
        assert (len(copied), len(ledger)) == (2, 2)


WRITING = ("_append", "_remember", "_count")  # functions of a ledger that an interrupt may reach


def check_an_interrupted_charge_counts_once() -> None:
    """Ctrl-C at each line: what the ledger counts is what its file holds, then and after a retry.

    With a seed the retry is the same release; without one it has another name. In memory too.
    """
    for stream, on_disk in itertools.product(("s", "t"), (True, False)):
        for line in itertools.count():
            with new_file() as path:
                ledger = Ledger(1e-5, path=path if on_disk else None)
                ledger.charge("s", 0, **STEP, release="0")
                charge = partial(ledger.charge, "s", 1, **STEP, release="1")
                interrupted = interrupt_at(line, WRITING, charge, code_of=ledger_module)
                check_counts(ledger, path)
                ledger.charge(stream, 1, **STEP, release="1")
                check_counts(ledger, path)
                assert len(ledger) <= 3
            if not interrupted:
                break
        assert line > 5


def check_counts(ledger: Ledger, path: Path) -> None:
    entries = len(ledger.entries())
    assert entries == len(ledger) == sum(charge.steps for charge in ledger.charges())
    if ledger.path is not None:
        assert entries == len(path.read_text().splitlines())
        try:
            assert entries == len(Ledger(1e-5, path=path))
        except ArgumentError as refusal:
            raise AssertionError(str(refusal)) from None


def test_an_interrupted_charge_counts_once() -> None:
    check_an_interrupted_charge_counts_once()


# --- the mistakes


def check_a_deleted_file_is_not_begun_anew() -> None:
    """A process that has seen entries in a file does not begin it anew, in a new object either."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        Ledger(1e-5, path=path).charge("a", 0, **STEP)
        path.unlink()
        try:
            Ledger(1e-5, path=path).charge("a", 1, **STEP)
        except ArgumentError:
            return
        raise AssertionError("the file counts one step of two")


def check_a_cut_file_is_not_continued() -> None:
    """Nor does it continue one that holds less than it has seen, in a new object either."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        ledger = Ledger(1e-5, path=path)
        ledger.charge("a", 0, **STEP)
        older = path.read_bytes()
        ledger.charge("a", 1, **STEP)
        ledger.close()
        path.write_bytes(older)
        try:
            Ledger(1e-5, path=path).charge("a", 2, **STEP)
        except ArgumentError:
            return
        raise AssertionError("the file counts two steps of three")


def forgotten(original):
    def remember(self, entry):
        original(self, entry)
        ledger_module._SEEN.clear()

    return remember


def no_lock(original):
    return lambda descriptor, path: None


def read_once(original):
    def refresh(self):
        if not vars(self).get("_opened"):
            self._opened = True
            original(self)

    return refresh


def inherited(original):
    """The child takes the lock for its own, as it would without the handler of forks."""
    locks = []

    def hold(path, *, create):
        locks.append(locks[0] if locks else original(path, create=create))
        return locks[0]

    return hold


def never_read_again(original):
    def refresh(self):
        if not self._releases:
            original(self)

    return refresh


def the_last_name_counts(original):
    return dict


def repaired_on_sight(original):
    def read(path):
        ledger_module._jsonl.repair(path, ledger_module._is_entry)
        lines = path.read_bytes().splitlines()
        return [ledger_module._parse_entry(line) for line in lines], False

    return read


def with_its_process(original):
    return lambda self: self.__dict__ | {"_lock": None}


def its_own_line_is_not_read(original):
    """The file's state is known before the entry is."""

    def append(self, entries):
        if self.path is not None and entries:
            ledger_module._jsonl.append_durably(self.path, *entries)
            self._status, self._torn = ledger_module._status(self.path.stat()), False
        _append(self, entries)

    def _append(self, entries):
        for entry in entries:
            self._remember(entry)

    return append


def added_by_and_by(original):
    """The entry is there before it counts."""

    def _remember(self, entry):
        original(self, entry)
        totals = self._totals
        self._totals = totals._replace(entries=totals.entries + 1)
        self._totals = self._totals._replace(steps=totals.steps + 1)
        charges = totals.charges.copy()
        charges[entry["noise_multiplier"], entry["sampling_rate"]] += 1
        self._totals = self._totals._replace(charges=charges)

    return _remember


MISTAKES = {
    "a line that its writer does not read again": Mistake(
        check_an_interrupted_charge_counts_once, Ledger, "_append", its_own_line_is_not_read
    ),
    "an entry that half counts": Mistake(
        check_an_interrupted_charge_counts_once, Ledger, "_remember", added_by_and_by
    ),
    "a deleted ledger that a new object begins": Mistake(
        check_a_deleted_file_is_not_begun_anew, Ledger, "_remember", forgotten
    ),
    "a ledger that a new object continues from an older copy": Mistake(
        check_a_cut_file_is_not_continued, Ledger, "_remember", forgotten
    ),
    "a copy that counts by itself": Mistake(
        check_a_pickled_copy_in_memory_is_not_charged, Ledger, "__getstate__", with_its_process
    ),
    "two processes write to one ledger": Mistake(
        check_one_process_writes_at_a_time, writer_lock, "_flock", no_lock
    ),
    "a ledger that is read once": Mistake(
        check_one_process_writes_at_a_time, Ledger, "_refresh", read_once
    ),
    "a lock that a child inherits": Mistake(
        check_a_forked_child_does_not_write_for_its_parent, writer_lock, "hold", inherited
    ),
    "a ledger that begins anew": Mistake(
        check_a_lost_file_is_not_continued, Ledger, "_refresh", never_read_again
    ),
    "a line that says two things": Mistake(
        check_a_line_counts_once_and_says_one_thing,
        ledger_module,
        "_object",
        the_last_name_counts,
    ),
    "a reader that cuts a writer's line": Mistake(
        check_a_reader_changes_nothing, ledger_module, "_read", repaired_on_sight
    ),
}


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
