"""The trials of a search: each a run folder, claimed, trained, scored and told to Optuna."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbam.app.compare.pool import StoppedError
from dpbam.app.runs import RunInterruptedError, execute
from dpbam.app.runs.config import ConfigError
from dpbam.app.runs.files import write_atomic
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.result import RunError, RunResult
from dpbam.app.search.search import Search, Stage
from dpbam.app.search.studies import StageStudy, trial_seed
from dpbam.data import DataError
from dpbam.privacy.ledger import Ledger
from dpbam.training.events import EvaluationReport, Reporter

if TYPE_CHECKING:
    from optuna.trial import Trial

Tell = Callable[[str], None]
_WAIT = 1.0  # seconds between two looks at what others do
_MARK = """# Not to be published

The folders here are the trials of a search, for its operator alone. What may be published of them
is copied into the folder best when the search has ended.
"""


class PrunedError(Exception):
    """Optuna's pruner gave the trial up."""


def do_trials(
    search: Search, out: Path, *, url: str | None = None, name: str = "search", workers: int = 1,
    tell: Tell = lambda text: None,
) -> list[StageStudy]:  # fmt: skip
    """All trials of all stages, those begun before among them; then every stage's study.

    Raises:
        StoppedError: after Ctrl-C, when what was running has saved.
        RunError: if a trial cannot be done; what was done is kept.
    """
    trials = out / "non-private" / "trials"
    trials.mkdir(parents=True, exist_ok=True)
    write_atomic(trials / "README.md", _MARK)
    if workers == 1:
        try:
            work(search, out, url, name, tell)
        except (RunInterruptedError, KeyboardInterrupt):
            raise StoppedError from None
    else:
        _side_by_side(search, out, url, name, workers, tell)
    return [StageStudy(search, stage, out, url, name) for stage in search.stages()]


def work(search: Search, out: Path, url: str | None, name: str, tell: Tell) -> None:
    """One worker: stage by stage, trial by trial, until all are through, here and elsewhere."""
    found: dict[str, Any] = {}  # the best of the first stage
    for index, stage in enumerate(search.stages()):
        study = StageStudy(search, stage, out, url, name)
        waiting = False
        while not study.finished():
            with study.claimed() as trial:
                if trial is not None:
                    _one(search, study, trial, found, tell)
                    continue
            if not waiting:
                tell(f"{stage.method}: waiting for trials at work elsewhere")
            waiting = True
            time.sleep(_WAIT)
        best = study.best()
        if index == 0 and best is not None:
            found = dict(best.params)


def _one(
    search: Search, study: StageStudy, trial: Trial, found: dict[str, Any], tell: Tell
) -> None:
    """Train one trial, and tell its score."""
    from optuna.trial import TrialState

    params = {**found, **{d.name: d.suggest(trial) for d in study.stage.space.values()}}
    trial.set_user_attr("settings", params)
    out = study.out(trial.number)
    label = f"{study.stage.method} trial {trial.number + 1} of {study.count}"
    try:
        result = execute(
            search.config(study.stage, params, **_seeds(search, study.stage, trial.number)),
            out, resume=RunFolder(out).facts.exists(), reporter=_Reports(trial),
        )  # fmt: skip
    except PrunedError:
        trial.set_user_attr("charges", _charges(out))
        study.study.tell(trial, state=TrialState.PRUNED)
        tell(f"{label}: pruned")
        return
    value = score(search, result, _noise(search, study.stage, trial.number))
    for name, fact in (("charges", _charges(out)), ("epsilon", result.epsilon),
                       ("delta", result.delta), ("seconds", result.seconds)):  # fmt: skip
        trial.set_user_attr(name, fact)
    study.study.tell(trial, value)
    shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                      for k, v in trial.params.items())  # fmt: skip
    tell(f"{label}: score {100 * value:.1f}% ({shown})")


def score(search: Search, result: RunResult, noise: random.Random) -> float:
    """A trial's accuracy; noised, if an accounted search was asked for that.

    (number right + N(0, s^2)) / number of test records, which is taken to be public
    """
    last = result.evaluations[-1]
    if search.score_noise is None:
        return last.accuracy
    right = round(last.accuracy * last.records)
    return (right + noise.gauss(0.0, search.score_noise)) / last.records


def _charges(out: Path) -> list[tuple[float, float, int]]:
    """What a trial spent, lost steps among it."""
    return [(*charge,) for charge in Ledger(0.5, path=RunFolder(out).ledger).charges()]


def _noise(search: Search, stage: Stage, number: int) -> random.Random:
    seed = search.settings.get("seed")
    if seed is None:
        return random.SystemRandom()
    return random.Random(f"score {seed} {stage.method} {number}")


def _seeds(search: Search, stage: Stage, number: int) -> dict[str, int]:
    """Of a seeded search every trial has its own seed, so that they are independent."""
    seed = search.settings.get("seed")
    return {} if seed is None else {"seed": trial_seed(seed, stage.method, number)}


class _Reports(Reporter):
    """Tells Optuna of evaluations along the way, and hears whether to give up."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._known = set(_intermediate(trial))

    def on_evaluation(self, evaluation: EvaluationReport) -> None:
        """One more."""
        if evaluation.step in self._known:  # before the run was resumed
            return
        self._known.add(evaluation.step)
        self._trial.report(evaluation.accuracy, evaluation.step)
        if self._trial.should_prune():
            raise PrunedError


def _intermediate(trial: Trial) -> dict[int, float]:
    frozen = next(t for t in trial.study.get_trials(deepcopy=False) if t.number == trial.number)
    return frozen.intermediate_values


def _side_by_side(
    search: Search, out: Path, url: str | None, name: str, workers: int, tell: Tell
) -> None:
    """Workers in processes of their own, each with one thread."""
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    processes = [
        context.Process(target=_in_process, args=(search, out, url, name, told))
        for _ in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        ending = _listen(processes, told, tell)
    except KeyboardInterrupt:  # the workers heard it, too, and save
        ending = "stopped"
    for process in processes:
        if ending and process.is_alive():
            process.terminate()  # which a run answers by saving
        process.join()
    if ending == "stopped":
        raise StoppedError
    if ending:
        raise RunError(ending)


def _listen(processes: list[Any], told: Any, tell: Tell) -> str | None:
    """Pass on what workers say; a sentence if one has failed, "stopped" after Ctrl-C."""
    working = len(processes)
    while working:
        if told.empty():
            if any(p.exitcode not in (None, 0) for p in processes):
                return "a worker was killed, perhaps for want of memory: take fewer --workers"
            time.sleep(0.1)
            continue
        kind, text = told.get()
        if kind == "line":
            tell(text)
            continue
        working -= 1
        if kind != "done":
            return str(text)
    return None


def _in_process(search: Search, out: Path, url: str | None, name: str, told: Any) -> None:
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(search, out, url, name, lambda text: told.put(("line", text)))
    except (RunInterruptedError, KeyboardInterrupt):
        told.put(("stopped", "stopped"))
    except (RunError, ConfigError, DataError, OSError) as error:
        told.put(("failed", str(error)))
    else:
        told.put(("done", ""))


def _end_with_parent() -> None:
    """When the parent is killed, a run in training saves and ends: nobody waits for more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
