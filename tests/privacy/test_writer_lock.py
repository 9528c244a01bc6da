"""One writer per ledger: processes are refused, objects and threads of one process share it."""

from __future__ import annotations

import copy
import errno
import fcntl
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dpbam.privacy import writer_lock
from dpbam.privacy.ledger import Ledger

STEP = {"noise_multiplier": 2.0, "sampling_rate": 0.1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def in_a_child(work: Callable[[], None]) -> str:
    """What ``work`` is refused with in a forked process; empty if it is not."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
        except ValueError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return answer.read()


def test_objects_of_one_process_share_a_file(path: Path) -> None:
    first, second = Ledger(1e-5, path=path), Ledger(1e-5, path=path)
    first.charge("a", 0, **STEP)
    second.charge("b", 0, **STEP)
    first.charge("a", 1, **STEP)
    assert first.entries() == second.entries()
    assert len(first) == len(path.read_text().splitlines()) == 3
    with pytest.raises(ValueError, match="already used for another release"):
        second.charge("a", 1, **STEP)


def test_threads_take_turns(path: Path) -> None:
    ledgers = [Ledger(1e-5, path=path) for _ in range(4)]

    def charge(step: int) -> None:
        ledgers[step % 4].charge("a", step, **STEP)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(charge, range(40)))
    assert [len(ledger) for ledger in ledgers] == [40] * 4
    assert sorted(entry["step"] for entry in Ledger(1e-5, path=path).entries()) == list(range(40))


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_the_same_file(path: Path, link: Callable[[Path, Path], None]) -> None:
    ledger, other = Ledger(1e-5, path=path), path.with_name("other.jsonl")
    ledger.charge("a", 0, **STEP)
    link(path, other)
    words = in_a_child(lambda: Ledger(1e-5, path=other).charge("b", 0, **STEP))
    assert f"another process is writing to {other}" in words
    assert len(Ledger(1e-5, path=other)) == len(ledger) == 1


def test_others_read_while_one_writes(path: Path) -> None:
    ledger = Ledger(1e-5, path=path)
    ledger.charge("a", 0, **STEP)

    def read() -> None:
        reader = Ledger(1e-5, path=path)
        raise ValueError(f"{len(reader)} {len(reader.charges())} {reader.epsilon() > 0}")

    assert in_a_child(read) == "1 1 True"


def test_a_closed_ledger_leaves_the_file_to_others(path: Path) -> None:
    ledger = Ledger(1e-5, path=path)
    ledger.charge("a", 0, **STEP)
    other = Ledger(1e-5, path=path)
    assert "another process" in in_a_child(lambda: other.charge("b", 0, **STEP))
    ledger.close()
    assert in_a_child(lambda: other.charge("b", 0, **STEP)) == ""
    ledger.charge("a", 1, **STEP)  # the child has ended
    assert len(ledger) == len(other) == 3


def test_the_end_of_a_ledger_frees_its_file(path: Path) -> None:
    Ledger(1e-5, path=path).charge("a", 0, **STEP)
    assert in_a_child(lambda: Ledger(1e-5, path=path).charge("b", 0, **STEP)) == ""


def test_the_end_of_a_process_says_nothing(path: Path) -> None:
    """The lock is freed without code, most of which is gone by then."""
    work = (
        "import sys; from dpbam.privacy.ledger import Ledger; sys.modules['kept'] = Ledger(1e-5, "
        "path=sys.argv[1]); sys.modules['kept'].charge('a', 0, noise_multiplier=1.0, "
        "sampling_rate=0.1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", work, str(path)], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
    Ledger(1e-5, path=path).charge("a", 1, **STEP)


def test_a_command_started_meanwhile_does_not_keep_the_lock(path: Path) -> None:
    ledger = Ledger(1e-5, path=path)
    ledger.charge("a", 0, **STEP)
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE, close_fds=False):
        ledger.close()
        assert in_a_child(lambda: Ledger(1e-5, path=path).charge("b", 0, **STEP)) == ""


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def failing(descriptor: int, operation: int) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", failing)
    with pytest.raises(ValueError, match=rf"cannot be locked .*{os.strerror(reason)}.*local disk"):
        Ledger(1e-5, path=path).charge("a", 0, **STEP)
    assert path.read_text() == ""


def test_a_ledger_in_memory_is_charged_by_its_own_process_alone() -> None:
    ledger = Ledger(1e-5)
    words = in_a_child(lambda: ledger.charge("a", 0, **STEP))
    assert "in the memory of another process" in words
    ledger.charge("a", 0, **STEP)
    assert "in the memory" in in_a_child(lambda: ledger.merge(ledger.entries()))


def test_a_copy_is_the_ledger_itself(path: Path) -> None:
    for ledger in (Ledger(1e-5), Ledger(1e-5, path=path)):
        ledger.charge("a", 0, **STEP)
        copy.deepcopy({"of": ledger})["of"].charge("a", 1, **STEP)
        copy.copy(ledger).charge("a", 2, **STEP)
        assert len(ledger) == 3


def test_a_pickled_ledger_shares_the_file(path: Path) -> None:
    ledger = Ledger(1e-5, path=path)
    ledger.charge("a", 0, **STEP)
    other = pickle.loads(pickle.dumps(ledger))
    other.charge("a", 1, **STEP)
    assert len(ledger) == len(other) == 2


def test_a_relative_path_stays_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    ledger = Ledger(1e-5, path=Path("ledger.jsonl"))
    ledger.charge("a", 0, **STEP)
    monkeypatch.chdir(tmp_path / "elsewhere")
    ledger.charge("a", 1, **STEP)
    assert len(Ledger(1e-5, path=tmp_path / "ledger.jsonl")) == 2
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_restored_file_is_continued(path: Path) -> None:
    ledger, backup = Ledger(1e-5, path=path), path.with_name("backup.jsonl")
    for step in range(2):
        ledger.charge("a", step, **STEP)
    shutil.copy(path, backup)
    path.unlink()
    for ask in (len, Ledger.epsilon, Ledger.charges, Ledger.entries):
        with pytest.raises(ValueError, match=r"does not hold the 2 entries .* restore it"):
            ask(ledger)
    with pytest.raises(ValueError, match="does not hold the 2 entries"):
        ledger.charge("a", 2, **STEP)
    assert not path.exists()  # nor is it made anew
    backup.replace(path)
    ledger.charge("a", 2, **STEP)
    assert len(Ledger(1e-5, path=path)) == 3


def test_an_edited_entry_is_refused(path: Path) -> None:
    ledger = Ledger(1e-5, path=path)
    ledger.charge("a", 0, **STEP)
    path.write_text(path.read_text().replace("2.0", "20.0"))
    with pytest.raises(ValueError, match="does not hold the 1 entries"):
        ledger.epsilon()


def test_a_step_without_a_file_of_its_own_is_refused(tmp_path: Path) -> None:
    """A pipe would block for ever, a folder ended in a traceback."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="is no plain file"):
            Ledger(1e-5, path=path)


@pytest.mark.parametrize("line", [0, 1])
def test_a_repeated_step_is_refused(path: Path, line: int) -> None:
    ledger = Ledger(1e-5, path=path)
    for step in range(2):
        ledger.charge("a", step, **STEP)
    with path.open("a") as file:
        file.write(path.read_text().splitlines(keepends=True)[line])
    with pytest.raises(ValueError, match=rf"line 3 .*step {line} of stream a is on an earlier"):
        Ledger(1e-5, path=path)
    with pytest.raises(ValueError, match="line 3"):
        ledger.charge("a", 2, **STEP)


def test_a_lock_that_a_thread_is_freeing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its object is gone and the lock still there; of another process it is refused at once."""
    path = tmp_path / "file"
    path.touch()
    identity, attempts = writer_lock.identify(path.stat()), []

    def busy(descriptor: int, how: int) -> None:
        attempts.append(how)
        if len(attempts) < 4:
            raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", busy)
    writer_lock._identities.add(identity)
    assert writer_lock.hold(path, create=False).identity == identity
    assert len(attempts) == 4
    writer_lock._identities.discard(identity)
    attempts.clear()
    with pytest.raises(ValueError, match="another process is writing"):
        writer_lock.hold(path, create=False)
    assert len(attempts) == 1
