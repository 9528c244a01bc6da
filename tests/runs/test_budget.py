import json
import multiprocessing

import pytest

from dpbam.accounting import Charge, total_epsilon
from dpbam.runs import Budget, RunError, execute, release_reservation, stored_config

STEP = Charge(4.0, 0.125, 8)


def reserve_in_a_process(path, run):
    try:
        Budget(path).reserve(run, [STEP], unit="record")
    except RunError:
        raise SystemExit(3) from None


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "budget.json"
    path.write_text('{"epsilon": 1.0, "delta": 1e-4, "accountant": "rdp"}')  # by hand
    return path


def test_entries_compose_and_a_run_replaces_its_own(path):
    budget = Budget(path)
    budget.reserve("a", [STEP], unit="record", label="runs/a")
    budget.reserve("b", [STEP], unit="record")
    budget.reserve("a", [STEP._replace(steps=4)], unit="record", label="runs/a")
    both = [STEP._replace(steps=4), STEP]
    assert budget.epsilon() == total_epsilon(both, 1e-4, accountant="rdp")
    assert [(e.run, e.label, e.settled) for e in budget.entries()] == [
        ("a", "runs/a", False),
        ("b", "", False),
    ]


def test_what_would_exceed_is_refused_and_changes_nothing(path):
    budget = Budget(path)
    budget.reserve("a", [STEP], unit="record")
    before = path.read_text()
    with pytest.raises(RunError, match=r"would exceed epsilon 1 .* is taken, the run alone needs"):
        budget.reserve("b", [STEP._replace(steps=1000)], unit="record")
    assert path.read_text() == before


def test_settling_gives_back_what_was_not_spent(path):
    budget = Budget(path)
    budget.reserve("a", [STEP], unit="record", label="runs/a")
    reserved = budget.epsilon()
    budget.settle("a", [STEP._replace(steps=2)])
    assert budget.epsilon() < reserved
    assert budget.entries()[0].settled
    with pytest.raises(RunError, match="knows no run zz"):
        budget.settle("zz", [])


def test_records_and_patients_do_not_add_up(path):
    Budget(path).reserve("a", [STEP], unit="record")
    with pytest.raises(RunError, match="counts by record, this run by patient"):
        Budget(path).reserve("b", [STEP], unit="patient")


def test_concurrent_runs_never_take_more_than_there_is(path):
    Budget(path).epsilon()  # imports the accountant once, here and not in every child
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=reserve_in_a_process, args=(path, f"run-{k}")) for k in range(12)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    budget = Budget(path)
    assert set(codes) == {0, 3}
    assert len(budget.entries()) == codes.count(0)
    assert budget.epsilon() <= 1.0
    with pytest.raises(RunError):
        budget.reserve("one more", [STEP], unit="record")


@pytest.mark.parametrize(
    "content",
    ["{", '{"epsilon": 3}', '{"epsilon": -1, "delta": 1e-5}', '{"delta": 1e-5, "epsilon": "3"}',
     '{"epsilon": 1, "delta": 1e-5, "entries": [{"run": "a"}]}'],
)  # fmt: skip
def test_a_file_that_is_not_a_budget(path, content):
    path.write_text(content)
    with pytest.raises(RunError):
        Budget(path)


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(RunError, match=r'make one that holds, for example, \{"epsilon"'):
        Budget(tmp_path / "none.json")


def test_create_does_not_replace(path):
    with pytest.raises(RunError, match="already"):
        Budget.create(path, epsilon=1, delta=1e-5)


def test_a_run_reserves_before_it_begins_and_settles_at_its_end(tiny, path, tmp_path):
    out = tmp_path / "run"
    result = execute(tiny.replace(budget=path), out)
    (entry,) = Budget(path).entries()
    assert entry.settled
    assert entry.label == str(out)
    assert entry.charges == (Charge(4.0, 180 / 1438, 8),)
    assert Budget(path).epsilon() == result.epsilon
    statement = json.loads((out / "privacy-statement.json").read_text())
    assert statement["budget"]["taken"] == result.epsilon


def test_a_run_that_would_exceed_leaves_nothing(tiny, path, tmp_path):
    with pytest.raises(RunError, match="would exceed"):
        execute(tiny.replace(budget=path, noise_multiplier=0.5), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert Budget(path).entries() == []


def test_a_run_that_died_keeps_its_reservation_until_it_is_released(
    tiny, path, tmp_path, monkeypatch
):
    out = tmp_path / "run"
    _die_at_step(monkeypatch, 3)
    with pytest.raises(RuntimeError, match="dead"):
        execute(tiny.replace(budget=path), out)
    assert Budget(path).entries()[0].charges[0].steps == 8
    release_reservation(out)
    assert Budget(path).entries()[0].charges[0].steps == 3


def test_a_copy_of_a_run_cannot_spend_in_its_name(tiny, path, tmp_path, monkeypatch):
    import shutil

    _die_at_step(monkeypatch, 3)
    with pytest.raises(RuntimeError, match="dead"):
        execute(tiny.replace(budget=path), tmp_path / "run")
    monkeypatch.undo()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(RunError, match="is a copy of the run in"):
        execute(stored_config(tmp_path / "copy"), tmp_path / "copy", resume=True)
    (tmp_path / "run").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "copy")
    moved = tmp_path / "moved"
    assert execute(stored_config(moved), moved, resume=True).charged == 8


def _die_at_step(monkeypatch, step):
    from dpbam.noise import GaussianNoise

    real = GaussianNoise.add

    def add(self, sums, std, at):
        if at == step:
            raise RuntimeError("dead")
        return real(self, sums, std, at)

    monkeypatch.setattr(GaussianNoise, "add", add)
