"""The trials of a search: each is a run folder, claimed, trained, scored and reported to Optuna."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbam.app.runs import execute
from dpbam.app.runs.files import write_atomic
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.pool import Send, run_tasks
from dpbam.app.runs.run import RunResult
from dpbam.app.search.search import Search, Stage
from dpbam.app.search.studies import StageStudy, trial_seed
from dpbam.privacy.ledger import Ledger
from dpbam.training.events import Evaluation, Reporter

if TYPE_CHECKING:
    from optuna.trial import Trial

_WAIT = 1.0  # seconds between two looks at the trials of other processes
_README = """# Not to be published

The folders here are the trials of a search, for its operator alone. What may be published of them
is copied into the folder best when the search has ended.
"""


class PrunedError(Exception):
    """Optuna's pruner ended the trial."""


def do_trials(
    search: Search,
    out: Path,
    *,
    url: str | None = None,
    name: str = "search",
    workers: int = 1,
    log: Callable[[str], None] = lambda line: None,
) -> list[StageStudy]:
    """Do all missing trials of all stages, resume unfinished ones, and return the studies.

    Args:
        search: the search, calibrated.
        out: its folder on this machine.
        url: of a shared storage, as SQLAlchemy writes it; None: a file in ``out``.
        name: of the search in a shared storage.
        workers: trials at a time, each in its own process.
        log: called with one line per finished trial.

    Raises:
        StoppedError: after Ctrl-C, when the trials in progress have saved.
        RunError: if a trial fails; finished ones are kept.
    """
    trials = out / "non-private" / "trials"
    trials.mkdir(parents=True, exist_ok=True)
    write_atomic(trials / "README.md", _README)
    worker = partial(work, search, out, url, name)
    run_tasks([worker] * workers, workers, on_message=lambda _, line: log(line))
    return [StageStudy(search, stage, out, url, name) for stage in search.stages()]


def work(search: Search, out: Path, url: str | None, name: str, log: Send) -> None:
    """Do trials, stage by stage, until all are finished, those of other processes too."""
    best_settings: dict[str, Any] = {}  # of the first stage
    for index, stage in enumerate(search.stages()):
        study = StageStudy(search, stage, out, url, name)
        waiting = False
        while not study.finished():
            with study.claimed() as trial:
                if trial is not None:
                    _do_trial(search, study, trial, best_settings, log)
                    continue
            if not waiting:
                log(f"{stage.method}: waiting for trials in other processes")
            waiting = True
            time.sleep(_WAIT)
        best = study.best()
        if index == 0 and best is not None:
            best_settings = dict(best.params)


def _do_trial(
    search: Search, study: StageStudy, trial: Trial, fixed: dict[str, Any], log: Send
) -> None:
    """Train one trial with the settings ``fixed`` before, and report its score."""
    from optuna.trial import TrialState

    stage, out = study.stage, study.out(trial.number)
    settings = {**fixed, **{d.name: d.suggest(trial) for d in stage.space.values()}}
    trial.set_user_attr("settings", settings)
    config = search.config(stage, settings, **_seeds(search, stage, trial.number))
    label = f"{stage.method} trial {trial.number + 1} of {study.count}"
    try:
        resume = RunFolder(out).facts.exists()
        result = execute(config, out, resume=resume, reporter=_Reports(trial))
    except PrunedError:
        trial.set_user_attr("charges", _charges(out))
        study.study.tell(trial, state=TrialState.PRUNED)
        log(f"{label}: pruned")
        return
    value = score(search, result, _noise_source(search, stage, trial.number))
    facts = {"charges": _charges(out), "epsilon": result.epsilon, "delta": result.delta,
             "seconds": result.seconds}  # fmt: skip
    for name, fact in facts.items():
        trial.set_user_attr(name, fact)
    study.study.tell(trial, value)
    shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                      for k, v in trial.params.items())  # fmt: skip
    log(f"{label}: score {100 * value:.1f}% ({shown})")


def score(search: Search, result: RunResult, noise: random.Random) -> float:
    """Return a trial's accuracy, with noise if an accounted search asks for it.

    (number correct + N(0, s^2)) / number of test records; that number is taken to be public.
    """
    last = result.evaluations[-1]
    if search.score_noise is None:
        return last.accuracy
    correct = round(last.accuracy * last.records)
    return (correct + noise.gauss(0.0, search.score_noise)) / last.records


def _charges(out: Path) -> list[tuple[float, float, int]]:
    """What a trial spent, with the steps that a crash lost."""
    return [(*charge,) for charge in Ledger(0.5, path=RunFolder(out).ledger).charges()]


def _noise_source(search: Search, stage: Stage, number: int) -> random.Random:
    seed = search.settings.get("seed")
    if seed is None:
        return random.SystemRandom()
    return random.Random(f"score {seed} {stage.method} {number}")


def _seeds(search: Search, stage: Stage, number: int) -> dict[str, int]:
    """A seed per trial in a seeded search, so that trials are independent."""
    seed = search.settings.get("seed")
    return {} if seed is None else {"seed": trial_seed(seed, stage.method, number)}


class _Reports(Reporter):
    """Reports evaluations to Optuna, and ends the trial if its pruner says so."""

    def __init__(self, trial: Trial) -> None:
        frozen = trial.study.get_trials(deepcopy=False)[trial.number]
        self._trial = trial
        self._reported = set(frozen.intermediate_values)  # before the run was resumed

    def on_evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.step in self._reported:
            return
        self._reported.add(evaluation.step)
        self._trial.report(evaluation.accuracy, evaluation.step)
        if self._trial.should_prune():
            raise PrunedError
