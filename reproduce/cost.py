"""What a recipe costs before it is run: image passes, memory, FLOPs, time here and on a GPU.

A real step of every arm is taken on a few blank images and its floating-point operations are
counted (:class:`torch.utils.flop_counter.FlopCounterMode`: matrix products and convolutions, which
is nearly all). FLOPs are proportional to rows, so

    FLOPs of a run = FLOPs per row * multiplicity * batch size * steps

An image pass is one image through the network once forward and backward; the additional work of a
method shows in its FLOPs.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpbam.app.runs import Prepared, RunConfig, RunSpec, prepare
from dpbam.app.runs.preparation import estimated_seconds
from dpbam.engines.memory import LIMIT_BYTES, MOST_ROWS
from dpbam.training.events import Reporter
from reproduce.recipes import Recipe
from reproduce.records import find_record

if TYPE_CHECKING:
    from torch import Tensor

    from dpbam.oracle import PrivateGradientOracle

#: What a GPU estimate assumes: an A100's 156 TFLOP/s of TF32, a quarter of it used.
GPU_FLOPS, GPU_USED = 156e12, 0.25
GPU = "an A100 at a quarter of its 156 TFLOP/s (TF32)"
_ROWS = 4  # at least, in the step that is counted
_IMAGES = 64  # that the loss is computed on


@dataclass(frozen=True)
class Step:
    """What a step takes.

    Attributes:
        flops_per_row: floating-point operations.
        rows: computed at once.
        bytes: that they take.
        seconds: of a whole step of the recipe's batch size, on this machine.
    """

    flops_per_row: float
    rows: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Cost:
    """What each run of one arm and place in the grid costs.

    Attributes:
        name: arm and place.
        asked: runs.
        done: finished ones.
        steps: of a run.
        noise_multiplier: calibrated.
        passes: images forward and backward in a run, with their augmented views.
        step: what a step takes.
    """

    name: str
    asked: int
    done: int
    steps: int
    noise_multiplier: float
    passes: float
    step: Step

    @property
    def flops(self) -> float:
        """The FLOPs of a run."""
        return self.step.flops_per_row * self.passes

    @property
    def gpu_hours(self) -> float:
        """Of a run, by the assumption above."""
        return self.flops / (GPU_FLOPS * GPU_USED) / 3600

    @property
    def seconds_left(self) -> float:
        """The time of all missing runs on this machine, one after the other."""
        return self.step.seconds * self.steps * (self.asked - self.done)

    @property
    def gpu_hours_left(self) -> float:
        """The GPU hours of all missing runs."""
        return self.gpu_hours * (self.asked - self.done)


def recipe_costs(recipe: Recipe, out: Path, seeds: int | None = None) -> list[Cost]:
    """Estimate every arm at every place of the grid; the data need not be there."""
    gathered: dict[str, list[RunSpec]] = {}
    for run in recipe.runs(seeds):
        gathered.setdefault(run.name.rpartition("-seed-")[0], []).append(run)
    steps: dict[str, Step] = {}  # of each arm: the privacy budget does not change it
    for runs in gathered.values():
        if runs[0].arm not in steps:
            steps[runs[0].arm] = count_step(runs[0].config, recipe)
    return [_cost(name, runs, steps[runs[0].arm], recipe, out) for name, runs in gathered.items()]


def _cost(name: str, runs: Sequence[RunSpec], step: Step, recipe: Recipe, out: Path) -> Cost:
    config = runs[0].config
    plan = config.plan(recipe.images)
    done = sum(find_record(recipe, run, out) is not None for run in runs)
    passes = float(plan.steps * plan.batch_size * max(1, config.augment_multiplicity))
    return Cost(name, len(runs), done, plan.steps, plan.noise_multiplier, passes, step)


def count_step(config: RunConfig, recipe: Recipe) -> Step:
    """Take steps with clipping and noise on blank images, and count; nothing is released.

    A row is one view of an image: all views cost the same, so one per image is enough here.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare(
            config.replace(
                data=_blank(recipe, Path(folder)), batch_size=_ROWS, augment_multiplicity=0,
                epochs=100.0, epsilon=None, noise_multiplier=1.0 if config.private else None,
                physical_batch_size=config.physical_batch_size or MOST_ROWS,
            )
        )  # fmt: skip
        oracle = prepared.oracle()
        fit, flops = prepared.fit(oracle), _flops_per_row(prepared, oracle)
        rows, size = fit.rows, fit.bytes
        if not config.physical_batch_size:
            rows = max(1, int(MOST_ROWS * min(1.0, 0.9 * LIMIT_BYTES / fit.bytes)))
            size = int(fit.bytes * rows / fit.rows)
        seconds = _step_seconds(config, prepared, recipe, rows)
    return Step(flops, rows, size, seconds)


def _step_seconds(config: RunConfig, prepared: Prepared, recipe: Recipe, rows: int) -> float:
    """Time steps of the recipe's batch size and views on blank images, evaluations left out."""
    known = prepared.plan.noise_multiplier or None  # of the trial: its value takes no time
    timed = config.replace(
        data=prepared.config.data, epsilon=None, noise_multiplier=known, eval_every=10**9
    )
    plan = timed.plan(recipe.images)
    return estimated_seconds(replace(prepared, config=timed, plan=plan), rows) / plan.steps


class _NoModules:
    """Takes the place of torch's tracker of modules: everything belongs to one."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def _flops_per_row(prepared: Prepared, oracle: PrivateGradientOracle) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    batches = (batch for batch in oracle.batches(prepared.train) if len(batch[1]) >= _ROWS)
    oracle.backward(*next(batches))  # DP-SAT does not ascend in its first step
    counted = next(batches)
    counter = FlopCounterMode(display=False)
    # by module it would count with hooks on gradients, which the engines refuse
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter:
        oracle.backward(*counted)
    return float(counter.get_total_flops() / len(counted[1]))


def _blank(recipe: Recipe, folder: Path) -> str:
    """Write images in the shape of the recipe's: costs do not depend on their values."""
    count = max(recipe.classes, 2 * _ROWS)
    images, labels = np.zeros((count, *recipe.shape), np.uint8), np.arange(count) % recipe.classes
    path = folder / "blank.npz"
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    return str(path)


@dataclass(frozen=True)
class Trial:
    """A few steps of a run, whose model is discarded.

    Attributes:
        rows: images of each step.
        losses: before and after each step, on images of its batch: not to be shared.
        epsilon: spent by the steps.
        seconds: that the steps took.
    """

    rows: list[int]
    losses: list[tuple[float, float]]
    epsilon: float
    seconds: float


def take_steps(config: RunConfig, steps: int, images: int, batch_size: int | None = None) -> Trial:
    """Take real steps of a run on its real data, and discard the model.

    Args:
        config: of the run.
        steps: how many.
        images: in the training set, on which the run's noise depends.
        batch_size: smaller than the run's, with the run's noise, where its own takes hours.
    """
    if batch_size is not None:
        # With the number of rows set, the engine does not try how many fit into memory: at full
        # width, with 16 views, that took five times as long as two steps.
        config = config.replace(
            batch_size=batch_size,
            physical_batch_size=4 * batch_size,
            epsilon=None,
            noise_multiplier=config.plan(images).noise_multiplier,
        )
    prepared = prepare(config)
    oracle = prepared.oracle()
    optimizer = prepared.trainer(oracle, Reporter()).optimizer
    batches = oracle.batches(prepared.train, units=prepared.units)
    rows, losses, seconds = [], [], 0.0
    for inputs, labels, units in islice(batches, steps):
        before, start = _loss(prepared, inputs, labels), time.perf_counter()
        oracle.backward(inputs, labels, units)
        optimizer.step()
        seconds += time.perf_counter() - start
        rows.append(len(labels))
        losses.append((before, _loss(prepared, inputs, labels)))
    return Trial(rows, losses, oracle.ledger.epsilon(), seconds)


def _loss(prepared: Prepared, images: Tensor, labels: Tensor) -> float:
    """Compute the mean cross-entropy on a few images."""
    import torch

    from dpbam.data import to_float

    few = slice(0, _IMAGES)
    with torch.no_grad():
        scores = prepared.model(to_float(images[few]).to(prepared.device))
        return float(torch.nn.functional.cross_entropy(scores, labels[few].to(prepared.device)))
