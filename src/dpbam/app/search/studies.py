"""The trials of a search: claimed in Optuna's storage, trained in run folders, scored, reported.

Any number of processes, on any number of machines, work on one storage with one study per stage.
Optuna numbers trials without gaps or repeats, so a stage of K trials is its numbers 0 .. K-1; K is
in the study before the first of them. A process that works on a trial holds a lock file next to its
folder. The system frees the lock when the process dies, and another process resumes the trial from
its last checkpoint, with the hyper-parameters that it had.
"""

from __future__ import annotations

import json
import platform
import random
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbam.app.runs import ConfigError, RunError, RunFolder, RunResult, execute
from dpbam.app.runs.files import locked, write_atomic
from dpbam.app.runs.pool import Send, run_tasks
from dpbam.app.search.search import Search, Stage
from dpbam.privacy.ledger import Ledger
from dpbam.training.events import EvaluationReport, Reporter, metric_label, metric_text

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

_PLAN, _COUNT, _OUT = "dpbam plan", "dpbam trials", "dpbam folder"
_PATIENCE = 30.0  # seconds that the creator of a study has to write its number of trials
_BUSY = "busy"
_WAIT = 1.0  # seconds between two looks at the trials of other processes
_README = """# Not to be published

The folders here are the trials of a search, for its operator only. What may be published of them
is copied into the folder best when the search has ended.
"""


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
    from optuna import TrialPruned
    from optuna.trial import TrialState

    stage, out = study.stage, study.out(trial.number)
    settings = {**fixed, **{d.name: d.suggest(trial) for d in stage.space.values()}}
    trial.set_user_attr("settings", settings)
    seed = search.settings.get("seed")  # then each trial has its own: trials are independent
    own = {} if seed is None else {"seed": trial_seed(seed, stage.method, trial.number)}
    config = search.config(stage, settings, **own)
    label = f"{stage.method} trial {trial.number + 1} of {study.count}"
    try:
        resume = RunFolder(out).started
        result = execute(config, out, resume=resume, reporter=_Reports(trial))
    except TrialPruned:
        trial.set_user_attr("charges", _charges(out))
        study.study.tell(trial, state=TrialState.PRUNED)
        log(f"{label}: pruned")
        return
    value = score(search, result, _noise_source(search, stage, trial.number))
    facts = {"charges": _charges(out), "epsilon": result.epsilon, "delta": result.delta,
             "seconds": result.seconds, "metric": result.metric}  # fmt: skip
    for name, fact in facts.items():
        trial.set_user_attr(name, fact)
    study.study.tell(trial, value)
    metric = result.metric
    shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                      for k, v in trial.params.items())  # fmt: skip
    log(f"{label}: {metric_label(metric)} {metric_text(metric, value)} ({shown})")


def score(search: Search, result: RunResult, noise: random.Random) -> float:
    """Return a trial's main metric, the accuracy with noise if an accounted search asks for it.

    (number correct + N(0, s^2)) / number of test records; that number is taken to be public.
    """
    last = result.evaluations[-1]
    if search.score_noise is None:
        return last.score
    correct = round(last.score * last.records)
    return (correct + noise.gauss(0.0, search.score_noise)) / last.records


def _charges(out: Path) -> list[tuple[float, float, int]]:
    """What a trial spent, with the steps that a crash lost."""
    return [(*charge,) for charge in Ledger(0.5, path=RunFolder(out).ledger).charges()]


def _noise_source(search: Search, stage: Stage, number: int) -> random.Random:
    seed = search.settings.get("seed")
    if seed is None:
        return random.SystemRandom()
    return random.Random(f"score {seed} {stage.method} {number}")


class _Reports(Reporter):
    """Reports evaluations to Optuna, and ends the trial if its pruner says so."""

    def __init__(self, trial: Trial) -> None:
        frozen = trial.study.get_trials(deepcopy=False)[trial.number]
        self._trial = trial
        self._reported = set(frozen.intermediate_values)  # before the run was resumed

    def on_evaluation(self, evaluation: EvaluationReport) -> None:
        from optuna import TrialPruned

        if evaluation.step in self._reported:
            return
        self._reported.add(evaluation.step)
        self._trial.report(evaluation.score, evaluation.step)
        if self._trial.should_prune():
            raise TrialPruned


class StageStudy:
    """One stage's study; the arguments are those of :func:`do_trials`."""

    def __init__(
        self, search: Search, stage: Stage, out: Path, url: str | None, name: str = "search"
    ) -> None:
        self.search, self.stage = search, stage
        self._settling = 0.0 if url is None else 2.0
        inner = out / "non-private"
        self.folder = inner / "trials" / stage.method
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / ".study.lock"):
            self.study = _open(
                search, url or f"sqlite:///{inner / 'search.db'}", f"{name} {stage.method}"
            )
            self.count = self._agree()

    def trials(self) -> list[FrozenTrial]:
        """Return those of the trials 0 .. K-1 that have begun."""
        return self.study.get_trials(deepcopy=False)[: self.count]

    def finished(self) -> bool:
        return sum(trial.state.is_finished() for trial in self.trials()) == self.count

    def best(self) -> FrozenTrial | None:
        """Return the complete trial with the best score, the first of a tie; None if none is."""
        done = [trial for trial in self.trials() if trial.state.name == "COMPLETE"]
        return max(done, key=lambda t: (t.value or 0.0, -t.number), default=None)

    @contextmanager
    def claimed(self) -> Iterator[Trial | None]:
        """Hold a trial: one whose process died, else a new one; None if all are taken."""
        from optuna.trial import Trial

        for left in self._left_behind():
            with self._holding(left.number) as held:
                if held:
                    yield Trial(self.study, left._trial_id)  # with the parameters that it had
                    return
        trial = self._new_trial()
        if trial is None:
            yield None
            return
        trial.set_user_attr(_OUT, self._place(trial.number))
        with self._holding(trial.number) as held:
            yield trial if held else None

    def out(self, number: int) -> Path:
        return self.folder / f"{number:04d}"

    def _new_trial(self) -> Trial | None:
        from optuna.trial import TrialState

        if len(self.trials()) == self.count:
            return None
        trial = self.study.ask()
        if trial.number < self.count:
            return trial
        self.study.tell(trial, state=TrialState.FAIL)  # another process was faster
        return None

    def _left_behind(self) -> list[FrozenTrial]:
        """Return the unfinished trials of this folder; a lock shows whether one is in progress."""
        running = [trial for trial in self.trials() if not trial.state.is_finished()]
        return [t for t in running if t.user_attrs.get(_OUT) in (None, self._place(t.number))]

    @contextmanager
    def _holding(self, number: int) -> Iterator[bool]:
        """Hold a trial's lock; False if another process does, or the trial is finished."""
        try:
            with locked(self.folder / f"{number:04d}.lock", busy=_BUSY):
                yield not self.trials()[number].state.is_finished()
        except RunError as error:
            if str(error) != _BUSY:
                raise
            yield False

    def _place(self, number: int) -> str:
        return f"{platform.node()}:{self.out(number).absolute()}"

    def _agree(self) -> int:
        """Return K, and check that the study is of the same search; its creator writes both."""
        plan = json.dumps(self.search.to_mapping(), sort_keys=True)
        until = time.monotonic() + _PATIENCE
        while (stored := self.study.user_attrs).get(_COUNT) is None:
            if stored.get(_PLAN) is None or time.monotonic() > until:
                self.study.set_user_attr(_PLAN, plan)
                self.study.set_user_attr(_COUNT, number_of_trials(self.search, self.stage))
                time.sleep(self._settling)  # if two machines write at once, the last one wins
                continue
            time.sleep(0.2)
        _check_same(json.loads(stored[_PLAN]), json.loads(plan))
        return int(stored[_COUNT])


def number_of_trials(search: Search, stage: Stage) -> int:
    """Return K: as asked, or in an accounted search drawn once, from the system's entropy."""
    import numpy as np

    if not search.accounted:
        return search.trials
    seed = search.settings.get("seed")
    entropy = secrets.randbits(128) if seed is None else trial_seed(seed, stage.method, -1)
    return search.repetitions.draw(np.random.default_rng(entropy))


def trial_seed(seed: int, method: str, number: int) -> int:
    """Derive the seed of one trial of a seeded search, so that trials are independent."""
    return random.Random(f"{seed} {method} {number}").getrandbits(48)


def _open(search: Search, url: str, name: str) -> Study:
    """Create or load a study. Samplers are unseeded: workers must not draw the same points."""
    import optuna

    samplers: dict[str, Callable[[], BaseSampler]] = {
        "random": optuna.samplers.RandomSampler,
        "tpe": optuna.samplers.TPESampler,
        "qmc": lambda: optuna.samplers.QMCSampler(warn_independent_sampling=False),
    }
    pruners: dict[str, Callable[[], BasePruner]] = {
        "none": optuna.pruners.NopPruner,
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=4),
        "hyperband": optuna.pruners.HyperbandPruner,
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            return optuna.create_study(
                storage=url, study_name=name, direction="maximize", load_if_exists=True,
                sampler=samplers[search.sampler](), pruner=pruners[search.pruner](),
            )  # fmt: skip
        except Exception as error:  # of any database driver; the address may hold a password
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(
                f"the search's storage cannot be used ({reason}): check the address and the "
                "driver of --storage"
            ) from error


def _check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    for key in before.keys() | now.keys():
        old, new = before.get(key), now.get(key)
        if old != new:
            raise ConfigError(
                f"this search was begun with other {key} ({old}, now {new}): choose another --out "
                "or, in a shared storage, another --name"
            )
