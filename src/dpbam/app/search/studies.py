"""A search's state in Optuna's storage: one study a stage, and who works on which trial.

Any number of processes, on any number of machines, work on one storage. Optuna numbers trials
without gaps or repeats, so that a stage of K trials is its numbers 0 .. K-1; K stands in the study
before the first of them. Whoever works on a trial holds a lock file beside its folder, which the
system frees when the process dies, however it dies: then another takes the trial up, from its last
checkpoint and with the hyper-parameters that it had.
"""

from __future__ import annotations

import json
import platform
import random
import secrets
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbam.app.runs.config import ConfigError
from dpbam.app.runs.files import locked
from dpbam.app.runs.run import RunError
from dpbam.app.search.database import unusable
from dpbam.app.search.search import Search, Stage

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

_PLAN, _COUNT, _OUT = "dpbam plan", "dpbam trials", "dpbam folder"
_PATIENCE = 30.0  # seconds that the creator of a study has to say how many trials it is of


class StageStudy:
    """One stage's study.

    Args:
        search: the search, calibrated.
        stage: which of its stages.
        out: the search's folder on this machine.
        url: of the storage, as SQLAlchemy writes it; None: a file in ``out``.
        name: of the search, in a storage that others share.
    """

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
        """Trials 0 .. K-1, as far as they have begun."""
        return [t for t in self.study.get_trials(deepcopy=False) if t.number < self.count]

    def finished(self) -> bool:
        """Whether all K are through."""
        done = [t for t in self.trials() if t.state.is_finished()]
        return len(done) == self.count

    def best(self) -> FrozenTrial | None:
        """The one with the best score; None if there is none (K may be 0)."""
        from optuna.trial import TrialState

        done = [t for t in self.trials() if t.state is TrialState.COMPLETE]
        return max(done, key=lambda t: (t.value or 0.0, -t.number), default=None)

    @contextmanager
    def claimed(self) -> Iterator[Trial | None]:
        """A trial that nobody works on: one left behind, else a new one; None: all are taken."""
        from optuna.trial import Trial

        for left in self._left():
            with self._holding(left.number) as held:
                if held:
                    # taken up again by its identifier; its parameters are those it had
                    yield Trial(self.study, left._trial_id)
                    return
        trial = (
            self.study.ask() if len(self.study.get_trials(deepcopy=False)) < self.count else None
        )
        if trial is None or trial.number >= self.count:
            if trial is not None:  # another process was faster
                self._discard(trial)
            yield None
            return
        trial.set_user_attr(_OUT, self._place(trial.number))
        with self._holding(trial.number) as held:
            yield trial if held else None

    def out(self, number: int) -> Path:
        """A trial's run folder."""
        return self.folder / f"{number:04d}"

    def _left(self) -> list[FrozenTrial]:
        from optuna.trial import TrialState

        def mine(trial: FrozenTrial) -> bool:
            return trial.user_attrs.get(_OUT) in (None, self._place(trial.number))

        return [t for t in self.trials() if t.state is TrialState.RUNNING and mine(t)]

    @contextmanager
    def _holding(self, number: int) -> Iterator[bool]:
        """Hold a trial's lock; False if another process does, or the trial is done."""
        try:
            with locked(self.folder / f"{number:04d}.lock", busy="busy"):
                state = next(t for t in self.trials() if t.number == number).state
                yield not state.is_finished()
        except RunError as error:
            if str(error) != "busy":
                raise
            yield False

    def _place(self, number: int) -> str:
        return f"{platform.node()}:{self.out(number).absolute()}"

    def _discard(self, trial: Trial) -> None:
        from optuna.trial import TrialState

        self.study.tell(trial, state=TrialState.FAIL)

    def _agree(self) -> int:
        """K, and the same search as all others': whoever made the study has written both."""
        plan = json.dumps(self.search.to_mapping(), sort_keys=True)
        until = time.monotonic() + _PATIENCE
        while (stored := self.study.user_attrs).get(_COUNT) is None:
            if stored.get(_PLAN) is None or time.monotonic() > until:
                self.study.set_user_attr(_PLAN, plan)
                self.study.set_user_attr(_COUNT, number_of_trials(self.search, self.stage))
                time.sleep(self._settling)  # should two machines write at once, the last one wins
                continue
            time.sleep(0.2)
        _check_same(json.loads(stored[_PLAN]), json.loads(plan))
        return int(stored[_COUNT])


def number_of_trials(search: Search, stage: Stage) -> int:
    """K: as asked, or in an accounted search drawn, once, from the system's entropy."""
    import numpy as np

    if not search.accounted:
        return search.trials
    seed = search.settings.get("seed")
    entropy = secrets.randbits(128) if seed is None else trial_seed(seed, stage.method, -1)
    return search.repetitions.draw(np.random.default_rng(entropy))


def trial_seed(seed: int, method: str, number: int) -> int:
    """The seed of a trial of a seeded search: one's own, so that trials are independent.

    Example:
        >>> trial_seed(0, "bam", 0) != trial_seed(0, "bam", 1)
        True
    """
    return random.Random(f"{seed} {method} {number}").getrandbits(48)


def _open(search: Search, url: str, name: str) -> Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            return optuna.create_study(
                storage=url, study_name=name, direction="maximize", load_if_exists=True,
                sampler=_sampler(search), pruner=_pruner(search.pruner),
            )  # fmt: skip
        except Exception as error:  # whatever a database driver raises
            raise unusable(url, error) from error


def _sampler(search: Search) -> BaseSampler:
    """Unseeded: workers of one search must not draw the same points."""
    from optuna import samplers

    if search.sampler == "qmc":
        return samplers.QMCSampler(warn_independent_sampling=False)
    return samplers.RandomSampler() if search.sampler == "random" else samplers.TPESampler()


def _pruner(name: str) -> BasePruner:
    from optuna import pruners

    if name == "median":
        return pruners.MedianPruner(n_startup_trials=4)
    return pruners.NopPruner() if name == "none" else pruners.HyperbandPruner()


def _check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    for key in before.keys() | now.keys():
        old, new = before.get(key), now.get(key)
        if old != new:
            raise ConfigError(
                f"this search was begun with other {key} ({old}, now {new}): choose another --out "
                "or, in a shared storage, another --name"
            )
