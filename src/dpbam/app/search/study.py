"""The study of a search: its trials are drawn once, trained in run folders, scored, one released.

====================================  ==================================================
file                                  may be published
====================================  ==================================================
``result.json``                       yes: how it was paid for, and the best
``best/``                             yes, all of it: the chosen model and its statement
``non-private/study.json``            never: all trials, and how many there were
``non-private/trials/NNNN``           no: each is marked by ``NOT-FOR-RELEASE.md``
====================================  ==================================================

All hyper-parameters, and the number of trials, are drawn before the first training,
from the system's entropy (from the seed, if the search has one). So trials are independent of one
another and of the data, and the same command resumes: a trial that has a score is kept, one that
has a run folder resumes from its last checkpoint, with the hyper-parameters that it had.

What is published is copied from the chosen trial's run folder, file by file, so that neither
contents nor names reveal anything about other trials (index, number, folders, seeds, times).
"""

from __future__ import annotations

import hashlib
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import ConfigDict, JsonValue

from dpbam.app.runs import ConfigError, RunError, RunFolder, RunResult, execute
from dpbam.app.runs.documents import Document, NotGiven, Statement
from dpbam.app.runs.files import locked, write_atomic, write_json
from dpbam.app.runs.folder import MARK, PUBLISHABLE
from dpbam.app.runs.identity import today
from dpbam.app.runs.pool import Send, run_tasks
from dpbam.app.runs.statement import released_files, write_statement
from dpbam.app.search.search import Search
from dpbam.app.search.selection import search_epsilon
from dpbam.privacy.accounting import Charge, accountant_version, total_epsilon
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.rounding import up
from dpbam.tasks.scores import metric_label, metric_text

BEST = "best"  # the folder that is published
_NOT_FOR_RELEASE = f"""# Not for release

This is a trial of a search, for its operator only. What may be published of it, if it was chosen,
is in the search's folder {BEST}/. The privacy statement here covers this training alone.
"""


class _OperatorsFile(Document):
    """A file of the operator's; the score of a training that diverged is -Infinity."""

    numbered = False
    model_config = ConfigDict(strict=False, ser_json_inf_nan="constants")

    def write(self, path: Path) -> None:
        write_atomic(path, self.model_dump_json(indent=1))


class Score(_OperatorsFile):
    """What a finished trial came to: the file ``NNNN.json`` next to its run folder.

    ``study`` is the digest of the study that drew it.
    """

    study: str
    number: int
    settings: dict[str, JsonValue]
    score: float
    metric: str
    epsilon: float
    delta: float
    charges: tuple[Charge, ...]

    def __str__(self) -> str:
        """Return the score and the hyper-parameters, for the operator."""
        values = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                  for k, v in self.settings.items()]  # fmt: skip
        text = metric_text(self.metric, self.score)
        return f"{metric_label(self.metric)} {text} ({', '.join(values)})"


class StudyFile(_OperatorsFile):
    """``study.json``: the search, and the hyper-parameters of every trial."""

    search: dict[str, JsonValue]
    trials: list[dict[str, JsonValue]]

    @property
    def digest(self) -> str:
        """SHA-256 of the search and its trials: scores of two studies are not comparable."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def draw_study(search: Search) -> StudyFile:
    """Draw the number of trials and the hyper-parameters of each.

    Guarantee: K is drawn as the search states and the hyper-parameters as its space states,
    independently of the data, before the first training.

    Assumptions: none for the draw itself; that K stays secret is the operator's.

    Proof: nothing here reads data; tests/app/search/test_search.py.
    """
    generator = np.random.default_rng(trial_seed(search, -2))  # None: the system's entropy
    trials = [
        {domain.name: domain.draw(generator) for domain in search.space.values()}
        for _ in range(number_of_trials(search))
    ]
    return StudyFile.model_validate({"search": search.to_mapping(), "trials": trials})


def number_of_trials(search: Search) -> int:
    """Return K: as asked, or in an accounted search drawn from the system's entropy."""
    if not search.accounted:
        return search.trials
    return int(np.random.default_rng(trial_seed(search, -1)).poisson(search.trials))


def trial_seed(search: Search, number: int) -> int | None:
    """Derive the seed of one trial of a seeded search, so that trials are independent."""
    if search.seed is None:
        return None
    return random.Random(f"{search.seed} {search.method} {number}").getrandbits(48)


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

    def folder(self, number: int) -> RunFolder:
        """Return a trial's run folder; its score is next to it, with the suffix .json."""
        return RunFolder(self.inner / "trials" / f"{number:04d}")

    def score_file(self, number: int) -> Path:
        """Return where a trial's score is, once it is finished."""
        return self.folder(number).path.with_suffix(".json")

    def missing(self) -> list[int]:
        """Return the numbers of the trials that are not finished."""
        return [number for number, trial in enumerate(self._scores()) if trial is None]

    def lacking(self) -> str | None:
        """Say in one sentence which trials are missing; None if all are finished."""
        sentence = (
            f"{len(self.missing())} of {len(self.file.trials)} trials are missing: run the other "
            "shares, copy their folders non-private/trials into this one, and run the command again"
        )
        return sentence if self.missing() else None

    def scores(self) -> list[Score]:
        """Return the finished trials, in order."""
        return [trial for trial in self._scores() if trial is not None]

    def _scores(self) -> list[Score | None]:
        """Return the score of each trial that has one.

        Raises:
            RunError: if a score is of another study, such as a share that another machine drew: its
                trials were never among those that this study counts.
        """
        scores: list[Score | None] = [None] * len(self.file.trials)
        for path in sorted(self.score_file(0).parent.glob("[0-9]*.json")):
            trial = Score.read(path)
            if trial.study != self.file.digest or path != self.score_file(trial.number):
                raise RunError(
                    f"{path} is of another study than {self.inner / 'study.json'}: remove it with "
                    "its run folder; a share must begin with a copy of this search's folder"
                )
            scores[trial.number] = trial
        return scores

    def do_trial(self, number: int, log: Send) -> None:
        """Mark a trial as not for release, train it, or resume it, and write its score."""
        search, varied = self.search, self.file.trials[number]
        # trials with one seed would share initial weights and noise: each derives another
        noise: random.Random = random.SystemRandom()
        config = search.config(varied)
        if (seed := trial_seed(search, number)) is not None:
            config = config.replace(seed=seed)
            noise = random.Random(f"score {search.seed} {search.method} {number}")
        folder = self.folder(number)
        # before its first step: its epsilon never covers the search, whenever that ends
        folder.path.mkdir(parents=True, exist_ok=True)
        write_atomic(folder.path / MARK, _NOT_FOR_RELEASE)
        result = execute(config, folder.path, resume=folder.started)
        trial = Score(
            study=self.file.digest, number=number, settings=varied,
            score=score(search, result, noise), metric=result.metric, epsilon=result.epsilon,
            delta=result.delta,
            charges=tuple(Ledger(0.5, path=folder.ledger).charges()),  # also of steps a crash lost
        )  # fmt: skip
        trial.write(self.score_file(number))
        log(f"trial {number + 1} of {len(self.file.trials)}: {trial}")


def score(search: Search, result: RunResult, noise: random.Random) -> float:
    """Return a trial's main metric, the accuracy with noise if an accounted search asks for it.

    (number correct + N(0, s^2)) / number of test records; that number is taken to be public. A
    training that diverged has no records right: its score has the same noise as every other, since
    which trial wins must depend on the test records by noised numbers alone. By a score that is
    public it is the worst.
    """
    last = result.evaluations[-1]
    diverged = math.isnan(last.score)
    if search.score_noise is None:
        return -math.inf if diverged else last.score
    correct = 0 if diverged else round(last.score * last.records)
    return (correct + noise.gauss(0.0, search.score_noise)) / last.records


def do_trials(
    search: Search,
    out: Path,
    *,
    shard: tuple[int, int] = (1, 1),
    workers: int = 1,
    log: Callable[[str], None] = lambda line: None,
) -> Study:
    """Do the missing trials, resume unfinished ones, and return the study.

    Args:
        search: the search; an accounted one is calibrated.
        out: its folder.
        shard: (i, n): every n-th trial, from the i-th on.
        workers: trials at a time, each in its own process.
        log: called with one line per finished trial.

    Raises:
        StoppedError: after Ctrl-C, when the trials in progress have saved.
        RunError: if a trial fails; finished ones are kept.
        ConfigError: if the search cannot be accounted as asked, on this data.
    """
    study = Study(search.calibrated(), out)
    first, machines = shard
    busy = f"another process works on this share of the search in {out}"
    with locked(study.inner / f".shard-{first}-of-{machines}.lock", busy=busy):
        share = [number for number in study.missing() if number % machines == first - 1]
        tasks = [partial(study.do_trial, number) for number in share]
        run_tasks(tasks, workers, on_message=lambda _, line: log(line))
    return study


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        study: the search and its trials.
        best: the best trial of all; None if no trial was drawn.
        epsilon: what publishing the best model costs: accounted, the whole search; otherwise that
            training alone.
        epsilon_of_all: what publishing all trials would cost; None in an accounted search.
        delta: of both.
    """

    study: Study
    best: Score | None
    epsilon: float
    epsilon_of_all: float | None
    delta: float

    @property
    def trial(self) -> RunFolder | None:
        """The run folder of the best trial: for the operator."""
        return None if self.best is None else self.study.folder(self.best.number)

    def statement(self) -> str:
        """State in one sentence how the search was paid for."""
        search = self.study.search
        if search.pay == "public":
            return "the search was made on data declared public or synthetic: it costs no privacy"
        if not search.accounted:
            return (
                "NOT ACCOUNTED: the hyper-parameters were chosen by "
                f"{len(self.study.file.trials)} trainings on the same data, which this epsilon "
                "does not cover; all of them together, were they published, cost epsilon "
                f"{up(self.epsilon_of_all or 0.0)}"
            )
        score = ", given that the test records, by which the best was chosen, are public"
        if search.score_noise is not None:
            score = (
                "; the score was the number of test records that a trial gets right, with Gaussian "
                f"noise of deviation {search.score_noise:g}, which epsilon covers, too"
            )
        return (
            "accounted: this is the best of a random number of independent trials "
            f"({search.describe_number()}), of which the others are not released; epsilon covers "
            f"the whole search (Papernot and Steinke 2022){score}"
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain values for ``result.json``: of the best trial alone."""
        search, best = self.study.search, self.best
        values: dict[str, object] = {
            "format": 1,
            "paid": search.pay,
            "epsilon_covers_the_search": search.pay != "nothing",
            "statement": self.statement(),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "research_only": search.seed is not None,
            "best": best and {"method": search.method, "score": best.score, **best.settings},
            "folder": best and BEST,
        }
        if not search.accounted:
            return values | {"epsilon_of_all_trials_together": self.epsilon_of_all}
        return values | {
            "accountant": accountant_version("rdp"),
            "number_of_trials": f"secret, drawn from: {search.describe_number()}",
            "noise_multiplier": search.settings["noise_multiplier"],
            "score_noise": search.score_noise,
        }


def conclude(study: Study) -> SearchResult:
    """Find the best trial and the cost, mark the others, and write ``result.json``.

    Raises:
        RunError: if trials are missing, such as those of another machine.
    """
    if lacking := study.lacking():
        raise RunError(lacking)
    search, trials = study.search, study.scores()
    best = max(trials, key=lambda trial: trial.score, default=None)
    charges = [charge for trial in trials for charge in trial.charges]
    delta = best.delta if best else float(str(search.settings["delta"]))  # calibrated to it
    if search.accounted:
        epsilon, together = whole_epsilon(search, charges, delta), None
    else:
        assert best is not None  # it has as many trials as were asked for
        epsilon, together = best.epsilon, total_epsilon(charges, delta, accountant="rdp")
    result = SearchResult(study, best, epsilon, together, delta)
    for trial in trials:
        _mark(result, study.folder(trial.number))
    _publish(result, study.out / BEST)
    write_json(study.out / "result.json", result.to_dict())
    return result


def whole_epsilon(search: Search, charges: list[Charge], delta: float) -> float:
    """Return epsilon of an accounted search whose trials have spent ``charges``."""
    if not charges:
        return 0.0
    if len({(c.noise_multiplier, c.sampling_rate) for c in charges}) > 1:
        raise RunError(
            "the trials of an accounted search have several noise multipliers or sampling rates, "
            "and only trials of one of each can be counted: start a new search with another --out"
        )
    # a trial that lost steps in a crash has spent more than planned: all count as the longest
    longest = max(charges, key=lambda charge: charge.steps)
    return search_epsilon(longest, delta, search.trials, search.score_noise)


def _publish(result: SearchResult, best: Path) -> None:
    """Copy what may be published of the chosen trial, with the statement about the search."""
    shutil.rmtree(best, ignore_errors=True)
    source = result.trial
    if source is None:
        return  # no trial was drawn
    best.mkdir()
    stored = Statement.read(source.statement_json)
    released = released_files(source.read_facts().config)
    for name in (source.weights.name, source.model.name, *released):
        write_atomic(best / name, (source.path / name).read_bytes())
    note = (
        f"{stored.evaluated_on.note}. Every trial of the search was evaluated on them, and this "
        "one chosen by that"
    )
    changes: dict[str, object] = {
        "identity": stored.identity.model_copy(update={"date": today()}),  # of the search
        "tuned_on": result.statement(),
        "evaluated_on": stored.evaluated_on.model_copy(update={"note": note}),
        "may_be_published": [*PUBLISHABLE, *released] if stored.private else [],
        "may_be_published_if_the_test_records_are_not_sensitive": [],
        "must_not_be_published": ["../non-private/"],
    }
    if result.study.search.accounted:
        no_curve = NotGiven(
            not_given="the epsilon of a search is by Renyi divergences, which have no distribution "
            "of the privacy loss to take more from"
        )
        changes |= {"epsilon": result.epsilon, "accountant": accountant_version("rdp"),
                    "trade_off": no_curve}  # fmt: skip
    write_statement(RunFolder(best), stored.model_copy(update=changes))


def _mark(result: SearchResult, folder: RunFolder) -> None:
    """State how the search was paid for in a trial's folder."""
    stored = Statement.read(folder.statement_json)
    write_statement(folder, stored.model_copy(update={"tuned_on": result.statement()}))
