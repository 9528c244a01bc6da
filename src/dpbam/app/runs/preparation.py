"""A run checked and built, before anything is written: what a dry run shows, and what it costs.

The time is that of a few steps on blank images: no record is used, nothing is charged to a ledger
on disk, and the model's parameters do not move.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpbam import _validate
from dpbam.app.runs.automatic import resolve
from dpbam.app.runs.config import ConfigError, RunConfig
from dpbam.privacy import accounting
from dpbam.privacy.plan import RELATION, PrivacyPlan, replace_quietly
from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpbam.app.runs.documents import PublicWeights
    from dpbam.bias import ReleasedStatistics
    from dpbam.data import DataSet, Splits
    from dpbam.distributed import Ranks
    from dpbam.engines.memory import Fit, LiveBytes
    from dpbam.observers import Observer
    from dpbam.oracle import PrivateGradientOracle
    from dpbam.privacy.ledger import Ledger
    from dpbam.tasks.base import Task
    from dpbam.training.events import Reporter
    from dpbam.training.trainer import Trainer

_WEAK_EPSILON = 20.0
_FEW_ROWS = 16  # with fewer, parts of a step that do not grow still dominate
Phase = Callable[[str], None]
_PATIENCE = 3.0  # seconds that one measured step may take
_ROWS = 256  # of an evaluation, computed at once


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """What a dry run shows: the plan, and what a step costs, in the order to show them."""

    data: str
    task: str
    n: int
    unit: str
    relation: str
    method: str
    epsilon: float
    delta: float
    noise_multiplier: float
    clip_norm: float
    batch_size: int
    sampling_rate: float
    steps: int
    epochs: float
    accountant: str
    model: str
    parameters: int
    trained_parameters: int
    engine: str
    device: str
    physical_batch_size: int
    estimated_memory_bytes: int
    estimated_seconds: float
    seeded: bool


@dataclass(frozen=True)
class Prepared:
    """A run that has been checked and built, with nothing written yet.

    Attributes:
        config: as given, with what was chosen for what was left out.
        train: the training set.
        test: the test set.
        plan: sigma, q, steps, n and epsilon.
        model: on its device, with its initial weights.
        task: the loss of a record, metrics and predictions.
        cache: the folder that keeps the features of a frozen encoder; None: memory.
        chosen: lines for the user about settings that were chosen; empty: none were.
        warnings: what is wrong with the data, for the operator alone, where it was looked for.
    """

    config: RunConfig
    train: DataSet
    test: DataSet
    plan: PrivacyPlan
    model: nn.Module
    task: Task
    cache: Path | None = None
    chosen: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @cached_property
    def seen(self) -> Splits:
        """The data as what is trained sees it: images, or features that are computed once."""
        from dpbam.app.runs.feature_model import FeatureModel, on_features
        from dpbam.data import Splits
        from dpbam.nn.encoders import PublicEncoder

        if not (self.config.on_features and isinstance(self.model, PublicEncoder | FeatureModel)):
            return Splits(self.train, self.test)
        shared = self.config.feature_cache
        cache = self.cache if shared is None else shared / "non-private"
        return Splits(*(on_features(x, self.model, cache) for x in (self.train, self.test)))

    @property
    def public_weights(self) -> PublicWeights | None:
        """Where the weights that training starts from came from, by digest."""
        from dpbam.app.runs import build

        return build.public_weights(self.config, self.model)

    @property
    def units(self) -> NDArray[Any] | None:
        """The owner of each training record, where the unit is not the record."""
        return _units(self.plan.unit, self.train)

    @property
    def evaluated_on(self) -> str:
        """Which records test the model, and that they do not train it: a sentence."""
        from dpbam.data.split import is_held_out

        role = "were held out for evaluation" if is_held_out(self.test) else "are for evaluation"
        return f"{len(self.test)} records ({self.test.name}) {role}, and are not trained on"

    def defects(self) -> list[str]:
        """Return the warnings on defects of the data, for the operator only.

        Raises:
            dpbam.data.DataError: if an image cannot be read, or is of another size.
        """
        from dpbam.data.checking import defects

        return defects(self.train, self.test, self.plan.unit, private=self.config.private)

    @property
    def device(self) -> str:
        return str(next(self.model.parameters()).device)

    def oracle(
        self,
        ledger: Ledger | None = None,
        observer: Observer | None = None,
        on_release: Callable[[ReleasedStatistics], None] | None = None,
        ranks: Ranks | None = None,
        sampling: str = "poisson",
    ) -> PrivateGradientOracle:
        """Make the oracle that trains this run.

        Args:
            ledger: where steps are recorded; None: in memory.
            observer: watches the steps; what it sees is not protected by privacy.
            on_release: called with the statistics that are released with each gradient.
            ranks: the processes that train together.
            sampling: "unchecked" for steps that are only measured, on batches without a record.
        """
        from dpbam.app.runs import build
        from dpbam.compute import Compute
        from dpbam.oracle import PrivateGradientOracle

        config = self.config
        return PrivateGradientOracle(
            self.model,
            build.make_loss(config, self.task),
            self.plan,
            build.make_method(config, self.plan.steps),
            augment=build.make_augment(config),
            augment_targets=build.make_mask_augment(config, self.task),
            multiplicity=max(1, config.augment_multiplicity),
            filter=build.make_filter(config),
            clipping=build.make_clipping(config),
            seed=config.seed,
            noise_seed=config.noise_seed,
            noise=config.noise,
            ledger=ledger,
            statistics=build.make_release(config, on_release),
            observers=() if observer is None else observer,
            compute=Compute(engine=config.engine, physical_batch_size=config.physical_batch_size),
            ranks=ranks,
            sampling=sampling,
        )

    def fit(self, oracle: PrivateGradientOracle) -> Fit:
        """Choose the oracle's physical batch size, unless it is given; no image is read for it.

        Raises:
            dpbam.errors.DPBAMError: if no step is possible: a shift too large for the images.
        """
        train = self.seen.train
        return oracle.fit(blank(train, 1), self.task.blank_targets(1, *train.shape[1:]))

    def estimated_fit(self) -> Fit:
        """Estimate the rows that fit and their memory, from the line through two small batches.

        A run itself measures ever larger batches (:meth:`fit`), which takes several times as long,
        and its choice may differ by some rows.
        """
        from dpbam.engines.memory import LIMIT_BYTES, MOST_ROWS, Fit, worthwhile

        oracle = self.oracle()
        each = oracle.views.multiplicity  # rows per unit
        units = max(2, _FEW_ROWS // each)
        train = self.seen.train
        few, more = (counted(oracle, train, self.task, k * units) for k in (1, 2))
        share = max(1.0, (more.peak - few.peak) / (each * units))  # bytes per row
        rows = oracle.physical_batch_size
        if rows is None:
            enough = max(2 * units, worthwhile(few.work, more.work, units))
            most = each * max(1, min(MOST_ROWS // each, enough))
            fitting = each * units + (0.9 * LIMIT_BYTES - few.peak) / share
            rows = int(min(most, max(each, fitting)))
        return Fit(rows, oracle.engine.name, int(few.peak + share * max(0, rows - each * units)))

    def trainer(self, oracle: PrivateGradientOracle, reporter: Reporter) -> Trainer:
        from dpbam.app.runs import build
        from dpbam.training.trainer import Trainer, evaluation_steps

        config, steps = self.config, self.plan.steps
        return Trainer(
            oracle,
            build.make_optimizer(config, self.model, oracle),
            *self.seen,
            task=self.task,
            units=self.units,
            schedule=build.make_schedule(config.schedule, steps),
            average=build.make_average(config, self.model, steps),
            eval_every=evaluation_steps(self.plan, config.eval_every),
            num_workers=config.num_workers,
            reporter=reporter,
        )

    def summary(self, on_phase: Phase = lambda phase: None) -> PlanSummary:
        """Measure a step, and return the plan with its cost."""
        from dpbam.app.runs.preparation import estimated_seconds
        from dpbam.params import count_trainable

        on_phase("measuring the memory of a step")
        plan, fit = self.plan, self.estimated_fit()
        on_phase("measuring the time of a step")
        seconds = estimated_seconds(self, fit.rows)
        parameters = sum(p.numel() for p in self.model.parameters())
        trained = count_trainable(self.model)
        return PlanSummary(
            data=self.train.name,
            task=self.task.name,
            n=plan.n,
            unit=plan.unit,
            relation=RELATION,
            method=self.config.method,
            epsilon=plan.epsilon(),
            delta=plan.delta,
            noise_multiplier=plan.noise_multiplier,
            clip_norm=plan.clip_norm,
            batch_size=plan.batch_size,
            sampling_rate=plan.sampling_rate,
            steps=plan.steps,
            epochs=plan.epochs,
            accountant=accounting.accountant_version(plan.accountant),
            model=self.config.model,
            parameters=parameters,
            trained_parameters=trained,
            engine=fit.engine,
            device=self.device,
            physical_batch_size=fit.rows,
            # weights, optimiser and averages; a logical batch; a step
            estimated_memory_bytes=4 * (6 * trained + parameters)
            + plan.batch_size * plan.max_records * blank(self.seen.train, 1).nbytes
            + fit.bytes,
            estimated_seconds=seconds,
            seeded=self.config.seed is not None,
        )


def prepare(
    config: RunConfig,
    *,
    noise_multiplier: float | None = None,
    cache: Path | None = None,
    on_phase: Phase = lambda phase: None,
) -> Prepared:
    """Load the data, make the plan, build the model; write nothing.

    Args:
        config: what to do.
        noise_multiplier: the sigma found before, for a run that is resumed.
        cache: the folder for the features of a frozen encoder; they are computed when needed.
        on_phase: called with what is done next.

    Raises:
        dpbam.errors.DPBAMError: one sentence.
    """
    from dpbam.app.runs import build
    from dpbam.catalogue import TASKS
    from dpbam.data import load_pair

    if config.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("tensorboard is not installed: pip install 'dpbam[tensorboard]'")
    if config.feature_cache is not None:
        _check_cache(config.feature_cache)
    on_phase("reading the data")
    train, test = load_pair(
        config.data,
        root=config.data_root,
        image_size=config.image_size,
        channels=config.channels,
        unit=config.unit,
        task=config.task and TASKS.load(config.task).layout,
        label_columns=config.label_columns,
        dicom_window=config.dicom_window,
    )
    unit = train.chosen_unit(config.unit)
    if not config.allow_shared_units:
        _refuse_shared(train, test, unit)
    units = _units(unit, train)
    if units is not None:
        _validate.owners(unit, units, train.place)
    n = len(train) if units is None else len(np.unique(units))
    resolved = resolve(config, train, n)
    config = resolved.config
    model = build.make_model(config, train)
    task = build.task_of(config, train, model)
    on_phase("calibrating the noise")
    plan = config.plan(n, noise_multiplier=noise_multiplier, unit=unit)
    if config.in_closed_form:
        build.set_moment_noise(model, plan)
    _warn_of_epsilon(config.epsilon or plan.epsilon(), unit)
    return Prepared(config, train, test, plan, model, task, cache, resolved.lines)


def blank(data: DataSet, records: int) -> Tensor:
    """Return zeros of the shape and type of ``records`` records."""
    import torch

    from dpbam.app.runs.feature_model import FeatureImages

    kind = torch.float32 if isinstance(data.images, FeatureImages) else torch.uint8
    return torch.zeros(records, *data.shape, dtype=kind)


def counted(oracle: PrivateGradientOracle, train: DataSet, task: Task, units: int) -> LiveBytes:
    """Count the bytes and the work of one step on ``units`` blank images.

    Neither depends on the values.
    """
    from dpbam.batches import LogicalBatch
    from dpbam.engines.memory import count_work

    batch = LogicalBatch.of(
        blank(train, units), task.blank_targets(units, *train.shape[1:]), None, 1
    )
    device = next(oracle.model.parameters()).device
    rows = units * oracle.views.multiplicity
    physical = next(batch.split(rows, oracle.views, device))
    with warnings.catch_warnings():  # the run's own engine will report what stands in its way
        warnings.simplefilter("ignore")
        return count_work(oracle.engine, physical, oracle.method, oracle.lam())


def _warn_of_epsilon(epsilon: float, unit: str) -> None:
    if _WEAK_EPSILON < epsilon < math.inf:
        warnings.warn(
            f"epsilon {up(epsilon)} is hardly any protection: it allows that guesses whether a "
            f"{unit} was trained on are nearly always right; most take 1 to 10",
            stacklevel=3,
        )


def _check_cache(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before a run is begun."""
    first = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not first.is_dir() or not os.access(first, os.W_OK):
        raise ConfigError(
            f"feature_cache {folder} cannot be written to: name a folder, which is made if need be"
        )


def _refuse_shared(train: DataSet, test: DataSet, unit: str) -> None:
    from dpbam.data.checking import shared_units

    for column, values in shared_units(train, test, unit).items():
        raise ConfigError(
            f"{len(values)} values of {column!r} are in both {train.name} and {test.name}: the "
            f"accuracy would not be one on new {column}s, and would reveal more about those; split "
            f"by {column} (--unit {column} does where a test set is held out), or pass "
            "--allow-shared-units"
        )


def _units(unit: str, train: DataSet) -> NDArray[Any] | None:
    return None if unit == "record" else train.column(unit)


def estimated_seconds(prepared: Prepared, rows: int) -> float:
    """Estimate the seconds of all steps and evaluations, without reading and decoding files.

    The time of a step is taken as linear in its units, from one with few and one with more.

    Args:
        prepared: the run.
        rows: of a physical batch.
    """
    from dpbam.training.trainer import evaluation_steps

    plan, views = prepared.plan, max(1, prepared.config.augment_multiplicity)
    few = min(plan.batch_size, max(1, _FEW_ROWS // views))
    fast = _step_seconds(prepared, few, rows)
    more = min(plan.batch_size, max(few, rows // views), max(few, int(few * _PATIENCE / fast)))
    slow = _step_seconds(prepared, more, rows) if more > few else fast
    # where the units cannot be told from the rest (one step takes all the patience, or the machine
    # was busy during the first), the whole step counts as theirs: too long rather than too short
    each = (slow - fast) / (more - few) if more > few and slow > fast else slow / more
    step = slow + each * (plan.batch_size - more)
    evaluations = math.ceil(plan.steps / evaluation_steps(plan, prepared.config.eval_every))
    return plan.steps * step + evaluations * _evaluation_seconds(prepared) + _features(prepared)


def _step_seconds(prepared: Prepared, units: int, rows: int) -> float:
    """Return the time of a step with ``units`` blank units, the second of two."""
    import torch

    # a step of these many units, of a plan that expects them; what is released before the first
    # step belongs to the run
    plan = replace_quietly(
        prepared.plan, batch_size=units, steps=max(2, prepared.plan.steps), released_before=None
    )
    config = prepared.config.replace(
        release_counts=None,
        release_centre=None,
        balance=0.0,
        physical_batch_size=rows,
        batch_size=units,
        budget=None,
    )
    # blank images are no sample of the data
    oracle = replace(prepared, plan=plan, config=config).oracle(sampling="unchecked")
    train = prepared.seen.train
    each = 1 if prepared.units is None else math.ceil(min(plan.max_records, len(train) / plan.n))

    def step() -> None:
        images = blank(train, units * each)  # new ones: a batch serves one step
        targets = prepared.task.blank_targets(len(images), *train.shape[1:])
        grouped = prepared.units is not None
        owners = torch.arange(units).repeat_interleave(each) if grouped else None
        oracle.backward(images, targets, owners)

    with warnings.catch_warnings():  # the run itself will report what there is to report
        warnings.simplefilter("ignore")
        first, second = (_timed(step) for _ in range(2))
    prepared.model.zero_grad(set_to_none=True)
    return min(first, second)


def _evaluation_seconds(prepared: Prepared) -> float:
    """Return the time of one evaluation of the test set, from blank records."""
    test = prepared.seen.test
    rows = min(_ROWS, len(test))
    return _forward_seconds(prepared, blank(test, rows)) * len(test) / rows


def _features(prepared: Prepared) -> float:
    """Return the time in which a frozen encoder computes the features of all records."""
    if prepared.seen.train is prepared.train:
        return 0.0
    records = len(prepared.train) + len(prepared.test)
    rows = min(_FEW_ROWS, records)
    return _forward_seconds(prepared, blank(prepared.train, rows)) * records / rows


def _forward_seconds(prepared: Prepared, images: Tensor) -> float:
    import torch

    from dpbam.data.dataset import model_input
    from dpbam.params import device_of, evaluating
    from dpbam.training.evaluation import spare

    model = spare(prepared.model) or prepared.model
    inputs = model_input(images.to(device_of(model)))
    with torch.no_grad(), evaluating(model):
        return min(_timed(lambda: model(inputs)) for _ in range(2))


def _timed(call: Callable[[], object]) -> float:
    import torch

    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def duration(seconds: float) -> str:
    """Format a rough duration: two digits would promise too much.

    Example:
        >>> duration(0.4), duration(47), duration(400), duration(9000), duration(400_000)
        ('5 s', '50 s', '7 min', '2.5 h', '4.6 days')
        >>> duration(2e7)
        '230 days'
    """
    if seconds < 5:
        return "5 s"
    if seconds < 90:
        return f"{math.ceil(seconds / 10) * 10} s"
    if seconds < 90 * 60:
        return f"{math.ceil(seconds / 60)} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.2g} h"
    days = float(f"{seconds / 86_400:.2g}")
    return f"{days:g} days"
