"""Reads run folders: what a report is made of.

=========================  ==============================================================
file                       what is taken from it
=========================  ==============================================================
config.toml                what was asked for
privacy-statement.json     what was spent, and what may be published
statistics.jsonl           norms and bias that were released with noise
metrics.jsonl              accuracy on the test data over training
non-private/               for the operator only:
  run.json                 versions and machine; the plan, while there is no statement yet
  evaluations.jsonl        the best constant answer, next to each evaluation
  training.jsonl           training loss
  bias.jsonl               measured steps of the bias lens
  evaluation-test.json     confusion, classes and sub-groups (``dpbam evaluate --save``)
=========================  ==============================================================

A missing file leaves its figures empty, with the reason; only the configuration must exist.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpbam import _jsonl
from dpbam._names import public_name
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.documents import RunFacts, Statement
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.settings import policies
from dpbam.app.runs.statement_check import check_statement
from dpbam.catalogue import METHODS, is_private
from dpbam.errors import DPBAMError
from dpbam.tasks.scores import Compared, is_useless

CONFIG = "config.toml"
#: Settings that may be in a report for publication.
PUBLIC_SETTINGS = frozenset(name for name, one in policies(RunConfig).items() if one.published)

_NO_METRICS = ("step", "epoch", "epsilon", "loss", "records")  # of metrics.jsonl
#: A JSON object of a file that only figures read, as written.
Row = Mapping[str, Any]
Rows = tuple[Row, ...]


class ReportError(DPBAMError, ValueError):
    """A run that cannot be reported on: one sentence with the way out."""


@dataclass(frozen=True)
class Run:
    """What one run folder holds.

    Attributes:
        name: the folder's name.
        config: the configuration, as written.
        statement: the privacy statement; None while the training has not finished.
        facts: the plan and the machine; None if not recorded. Not to be shared.
        metrics: evaluations over training, in order.
        evaluation: by class and sub-group; None if there is none. Not to be shared.
        steps: per-step rows. Not to be shared.
        bias: measured steps. Not to be shared.
        statistics: what was released next to the gradients, with noise.
        compared: scores next to those of the best constant answer. Not to be shared.
        sampling_rate: q; NaN if not known.
    """

    name: str
    config: Mapping[str, object]
    statement: Statement | None = None
    facts: RunFacts | None = None
    metrics: Rows = ()
    evaluation: Row | None = None
    steps: Rows = ()
    bias: Rows = ()
    statistics: Rows = ()
    compared: Rows = ()
    sampling_rate: float = math.nan

    @property
    def method(self) -> str:
        """As people write it: DP-SGD, BAM."""
        name = str(self.config.get("method", "run"))
        return METHODS[name].label if name in METHODS else name

    @property
    def data(self) -> str:
        """The data set's name, as the statement has it; never a path."""
        name = str(self.config.get("data", "data"))
        if self.statement is not None:
            name = self.statement.evaluated_on.set or name
        return name.removesuffix("/test").removesuffix("/held-out").split("/")[-1]

    @property
    def private(self) -> bool:
        """Whether it promises privacy, by its statement, else by its method."""
        if self.statement is not None:
            return self.statement.private
        return is_private(self.config.get("method"))

    @property
    def epsilon(self) -> float:
        """What was spent; while the training has not finished, at the last evaluation."""
        if self.statement is not None:
            return self.statement.epsilon
        spent = self.metrics[-1].get("epsilon") if self.metrics else 0.0
        return float(spent) if isinstance(spent, int | float) else math.inf

    @property
    def delta(self) -> float | None:
        source = self.statement or self.facts
        return None if source is None else source.delta

    @property
    def unit(self) -> str:
        """The unit of privacy in a word: record, patient."""
        source = self.statement or self.facts
        return "record" if source is None else source.unit.split(" ")[0]

    @property
    def seeded(self) -> bool:
        if self.statement is not None:
            return self.statement.seeded
        return self.config.get("seed") is not None

    @property
    def environment(self) -> dict[str, object]:
        """Versions and machine. Not to be shared."""
        if self.facts is None:
            return {}
        rows = self.facts.physical_batch_size
        machine = {"device": self.facts.device, "threads": self.facts.threads}
        return {**self.facts.versions, **machine} | ({"physical_batch_size": rows} if rows else {})

    @property
    def metric(self) -> str:
        """The task's main metric, such as the accuracy."""
        last = self.metrics[-1] if self.metrics else {}
        return next((name for name in last if name not in _NO_METRICS), "accuracy")

    @property
    def final(self) -> float | None:
        """The main metric at the end of training; None if none was recorded."""
        values = [row.get(self.metric) for row in self.metrics]
        return next((float(v) for v in reversed(values) if v is not None), None)

    @property
    def constant(self) -> float | None:
        """The main metric of the best answer that ignores the image; None if not recorded."""
        scores = self._last_compared.get(self.metric) or {}
        if scores.get("constant") is not None:
            return float(scores["constant"])
        evaluation = self.evaluation_of_last_records
        return float(evaluation["trivial"]) if "trivial" in evaluation else None

    @property
    def useless(self) -> bool | None:
        """Whether the last model was not better than the best constant by more than chance.

        None: there are too few test records to tell.
        """
        scores = list(self._last_compared.values())
        if scores:
            numbers = [{k: math.nan if v is None else v for k, v in s.items()} for s in scores]
            return is_useless({str(k): Compared(**score) for k, score in enumerate(numbers)})
        constant, final = self.constant, self.final
        if constant is None or final is None or final > constant:
            return False
        records = int(self.metrics[-1].get("records") or 0)
        chance = 0.0
        if self.metric == "accuracy" and records:
            chance = math.sqrt(constant * (1 - constant) / records)
        return is_useless({self.metric: Compared(final, constant, chance)})

    @property
    def evaluation_of_last_records(self) -> Row:
        """What ``dpbam evaluate --save`` recorded, if it was of as many records."""
        evaluation = self.evaluation or {}
        count = evaluation.get("count")
        records = int(self.metrics[-1].get("records") or 0) if self.metrics else 0
        return evaluation if count == records else {}

    @property
    def _last_compared(self) -> Mapping[str, Row]:
        """Scores by metric, of the last evaluation alone."""
        last = self.metrics[-1].get("step") if self.metrics else None
        rows = [row for row in self.compared if row.get("step") == last]
        return (rows[-1].get("compared") or {}) if rows else {}

    def publishable(self, *, public_test_data: bool) -> Run:
        """The same run without anything that privacy does not protect, named by its statement.

        A folder's name is the operator's, and often contains the seed; so do the settings. An
        evaluation is left out unless ``dpbam evaluate`` found its records to be the run's test set.

        Raises:
            ReportError: if there is no privacy statement to publish under, or it forbids that.
        """
        statement = self.statement
        if statement is None:
            raise ReportError(
                f"{self.name} has no privacy statement yet, so nothing of it may be published: "
                "finish its training first (dpbam train --resume)"
            )
        if not statement.may_be_published:
            raise ReportError(
                f"the privacy statement of {self.name} lets nothing be published, as that of a "
                "search's trial (report on the search's folder best) or of a reference without "
                "privacy (leave it out)"
            )
        evaluation = self.evaluation or {}
        # of other records than the run's test set nothing is promised
        of_test_set = evaluation.get("test_set_of_the_run") is True
        return Run(
            name=f"run {statement.run[:8]}",
            config=_public(self.config),
            statement=statement,
            statistics=self.statistics,
            metrics=self.metrics if public_test_data else (),
            evaluation=evaluation if public_test_data and of_test_set else None,
            sampling_rate=statement.sampling_rate,
        )


def unit_of(runs: Sequence[Run]) -> str:
    """The unit of privacy in the plural: "samples" for records, "patients" for patients.

    Example:
        >>> unit_of([Run("a", {})])
        'samples'
    """
    names = {run.unit for run in runs}
    name = names.pop() if len(names) == 1 else "unit"
    return "samples" if name == "record" else f"{name}s"


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """The runs in ``folders``: each is a run, or holds runs, as a comparison's folder does.

    Runs of a comparison come in its order, the baseline first, others in that of the catalogue.
    A name that two runs share is made longer by the folder above.

    Raises:
        ReportError: if there is no run.
    """
    paths = [path for folder in folders for path in _runs_within(Path(folder))]
    names = Counter(path.name for path in paths)
    return [
        replace(read_run(p), name=p.name if names[p.name] == 1 else f"{p.parent.name}/{p.name}")
        for p in paths
    ]


def _runs_within(folder: Path) -> list[Path]:
    """The folder itself, or the run folders one or two levels below it, resolved."""
    folder = folder.resolve()
    if (folder / CONFIG).exists() or not folder.is_dir():
        return [folder]
    below = {p.parent for depth in ("*", "*/*") for p in folder.glob(f"{depth}/{CONFIG}")}
    arms = list(_maybe(folder / "comparison.json").get("contenders", ()))
    return sorted(below, key=lambda p: (_arm_rank(p, arms), _rank(p), str(p))) or [folder]


def _arm_rank(path: Path, arms: Sequence[str]) -> int:
    """The position of a run's contender in its comparison; last if it is of none."""
    return arms.index(path.parent.name) if path.parent.name in arms else len(arms)


def _rank(path: Path) -> int:
    """The position of the method that a run's folder, or the one above it, is named after."""
    folders = [f"{name}-" for name in (path.name, path.parent.name)]  # bam, or bam-0.02
    named = [k for k, m in enumerate(METHODS) if any(f.startswith(f"{m}-") for f in folders)]
    return named[0] if named else len(METHODS)


def read_run(folder: str | Path) -> Run:
    """Everything a report needs from a run folder, or from the files of one that are published.

    Raises:
        ReportError: if the folder is no run, or a file in it is damaged.
        RunError: if a link in it leads out, or the statement disagrees with the other files.
    """
    files = RunFolder(folder)
    if not files.path.is_dir():
        raise ReportError(f"{folder} is not a folder: name a run folder, as dpbam train --out made")
    files.check_links()  # a link may lead to a secret of another user
    statement = Statement.read(path) if (path := files.statement_json).exists() else None
    if statement is not None:
        check_statement(files, statement)
    if not files.config.exists() and statement is None:
        raise ReportError(
            f"{folder} has no config.toml: it is not a run folder, or its training never began"
        )
    # a published folder has its settings in the statement alone; epsilon there is what was spent
    stated = {} if statement is None else statement.to_json()
    settings = {k: v for k, v in stated.items() if k in PUBLIC_SETTINGS - {"epsilon"}}
    facts = files.read_facts() if files.facts.exists() else None
    plan = statement or facts
    return Run(
        name=files.path.resolve().name,
        config=_parse(files.config, tomllib.loads) if files.config.exists() else settings,
        statement=statement,
        facts=facts,
        sampling_rate=math.nan if plan is None else plan.sampling_rate,
        metrics=_rows(files.metrics),
        statistics=_rows(files.statistics),
        evaluation=_maybe(files.non_private / "evaluation-test.json") or None,
        compared=_rows(files.evaluations),
        steps=_rows(files.training_log),
        bias=_rows(files.bias),
    )


def _public(config: Mapping[str, object]) -> dict[str, object]:
    """Return the settings for publication, an encoder's folder without the path to it."""
    public = {k: v for k, v in config.items() if k in PUBLIC_SETTINGS}
    return public | ({"model": public_name(str(public["model"]))} if "model" in public else {})


def _maybe(path: Path) -> Row:
    """Return a JSON file's values; empty where there is none."""
    return _parse(path, json.loads) if path.exists() else {}


def _rows(path: Path) -> Rows:
    """The lines of a JSON-lines file, by step; a missing file is empty.

    A torn last line is left out. Of a step that was repeated after a crash, the last line counts.
    """
    rows = _jsonl.read(path, error=ReportError)
    if not all(isinstance(row.get("step", 0), int) for row in rows):
        raise ReportError(f"{path} has a line whose step is not a number: restore the file")
    by_step = {row.get("step", number): row for number, row in enumerate(rows)}
    return tuple(by_step[step] for step in sorted(by_step))


def _parse(path: Path, parse: Callable[[str], object]) -> Row:
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} cannot be read ({error}): restore the file") from None
    if not isinstance(values, dict):
        raise ReportError(f"{path} does not hold names and values: restore the file")
    return values
