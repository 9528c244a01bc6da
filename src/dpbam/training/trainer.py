"""The training loop: sampler -> oracle -> optimiser -> average, with evaluations in between.

The model depends on the training data through :meth:`PrivateGradientOracle.backward` alone:
schedule and averages are functions of the step and of what was released. With several ranks, each
trains on its own units, and the leader evaluates and reports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cache
from typing import Any, Literal, TypedDict

from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from dpbam.data import DataSet, to_float
from dpbam.data.dataset import model_input
from dpbam.loading import PoissonBatches
from dpbam.observers import TrainingLoss
from dpbam.oracle import PrivateGradientOracle
from dpbam.params import Params, device_of, map_rows
from dpbam.privacy.plan import PrivacyPlan
from dpbam.tasks.base import Task, make_task
from dpbam.training.averaging import WeightAverage
from dpbam.training.evaluation import spare, summarise
from dpbam.training.events import EvaluationReport, Reporter, StepReport

Ending = Literal["complete", "stopped", "budget ended"]

_LOSS_EVERY = 10  # steps between measurements of the training loss
_POINTS = 10  # bounds on epsilon that a run computes for its steps, and evaluations by default


class TrainerState(TypedDict):
    """All that resuming needs, apart from the ledger.

    Attributes:
        model: parameters and buffers.
        optimizer: as its ``state_dict`` returns it.
        oracle: as :meth:`PrivateGradientOracle.state_dict` returns it.
        average: the average of the weights, if there is one.
    """

    model: Params
    optimizer: StateDict
    oracle: Mapping[str, Any]
    average: Params | None


class Trainer:
    """Trains the oracle's model on a data set of images.

    Args:
        oracle: computes private gradients; its model, plan, method, seed and ledger are used. Its
            ``augment`` must turn uint8 images into floats, for example :func:`augmentation`.
        optimizer: of ``torch.optim``, over the trainable parameters.
        train: the training set.
        test: the data of :meth:`evaluate`.
        task: its metrics; the oracle's loss is to be its loss. None: that of the training set.
        units: the owner of each training record, where the unit of privacy is not the record.
        schedule: from the step (from 0) to a factor on the learning rate; no private data.
        average: an average of the weights, which is evaluated in their place.
        eval_every: steps between evaluations; the last step is always evaluated.
        max_charges: the most steps that the ledger may hold; None: those of the plan.
        num_workers: threads that read batches ahead.
        reporter: receives the events of the training.

    Example:
        >>> import torch
        >>> from dpbam import PrivacyPlan
        >>> from dpbam.data import load_pair
        >>> from dpbam.nn import build_model
        >>> train, test = load_pair("digits")
        >>> model = build_model("mlp", in_channels=1, image_size=8, num_classes=10, seed=0)
        >>> plan = PrivacyPlan(n=len(train), batch_size=100, steps=2, noise_multiplier=1.0,
        ...                    delta=1e-4, accountant="rdp")
        >>> oracle = PrivateGradientOracle(model, nn.CrossEntropyLoss(reduction="none"), plan,
        ...                                augment=augmentation())
        >>> trainer = Trainer(oracle, torch.optim.SGD(model.parameters(), lr=0.1), train, test)
        >>> trainer.run(), trainer.evaluations[-1].step
        ('complete', 2)
    """

    def __init__(
        self,
        oracle: PrivateGradientOracle,
        optimizer: Optimizer,
        train: DataSet,
        test: DataSet,
        *,
        task: Task | None = None,
        units: NDArray[Any] | None = None,
        schedule: Callable[[int], float] = lambda step: 1.0,
        average: WeightAverage | None = None,
        eval_every: int | None = None,
        max_charges: int | None = None,
        num_workers: int = 0,
        reporter: Reporter | None = None,
    ) -> None:
        self.oracle, self.optimizer = oracle, optimizer
        self.train, self.test, self.units = train, test, units
        self.task = task or make_task(train.task, train.class_names)
        self.schedule, self.average = schedule, average
        self.eval_every, self.max_charges = eval_every, max_charges
        self.num_workers, self.reporter = num_workers, reporter or Reporter()
        self.evaluations: list[EvaluationReport] = []
        self._base_lr = [group["lr"] for group in optimizer.param_groups]
        self._curve = EpsilonCurve(oracle.plan)
        # for the operator, never published; in the step's own pass, so that no pass outside of the
        # oracle leaves anything of a record in the model
        self._losses = TrainingLoss(every=_LOSS_EVERY)
        oracle.observers = (*oracle.observers, self._losses)
        self._began = (time.monotonic(), oracle.step)

    @property
    def model(self) -> nn.Module:
        return self.oracle.model

    @property
    def charged(self) -> int:
        """Steps paid for; a seeded replay is the same release, and is not paid for again."""
        oracle = self.oracle
        return oracle.step if oracle.randomness.seeded else len(oracle.ledger)

    def run(
        self,
        *,
        after_step: Callable[[], None] = lambda: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Ending:
        """Train to the end of the plan or of the budget, or until ``stop()``.

        Args:
            after_step: called when a step is complete, including its evaluation.
            stop: called between steps; if it is true on any rank, all stop.
        """
        batches = self.oracle.batches(self.train, units=self.units, num_workers=self.num_workers)
        with closing(batches):  # ends the reading threads now, also if a step raises
            return self._train_on(batches, after_step, stop)

    def _train_on(
        self, batches: PoissonBatches, after_step: Callable[[], None], stop: Callable[[], bool]
    ) -> Ending:
        oracle, plan, ranks = self.oracle, self.oracle.plan, self.oracle.ranks
        self._began = (time.monotonic(), oracle.step)
        for images, labels, units in batches:  # uint8 [N, C, H, W], the task's, int64 [N]
            rows, spent, asked = ranks.sums(len(images), self._is_spent(), stop())
            if spent:
                self._evaluate_once()
                return "budget ended"
            if asked:
                return "stopped"
            lr = self._set_learning_rate()
            oracle.backward(images, labels, units)  # on the ledger, then into .grad
            self.optimizer.step()
            if self.average:
                self.average.update(oracle.step - 1)
            measured = self._losses.non_private_losses
            loss = measured.pop() if measured else math.nan
            if ranks.leads:
                finite_loss = None if math.isnan(loss) else loss
                self.reporter.on_step(self._report(lr, int(rows), finite_loss))
                if oracle.step == plan.steps or oracle.step % (self.eval_every or plan.steps) == 0:
                    self.evaluate()
            after_step()
        self._evaluate_once()  # a run that was resumed at its end
        return "complete"

    def _is_spent(self) -> bool:
        """Whether the budget has ended, on the leader, which has the ledger."""
        limit = self.max_charges
        return self.oracle.ranks.leads and limit is not None and self.charged >= limit

    def _report(self, lr: float, rows: int, loss: float | None) -> StepReport:
        plan, step = self.oracle.plan, self.oracle.step
        began, first = self._began
        elapsed = time.monotonic() - began
        return StepReport(
            step=step,
            steps=plan.steps,
            epoch=step * plan.sampling_rate,
            charged=self.charged,
            epsilon_at_most=self._curve.bound(self.charged),
            lr=lr,
            seconds=elapsed,
            seconds_left=elapsed / (step - first) * (plan.steps - step),
            non_private_batch_size=rows,
            non_private_loss=loss,
        )

    def evaluate(self) -> EvaluationReport:
        """Evaluate the model that would be released, on the test data."""
        with self.averaged():
            model = spare(self.model) or self.model
            outputs, targets, losses = summarise(model, self.test, self.task)
        plan, step = self.oracle.plan, self.oracle.step
        summaries, labels = outputs.double().numpy(), targets.numpy()
        result = EvaluationReport(
            step=step,
            epoch=step * plan.sampling_rate,
            epsilon=self._epsilon(),
            scores=self.task.scores(summaries, labels),
            compared=self.task.compared(summaries, labels),
            loss=float(losses.double().mean()),
            records=len(losses),
        )
        self.evaluations.append(result)
        self.reporter.on_evaluation(result)
        return result

    def _epsilon(self) -> float:
        """Return what was spent: by the ledger, unless steps of a seeded run are repeated."""
        oracle = self.oracle
        if not oracle.plan.private or oracle.randomness.seeded:
            return oracle.plan.epsilon(oracle.step)
        return oracle.ledger.epsilon()

    def averaged(self) -> AbstractContextManager[None]:
        return self.average.applied() if self.average else nullcontext()

    def state_dict(self) -> TrainerState:
        """Return all that resuming needs, apart from the ledger."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "oracle": self.oracle.state_dict(),
            "average": self.average.state_dict() if self.average else None,
        }

    def load_state_dict(self, state: TrainerState) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        device = device_of(self.model)
        parts = map_rows(lambda t: t.to(device), state["oracle"]["parts"])
        self.oracle.load_state_dict({**state["oracle"], "parts": parts})
        if self.average:
            self.average.load_state_dict(state["average"] or {})

    def _evaluate_once(self) -> None:
        if not self.oracle.ranks.leads:
            return
        if not self.evaluations or self.evaluations[-1].step != self.oracle.step:
            self.evaluate()

    def _set_learning_rate(self) -> float:
        """Set and return lr_t = lr * schedule(t)."""
        factor = self.schedule(self.oracle.step)
        for group, base in zip(self.optimizer.param_groups, self._base_lr, strict=True):
            group["lr"] = base * factor
        return float(self._base_lr[0] * factor)


class EpsilonCurve:
    """Epsilon by the number of charged steps, rounded up to a grid: cheap enough for every step."""

    def __init__(self, plan: PrivacyPlan) -> None:
        self._steps, self._epsilon = plan.steps, cache(plan.epsilon)
        self._width = max(1, math.ceil(plan.steps / _POINTS))

    def bound(self, charged: int) -> float:
        """Return at least the epsilon of ``charged`` steps, at most that of the next grid point."""
        point = math.ceil(charged / self._width) * self._width
        return self._epsilon(min(point, self._steps) if charged <= self._steps else point)


def evaluation_steps(plan: PrivacyPlan, epochs: int | None) -> int:
    """Return the steps of ``epochs`` expected passes, or a tenth of the run if None."""
    if epochs is None:
        return max(1, math.ceil(plan.steps / _POINTS))
    return max(1, round(epochs / plan.sampling_rate))


def augmentation(
    draw: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the oracle's ``augment`` for uint8 images: draw a view, if asked for, then to float.

    Features of a frozen encoder are floats, and stay as they are.

    It runs on one physical batch at a time, on the device, so that a logical batch of thousands of
    images with K views each is never held as floats.
    """
    if draw is None:
        return lambda images, keys: model_input(images)
    return lambda images, keys: to_float(draw(images, keys))
