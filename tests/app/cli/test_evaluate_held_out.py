"""``dpbam evaluate``: what it takes to be held out was not trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from app.cli.helpers import QUICK, one_sentence
from dpbam.app.cli import evaluate as command
from dpbam.app.cli import main
from dpbam.app.cli.evaluate import show
from dpbam.app.report.records import read_run
from dpbam.app.runs import load_run_model, stored_config
from dpbam.app.runs.folder import PUBLISHABLE
from dpbam.data import DataSet, from_arrays, load_pair
from dpbam.tasks import base
from dpbam.tasks.base import make_task

PEOPLE = np.repeat(np.arange(30), 4)  # each has four images of one class
ARRAYS = {
    "images": np.random.default_rng(0).integers(0, 255, (120, 8, 8), dtype=np.uint8),
    "labels": PEOPLE % 2,
}
OTHER = "is not what the run held out"
UNKNOWN = "has no record of what the run held out"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with x.npz and a run by person, which names it by a relative path."""
    place = tmp_path_factory.mktemp("held_out")
    np.savez(place / "x.npz", person=PEOPLE, **ARRAYS)
    flags = ["--batch-size", "8", "--data", "x.npz", "--unit", "person", "--out", "run"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", *QUICK, *flags, "--quiet"]) == 0
    return place


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, next to the working directory ``elsewhere``."""
    shutil.copytree(trained, tmp_path / "a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "a"


def published(place: Path) -> Path:
    """What is published of the run, as a search's folder best has it."""
    (place / "best").mkdir()
    for name in PUBLISHABLE:
        shutil.copy(place / "run" / name, place / "best" / name)
    return place / "best"


def saved(run: Path) -> dict:
    return json.loads((run / "non-private" / "evaluation-test.json").read_text())


def persons(dataset: DataSet) -> set[int]:
    return set(dataset.column("person").tolist())


def test_from_another_folder_it_is_still_split_by_person(place, dpbam, monkeypatch):
    """By record, four in five of the records would have been trained on."""
    seen: list[DataSet] = []
    real = command.evaluate_dataset
    monkeypatch.setattr(
        command, "evaluate_dataset", lambda *args: seen.append(args[1]) or real(*args)
    )
    train, test = load_pair(str(place / "x.npz"), unit="person")
    for where in (place, Path.cwd()):
        monkeypatch.chdir(where)
        data = "x.npz" if where == place else "../a/x.npz"
        ended = dpbam("evaluate", place / "run", "--data", data, "--save")
        assert ended.code == 0, ended.err
        assert not persons(seen[-1]) & persons(train)
        assert seen[-1].fingerprint() == test.fingerprint()
        assert saved(place / "run")["test_set_of_the_run"] is True


def test_the_same_data_by_another_name(place, dpbam):
    (place / "x.npz").rename("y.npz")
    assert dpbam("evaluate", place / "run", "--data", "y.npz").code == 0


def test_a_column_of_sub_groups_may_be_added(place, dpbam):
    sex = np.array(["f", "m"])[PEOPLE // 2 % 2]
    np.savez("y.npz", person=PEOPLE, sex=sex, **ARRAYS)
    for flags in (["--by", "sex"], ["--by", "sex", "--by", "person"], []):
        assert dpbam("evaluate", place / "run", "--data", "y.npz", *flags).code == 0


OTHERS = {
    "another unit": ({"person": PEOPLE, "room": PEOPLE // 3}, 0, ["--unit", "room"]),
    "without persons": ({}, 0, []),
    "other persons": ({"person": PEOPLE[::-1]}, 0, []),
    "persons less": ({"person": PEOPLE}, 40, []),
}


@pytest.mark.parametrize(("columns", "without", "flags"), OTHERS.values(), ids=OTHERS)
def test_another_cut_is_refused(columns, without, flags, place, dpbam):
    np.savez("x.npz", **{name: v[without:] for name, v in (ARRAYS | columns).items()})
    args = ["evaluate", place / "run", "--data", "x.npz", "--save", *flags]
    one_sentence(dpbam(*args), OTHER)
    assert not (place / "run" / "non-private" / "evaluation-test.json").exists()
    ended = dpbam(*args, "--split", "all", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["test_set_of_the_run"] is False
    assert not (place / "run" / "non-private" / "evaluation-test.json").exists()


def test_another_file_of_that_name_in_the_working_folder(place, dpbam):
    np.savez("x.npz", **ARRAYS)
    one_sentence(dpbam("evaluate", place / "run"), OTHER)


def test_a_folder_without_facts_needs_the_unit(place, dpbam):
    best = published(place)
    for flags in ([], ["--unit", "record"]):
        ended = dpbam("evaluate", best, "--data", "../a/x.npz", "--save", *flags)
        one_sentence(ended, UNKNOWN)
        assert "pass --unit person, or --split all" in ended.err
    assert not (best / "non-private").exists()
    for _ in range(2):  # also when there is something in non-private
        ended = dpbam("evaluate", best, "--data", "../a/x.npz", "--unit", "person", "--save")
        assert ended.code == 0, ended.err
    assert saved(best)["test_set_of_the_run"] is False  # nothing tells whether it is


def test_a_model_alone_needs_the_unit(place, dpbam):
    (published(place) / "privacy-statement.json").unlink()
    one_sentence(dpbam("evaluate", place / "best", "--data", "../a/x.npz"), "pass the --unit of")
    ended = dpbam("evaluate", place / "best", "--data", "../a/x.npz", "--unit", "person")
    assert ended.code == 0, ended.err


def test_a_test_split_of_the_sources_own_needs_no_unit(place, dpbam):
    best = published(place)
    test = {f"test_{name}": values[:40] for name, values in ARRAYS.items()}
    np.savez("other.npz", **{f"train_{k}": v for k, v in ARRAYS.items()}, **test)
    for run in (place / "run", best):
        ended = dpbam("evaluate", run, "--data", "other.npz", "--save")
        assert ended.code == 0, ended.err
        assert saved(run)["test_set_of_the_run"] is False


def test_a_published_test_set_is_known_by_name_and_size(place, dpbam):
    best = published(place)
    path = best / "privacy-statement.json"
    statement = json.loads(path.read_text())
    statement["evaluated_on"] |= {"set": "other.npz/test", "records": 40}
    path.write_text(json.dumps(statement))
    for records in (40, 30):
        test = {f"test_{name}": values[:records] for name, values in ARRAYS.items()}
        np.savez("other.npz", **{f"train_{k}": v for k, v in ARRAYS.items()}, **test)
        assert dpbam("evaluate", best, "--data", "other.npz", "--save").code == 0
        assert saved(best)["test_set_of_the_run"] is (records == 40)


@pytest.mark.parametrize("mark", [True, False, None])
def test_only_the_runs_test_set_is_published(mark, place, dpbam):
    """Also not what an earlier version saved, which did not check."""
    run, path = place / "run", place / "run" / "non-private" / "evaluation-test.json"
    assert dpbam("evaluate", run, "--data", place / "x.npz", "--save").code == 0
    path.write_text(json.dumps(saved(run) | {"test_set_of_the_run": mark}))
    public = read_run(run).publishable(public_test_data=True)
    assert (public.evaluation is not None) is (mark is True)
    assert public.metrics
    assert read_run(run).publishable(public_test_data=False).evaluation is None


def test_thresholds_from_public_data_need_no_unit(place):
    """They are of the part to train on, of data that may have no such column."""
    run = place / "run"
    np.savez("public.npz", **ARRAYS)
    loaded = load_run_model(run)
    part = command._load(run, loaded, "public.npz", "train", None, None, None)
    assert len(part) == 96
    assert stored_config(run).unit == "person"


FINDINGS = ("Atelectasis", "Cardiomegaly", "Pleural_Thickening")


@pytest.mark.parametrize("thresholds", [{}, {"Cardiomegaly": 0.3}])
def test_findings_are_readable_at_80_columns(
    thresholds: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(base, "_RESAMPLES", 2)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (40, 3))
    data = from_arrays(np.zeros((40, 8, 8), np.uint8), labels, class_names=FINDINGS)
    sexes = {"sex": np.array(["f", "m"] * 20)}
    task = make_task("multi-label", FINDINGS)
    result = task.evaluate(rng.normal(size=(40, 3)), labels, sexes, thresholds)
    show(data, result, task.words)
    shown = capsys.readouterr().out
    for word in (*FINDINGS, "sensitivity", "specificity", "precision", "records"):
        assert f" {word} " in shown
    said = (
        "Atelectasis 0.500, Cardiomegaly 0.300" if thresholds else "threshold                0.500"
    )
    assert said in shown
    assert max(map(len, shown.split("These figures")[0].splitlines())) <= 80
