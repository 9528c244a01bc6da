"""``python -m reproduce`` at the command line: what it writes, what it prints, what it refuses."""

from __future__ import annotations

import json
import shutil

import pytest

from dpbam.app.cli.progress import RunsDisplay
from reproduce import recipes
from reproduce.command import relative_cost
from reproduce.records import missing
from tests.app.cli.helpers import one_sentence
from tests.reproduce.tiny import TEXT, tiny
from tests.results import finished

RECIPES = recipes.recipes_folder()
OPTIONS = {"epochs": 0.2, "clip_norms": "[1.0]", "flatness": "true"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of recipes in which the methods' recipe is a tiny one."""
    text = TEXT.format(**OPTIONS).replace("seeds = 2", "seeds = 1")
    for scale in ("pocket", "desk"):
        (tmp_path / "recipes" / scale).mkdir(parents=True)
        for name in ("methods", "fig2-resnet9"):
            (tmp_path / "recipes" / scale / f"{name}.toml").write_text(text)
    shutil.copy(recipes.recipes_folder() / "paper.toml", tmp_path / "recipes")
    monkeypatch.setattr(recipes, "recipes_folder", lambda: tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_nothing_to_a_verdict_and_not_twice(place, reproduce):
    for path in RECIPES.glob("*/*.toml"):  # the page reports on all of them
        copy = place / "recipes" / path.parent.name / path.name
        copy.parent.mkdir(exist_ok=True)
        if not copy.exists():  # the tiny ones stay
            shutil.copy(path, copy)
    ended = reproduce("fig2")
    assert ended.code == 0, ended.err
    assert "3/3 bam" in ended.err
    assert "inconclusive" in ended.out
    pages = reproduce("all", "--only-report", "--docs", "docs")
    assert pages.code == 0, pages.err
    assert (place / "docs" / "results.md").exists()
    result = json.loads((place / "reproduce" / "results" / "pocket" / "fig2.json").read_text())
    assert result["provenance"]["runs"] == 3
    assert "## Figure 2" in (place / "reproduce" / "pages" / "pocket.md").read_text()
    assert (place / "reproduce" / "results" / "pocket" / "fig2.svg").exists()
    assert (
        "No record yet: `tuning`, `table1`"
        in (place / "reproduce" / "pages" / "pocket.md").read_text()
    )
    assert not (place / "reproduce" / "pages" / "desk.md").exists()  # no run of that scale
    again = reproduce("fig2")
    assert again.code == 0
    assert "3/3" not in again.err  # nothing was trained


def test_only_trains_what_matches(place, reproduce):
    ended = reproduce("fig2", "--only", "dp-sgd-*", "--only", "*-seed-7")
    one_sentence(ended, "'*-seed-7' matches no run")
    ended = reproduce("fig2", "--only", "dp-sgd-*")
    assert ended.code == 0, ended.err
    lines = (place / "reproduce/results/pocket/methods.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    assert [record["run"] for record in records] == ["dp-sgd-clip_norm-1-seed-0"]


def test_a_dry_run_trains_nothing(place, reproduce):
    ended = reproduce("fig2", "--dry-run")
    assert ended.code == 0, ended.err
    assert "0/1" in ended.out
    assert "Missing: 5 s on this machine" in ended.out
    assert "GPU hours" in ended.out
    assert not (place / "reproduce").exists()
    assert not (place / "runs").exists()


def test_steps_keep_nothing(place, reproduce):
    ended = reproduce("fig2", "--steps", "1")
    assert ended.code == 0, ended.err
    assert ended.out.count("1 steps of") == 3
    assert not (place / "reproduce").exists()


def test_only_report_names_what_is_missing(place, reproduce):
    ended = reproduce("fig2", "--only-report")
    assert (ended.code, ended.out.strip()) == (0, "fig2: no finished run yet")


def test_a_recipe_of_ones_own_is_trained_and_judged(place, reproduce):
    (place / "mine.toml").write_text(TEXT.format(**{**OPTIONS, "flatness": "false"}))
    ended = reproduce("--recipe", "mine.toml")
    assert ended.code == 0, ended.err
    result = json.loads((place / "reproduce/results/own/mine.json").read_text())
    assert result["claims"][1]["claim"].endswith("bam is more accurate than dp-sgd")
    assert result["provenance"]["runs"] == result["provenance"]["asked"] == 6
    assert {claim["verdict"] for claim in result["claims"]} == {"inconclusive"}
    again = reproduce("--recipe", "mine.toml")
    assert again.out == ended.out
    assert "6/6" not in again.err  # nothing was trained


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "give an experiment, such as table1, or a recipe with --recipe FILE"),
        (["fig2", "--recipe", "mine.toml"], "give an experiment, such as table1, or a recipe"),
        (["--recipe", "none.toml"], "there is no recipe none.toml"),
        (["fig8"], "there is no experiment 'fig8': did you mean 'fig7'?"),
        (["fig2", "--scale", "huge"], "--scale must be pocket, desk or full"),
        (["fig1", "--scale", "desk"], "fig1 has no recipe of scale desk: choose pocket"),
        (["fig2", "--seeds", "0"], "seeds"),
        (["fig2", "--only", "sam-*"], "--only 'sam-*' matches no run: a name is such as dp-sgd-"),
        (["table1"], "there is no pocket recipe"),
        (["fig2", "--shard", "3/2"], "--shard must be I/N with 1 <= I <= N"),
        (
            ["fig2", "--docs", "docs"],
            "--docs writes pages about several experiments, not about fig2",
        ),
        (["all", "--docs", "docs", "--seeds", "2"], "--docs writes pages of all seeds"),
        (["fig2", "--shard", "2"], "--shard must be I/N with 1 <= I <= N"),
    ],
)
def test_what_cannot_be_done_is_refused(place, reproduce, args, says):
    one_sentence(reproduce(*args), says)


def test_costs_and_lines(tmp_path, capsys):
    jobs = missing([tiny(tmp_path)], tmp_path, 1)
    sgd, sat, bam = costs = [relative_cost(job) for job in jobs]
    assert sgd == sat == pytest.approx(0.2 * 1438 * 64)
    assert bam == pytest.approx(2.2 * sgd)
    with RunsDisplay([run.name for _, run in jobs], costs) as progress:
        progress.progress(0, 1, 4)
        progress.finished(1, finished("dp-sat", 0, 0.5))
        progress.progress(0, 0, 4)  # a late message does not move the bar back
        task = progress._bar.tasks[0]
        assert task.completed == pytest.approx(0.25 * sgd + sat)
        assert task.total == pytest.approx(sgd + sat + bam)
    said = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert said == ["1/3 dp-sat-clip_norm-1-seed-0: 50.0% in 1 s"]
