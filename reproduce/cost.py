"""What a recipe will cost, before it is run: image passes, memory of a step, FLOPs, GPU hours.

A real step of every arm is taken on a few rows and its floating-point operations are counted
(:class:`torch.utils.flop_counter.FlopCounterMode`: matrix products and convolutions, which is
nearly all). FLOPs are proportional to rows, so

    FLOPs of a run = FLOPs a row * multiplicity * batch size * steps

An image pass is one image through the network once forward and backward; what a method does more
than that shows in its FLOPs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from dpbam.app.runs import Prepared, prepare
from dpbam.app.runs.config import RunConfig
from dpbam.engines.memory import LIMIT_BYTES, MOST_ROWS
from dpbam.privacy.plan import PrivacyPlan
from reproduce.jobs import records_folder
from reproduce.recipes import Recipe, RecipeRun, label
from reproduce.records import find_record

if TYPE_CHECKING:
    from torch import Tensor

    from dpbam.data import DataSet

#: What a GPU estimate assumes: an A100's 156 TFLOP/s of TF32, a quarter of it used.
GPU_FLOPS, GPU_USED = 156e12, 0.25
GPU = "an A100 at a quarter of its 156 TFLOP/s (TF32)"
_ROWS = 2  # of the step that is counted
_ROOM = 0.9 * LIMIT_BYTES  # what a run without a physical batch size of its own may take
_LOOK = 64  # images that the loss is taken on


@dataclass(frozen=True)
class Step:
    """What a step takes.

    Attributes:
        flops_per_row: counted.
        rows: computed at once: the configuration's, or what fits, by the engine's estimate.
        bytes: of these rows, by the same estimate.
    """

    flops_per_row: float
    rows: int
    bytes: int


@dataclass(frozen=True)
class Cost:
    """What the runs of one arm and place in the grid cost, each.

    Attributes:
        name: arm and place.
        asked: runs.
        done: of these.
        steps: of a run.
        noise_multiplier: calibrated.
        passes: images forward and backward in a run, with their augmented views.
        rows: computed at once.
        memory: bytes of these rows, estimated by the engine.
        flops: of a run.
    """

    name: str
    asked: int
    done: int
    steps: int
    noise_multiplier: float
    passes: float
    rows: int
    memory: int
    flops: float

    @property
    def gpu_hours(self) -> float:
        """Of a run, by the assumption above."""
        return self.flops / (GPU_FLOPS * GPU_USED) / 3600

    @property
    def gpu_hours_left(self) -> float:
        """Of all runs that are missing."""
        return self.gpu_hours * (self.asked - self.done)


def recipe_costs(recipe: Recipe, out: Path, seeds: int | None = None) -> list[Cost]:
    """Every arm at every place of the grid. Needs no data: the recipe has its public facts.

    Raises:
        ConfigError: if a run could not be done.
    """
    gathered: dict[str, list[RecipeRun]] = {}
    for run in recipe.runs(seeds):
        gathered.setdefault(run.name.rpartition("-seed-")[0], []).append(run)
    folder = records_folder(recipe, out)
    counted: dict[str, Step] = {}
    costs = []
    for runs in gathered.values():
        finished = sum(find_record(folder, run) is not None for run in runs)
        costs.append(_cost(recipe, runs, finished, counted))
    return costs


def _cost(
    recipe: Recipe, runs: Sequence[RecipeRun], finished: int, counted: dict[str, Step]
) -> Cost:
    """``counted`` keeps the step of each arm: the budget of privacy does not change it."""
    config, arm = runs[0].config, runs[0].arm
    plan = config.plan(recipe.images)
    if arm not in counted:
        counted[arm] = one_step(config, plan, _blank(recipe))
    passes = float(plan.steps * plan.batch_size * max(1, config.augment_multiplicity))
    return Cost(
        label(arm, runs[0].cell),
        len(runs),
        finished,
        plan.steps,
        plan.noise_multiplier,
        passes,
        counted[arm].rows,
        counted[arm].bytes,
        counted[arm].flops_per_row * passes,
    )


def one_step(config: RunConfig, plan: PrivacyPlan, train: DataSet) -> Step:
    """Take a step with clipping and noise on a few rows, and count; nothing is released.

    A row is one view of an image: views cost the same, so one of each is enough here.
    """
    import numpy as np
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    from dpbam.app.runs import build
    from dpbam.compute import Compute
    from dpbam.oracle import PrivateGradientOracle

    oracle = PrivateGradientOracle(
        build.make_model(config, train), nn.CrossEntropyLoss(reduction="none"), plan,
        build.make_method(config), seed=config.seed,
        compute=Compute(
            engine=config.engine, physical_batch_size=config.physical_batch_size or MOST_ROWS
        ),
        augment=build.make_augment(config.replace(augment_multiplicity=0)), sampling="unchecked",
    )  # fmt: skip
    images, labels = train.batch(np.arange(_ROWS))
    fit = oracle.fit(images[:1], labels[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle.backward(images, labels)  # DP-SAT does not ascend in its first step
        with FlopCounterMode(display=False) as counter:
            oracle.backward(images, labels)
    rows = config.physical_batch_size or max(1, int(MOST_ROWS * min(1.0, _ROOM / fit.bytes)))
    return Step(counter.get_total_flops() / _ROWS, rows, int(fit.bytes * rows / fit.rows))


def _blank(recipe: Recipe) -> DataSet:
    """Blank images in the shape of the recipe's: FLOPs and memory do not hang on their values."""
    import numpy as np

    from dpbam.data import from_arrays

    images = np.zeros((_ROWS, *recipe.shape), np.uint8)
    names = [f"class {k}" for k in range(recipe.classes)]
    labels = np.array(names)[np.arange(_ROWS) % recipe.classes]
    return from_arrays(images, labels, class_names=names)


@dataclass(frozen=True)
class Taken:
    """A few steps that were taken.

    Attributes:
        rows: images of each.
        losses: of each, on a few images of its batch, before and after. Not private.
        epsilon: what the steps would cost.
    """

    rows: list[int]
    losses: list[tuple[float, float]]
    epsilon: float


def take_steps(config: RunConfig, steps: int, batch_size: int | None = None) -> Taken:
    """Take a few real steps of a run, on its real data, and throw the model away.

    Args:
        config: of the run.
        steps: how many.
        batch_size: a smaller one than the run's, with the run's noise, where its own takes hours.
    """
    from dpbam.app.runs import build

    prepared = prepare(config)
    if batch_size is not None:
        sigma = prepared.plan.noise_multiplier
        small = {"batch_size": batch_size, "epsilon": None, "noise_multiplier": sigma}
        prepared = prepare(config.replace(**small))
    oracle, optimizer = prepared.oracle(), build.make_optimizer(config, prepared.model)
    drawn = oracle.batches(prepared.train, units=prepared.units)
    rows, losses = [], []
    for images, labels, units in islice(drawn, steps):
        before = _loss(prepared, images, labels)
        oracle.backward(images, labels, units)
        optimizer.step()
        rows.append(len(labels))
        losses.append((before, _loss(prepared, images, labels)))
    return Taken(rows, losses, oracle.ledger.epsilon())


def _loss(prepared: Prepared, images: Tensor, labels: Tensor) -> float:
    """Mean cross-entropy on a few images."""
    import torch

    from dpbam.data import to_float

    few = slice(0, _LOOK)
    with torch.no_grad():
        scores = prepared.model(to_float(images[few]).to(prepared.device))
        return float(torch.nn.functional.cross_entropy(scores, labels[few].to(prepared.device)))
