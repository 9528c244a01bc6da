"""What a search found, and what may be published of it.

====================================  ==================================================
file                                  may be published
====================================  ==================================================
``result.json``                       yes: how it was paid for, and the best
``best/``                             yes, all of it: the chosen model and its statement
``non-private/study.json``            never: all trials, and how many there were
``non-private/trials/METHOD/NNNN``    no: each is marked by ``NOT-FOR-RELEASE.md``
====================================  ==================================================

What is published is copied from the chosen trial's run folder, file by file, so that neither
contents nor names reveal anything about other trials (index, number, folders, seeds, times).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from dpbam.app.runs.documents import NotGiven, Statement
from dpbam.app.runs.files import write_atomic, write_json
from dpbam.app.runs.folder import MARK, PUBLISHABLE, RunFolder
from dpbam.app.runs.identity import today
from dpbam.app.runs.run import RunError
from dpbam.app.runs.statement import write_statement
from dpbam.app.search.search import Search
from dpbam.app.search.selection import search_epsilon
from dpbam.app.search.study import Score, Study
from dpbam.privacy.accounting import Charge, accountant_version, total_epsilon
from dpbam.privacy.rounding import up

BEST = "best"  # the folder that is published
_ALL_EVALUATED = "Every trial of the search was evaluated on them, and this one chosen by that"
_PUBLIC = "the search was made on data declared public or synthetic: it costs no privacy"
_NOTHING = (
    "NOT ACCOUNTED: the hyper-parameters were chosen by {trials} trainings on the same data, which "
    "this epsilon does not cover; all of them together, were they published, cost epsilon {all}"
)
_ACCOUNTED = (
    "accounted: this is the best of a random number of independent trials ({draw}; {stages} such "
    "selections, one after the other), of which the others are not released; epsilon covers the "
    "whole search (Papernot and Steinke 2022){score}"
)
_RDP_ALONE = (
    "the epsilon of a search is by Renyi divergences, which have no distribution of the privacy "
    "loss to take more from"
)
_PUBLIC_SCORE = ", given that the test records, by which the best was chosen, are public"
_NOISED_SCORE = (
    "; the score was the number of test records that a trial gets right, with Gaussian noise of "
    "deviation {noise:g}, which epsilon covers, too"
)
_NOT_FOR_RELEASE = """# Not for release

This is a trial of a search. {why}
Its privacy statement covers this training alone.
"""
_WHY = {
    "accounted": f"The epsilon of the search holds if {BEST}/ alone is released.",
    "nothing": "Every further trial that is published costs its own epsilon on top.",
    "public": "It was made on data declared public or synthetic: releasing it would do no harm.",
}


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
    def search(self) -> Search:
        return self.study.search

    @property
    def trial(self) -> RunFolder | None:
        """The run folder of the best trial: for the operator."""
        best = self.best
        return None if best is None else RunFolder(self.study.folder(best.method, best.number))

    def statement(self) -> str:
        """State in one sentence how the search was paid for."""
        search = self.search
        if search.pay == "public":
            return _PUBLIC
        if not search.accounted:
            trials = sum(self.study.count(stage) for stage in search.stages())
            return _NOTHING.format(trials=trials, all=up(self.epsilon_of_all or 0.0))
        noise = search.score_noise
        score = _PUBLIC_SCORE if noise is None else _NOISED_SCORE.format(noise=noise)
        draw = search.selection.describe()
        return _ACCOUNTED.format(draw=draw, stages=len(search.methods), score=score)

    def to_dict(self) -> dict[str, object]:
        """Return plain values for ``result.json``; if accounted, of the best trial alone."""
        search, best = self.search, self.best
        winner = None if best is None else {"method": best.method, **_score_and_settings(best)}
        values: dict[str, object] = {
            "format": 1,
            "paid": search.pay,
            "epsilon_covers_the_search": search.pay != "nothing",
            "statement": self.statement(),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "research_only": search.seed is not None,
            "best": winner,
            "folder": None if best is None else BEST,
        }
        if search.accounted:
            return values | {
                "accountant": accountant_version("rdp"),
                "number_of_trials": f"secret, drawn from: {search.selection.describe()}",
                "noise_multiplier": search.settings["noise_multiplier"],
                "score_noise": search.score_noise,
            }
        best_of_each = {stage.method: self.study.best(stage) for stage in search.stages()}
        return values | {
            "best_of_each_method": {
                method: {} if trial is None else _score_and_settings(trial)
                for method, trial in best_of_each.items()
            },
            "epsilon_of_all_trials_together": self.epsilon_of_all,
        }


def conclude(study: Study) -> SearchResult:
    """Find the best trial and the cost, mark the others, and write ``result.json``.

    Raises:
        RunError: if trials are missing, such as those of another machine.
    """
    if lacking := study.lacking():
        raise RunError(lacking)
    search = study.search
    trials = [trial for stage in search.stages() for trial in study.scores(stage)]
    best = max(trials, key=lambda trial: trial.score, default=None)
    charges = [charge for trial in trials for charge in trial.charges]
    delta = trials[0].delta if trials else float(str(search.settings.get("delta", 0.0)))
    if search.accounted:
        epsilon, together = whole_epsilon(search, charges, delta), None
    else:
        epsilon = 0.0 if best is None else best.epsilon
        together = total_epsilon(charges, delta, accountant="rdp")
    result = SearchResult(study, best, epsilon, together, delta)
    for trial in trials:
        _mark(result, RunFolder(study.folder(trial.method, trial.number)))
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
    return search_epsilon(longest, delta, search.selection)


def _publish(result: SearchResult, best: Path) -> None:
    """Copy what may be published of the chosen trial, with the statement about the search."""
    shutil.rmtree(best, ignore_errors=True)
    source = result.trial
    if source is None:
        return  # no trial was drawn
    best.mkdir()
    released = [
        p.name for p in (source.statistics, source.class_counts, source.centre) if p.exists()
    ]
    for name in (source.weights.name, source.model.name, *released):
        write_atomic(best / name, (source.path / name).read_bytes())
    stored = Statement.read(source.statement_json)
    note = f"{stored.evaluated_on.note}. {_ALL_EVALUATED}"
    changes: dict[str, object] = {
        "identity": stored.identity.model_copy(update={"date": today()}),  # of the search
        "tuned_on": result.statement(),
        "evaluated_on": stored.evaluated_on.model_copy(update={"note": note}),
        "may_be_published": [*PUBLISHABLE, *released],
        "may_be_published_if_the_test_records_are_not_sensitive": [],
        "must_not_be_published": ["../non-private/"],
    }
    if result.search.accounted:
        changes |= {"epsilon": result.epsilon, "accountant": accountant_version("rdp"),
                    "trade_off": NotGiven(not_given=_RDP_ALONE)}  # fmt: skip
    write_statement(RunFolder(best), stored.model_copy(update=changes))


def _mark(result: SearchResult, folder: RunFolder) -> None:
    """Mark a trial's folder; no trial of an accounted search may be published as it is."""
    stored = Statement.read(folder.statement_json)
    changes: dict[str, object] = {"tuned_on": result.statement()}
    if result.search.accounted:
        secret = dict.fromkeys([*stored.may_be_published, *stored.must_not_be_published])
        changes |= {"may_be_published": [], "must_not_be_published": list(secret)}
    write_statement(folder, stored.model_copy(update=changes))
    write_atomic(folder.path / MARK, _NOT_FOR_RELEASE.format(why=_WHY[result.search.pay]))


def _score_and_settings(trial: Score) -> dict[str, object]:
    """Return the score, and what was varied in this stage and before."""
    return {"score": trial.score, **trial.settings}
