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

from pydantic import ConfigDict, JsonValue

from dpbam.app.runs import ConfigError, RunFolder, RunResult, execute
from dpbam.app.runs.documents import Document
from dpbam.app.runs.files import locked, write_atomic
from dpbam.app.runs.pool import Send, run_tasks
from dpbam.app.search.search import Search, Stage
from dpbam.privacy.accounting import Charge
from dpbam.privacy.ledger import Ledger
from dpbam.tasks.scores import metric_label, metric_text

_README = """# Not to be published

The folders here are the trials of a search, for its operator only. What may be published of them
is copied into the folder best when the search has ended.
"""


class _OperatorsFile(Document):
    """A file of the operator's; the score of a training that diverged is -Infinity."""

    numbered = False
    model_config = ConfigDict(strict=False, ser_json_inf_nan="constants")

    def write(self, path: Path) -> None:
        write_atomic(path, self.model_dump_json(indent=1))


class Score(_OperatorsFile):
    """What a finished trial came to: the file ``NNNN.json`` next to its run folder."""

    method: str
    number: int
    settings: dict[str, JsonValue]
    score: float
    metric: str
    epsilon: float
    delta: float
    seconds: float
    charges: tuple[Charge, ...]


class StudyFile(_OperatorsFile):
    """``study.json``: the search, and the hyper-parameters of every trial by method."""

    search: dict[str, JsonValue]
    trials: dict[str, list[dict[str, JsonValue]]]


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
                draw_study(search).write(path)
        self.file = StudyFile.read(path)
        before, now = self.file.search, search.to_mapping()
        for key in before.keys() | now.keys():
            if before.get(key) != now.get(key):
                raise ConfigError(
                    f"this search was begun with other {key} ({before.get(key)}, now "
                    f"{now.get(key)}): choose another --out"
                )

    def count(self, stage: Stage) -> int:
        """Return K, the number of trials of a stage."""
        return len(self.file.trials[stage.method])

    def folder(self, method: str, number: int) -> Path:
        """Return a trial's run folder; its score is next to it."""
        return self.inner / "trials" / method / f"{number:04d}"

    def scores(self, stage: Stage) -> list[Score]:
        """Return the finished trials of a stage, in order."""
        paths = [self.score_file(stage, number) for number in range(self.count(stage))]
        return [Score.read(path) for path in paths if path.exists()]

    def missing(self, stage: Stage) -> list[int]:
        """Return the numbers of the trials of a stage that have no score yet."""
        return [k for k in range(self.count(stage)) if not self.score_file(stage, k).exists()]

    def best(self, stage: Stage) -> Score | None:
        """Return the trial with the best score, the first of a tie; None if there is none."""
        return max(self.scores(stage), key=lambda trial: trial.score, default=None)

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
        search = self.search
        # the first stage decides what later ones do not vary
        first = search.stages()[0]
        leader = None if stage == first else self.best(first)
        varied = self.file.trials[stage.method][number]
        settings = {**(leader.settings if leader else {}), **varied}
        # trials with one seed would share initial weights and noise: each derives another
        seeds: dict[str, int] = {}
        noise: random.Random = random.SystemRandom()
        if search.seed is not None:
            seeds = {"seed": trial_seed(search.seed, stage.method, number)}
            noise = random.Random(f"score {search.seed} {stage.method} {number}")
        folder = RunFolder(self.folder(stage.method, number))
        config = search.config(stage, settings, **seeds)
        result = execute(config, folder.path, resume=folder.started)
        trial = Score(
            method=stage.method, number=number, settings=settings,
            score=score(search, result, noise), metric=result.metric, epsilon=result.epsilon,
            delta=result.delta, seconds=result.seconds,
            charges=tuple(Ledger(0.5, path=folder.ledger).charges()),  # also of steps a crash lost
        )  # fmt: skip
        trial.write(self.score_file(stage, number))
        shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                          for k, v in varied.items())  # fmt: skip
        metric = f"{metric_label(trial.metric)} {metric_text(trial.metric, trial.score)}"
        log(f"{stage.method} trial {number + 1} of {self.count(stage)}: {metric} ({shown})")

    def score_file(self, stage: Stage, number: int) -> Path:
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

    Guarantee: K is drawn as ``search.selection`` states and the hyper-parameters as the search's
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
    return StudyFile.model_validate({"search": search.to_mapping(), "trials": trials})


def number_of_trials(search: Search, stage: Stage) -> int:
    """Return K: as asked, or in an accounted search drawn from the system's entropy."""
    import numpy as np

    if not search.accounted:
        return search.trials
    return search.selection.draw(np.random.default_rng(_entropy(search, stage, -1)))


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
    """Return the seed of a draw: the system's entropy, unless the search has a seed."""
    if search.seed is None:
        return secrets.randbits(128)
    return trial_seed(search.seed, stage.method, purpose)
