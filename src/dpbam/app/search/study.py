"""The study of a search: its trials are drawn once, trained in run folders, and scored.

``non-private/study.json`` has the search's settings and the hyper-parameters of every trial. All of
them, and the number of trials of each stage, are drawn before the first training, from the system's
entropy (from the seed, if the search has one). So trials are independent of one another and of the
data, and the same command resumes: a trial that has a score is kept, one that has a run folder
resumes from its last checkpoint, with the hyper-parameters that it had.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dpbam.app.runs import ConfigError, RunError, RunFolder, RunResult, execute
from dpbam.app.runs.files import locked, read_json, write_atomic
from dpbam.app.runs.pool import Send, run_tasks
from dpbam.app.search.search import Search, Stage
from dpbam.privacy.ledger import Ledger
from dpbam.tasks.scores import metric_label, metric_text

Model = TypeVar("Model", bound=BaseModel)

_README = """# Not to be published

The folders here are the trials of a search, for its operator only. What may be published of them
is copied into the folder best when the search has ended.
"""


class Score(BaseModel):
    """What a finished trial came to: the file ``NNNN.json`` next to its run folder."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    method: str
    number: int
    settings: dict[str, Any]
    score: float
    metric: str
    epsilon: float
    delta: float
    seconds: float
    charges: tuple[tuple[float, float, int], ...]


class StudyFile(BaseModel):
    """``study.json``: the search, and the hyper-parameters of every trial by method."""

    model_config = ConfigDict(frozen=True)

    search: dict[str, Any]
    trials: dict[str, list[dict[str, Any]]]


class Study:
    """The trials of a search in its folder: drawn when it is first opened, then the same.

    Args:
        search: the search, calibrated.
        out: its folder.

    Raises:
        ConfigError: if the folder has a search with other settings.
    """

    def __init__(self, search: Search, out: Path) -> None:
        self.search, self.out = search, out
        self.inner = out / "non-private"
        self.inner.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.inner / "study.json"
        with locked(self.inner / ".study.lock"):
            if not path.exists():
                write_atomic(path, draw_study(search).model_dump_json(indent=1))
        self.file = _read(path, StudyFile)
        _check_same(self.file.search, search.to_mapping())

    def count(self, stage: Stage) -> int:
        """Return K, the number of trials of a stage."""
        return len(self.file.trials[stage.method])

    def folder(self, method: str, number: int) -> Path:
        """Return a trial's run folder."""
        return self.inner / "trials" / method / f"{number:04d}"

    def scores(self, stage: Stage) -> list[Score]:
        """Return the finished trials of a stage, in order."""
        paths = [self._score_file(stage, number) for number in range(self.count(stage))]
        return [_read(path, Score) for path in paths if path.exists()]

    def missing(self, stage: Stage) -> list[int]:
        """Return the numbers of the trials of a stage that have no score yet."""
        return [k for k in range(self.count(stage)) if not self._score_file(stage, k).exists()]

    def best(self, stage: Stage) -> Score | None:
        """Return the trial with the best score, the first of a tie; None if there is none."""
        return max(self.scores(stage), key=lambda t: (t.score, -t.number), default=None)

    def lacking(self) -> str | None:
        """Say in one sentence which trials are missing; None if all are finished."""
        for stage in self.search.stages():
            if missing := len(self.missing(stage)):
                return (
                    f"{missing} of {self.count(stage)} trials of {stage.method} are missing: run "
                    "the other shares, copy their folders non-private/trials into this one, and "
                    "run the command again"
                )
        return None

    def do_trial(self, stage: Stage, number: int, log: Send) -> None:
        """Train a trial, or resume it, and write its score."""
        # the first stage decides what later ones do not vary
        first = self.search.stages()[0]
        leader = None if stage == first else self.best(first)
        hyper_parameters = self.file.trials[stage.method][number]
        settings = {**(leader.settings if leader else {}), **hyper_parameters}
        seed = self.search.settings.get("seed")
        # trials with one seed would share initial weights and noise: each derives another
        seeds = {} if seed is None else {"seed": trial_seed(seed, stage.method, number)}
        folder = RunFolder(self.folder(stage.method, number))
        config = self.search.config(stage, settings, **seeds)
        result = execute(config, folder.path, resume=folder.started)
        value = score(self.search, result, _noise_source(seed, stage, number))
        charges = tuple(Ledger(0.5, path=folder.ledger).charges())  # with steps that a crash lost
        trial = Score(
            method=stage.method, number=number, settings=settings, score=value,
            metric=result.metric, epsilon=result.epsilon, delta=result.delta,
            seconds=result.seconds, charges=charges,
        )  # fmt: skip
        write_atomic(self._score_file(stage, number), trial.model_dump_json(indent=1))
        varied = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                           for k, v in hyper_parameters.items())  # fmt: skip
        shown = f"{metric_label(trial.metric)} {metric_text(trial.metric, value)}"
        log(f"{stage.method} trial {number + 1} of {self.count(stage)}: {shown} ({varied})")

    def _score_file(self, stage: Stage, number: int) -> Path:
        return self.folder(stage.method, number).with_suffix(".json")


def do_trials(
    search: Search,
    out: Path,
    *,
    shard: tuple[int, int] = (1, 1),
    workers: int = 1,
    log: Callable[[str], None] = lambda line: None,
) -> Study:
    """Do the missing trials of all stages, resume unfinished ones, and return the study.

    Args:
        search: the search, calibrated.
        out: its folder.
        shard: (i, n): every n-th trial of a stage, from the i-th on. A stage whose other trials are
            missing ends the call, since the next stage needs the best of all.
        workers: trials at a time, each in its own process.
        log: called with one line per finished trial.

    Raises:
        StoppedError: after Ctrl-C, when the trials in progress have saved.
        RunError: if a trial fails; finished ones are kept.
    """
    study = Study(search, out)
    first, machines = shard
    trials = study.inner / "trials"
    trials.mkdir(exist_ok=True)
    write_atomic(trials / "README.md", _README)
    busy = f"another process works on this share of the search in {out}"
    with locked(study.inner / f".shard-{first}-of-{machines}.lock", busy=busy):
        for stage in search.stages():
            (trials / stage.method).mkdir(exist_ok=True)
            share = [k for k in study.missing(stage) if k % machines == first - 1]
            tasks = [partial(study.do_trial, stage, number) for number in share]
            run_tasks(tasks, workers, on_message=lambda _, line: log(line))
            if study.missing(stage):
                break
    return study


def draw_study(search: Search) -> StudyFile:
    """Draw the number of trials of each stage and the hyper-parameters of each trial.

    Guarantee: K is drawn as ``search.repetitions`` states and the hyper-parameters as the search's
    space states, independently of the data, before the first training.

    Assumptions: none for the draw itself; that K stays secret is the operator's.

    Proof: nothing here reads data; tests/app/search/test_search.py.
    """
    import numpy as np

    trials = {}
    for stage in search.stages():
        generator = np.random.default_rng(_entropy(search, stage, -2))
        trials[stage.method] = [
            {domain.name: domain.draw(generator) for domain in stage.space.values()}
            for _ in range(number_of_trials(search, stage))
        ]
    return StudyFile(search=search.to_mapping(), trials=trials)


def number_of_trials(search: Search, stage: Stage) -> int:
    """Return K: as asked, or in an accounted search drawn from the system's entropy."""
    import numpy as np

    if not search.accounted:
        return search.trials
    return search.repetitions.draw(np.random.default_rng(_entropy(search, stage, -1)))


def score(search: Search, result: RunResult, noise: random.Random) -> float:
    """Return a trial's main metric, the accuracy with noise if an accounted search asks for it.

    (number correct + N(0, s^2)) / number of test records; that number is taken to be public.
    """
    last = result.evaluations[-1]
    if math.isnan(last.score):  # a training that diverged is the worst
        return -math.inf
    if search.score_noise is None:
        return last.score
    correct = round(last.score * last.records)
    return (correct + noise.gauss(0.0, search.score_noise)) / last.records


def trial_seed(seed: int, method: str, number: int) -> int:
    """Derive the seed of one trial of a seeded search, so that trials are independent."""
    return random.Random(f"{seed} {method} {number}").getrandbits(48)


def _entropy(search: Search, stage: Stage, purpose: int) -> int:
    seed = search.settings.get("seed")
    return secrets.randbits(128) if seed is None else trial_seed(seed, stage.method, purpose)


def _noise_source(seed: int | None, stage: Stage, number: int) -> random.Random:
    if seed is None:
        return random.SystemRandom()
    return random.Random(f"score {seed} {stage.method} {number}")


def _read(path: Path, model: type[Model]) -> Model:
    try:
        return model.model_validate(read_json(path))
    except ValidationError as error:
        at = ".".join(map(str, error.errors()[0]["loc"]))
        raise RunError(f"{path} is damaged (at {at}): restore it from a backup") from None


def _check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    for key in before.keys() | now.keys():
        old, new = before.get(key), now.get(key)
        if old != new:
            raise ConfigError(
                f"this search was begun with other {key} ({old}, now {new}): choose another --out"
            )
