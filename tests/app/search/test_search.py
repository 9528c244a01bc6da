"""A search: what is refused, what is varied, what is stated, and that a killed one resumes."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpbam.app.cli import main
from dpbam.app.cli.search import show
from dpbam.app.report import ReportError, write_report
from dpbam.app.runs import ConfigError, RunError, execute, load_run_model
from dpbam.app.runs.documents import Statement
from dpbam.app.runs.folder import MARK, PUBLISHABLE, RunFolder
from dpbam.app.runs.pool import StoppedError
from dpbam.app.runs.predict import predict_files
from dpbam.app.search import study as studies
from dpbam.app.search.search import Search, parse_space
from dpbam.app.search.selection import search_epsilon
from dpbam.app.search.study import (
    Score,
    SearchResult,
    Study,
    StudyFile,
    conclude,
    do_trials,
    draw_study,
    number_of_trials,
    score,
    whole_epsilon,
)
from dpbam.data.dataset import TASKS
from dpbam.privacy.accounting import Charge
from dpbam.privacy.ledger import Ledger
from dpbam.tasks.base import make_task
from dpbam.tasks.scores import metric_label, metric_text
from end_to_end.kill_driver import plant
from tests.app.runs.test_task_combinations import METRICS, config_of, write_data
from tests.app.runs.test_task_combinations import SETTINGS as TASK_SETTINGS
from tests.data.helpers import random_pixels
from tests.forked import command

from .test_selection import fits

BEST = "best"
SETTINGS = {
    "data": "digits", "model": "mlp", "model_options": {"hidden": [8]}, "noise_multiplier": 2.0,
    "delta": 1e-4, "epochs": 0.5, "batch_size": 256, "accountant": "rdp",
}  # fmt: skip


def a_search(**changes: Any) -> Search:
    values = {"settings": SETTINGS, "pay": "nothing", "trials": 3}
    return Search(**{**values, "space": parse_space(["lr=1e-3..1e-1:log"]), **changes})


def varied(name: str, text: str) -> dict[str, Any]:
    fixed = {k: v for k, v in SETTINGS.items() if k != name}
    return {"settings": fixed, "space": parse_space([f"{name}={text}"])}


def accounted(**changes: Any) -> Search:
    return a_search(**{"pay": "accounted", **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (varied("batch_size", "64,128"), "batch_size may change what a trial costs"),
        (varied("epochs", "1..2"), "epochs may change what a trial costs"),
        ({"settings": {**SETTINGS, "budget": "b.json"}}, "budget"),
        ({"settings": {**SETTINGS, "release_norms": 50.0}}, "release_norms"),
        ({"score_noise": 0.0}, "score_noise"),
        ({"settings": {**SETTINGS, "method": "sgd", "noise_multiplier": None}}, "no privacy"),
    ],
)
def test_what_cannot_be_accounted_is_refused(changes: dict[str, Any], says: str) -> None:
    accounted()  # which is fine
    with pytest.raises(ValueError, match=says):
        accounted(**changes)


@pytest.mark.parametrize("other", [Charge(1.0, 0.1, 5), Charge(2.0, 0.2, 5)])
def test_accounted_trials_of_several_costs_are_not_counted(other: Charge) -> None:
    one = Charge(2.0, 0.1, 9)
    assert whole_epsilon(accounted(), [one, one._replace(steps=5)], 1e-4) > 0
    with pytest.raises(ValueError, match="several noise multipliers"):
        whole_epsilon(accounted(), [one, other], 1e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pay": "later"}, "pay"),
        ({"settings": {**SETTINGS, "method": "bma"}}, "did you mean 'bam'"),
        ({"space": {}}, "nothing to vary"),
        ({"settings": {**SETTINGS, "lr": 0.1}}, "both fixed and varied"),
        ({"settings": {"data": "digits"}}, "epsilon"),
        ({"score_noise": 9.0}, "accounted"),
    ],
)
def test_wrong_searches_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        a_search(**changes)


def test_the_number_of_trials_of_a_search_is_drawn_as_claimed() -> None:
    seeds = iter(range(10**6))

    def draw(trials: int = 8, accounted: bool = True) -> int:
        search: Any = SimpleNamespace(
            accounted=accounted, trials=trials, seed=next(seeds), method="dp-sgd"
        )
        return number_of_trials(search)

    assert fits(draw, 8)
    assert not fits(lambda: draw(accounted=False), 8)  # a fixed number
    assert not fits(lambda: draw(9), 8)
    # a search that is begun again where its number was small
    assert not fits(lambda: max(draw(), draw()), 8)


def test_an_unseeded_number_is_not_always_the_same() -> None:
    search = accounted(trials=50)
    assert len({number_of_trials(search) for _ in range(20)}) > 1


@pytest.mark.parametrize(("reached", "correct"), [(0.7, 140), (math.nan, 0)])
def test_a_noised_score_has_the_noise_that_is_charged(reached: float, correct: int) -> None:
    """Also that of a training that diverged; the control is a score without noise."""
    search = accounted(score_noise=4.0)
    result: Any = SimpleNamespace(evaluations=[SimpleNamespace(score=reached, records=200)])

    def is_noised(search: Search) -> bool:
        noise = random.Random(0)
        counts = 200 * np.array([score(search, result, noise) for _ in range(4000)])
        if not np.isfinite(counts).all():
            return False
        near = abs(counts.mean() - correct) < 4 * 4 / 4000**0.5
        return near and bool(abs(counts.std() / 4.0 - 1) < 0.06)

    assert is_noised(search)
    assert not is_noised(replace(search, score_noise=None))


def test_a_public_score_is_that_of_the_records_and_the_worst_of_a_training_that_diverged() -> None:
    for reached, expected in ((0.7, 0.7), (math.nan, -math.inf)):
        result: Any = SimpleNamespace(evaluations=[SimpleNamespace(score=reached, records=200)])
        assert score(accounted(), result, random.Random(0)) == expected


def test_one_record_changes_the_count_of_a_net_that_diverged_by_one_at_most() -> None:
    """What the noise of a score is calibrated to, with outputs that are not numbers."""
    task = make_task("single-label", ["a", "b", "c"])
    rng = np.random.default_rng(0)
    outputs, labels = rng.normal(size=(20, 3)), rng.integers(0, 3, 20)

    def right(rows: slice) -> int:
        return round(task.scores(outputs[rows], labels[rows])["accuracy"] * len(labels[rows]))

    for broken in (math.nan, math.inf, -math.inf):
        outputs[-1] = broken  # one record alone is enough for outputs that are not finite
        assert abs(right(slice(20)) - right(slice(19))) <= 1
        assert right(slice(20)) > 1


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Trials that train nothing: accuracy falls with the distance of lr from 0.01."""
    done: list[Any] = []

    def execute(config: Any, out: Path, *, resume: bool) -> Any:
        done.append((config, out))
        assert (out / MARK).exists()  # before the first step
        accuracy = 1 / (1 + abs(np.log(config.lr / 0.01))) - (config.lam or 0)
        return SimpleNamespace(
            evaluations=[SimpleNamespace(score=accuracy, records=100)], metric="accuracy",
            epsilon=1.0, delta=1e-4, seconds=0.0,
        )  # fmt: skip

    monkeypatch.setattr(studies, "execute", execute)
    return done


def test_every_trial_trains_with_what_was_drawn(stub: list[Any], tmp_path: Path) -> None:
    settings = {**SETTINGS, "method": "bam"}
    space = parse_space(["lr=1e-3..1e-1:log", "lam=0.01..0.1"])
    study = do_trials(a_search(settings=settings, space=space, trials=4), tmp_path)
    drawn = [(trial["lr"], trial["lam"]) for trial in study.file.trials]
    assert len(set(drawn)) == 4
    assert [(config.lr, config.lam) for config, _ in stub] == drawn
    assert {config.method for config, _ in stub} == {"bam"}


def test_the_same_command_again_keeps_finished_trials(stub: list[Any], tmp_path: Path) -> None:
    do_trials(a_search(), tmp_path)
    do_trials(a_search(), tmp_path)
    assert len(stub) == 3
    with pytest.raises(ConfigError, match="begun with other trials"):
        do_trials(a_search(trials=4), tmp_path)


def test_a_trial_left_behind_keeps_its_parameters(
    stub: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = a_search(trials=2)
    drawn = Study(search, tmp_path).file.trials
    trained = studies.execute

    def killed(config: Any, out: Path, *, resume: bool) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(studies, "execute", killed)
    with pytest.raises(StoppedError):
        do_trials(search, tmp_path)
    monkeypatch.setattr(studies, "execute", trained)
    do_trials(search, tmp_path)
    assert [config.lr for config, _ in stub] == [trial["lr"] for trial in drawn]


def test_a_seed_draws_the_same_study_and_none_another_one() -> None:
    seeded = accounted(settings={**SETTINGS, "seed": 1}, trials=20)
    assert draw_study(seeded) == draw_study(seeded)
    other = replace(seeded, settings={**SETTINGS, "seed": 2})
    assert draw_study(other).trials != draw_study(seeded).trials
    assert draw_study(accounted(trials=20)).trials != draw_study(accounted(trials=20)).trials


def test_a_seeded_search_may_vary_what_a_run_needs() -> None:
    settings = {k: v for k, v in SETTINGS.items() if k != "noise_multiplier"} | {"seed": 1}
    search = a_search(settings=settings, space=parse_space(["epsilon=1..8"]))
    assert len(draw_study(search).trials) == 3


def test_shares_of_a_study_are_every_trial_once(stub: list[Any], tmp_path: Path) -> None:
    """Two machines with a copy of one study: neither concludes alone, together they do."""
    search = a_search(trials=5)
    drawn = [trial["lr"] for trial in Study(search, tmp_path / "a").file.trials]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for machine, name in ((1, "a"), (2, "b")):
        study = do_trials(search, tmp_path / name, shard=(machine, 2))
        with pytest.raises(RunError, match="of 5 trials are missing: run the other shares"):
            conclude(study)
    assert [config.lr for config, _ in stub] == drawn[::2] + drawn[1::2]
    shutil.copytree(
        tmp_path / "b/non-private/trials", tmp_path / "a/non-private/trials", dirs_exist_ok=True
    )
    assert do_trials(search, tmp_path / "a").lacking() is None
    assert len(stub) == 5


@pytest.mark.parametrize("trials", [5, 9])
def test_a_share_of_another_study_is_refused(stub: list[Any], tmp_path: Path, trials: int) -> None:
    """Two machines that each drew a study, of equal settings or not: the trials are others."""
    do_trials(a_search(trials=5), tmp_path / "a", shard=(1, 2))
    do_trials(a_search(trials=trials), tmp_path / "b", shard=(2, 2))
    shutil.copytree(
        tmp_path / "b/non-private/trials", tmp_path / "a/non-private/trials", dirs_exist_ok=True
    )
    trained = len(stub)
    for shard in ((1, 1), (2, 2)):
        with pytest.raises(RunError, match=r"a/non-private/trials/0001\.json is of another study"):
            do_trials(a_search(trials=5), tmp_path / "a", shard=shard)
    with pytest.raises(RunError, match=r"0001\.json is of another study"):
        conclude(Study(a_search(trials=5), tmp_path / "a"))
    assert len(stub) == trained


def test_a_damaged_study_is_one_sentence(tmp_path: Path) -> None:
    search = a_search()
    path = Study(search, tmp_path).inner / "study.json"
    path.write_text('{"search": {}, "trials": 3}')
    with pytest.raises(RunError, match=r"study.json is damaged \(trials: "):
        Study(search, tmp_path)


def test_zero_trials_release_nothing(
    stub: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "number_of_trials", lambda *a: 0)
    search = accounted()
    result = conclude(do_trials(search, tmp_path))
    assert result.best is None
    assert not stub


@pytest.fixture(scope="module")
def paid(tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchResult, Path]:
    """A real accounted search, seeded, of a few trials."""
    out = tmp_path_factory.mktemp("search")
    settings = {k: v for k, v in SETTINGS.items() if k not in ("noise_multiplier", "delta")}
    search = accounted(
        settings={**settings, "epsilon": 2.0, "seed": 3}, trials=4, score_noise=8.0
    ).calibrated()
    return conclude(do_trials(search, out)), out


def test_epsilon_covers_the_search_and_no_more_is_asked_for(
    paid: tuple[SearchResult, Path],
) -> None:
    result, out = paid
    assert result.trial is not None
    spent = Ledger(1e-6, path=result.trial.ledger).charges()[0]
    trial = Charge(spent.noise_multiplier, 256 / 1438, spent.steps)
    whole = search_epsilon(trial, 1e-6, 4, 8.0)
    statement = json.loads(RunFolder(out / BEST).statement_json.read_text())
    said = json.loads((out / "result.json").read_text())
    assert said["epsilon"] == statement["epsilon"] == pytest.approx(whole)
    assert 1.99 < whole <= 2.0
    assert statement["tuned_on"].startswith("accounted: this is the best of a random number")
    assert "RDP" in statement["accountant"]
    assert "by Renyi divergences" in statement["trade_off"]["not_given"]


def test_the_best_alone_may_be_released(paid: tuple[SearchResult, Path]) -> None:
    result, out = paid
    folders = [result.study.folder(trial.number) for trial in result.study.scores()]
    assert len(folders) > 1
    for folder in folders:
        assert json.loads(folder.statement_json.read_text())["may_be_published"] == []
        assert (folder.path / MARK).exists()
    best = RunFolder(out / BEST)
    listed = json.loads(best.statement_json.read_text())["may_be_published"]
    assert sorted(listed) == sorted(p.name for p in best.path.iterdir())
    assert result.trial is not None
    assert best.weights.read_bytes() == result.trial.weights.read_bytes()
    assert load_run_model(best.path).facts.model == "mlp"


def published(out: Path) -> dict[str, bytes]:
    """Every file that a search leaves outside its non-private folder, by name."""
    inner = out / "non-private"
    paths = [p for p in out.rglob("*") if p.is_file() and not p.is_relative_to(inner)]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in paths}


def test_published_files_reveal_nothing_about_other_trials(paid: tuple[SearchResult, Path]) -> None:
    result, out = paid
    files = published(out)
    assert sorted(files) == sorted(["result.json", *(f"best/{name}" for name in PUBLISHABLE)])
    text = b" ".join(files.values()).decode(errors="replace")
    secrets = [str(out), "trials/"]
    for trial in result.study.scores():
        facts = result.study.folder(trial.number).read_facts()
        secrets += [str(facts.config.seed), f"{trial.number:04d}/"]
        secrets += [] if trial == result.best else [facts.run, facts.initial_weights]
    assert len(secrets) > 8
    assert not [secret for secret in secrets if secret in text]
    said = json.loads(files["result.json"])
    assert said["number_of_trials"] == "secret, drawn from: Poisson, mean 4"
    unchosen = {trial.score for trial in result.study.scores()} - {said["best"]["score"]}
    assert unchosen
    assert not any(str(score) in text for score in unchosen)


def test_a_report_for_publication_is_one_of_the_winner(
    paid: tuple[SearchResult, Path], tmp_path: Path
) -> None:
    result, out = paid
    page = write_report([out / BEST], tmp_path / "page.html", publishable=True).read_text()
    assert "this is the best of a random number of independent trials" in page
    assert result.trial is not None
    assert str(result.trial.read_facts().config.seed) not in page
    assert f"{result.trial.path.name}/" not in page
    with pytest.raises(ReportError, match="lets nothing be published"):
        write_report([result.trial.path], tmp_path / "page.html", publishable=True)


@pytest.mark.parametrize("pay", ["accounted", "nothing"])
def test_what_is_published_is_a_function_of_the_winner_alone(tmp_path: Path, pay: str) -> None:
    """The same winner as one of two trials and as the eighth of twelve: the same bytes.

    An unaccounted search is the control: it states how many trials there were.
    """
    search = a_search(pay=pay)
    settings = {"lr": 0.01}
    execute(search.config(settings), tmp_path / "winner")

    def concluded(name: str, count: int, winner: int) -> dict[str, bytes]:
        out, drawn = tmp_path / name, [settings] * count
        path = out / "non-private" / "study.json"
        path.parent.mkdir(parents=True)
        file = StudyFile(search=search.to_mapping(), trials=drawn)
        path.write_text(file.model_dump_json())
        study = Study(search, out)
        for number in range(count):
            folder = study.folder(number).path
            shutil.copytree(tmp_path / "winner", folder)
            value = 0.9 if number == winner else 0.1 + number / 100
            trial = Score(
                study=study.file.digest, number=number, settings=settings, score=value,
                metric="accuracy",
                epsilon=1.0, delta=1e-4, charges=[(2.0, 256 / 1438, 3)],
            )  # fmt: skip
            folder.with_suffix(".json").write_text(trial.model_dump_json())
        conclude(study)
        return published(out)

    same = concluded("few", 2, 0) == concluded("many", 12, 7)
    assert same == (pay == "accounted")


def test_an_unaccounted_search_is_marked_in_every_file(tmp_path: Path) -> None:
    search = a_search(trials=2)
    result = conclude(do_trials(search, tmp_path))
    said = json.loads((tmp_path / "result.json").read_text())
    assert said["epsilon_covers_the_search"] is False
    assert said["statement"].startswith("NOT ACCOUNTED")
    assert said["epsilon_of_all_trials_together"] > said["epsilon"]
    assert result.trial is not None
    for folder in (result.trial, RunFolder(tmp_path / BEST)):
        assert "NOT ACCOUNTED" in folder.statement.read_text()


def test_a_search_without_privacy_lets_nothing_be_published(tmp_path: Path) -> None:
    """The control, a private method, is test_the_best_alone_may_be_released."""
    settings = {**SETTINGS, "method": "sgd", "noise_multiplier": None}
    conclude(do_trials(a_search(settings=settings, trials=1), tmp_path))
    best = RunFolder(tmp_path / BEST)
    assert json.loads(best.statement_json.read_text())["may_be_published"] == []


def test_nothing_of_a_trial_may_be_published_whatever_is_run_on_it(tmp_path: Path) -> None:
    """Its epsilon does not cover the search: neither before the search ends nor if it is resumed.

    The control, which has no mark, is the same run in a folder of its own.
    """
    search = a_search(settings=SETTINGS, trials=1)
    study = do_trials(search, tmp_path / "search")  # not concluded
    trial = study.folder(0)
    assert Statement.read(trial.statement_json).may_be_published == []
    config = trial.read_facts().config
    execute(config, trial.path, resume=True)
    assert Statement.read(trial.statement_json).may_be_published == []
    execute(config, tmp_path / "alone")
    alone = Statement.read(RunFolder(tmp_path / "alone").statement_json)
    assert alone.may_be_published[: len(PUBLISHABLE)] == list(PUBLISHABLE)


COMMAND = [
    "search", "--data", "digits", "--model", "mlp", "--noise-multiplier", "4", "--accountant",
    "rdp", "--model-option", "hidden=[8]", "--epochs", "1", "--batch-size", "180",
    "--checkpoint-every", "0", "--pay", "nothing",
    "--trials", "2", "--vary", "lr=1e-3..1e-1:log", "--json",
]  # fmt: skip


@pytest.mark.slow
def test_a_killed_search_resumes_its_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search"
    again = [*COMMAND, "--out", str(out)]
    second = RunFolder(out / "non-private" / "trials" / "0001")
    told = tmp_path / "told.txt"
    killed = partial(plant, "after the optimiser's step", 8 + 6)  # the second trial's sixth
    process = command(*again, cwd=tmp_path, stdout=told, stderr=told, first=killed)
    process.join()
    assert process.exitcode == -9, told.read_text()
    lr = json.loads(second.facts.read_text())["config"]["lr"]
    first = (out / "non-private" / "trials" / "0000" / "ledger.jsonl").read_bytes()
    before = second.ledger.read_bytes()

    assert main(again) == 0

    files = sorted((out / "non-private" / "trials").glob("*.json"))
    rows = [json.loads(path.read_text()) for path in files]
    assert len(rows) == 2
    assert rows[1]["settings"]["lr"] == lr  # the trial that was killed, not another
    assert (out / "non-private" / "trials" / "0000" / "ledger.jsonl").read_bytes() == first  # kept
    assert second.ledger.read_bytes().startswith(before)  # from its checkpoint, all steps counted
    steps = json.loads(second.statement_json.read_text())["steps"]
    assert len(second.ledger.read_bytes().splitlines()) <= steps + 2
    assert json.loads(capsys.readouterr().out)["best"]["score"] == max(row["score"] for row in rows)


QUICK = ("multi-label",)


def task_search(task: str, folder: Path, **changes: Any) -> Search:
    """Two trials of dp-sgd; classes are weighted by counts that every trial releases."""
    weights = "none" if task == "regression" else "counts"
    row = {name: values[0] for name, values in TASK_SETTINGS.items()} | {"weights": weights}
    settings = config_of({**row, "task": task}, write_data(folder, task))
    del settings["method"], settings["epsilon"]
    settings |= {"noise_multiplier": 2.0, "delta": 1e-3, "epochs": 0.5}
    values = {"pay": "nothing", "trials": 2, "settings": settings}
    return Search(**{**values, "space": parse_space(["lr=1e-3..1e-1:log"]), **changes})


@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=() if t in QUICK else pytest.mark.slow) for t in TASKS]
)
@pytest.mark.slow
def test_a_search_finds_and_publishes_the_best_model_of_a_task(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search, out = task_search(task, tmp_path), tmp_path / "search"
    lines: list[str] = []
    result = conclude(do_trials(search, out, log=lines.append))
    assert result.trial is not None
    _check_shown(result, lines, METRICS[task][0], capsys)
    last = json.loads(result.trial.metrics.read_text().splitlines()[-1])
    assert json.loads((out / "result.json").read_text())["best"]["score"] == last[METRICS[task][0]]
    best = RunFolder(out / BEST)
    stated = json.loads(best.statement_json.read_text())
    assert sorted(stated["may_be_published"]) == sorted(p.name for p in best.path.iterdir())
    assert best.class_counts.exists() == (task != "regression")
    np.savez(tmp_path / "new.npz", images=random_pixels(2, 5, (8, 8)))
    assert len(list(predict_files(load_run_model(best.path), [tmp_path / "new.npz"]))) == 2


def _check_shown(
    result: SearchResult, lines: list[str], metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every score is of its metric's kind: a percentage only where it is an accuracy."""
    assert result.best is not None
    value = result.best.score
    text = f"{metric_label(metric)} {metric_text(metric, value)}"
    assert any(text in line for line in lines)
    capsys.readouterr()
    show(result)
    shown = capsys.readouterr().out
    assert text in shown
    assert ("%" in shown) == (metric == "accuracy")


@pytest.mark.parametrize(
    ("task", "changes", "says"),
    [
        ("regression", {}, "r2 has no such bound"),
        ("single-label", {"release_counts": None, "unit": "patient"}, "one patient may have many"),
    ],
)
def test_a_noised_score_is_refused_where_one_unit_s_effect_has_no_bound(
    task: str, changes: dict[str, Any], says: str, stub: list[Any], tmp_path: Path
) -> None:
    search = task_search(task, tmp_path)
    search = replace(search, settings={**search.settings, **changes}, pay="accounted")
    do_trials(search, tmp_path / "public score")  # which is fine
    trained = len(stub)
    with pytest.raises(ConfigError, match=says):
        do_trials(replace(search, score_noise=4.0), tmp_path / "noised score")
    assert len(stub) == trained
