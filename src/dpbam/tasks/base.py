"""A task: the loss of a record, metrics, predictions, and the words for them."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpbam import _validate
from dpbam._names import did_you_mean
from dpbam.catalogue import TASKS
from dpbam.errors import ArgumentError
from dpbam.tasks.scores import LEVEL, Compared, Evaluation, Figures, Scores, Subset

Floats = NDArray[np.float64]
_RESAMPLES = 200
_MOST_GROUPS = 100


@dataclass(frozen=True)
class Row:
    """What is predicted for one record.

    Attributes:
        label: the likeliest class; findings with ``|`` between them; the value, as text.
        values: by class, finding or name of the value: probability, share of the pixels, value.
        mask: of a segmentation: uint8 [H, W].
    """

    label: str
    values: dict[str, float]
    mask: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Words:
    """What a model card and the command line say about a task.

    Attributes:
        gives: what the model gives for an image; ``{names}``, ``{low}``, ``{high}`` are filled in.
        outputs: what its outputs mean; also ``{width}``, the range of the values.
        pipeline_tag: of the Hugging Face hub; empty: none.
        values: what the numbers of a prediction are.
        column: heading of a number in a table of predictions.
        counted: what a class is counted in.
        labelled: whether a prediction has a label in addition to its numbers.
    """

    gives: str
    outputs: str
    pipeline_tag: str = ""
    values: str = "probabilities"
    column: str = "p({})"
    counted: str = "records"
    labelled: bool = True


class Task(nn.Module, ABC):
    """One task; calling it returns the loss of each record, [N].

    Args:
        class_names: of the outputs.
        class_weights: a public weight per class name; others weigh 1.
        focal: gamma; 0 is cross-entropy.

    Attributes:
        weights: [K], of the classes. A buffer: part of a training's state.
    """

    name: ClassVar[str]
    metric: ClassVar[str]  # the first of the scores: more is better
    words: ClassVar[Words]
    layout: ClassVar[str]  # of its labels in a data set
    has_classes: ClassVar[bool] = True
    has_thresholds: ClassVar[bool] = False  # a class is predicted where it reaches one
    several_labels: ClassVar[bool] = False  # a record may have more than one class
    targets_are_images: ClassVar[bool] = False  # and are augmented with the images
    weights: Tensor

    def __init__(
        self,
        class_names: Sequence[str],
        *,
        class_weights: Mapping[str, float] | None = None,
        focal: float = 0.0,
    ) -> None:
        super().__init__()
        self.class_names, weights_by_name = tuple(class_names), class_weights or {}
        self.focal = _validate.non_negative("focal", focal)
        for name, weight in weights_by_name.items():
            if name not in self.class_names:
                hint = did_you_mean(name, self.class_names)
                raise ArgumentError(f"class_weights names {name!r}, which is no class: {hint}")
            _validate.positive(f"the weight of class {name!r}", weight)
        weights = [float(weights_by_name.get(name, 1.0)) for name in self.class_names]
        self.register_buffer("weights", torch.tensor(weights))

    @abstractmethod
    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each record: [N, ...], [N, ...] -> [N]."""

    @abstractmethod
    def predictions(self, output: Tensor) -> Tensor:
        """Return what a user is given of the outputs: probabilities, values or masks."""

    def summary(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the metrics need of each record, small enough to keep for a whole set."""
        return output, targets

    @abstractmethod
    def scores(self, summaries: Floats, targets: NDArray[Any]) -> Scores:
        """Return the metrics of records, from what :meth:`summary` returns of them."""

    def main_score(self, summaries: Floats, targets: NDArray[Any]) -> float:
        """Return the main metric alone, which a bootstrap computes many times."""
        return self.scores(summaries, targets)[self.metric]

    @abstractmethod
    def compared(self, summaries: Floats, targets: NDArray[Any]) -> dict[str, Compared]:
        """Return the main metric, and others that show it, next to those of the best constant."""

    @abstractmethod
    def by_class(self, summaries: Floats, targets: NDArray[Any]) -> dict[str, Subset]:
        """Return the main metric of each class as ``value``, and others."""

    def details(self, summaries: Floats, targets: NDArray[Any]) -> Scores:
        """Return the metrics of a finished model: those of training, and slower ones."""
        return self.scores(summaries, targets)

    def interval(self, summaries: Floats, targets: NDArray[Any]) -> tuple[float, float]:
        """Return the 95% interval of the main metric: a percentile bootstrap over records."""
        from scipy.stats import bootstrap

        n = len(targets)
        if n < 2:
            return math.nan, math.nan

        def score(rows: NDArray[np.int64]) -> float:
            return self.main_score(summaries[rows], targets[rows])

        with warnings.catch_warnings():  # of samples on which the metric is not defined
            warnings.simplefilter("ignore")
            values = bootstrap(
                (np.arange(n),), score, n_resamples=_RESAMPLES, vectorized=False,
                method="percentile", random_state=np.random.default_rng(0),
            ).bootstrap_distribution  # fmt: skip
            low, high = np.nanquantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)

    def figures(self, summaries: Floats, targets: NDArray[Any]) -> Figures:
        """Return what a report draws."""
        return {}

    @abstractmethod
    def row(self, prediction: NDArray[Any], thresholds: Mapping[str, float]) -> Row:
        """Return what is reported of one record of :meth:`predictions`."""

    def numbered(self, class_names: Sequence[str]) -> NDArray[np.int64] | None:
        """Return the model's numbers of a data set's classes; None where they are the same.

        Raises:
            ArgumentError: if the model cannot be evaluated on these classes.
        """
        if tuple(class_names) != self.class_names:
            raise ArgumentError(
                f"has {', '.join(class_names[:10])}, but the model knows "
                f"{', '.join(self.class_names[:10])}: give the same, in the same order"
            )
        return None

    def evaluate(
        self,
        summaries: Floats,
        targets: NDArray[Any],
        groups: Mapping[str, NDArray[Any]] | None = None,
        thresholds: Mapping[str, float] | None = None,
    ) -> Evaluation:
        """Compute all metrics of a finished model.

        Args:
            summaries: what :meth:`summary` returns of each record.
            targets: of each record.
            groups: columns [N] by name; each column's values are sub-groups.
            thresholds: of findings; others have 0.5.
        """
        if not len(targets):
            raise ArgumentError("there are no records to evaluate")
        if not np.isfinite(summaries).all():
            raise ArgumentError(
                "the model predicts numbers that are not finite: its training has diverged, so "
                "lower the learning rate"
            )
        classes = self.by_class(summaries, targets)
        if self.has_thresholds:
            at_thresholds = self.at_thresholds(summaries, targets, thresholds or {})
            classes = {
                name: replace(one, scores={**one.scores, **at_thresholds[name]})
                for name, one in classes.items()
            }
        compared = self.compared(summaries, targets)
        return Evaluation(
            task=self.name,
            metric=self.metric,
            scores=self.details(summaries, targets),
            interval=self.interval(summaries, targets),
            trivial=compared[self.metric].constant,
            count=len(targets),
            classes=classes,
            groups={
                column: {
                    name: self.of_group(summaries[mine], targets[mine])
                    for name, mine in by_value(column, values, len(targets)).items()
                }
                for column, values in (groups or {}).items()
            },
            figures=self.figures(summaries, targets),
            compared=compared,
        )

    def of_group(self, summaries: Floats, targets: NDArray[Any]) -> Subset:
        """Return the scores of a sub-group, and its number of records."""
        return Subset(self.details(summaries, targets), len(targets))

    def at_thresholds(
        self, summaries: Floats, targets: NDArray[Any], thresholds: Mapping[str, float]
    ) -> dict[str, Scores]:
        """Return what depends on the threshold of each class."""
        return {}

    def best_thresholds(self, summaries: Floats, targets: NDArray[Any]) -> dict[str, float]:
        """Return the threshold of each class that is best on these records."""
        raise ArgumentError(f"thresholds are for findings, and this model does {self.name}")

    def check_output(self, output: Tensor, images: Tensor) -> None:
        expected = (len(images), *self.output_shape(images.shape[-2], images.shape[-1]))
        if tuple(output.shape) != expected:
            raise ArgumentError(
                f"{self.name} needs a model with outputs {list(expected[1:])} per record, this one "
                f"gives {list(output.shape[1:])}: {self._hint}"
            )

    _hint: ClassVar[str] = "unet is for segmentation, choose another"

    def output_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (len(self.class_names),)

    def blank_targets(self, count: int, height: int, width: int) -> Tensor:
        """Return targets of ``count`` blank records, to measure memory with."""
        return torch.zeros(count, dtype=torch.int64)

    def _weighted(self, nll: Tensor, weights: Tensor) -> Tensor:
        """w (1 - p)^gamma (-log p), from -log p."""
        if self.focal:
            wrong = (-torch.expm1(-nll)).clamp(min=1e-7)  # 1 - p; at 0 powers have no derivative
            nll = wrong**self.focal * nll
        return weights * nll


def by_value(column: str, values: NDArray[Any], records: int) -> dict[str, NDArray[np.bool_]]:
    """Return which records have each value of a column."""
    if len(values) != records:
        raise ArgumentError(f"column {column!r} has {len(values)} values for {records} records")
    names, group = np.unique(values, return_inverse=True)
    if len(names) > _MOST_GROUPS:
        raise ArgumentError(
            f"column {column!r} has {len(names)} different values, too many to compare as groups: "
            f"put them into at most {_MOST_GROUPS} bins first"
        )
    return {str(name): group == k for k, name in enumerate(names)}


def ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else math.nan


def mean(values: Sequence[float]) -> float:
    """Return the mean of those that are defined; NaN if none is."""
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


def by_name(names: Sequence[str], values: NDArray[Any]) -> dict[str, float]:
    return dict(zip(names, values.tolist(), strict=True))


def make_task(
    name: str,
    class_names: Sequence[str],
    *,
    class_weights: Mapping[str, float] | None = None,
    focal: float = 0.0,
    target_range: tuple[float, float] | None = None,
) -> Task:
    """Return the task called ``name``; refuse settings that it does not have."""
    cls: type[Task] = TASKS.load(name)
    if cls.has_classes:
        if target_range is not None:
            raise ArgumentError(f"target_range is for a regression, not for {name}: leave it out")
        return cls(class_names, class_weights=class_weights, focal=focal)
    if class_weights or focal:
        raise ArgumentError("class weights and focal loss are for classes, not for a regression")
    if target_range is None:
        raise ArgumentError(
            "a regression needs --target-range LOW:HIGH, a public fact such as 0:100 for an age: "
            "measured on the data it would be a release without noise"
        )
    make: Any = cls
    task: Task = make(class_names, target_range=target_range)
    return task
