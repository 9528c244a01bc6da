"""A run checked and built, before anything is written: what a dry run shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpbam import _validate
from dpbam.app.runs.config import ConfigError, RunConfig
from dpbam.app.runs.result import RunError
from dpbam.app.runs.settling import check_steps
from dpbam.privacy import accounting, calibration
from dpbam.privacy.plan import RELATION, PrivacyPlan

if TYPE_CHECKING:
    from torch import nn

    from dpbam.bias import ReleasedStatistics
    from dpbam.data import DataSet
    from dpbam.distributed import Ranks
    from dpbam.engines.memory import Fit
    from dpbam.observers import Observer
    from dpbam.oracle import PrivateGradientOracle
    from dpbam.privacy.ledger import Ledger
    from dpbam.training.events import Reporter
    from dpbam.training.trainer import Trainer


@dataclass(frozen=True)
class Prepared:
    """A run that has been checked and built, with nothing written yet.

    Attributes:
        config: as given.
        train: the training set.
        test: the test set.
        plan: sigma, q, steps, n and epsilon.
        model: on its device, with its initial weights.
        fit: rows computed at once, the engine that serves, and the memory of a step.
    """

    config: RunConfig
    train: DataSet
    test: DataSet
    plan: PrivacyPlan
    model: nn.Module
    fit: Fit

    @property
    def physical_batch_size(self) -> int:
        """Rows computed at once."""
        return self.fit.rows

    @property
    def engine(self) -> str:
        """The engine that serves."""
        return self.fit.engine

    @property
    def units(self) -> NDArray[Any] | None:
        """The owner of each training record, where the unit is not the record."""
        return _units(self.config, self.train)

    @property
    def device(self) -> str:
        """Where the model is."""
        return str(next(self.model.parameters()).device)

    def oracle(
        self,
        ledger: Ledger | None = None,
        observer: Observer | None = None,
        on_release: Callable[[ReleasedStatistics], None] | None = None,
        ranks: Ranks | None = None,
    ) -> PrivateGradientOracle:
        """The oracle of this run, writing to ``ledger``, watched by ``observer``.

        ``on_release`` hears of the statistics that are released beside the gradients; ``ranks`` are
        the processes that train together.
        """
        rows = self.physical_batch_size
        return _oracle(
            self.config, self.plan, self.model, rows, ledger, on_release,
            observer=observer, ranks=ranks,
        )  # fmt: skip

    def trainer(
        self, oracle: PrivateGradientOracle, reporter: Reporter, max_charges: int | None = None
    ) -> Trainer:
        """The trainer of this run."""
        from dpbam.app.runs import build
        from dpbam.training.progress import evaluation_steps
        from dpbam.training.trainer import Trainer

        config, steps = self.config, self.plan.steps
        return Trainer(
            oracle,
            build.make_optimizer(config, self.model),
            self.train,
            self.test,
            units=self.units,
            schedule=build.make_schedule(config.schedule, steps),
            average=build.make_average(config, self.model, steps),
            eval_every=evaluation_steps(self.plan, config.eval_every),
            max_charges=max_charges,
            num_workers=config.num_workers,
            reporter=reporter,
        )

    def summary(self) -> dict[str, Any]:
        """The plan in plain values, in the order to show them."""
        from dpbam.params import count_trainable

        plan = self.plan
        return {
            "data": self.train.name,
            "n": plan.n,
            "unit": plan.unit,
            "relation": RELATION,
            "method": self.config.method,
            "epsilon": plan.epsilon(),
            "delta": plan.delta,
            "noise_multiplier": plan.noise_multiplier,
            "clip_norm": plan.clip_norm,
            "batch_size": plan.batch_size,
            "sampling_rate": plan.sampling_rate,
            "steps": plan.steps,
            "epochs": plan.epochs,
            "accountant": accounting.accountant_version(plan.accountant),
            "model": self.config.model,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "trained_parameters": count_trainable(self.model),
            "engine": self.engine,
            "device": self.device,
            "physical_batch_size": self.physical_batch_size,
            "estimated_memory_bytes": self.estimated_memory(),
            "seeded": self.config.seed is not None,
        }

    def estimated_memory(self) -> int:
        """Bytes: weights, optimiser and averages, a logical batch of uint8, and a measured step."""
        from dpbam.params import count_trainable

        weights = 4 * (
            6 * count_trainable(self.model) + sum(p.numel() for p in self.model.parameters())
        )
        batch = self.plan.batch_size * self.plan.max_records * math.prod(self.train.shape)
        return int(weights + batch + self.fit.bytes)


def prepare(
    config: RunConfig,
    *,
    noise_multiplier: float | None = None,
    estimate: bool = False,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> Prepared:
    """Load the data, make the plan, build the model; write nothing.

    Args:
        config: what to do.
        noise_multiplier: the sigma found before, for a run that is resumed.
        estimate: estimate the memory of a step and the rows that fit from two small batches, in
            place of measuring ever larger ones: for a plan that is shown and not carried out.
        on_phase: hears what is being done, before it is.

    Raises:
        dpbam.errors.DPBAMError: one sentence.
    """
    from dpbam.app.runs import build
    from dpbam.data import load_pair

    if config.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("tensorboard is not installed: pip install 'dpbam[tensorboard]'")
    on_phase("reading the data")
    train, test = load_pair(
        config.data,
        root=config.data_root,
        image_size=config.image_size,
        channels=config.channels,
        unit=config.unit,
    )
    units = _units(config, train)
    if units is not None:
        _validate.owners(config.unit, units)
    n = len(train) if units is None else len(np.unique(units))
    model = build.make_model(config, train)
    on_phase("calibrating the noise")
    plan = config.plan(n, noise_multiplier=noise_multiplier)
    on_phase("measuring the memory of a step")
    oracle = _oracle(config, plan, model, config.physical_batch_size, None)
    fit = _estimated(oracle, train) if estimate else _fit(oracle, train)
    return Prepared(config, train, test, plan, model, fit)


def most_charges(config: RunConfig, plan: PrivacyPlan, ledger: Ledger, step: int) -> int:
    """The most steps that the ledger may hold: those of the plan and, unseeded, those replayed.

    Where replays would carry it beyond the configured epsilon, as many as stay within.
    """
    replays = max(0, len(ledger) - step) if config.seed is None else 0
    total = max(plan.steps, step) + replays
    if config.epsilon is None or not replays or plan.epsilon(total) <= config.epsilon:
        return total
    return calibration.max_steps(
        config.epsilon,
        plan.delta,
        plan.charged_noise_multiplier,
        plan.sampling_rate,
        accountant=plan.accountant,
    )


def check_ledger(plan: PrivacyPlan, ledger: Ledger, step: int) -> None:
    """Refuse a ledger with fewer steps than the parameters have seen, or of another mechanism."""
    check_steps(ledger, step)
    for charge in ledger.charges():
        if charge[:2] != (plan.charged_noise_multiplier, plan.sampling_rate):
            raise RunError(
                f"{ledger.path} holds steps at sigma {charge.noise_multiplier:g} and sampling rate "
                f"{charge.sampling_rate:g}, not this run's {plan.charged_noise_multiplier:g} and "
                f"{plan.sampling_rate:g}: it is not this run's ledger; restore it from a backup"
            )


def _units(config: RunConfig, train: DataSet) -> NDArray[Any] | None:
    return None if config.unit == "record" else train.column(config.unit)


def _oracle(
    config: RunConfig,
    plan: PrivacyPlan,
    model: nn.Module,
    physical_batch_size: int | None,
    ledger: Ledger | None,
    on_release: Callable[[ReleasedStatistics], None] | None = None,
    *,
    observer: Observer | None = None,
    ranks: Ranks | None = None,
) -> PrivateGradientOracle:
    from torch import nn

    from dpbam.app.runs import build
    from dpbam.compute import Compute
    from dpbam.oracle import PrivateGradientOracle

    return PrivateGradientOracle(
        model,
        nn.CrossEntropyLoss(reduction="none"),
        plan,
        build.make_method(config),
        augment=build.make_augment(config),
        multiplicity=max(1, config.augment_multiplicity),
        seed=config.seed,
        noise_seed=config.noise_seed,
        noise=config.noise,
        ledger=ledger,
        statistics=build.make_release(config, on_release),
        observer=observer,
        compute=Compute(engine=config.engine, physical_batch_size=physical_batch_size),
        ranks=ranks,
    )


def _estimated(oracle: PrivateGradientOracle, train: DataSet) -> Fit:
    from dpbam.app.runs.footprint import estimated_fit

    return estimated_fit(oracle, train)


def _fit(oracle: PrivateGradientOracle, train: DataSet) -> Fit:
    """How many rows fit, tried on a blank image; also refuses a shift too large for the images."""
    import torch

    blank = torch.zeros(1, *train.shape, dtype=torch.uint8)
    return oracle.fit(blank, torch.zeros(1, dtype=torch.int64))
