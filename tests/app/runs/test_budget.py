import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from dpbam.app.cli import main
from dpbam.app.runs import Budget, RunError, execute, release_reservation, stored_config
from dpbam.privacy import ledger as ledger_module
from dpbam.privacy.accounting import Charge, total_epsilon

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


def test_entries_compose_and_a_run_raises_its_own(path):
    budget = Budget(path)
    budget.reserve("a", [STEP], unit="record", label="runs/a")
    budget.reserve("b", [STEP], unit="record")
    budget.reserve("a", [STEP._replace(steps=12)], unit="record", label="runs/a")
    budget.reserve("a", [STEP._replace(steps=4)], unit="record", label="runs/a")
    both = [STEP._replace(steps=12), STEP]
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


def test_what_is_spent_is_never_lowered(path):
    """Neither by settling again, nor by a reservation, nor by a ledger that holds less."""
    budget = Budget(path)
    budget.reserve("a", [STEP], unit="record")
    budget.note("a", [STEP._replace(steps=5)])
    with pytest.raises(RunError, match=r"holds 2 steps, but the budget .* knows of 5: it was lost"):
        budget.settle("a", [STEP._replace(steps=2)])
    budget.settle("a", [STEP._replace(steps=6)])
    spent = budget.epsilon()
    for lower in (budget.settle, budget.note):
        with pytest.raises(RunError, match="knows of 6"):
            lower("a", [STEP._replace(steps=2)])
    with pytest.raises(RunError, match="knows of 6"):
        budget.reserve("a", [STEP._replace(steps=2)], unit="record")
    assert budget.epsilon() == spent
    budget.reserve("a", [STEP], unit="record", spent=[STEP._replace(steps=6)])
    budget.settle("a", [STEP._replace(steps=7)])
    assert budget.entries()[0].charges == (STEP._replace(steps=7),)


def test_a_settled_entry_keeps_what_it_has(path):
    """Also one of a file without a record of what the ledger held."""
    entry = {"run": "a", "label": "", "settled": True, "charges": [list(STEP)]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "entries": [entry]}))
    with pytest.raises(RunError, match="knows of 8"):
        Budget(path).settle("a", [STEP._replace(steps=1)])
    assert Budget(path).entries()[0].charges == (STEP,)


def test_steps_that_were_not_reserved_are_not_settled(path):
    budget = Budget(path)
    budget.reserve("a", [STEP], unit="record", label="runs/a")
    with pytest.raises(RunError, match=r"sigma 99 .* it is not that run's ledger"):
        budget.settle("a", [STEP._replace(noise_multiplier=99.0)])
    assert not budget.entries()[0].settled


def test_symbolic_links_share_the_file_behind_them(path, tmp_path):
    (tmp_path / "links").mkdir()
    link, folder = tmp_path / "links" / "budget.json", tmp_path / "folder"
    link.symlink_to(path)
    folder.symlink_to(tmp_path)
    for run, way in {"a": link, "b": path, "c": folder / "links" / "budget.json"}.items():
        Budget(way).reserve(run, [STEP], unit="record")
    assert link.is_symlink()
    for way in (link, path, folder / "budget.json"):
        assert [e.run for e in Budget(way).entries()] == ["a", "b", "c"]
    with pytest.raises(RunError, match="already"):
        Budget.create(link, epsilon=1, delta=1e-5)
    assert [p.name for p in (tmp_path / "links").iterdir()] == ["budget.json"]  # one lock, one file


def test_a_budget_with_several_hard_links_is_refused(path, tmp_path):
    budget = Budget(path)
    os.link(path, tmp_path / "other.json")
    for way in (path, tmp_path / "other.json"):
        with pytest.raises(RunError, match=r"has 2 hard links, .* make the others symbolic links"):
            Budget(way)
    with pytest.raises(RunError, match="hard links"):  # linked after it was opened
        budget.reserve("a", [STEP], unit="record")
    (tmp_path / "other.json").unlink()
    budget.reserve("a", [STEP], unit="record")


def test_a_pipe_is_no_budget(tmp_path):
    os.mkfifo(tmp_path / "budget.json")
    with pytest.raises(RunError, match="no plain file"):  # and does not wait for a writer
        Budget(tmp_path / "budget.json")


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


@pytest.mark.parametrize("field", ["charges", "spent"])
@pytest.mark.parametrize(
    "charge",
    ["[4.0, 0.125, -100]", "[4.0, 0.125, 7.9]", "[4.0, 0.125, 1e300]", '[4.0, 0.125, "8"]',
     "[4.0, 0.125, true]", "[1e300, 0.125, 8]", "[-4.0, 0.125, 8]", "[4.0, 1.5, 8]",
     "[4.0, NaN, 8]", "[4.0, 0.125, 10000000000000]", "[4.0, 0.125]", "8", "null"],
)  # fmt: skip
def test_counts_that_are_no_counts_are_a_sentence(path, charge, field):
    """A count of -100 gave budget back, 7.9 counted as 7, and 1e300 did not end."""
    fields = {"charges": "[[4.0, 0.125, 8]]", "spent": "[]", field: f"[{charge}]"}
    entry = f'"charges": {fields["charges"]}, "spent": {fields["spent"]}'
    path.write_text(
        '{"epsilon": 1, "delta": 1e-4, "entries": [{"run": "a", "label": "", "settled": true, '
        + entry + "}]}"
    )  # fmt: skip
    with pytest.raises(RunError, match=r"budget.json is damaged \(.*restore it"):
        Budget(path)


def test_a_malformed_budget_ends_the_command_with_one_sentence(path, tmp_path, capsys):
    entry = {"run": "a", "label": "", "settled": True, "charges": [[4.0, 0.125, -100]]}
    path.write_text(json.dumps({"epsilon": 1, "delta": 1e-4, "entries": [entry]}))
    command = ["train", "--data", "digits", "--model", "mlp", "--noise-multiplier", "9", "--budget",
               str(path), "--accountant", "rdp", "--epochs", "1", "--batch-size", "256", "--out",
               str(tmp_path / "run")]  # fmt: skip
    assert main(command) == 2
    assert "steps must be at least 0, got -100" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


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


def test_a_run_folder_restored_from_an_old_copy_is_refused(tiny, path, tmp_path, monkeypatch):
    """Unseeded, it would draw new noise: eight steps and then five more, for the price of eight."""
    out, copy = tmp_path / "run", tmp_path / "backup"
    config = tiny.replace(budget=path, seed=None)
    _die_at_step(monkeypatch, 3)
    with pytest.raises(RuntimeError, match="dead"):
        execute(config, out)
    shutil.copytree(out, copy)
    monkeypatch.undo()
    _die_at_step(monkeypatch, 6)
    with pytest.raises(RuntimeError, match="dead"):
        execute(stored_config(out), out, resume=True)
    monkeypatch.undo()
    _restore(copy, out)
    _refused_and_unchanged(out, path, "does not hold the 6 entries that this process has seen")
    monkeypatch.setattr(ledger_module, "_SEEN", {})  # as in a new process
    _refused_and_unchanged(out, path, "holds 3 steps, but the budget .* knows of")

    shutil.rmtree(out)
    fresh = tmp_path / "whole"
    execute(config, fresh)
    shutil.rmtree(fresh / "checkpoints")
    lines = (fresh / "ledger.jsonl").read_text().splitlines(keepends=True)
    (fresh / "ledger.jsonl").write_text("".join(lines[:2]))
    monkeypatch.setattr(ledger_module, "_SEEN", {})
    _refused_and_unchanged(fresh, path, "holds 2 steps, but the budget .* knows of 8")


@pytest.mark.parametrize("lost", ["the file", "its steps", "its end"])
def test_a_reservation_is_not_released_without_the_ledger(tiny, path, tmp_path, monkeypatch, lost):
    out = tmp_path / "run"
    _die_at_step(monkeypatch, 3)
    with pytest.raises(RuntimeError, match="dead"):
        execute(tiny.replace(budget=path), out)
    monkeypatch.undo()
    ledger = out / "ledger.jsonl"
    if lost == "the file":
        ledger.unlink()
    elif lost == "its steps":
        ledger.write_text("")
    else:
        ledger.write_text(ledger.read_text().replace('"step": 1,', '"step": 1.5,'))
    _refused_and_unchanged(out, path, "restore")


def test_a_run_that_never_took_a_step_gives_everything_back(tiny, path, tmp_path, monkeypatch):
    _die_at_step(monkeypatch, 0)
    with pytest.raises(RuntimeError, match="dead"):
        execute(tiny.replace(budget=path), tmp_path / "run")
    release_reservation(tmp_path / "run")
    assert Budget(path).epsilon() == 0


def _restore(copy, out):
    shutil.rmtree(out)
    shutil.copytree(copy, out)


def _refused_and_unchanged(out, path, says):
    before = path.read_text()
    with pytest.raises(ValueError, match=says):
        release_reservation(out)
    with pytest.raises(ValueError, match=says):
        execute(stored_config(out), out, resume=True)
    assert path.read_text() == before


def test_a_copy_of_a_run_cannot_spend_in_its_name(tiny, path, tmp_path, monkeypatch):
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


def test_a_run_cannot_go_on_with_another_budget(tiny, path, tmp_path, monkeypatch):
    """Also not where the same relative path means another file."""
    out = tmp_path / "run"
    monkeypatch.chdir(path.parent)
    with monkeypatch.context() as patch:
        _die_at_step(patch, 3)
        with pytest.raises(RuntimeError, match="dead"):
            execute(tiny.replace(budget=Path(path.name)), out)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    other = Budget.create(path.name, epsilon=30, delta=1e-4, accountant="rdp")
    with pytest.raises(RunError, match=r"has taken 3 steps, and the budget .* knows nothing of it"):
        execute(stored_config(out), out, resume=True)
    assert not other.entries()
    monkeypatch.chdir(path.parent)
    assert execute(stored_config(out), out, resume=True).charged == 8


def _die_at_step(monkeypatch, step):
    from dpbam.privacy.noise import GaussianNoise

    real = GaussianNoise.add

    def add(self, sums, std, at, **more):
        if at == step:
            raise RuntimeError("dead")
        return real(self, sums, std, at, **more)

    monkeypatch.setattr(GaussianNoise, "add", add)
