"""PyTorch Lightning: a LightningModule that trains privately with two changed lines.

::

    return F.cross_entropy(self(x), y, reduction="none")  # in training_step: one loss per sample
    model, loader = make_private(model, loader, plan, ledger="runs/ledger.jsonl")

Everything else is unchanged: ``Trainer``, optimisers and schedulers, callbacks, progress bar,
checkpoints. In an automatic optimisation step Lightning calls ``training_step``, ``zero_grad``,
``backward``, ``optimizer.step``. Here ``training_step`` only stores the batch; in ``backward`` the
oracle computes the private gradient from the user's own ``training_step``.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpbam.errors import ArgumentError, ArgumentTypeError
from dpbam.guard import check_new
from dpbam.interop import trainers
from dpbam.loading import refuse_sampler
from dpbam.methods import Method
from dpbam.oracle import PrivateGradientOracle
from dpbam.params import map_rows, rows
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import PrivacyPlan
from dpbam.reading import Join

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        GradientAccumulationScheduler,
        LearningRateFinder,
    )
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    raise ImportError(
        "dpbam.interop.lightning needs the package lightning: pip install 'dpbam[lightning]'"
    ) from error

__all__ = ["PrivateModule", "make_private"]

_KEY = "dpbam"  # in Lightning's checkpoint
_PRECISIONS = {"32-true": None, "64-true": torch.float64, "bf16-true": torch.bfloat16}
_ACCUMULATION = (
    "it adds up the gradients of several batches, but each one's is written alone, and the oracle "
    "splits a batch itself: pass compute=dpbam.Compute(physical_batch_size=...) to make_private"
)
_MAY_OVERRIDE = {
    "prepare_data", "setup", "teardown", "optimizer_zero_grad", "clip_gradients", "log", "log_dict",
    "print", "freeze", "unfreeze", "example_input_array", "automatic_optimization",
    "strict_loading", "hparams", "to_onnx", "to_torchscript", "to_tensorrt",
    "load_from_checkpoint",
}  # fmt: skip
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def make_private(
    module: Any,
    data_loader: Any,
    plan: PrivacyPlan,
    method: Method | None = None,
    *,
    ledger: Ledger | Path | str,
    seed: int | None = None,
    **options: Any,
) -> tuple[Any, DataLoader[Any]]:
    """Make a LightningModule and its training data private; pass both to ``Trainer.fit``.

    Args:
        module: its ``training_step`` must return one loss per sample. It is changed in place: its
            class becomes a subclass of :class:`PrivateModule` and of its own class.
        data_loader: a DataLoader, whose data set, collate function and workers are kept and whose
            order and batch size are replaced by the plan's Poisson samples; or a data set. A
            sampler that may leave records out is refused. The collate function is given one record
            at a time.
        plan: the privacy plan. Training stops after its last step, or earlier if the Trainer does.
        method: DPSGD(), DPSAT(lam), BAM(lam), or your own.
        ledger: the file where every step is recorded before it changes the weights; a checkpoint
            holds a copy. A :class:`~dpbam.privacy.ledger.Ledger` is used as it is.
        seed: of noise and samples, for reproducible research only.
        options: further arguments of :class:`~dpbam.oracle.PrivateGradientOracle`.

    Returns:
        The module and a loader of Poisson batches; an epoch is n / l of them.
    """
    if not isinstance(module, LightningModule):
        raise ArgumentTypeError(
            f"make_private takes a LightningModule, got {type(module).__name__}"
        )
    state = _Private(plan, method, ledger, {"seed": seed, **options})
    state.loader = _loader(data_loader, plan, trainers.EpochSampler(plan, lambda: module.oracle))
    module_class = type(module)
    module.__class__ = type(f"Private{module_class.__name__}", (PrivateModule, module_class), {})
    module._private = state
    return module, state.loader


@dataclass
class _Private:
    """The state of a private module, apart from its layers."""

    plan: PrivacyPlan
    method: Method | None
    ledger_place: Ledger | Path | str
    options: dict[str, Any]
    loader: DataLoader[Any] | None = None
    oracle: PrivateGradientOracle | None = None
    steps: trainers.PrivateSteps | None = None
    restored: dict[str, Any] = field(default_factory=dict)  # the checkpoint, if resumed
    batch: Any = None  # of the current training step
    computing: bool = False


class PrivateModule(LightningModule):  # type: ignore[misc]
    """The base class that :func:`make_private` adds to a LightningModule."""

    _private: _Private

    @property
    def oracle(self) -> PrivateGradientOracle:
        """The private gradient oracle, which exists from the start of ``fit``."""
        if self._private.oracle is None:
            raise ArgumentError("there is no oracle before trainer.fit(model, loader) has begun")
        return self._private.oracle

    def setup(self, stage: str) -> None:
        """Refuse callbacks before they train."""
        super().setup(stage)
        if stage == "fit":
            _check_callbacks(self.trainer)

    def on_fit_start(self) -> None:
        """Create the oracle and restore the checkpoint."""
        super().on_fit_start()
        _check_trainer(self.trainer, self)
        state = self._private
        if state.oracle is None:
            ledger = trainers.open_ledger(state.plan, state.ledger_place)
            if not state.restored:
                trainers.check_fresh(ledger, state.ledger_place, "trainer.fit(..., ckpt_path=...)")
            state.oracle = PrivateGradientOracle(
                _Losses(self, super().training_step), _as_it_is, state.plan, state.method,
                ledger=ledger, **state.options,
            )  # fmt: skip
        if state.restored:
            trainers.restore(state.oracle, state.restored.get(_KEY))
            state.restored = {}
        state.steps = trainers.PrivateSteps(state.oracle)

    def on_train_start(self) -> None:
        """Refuse batches that are not the plan's."""
        super().on_train_start()
        _check_optimisation(self)  # again: hooks may have changed it
        if self.trainer.train_dataloader is not self._private.loader:
            raise ArgumentError(
                "trainer.fit got another loader than the one that make_private returned, whose "
                "Poisson samples the plan accounts for: trainer.fit(model, loader)"
            )

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Store the batch. Lightning sees a loss of 0: privacy does not protect the true one.

        A batch of other data, such as ``validation_step`` may pass on, gets the user's own step.
        """
        if not isinstance(batch, _Sealed):
            return super().training_step(batch, *args)
        self._private.batch = batch.opened(_PRECISIONS[str(self.trainer.precision)])
        return torch.zeros((), device=self.device, requires_grad=True)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Write the private gradient of the stored batch to ``.grad``."""
        state, oracle = self._private, self.oracle
        _check_accumulation(self.trainer)  # which a callback may change at any time
        trainers.warn_unmoved(oracle)
        batch, state.batch, state.computing = state.batch, None, True
        try:
            oracle.backward({"batch": batch}, torch.arange(rows(batch)))
        finally:
            state.computing = False
        if oracle.step >= state.plan.steps:
            self.trainer.should_stop = True

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Refuse a gradient that is not the oracle's; what a hook makes of one is public."""
        if self._private.steps is not None:
            self._private.steps.check()
        super().on_before_optimizer_step(optimizer)

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Log, except from ``training_step``, whose values come from the training data."""
        if not self._private.computing:
            if self._trainer is not None and self.trainer.training:
                kwargs["batch_size"] = kwargs.get("batch_size") or 1  # the true one is not public
            super().log(name, *args, **kwargs)
        else:
            warnings.warn(
                f"training_step logs {name!r}, which is computed from the training data without "
                "noise: it is omitted; log in validation_step, on data that may be published",
                stacklevel=2,
            )

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("epsilon", self.oracle.ledger.epsilon(), prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._private.oracle is not None:
            checkpoint[_KEY] = trainers.saved(self._private.oracle)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the saved state until ``fit`` creates the oracle."""
        super().on_load_checkpoint(checkpoint)
        self._private.restored = {_KEY: checkpoint.get(_KEY)}


class _Losses(nn.Module):
    """The user's training step as a model: from a batch to one loss per sample."""

    def __init__(self, module: nn.Module, step: Any) -> None:
        super().__init__()
        self.module, self._step = module, step
        self._numbered = len(inspect.signature(step).parameters) > 1  # (batch, batch_idx)

    def forward(self, batch: Any) -> Any:
        losses = self._step(batch, 0) if self._numbered else self._step(batch)
        return losses["loss"] if isinstance(losses, dict) else losses


class _Sealed:
    """A batch that Lightning moves to a device; its hooks and callbacks are not to open it.

    They would see all records at once, and could let one change the others. It is opened once: one
    sample is one step.
    """

    __slots__ = ("__batch", "__opened")

    def __init__(self, batch: Any) -> None:
        self.__batch, self.__opened = batch, False

    def to(self, device: Any, **options: Any) -> _Sealed:
        return _Sealed(map_rows(lambda t: t.to(device, **options), self.__batch))

    def pin_memory(self) -> _Sealed:
        return _Sealed(map_rows(lambda t: t.pin_memory(), self.__batch))

    def opened(self, dtype: torch.dtype | None) -> Any:
        """Return the batch, its real numbers in the precision of the Trainer."""
        check_new(int(self.__opened))
        self.__opened = True
        if dtype is None:
            return self.__batch
        return map_rows(lambda t: t.to(dtype) if t.is_floating_point() else t, self.__batch)

    def __getitem__(self, key: Any) -> Any:
        raise ArgumentTypeError(
            "hooks and callbacks cannot open a private training batch, where one record could "
            "change the others: change each record in the data set, or pass augment= to "
            "make_private"
        )


class _Seal:
    """A collate function whose batches are sealed."""

    def __init__(self, join: Join) -> None:
        self._join = join

    def __call__(self, batches: list[Any]) -> _Sealed:
        return _Sealed(self._join(batches))


def _as_it_is(losses: Tensor, targets: Tensor) -> Tensor:
    return losses


def _loader(loader: Any, plan: PrivacyPlan, sampler: trainers.EpochSampler) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        loader = DataLoader(loader) if hasattr(loader, "__getitem__") else loader
    if not isinstance(loader, DataLoader):
        raise ArgumentTypeError(
            f"make_private takes a DataLoader or a data set, got {type(loader).__name__}: for a "
            "LightningDataModule, pass its train_dataloader()"
        )
    refuse_sampler(loader)
    return trainers.poisson_loader(
        loader.dataset, loader.collate_fn, plan, sampler, _Seal, num_workers=loader.num_workers,
        pin_memory=loader.pin_memory, persistent_workers=loader.persistent_workers,
    )  # fmt: skip


def _may_override(name: str) -> bool:
    """Whether a part of a LightningModule sees no batch, or is used by the private step."""
    usual = name.startswith(("on_", "configure_")) or name.endswith(("_dataloader", "_step"))
    return usual or name in _MAY_OVERRIDE or hasattr(nn.Module, name)


def _check_optimisation(module: Any) -> None:
    if not module.automatic_optimization:
        raise ArgumentError(
            "the module uses manual optimisation (automatic_optimization = False), whose "
            "manual_backward would not be private: use automatic optimisation, or your own loop "
            "with oracle.backward"
        )


def _check_accumulation(trainer: Any) -> None:
    if trainer.accumulate_grad_batches != 1:
        raise ArgumentError(f"accumulate_grad_batches must be 1: {_ACCUMULATION}")


def _check_callbacks(trainer: Any) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            raise ArgumentError(f"GradientAccumulationScheduler is not supported: {_ACCUMULATION}")
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            raise ArgumentError(
                f"{type(callback).__name__} trains on the data to look at its loss, which is not "
                "released: leave it out, and set the value yourself"
            )


def _check_trainer(trainer: Any, module: Any) -> None:
    """Refuse settings of the Trainer that the oracle replaces or does not support."""
    _check_optimisation(module)
    for name, owner in trainers.overrides(module, PrivateModule):
        if name not in _BATCH_HOOKS and not _may_override(name):
            raise ArgumentError(
                f"{owner} overrides {name}, which is a part of the private step or replaced by it: "
                "leave it out (on_after_backward and on_before_optimizer_step see the private "
                "gradient), or write the loop yourself, with oracle.backward"
            )
    for hook in _BATCH_HOOKS:
        usual = getattr(LightningModule, hook)
        if any(getattr(type(o), hook, usual) is not usual for o in (module, trainer.datamodule)):
            raise ArgumentError(
                f"{hook} is given whole batches, where one record could change the others: change "
                "each record in the data set, or pass augment= to make_private"
            )
    if trainer.world_size > 1:
        raise ArgumentError(
            f"the Trainer has {trainer.world_size} processes, but the private gradient is computed "
            "by one: Trainer(devices=1)"
        )
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise ArgumentError(
            f"the strategy {type(trainer.strategy).__name__} is not supported: the private "
            "gradient is computed by one process; leave strategy out"
        )
    _check_accumulation(trainer)
    if str(trainer.precision) not in _PRECISIONS:
        raise ArgumentError(
            f"precision {trainer.precision} is not supported: private gradients are computed in "
            f"the parameters' own precision, one of {', '.join(_PRECISIONS)}"
        )
