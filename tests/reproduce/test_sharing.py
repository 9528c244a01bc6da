"""Runs shared by several machines: each is done once, and those of a machine that dies too."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from dpbam.app.runs import ConfigError
from dpbam.app.runs.result import RunError
from reproduce.jobs import carry_out, missing, offer
from reproduce.sharing import SharedRuns
from tests.forked import started, wait_until
from tests.reproduce.tiny import machine, tiny

pytest.importorskip("sqlalchemy")


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'shared.db'}"


def finished(*processes: BaseProcess) -> list[int | None]:
    """Wait for processes; their exit codes."""
    for process in processes:
        process.join(300)
    return [process.exitcode for process in processes]


def records(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in sorted(folder.glob("results/pocket/tiny/*.json"))}


def begun(folder: Path) -> set[str]:
    return {p.name for p in folder.glob("runs/pocket/tiny/*")}


def test_many_claim_at_once_and_each_run_has_one_owner(tmp_path):
    machines = [SharedRuns(url(tmp_path)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        owned = pool.map(lambda m: [k for k in range(40) if m.claim(f"run {k}")], machines)
    assert Counter(k for ours in owned for k in ours) == Counter(range(40))


def test_the_first_record_counts(tmp_path):
    one, two = SharedRuns(url(tmp_path)), SharedRuns(url(tmp_path))
    assert one.claim("run")
    assert two.finish("run", "two's") == "two's"
    assert one.finish("run", "one's") == "two's"
    assert not one.claim("run")
    assert one.finish("never claimed", "there already") == "there already"
    assert two.finished() == {"run", "never claimed"}
    assert [two.record(r) for r in ("run", "never claimed", "unknown")] == [
        "two's", "there already", None,
    ]  # fmt: skip


def test_a_run_is_taken_over_when_its_machine_is_gone_and_not_before(tmp_path):
    gone, alive, other = (SharedRuns(url(tmp_path), heartbeat=0.05, patience=3) for _ in range(3))
    assert gone.claim("abandoned")  # and never a heartbeat
    with alive.alive():
        assert alive.claim("in good hands")
        taken: list[str] = []
        while not taken:  # until one of them has been silent for too long
            taken += [r for r in ("abandoned", "in good hands") if other.claim(r)]
            time.sleep(0.05)
        assert taken == ["abandoned"]
    assert other.claim("in good hands")  # given back by the machine that stopped


def test_a_claim_by_another_machine_is_a_new_one(tmp_path):
    """One machine gives up and another begins: both at no heartbeat, and the second is alive."""
    first, second, watcher = (SharedRuns(url(tmp_path), patience=0.3) for _ in range(3))
    with first.alive():
        assert first.claim("run")
        assert not watcher.claim("run")
    assert second.claim("run")
    time.sleep(0.4)
    assert not watcher.claim("run")


def test_many_open_a_new_database_and_finish_one_run_at_once(tmp_path):
    with ThreadPoolExecutor(6) as pool:
        machines = list(pool.map(lambda _: SharedRuns(url(tmp_path)), range(6)))
        found = list(pool.map(lambda k: machines[k].finish("run", f"record {k}"), range(6)))
    assert len(set(found)) == 1
    assert machines[0].record("run") == found[0]


@pytest.mark.parametrize("name", ["postgresql", "mysql", "sqlite"])
def test_the_table_is_one_that_the_database_knows(tmp_path, name):
    from sqlalchemy.dialects import registry
    from sqlalchemy.schema import CreateTable

    made = str(CreateTable(SharedRuns(url(tmp_path)).runs).compile(dialect=registry.load(name)()))
    assert ("record LONGTEXT" if name == "mysql" else "record TEXT,") in made


def test_a_claim_is_given_back_when_a_machine_stops_in_an_error(tmp_path):
    one, two = SharedRuns(url(tmp_path)), SharedRuns(url(tmp_path))

    def stopped() -> None:
        with one.alive():
            assert one.claim("run")
            assert not two.claim("run")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert two.claim("run")


def test_two_machines_share_the_runs_and_both_have_all_records(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        recipe = tiny(folder, epochs=0.6)
    machines = [started(machine, folder, url(tmp_path)) for folder in folders]
    assert finished(*machines) == [0, 0]
    one, two = map(begun, folders)
    assert not one & two  # nothing was done twice
    assert len(one | two) == len(recipe.runs()) == 6
    assert records(folders[0]) == records(folders[1])
    assert len(records(folders[0])) == 6


@pytest.mark.slow
def test_the_runs_of_a_killed_machine_are_done_by_the_other(tmp_path):
    killed, other = tmp_path / "killed", tmp_path / "other"
    for folder in (killed, other):
        tiny(folder, epochs=1.0)
    first = started(machine, killed, url(tmp_path))
    wait_until(lambda: list(killed.glob("runs/pocket/tiny/*/ledger.jsonl")), alive=first.is_alive)
    first.kill()
    first.join()
    assert len(records(killed)) < 6
    assert finished(started(machine, other, url(tmp_path))) == [0]
    assert len(records(other)) == 6
    assert begun(killed) & begun(other)  # what it was at
    assert finished(started(machine, killed, url(tmp_path))) == [0]
    assert records(killed) == records(other)


def test_records_that_are_here_already_are_shown_to_the_others(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    recipe, same = tiny(here), tiny(there)
    carry_out(missing([recipe], here / "results", 1), here / "runs")
    shared = SharedRuns(url(tmp_path))
    offer([recipe], here / "results", 1, shared)
    carry_out(missing([same], there / "results", 1), there / "runs", shared=shared)
    assert records(there) == records(here)
    assert not begun(there)


def test_other_settings_are_other_runs(tmp_path):
    recipe, longer = tiny(tmp_path / "a"), tiny(tmp_path / "b", epochs=0.3)
    keys = [{job.key for job in missing([r], tmp_path / "none")} for r in (recipe, longer)]
    assert len(keys[0]) == 6
    assert not keys[0] & keys[1]


def test_a_storage_that_cannot_be_used_is_said_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"the storage .* cannot be used"):
        SharedRuns(f"sqlite:///{tmp_path}/no/such/folder/x.db")
    with pytest.raises(ConfigError, match="cannot be used"):
        SharedRuns("not a url")
    with pytest.raises(ConfigError) as refused:
        SharedRuns("postgresql+nosuch://me:secret@host/db")
    assert "secret" not in str(refused.value)
    shared = SharedRuns(url(tmp_path))
    (tmp_path / "shared.db").write_bytes(b"something else")
    with pytest.raises(RunError, match="no longer answers"):
        shared.claim("run")
