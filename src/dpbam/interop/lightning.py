"""PyTorch Lightning: a LightningModule that trains privately with two changed lines.

::

    return F.cross_entropy(self(x), y, reduction="none")      # one loss a sample, in training_step
    model, loader = make_private(model, loader, plan, ledger="runs/ledger.jsonl")

Everything else stays Lightning's: ``Trainer``, optimisers and schedulers, callbacks, progress bar,
checkpoints. In an automatic optimisation step Lightning calls ``training_step``, ``zero_grad``,
``backward``, ``optimizer.step``; here ``training_step`` only remembers the batch, and ``backward``
has the oracle write the private gradient from the user's own ``training_step``.
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
from dpbam.interop import joining
from dpbam.methods import Method
from dpbam.oracle import PrivateGradientOracle
from dpbam.params import rows
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import PrivacyPlan

try:
    from lightning.pytorch import LightningModule
except ImportError as error:
    raise ImportError(
        "dpbam.interop.lightning needs the package lightning: pip install 'dpbam[lightning]'"
    ) from error

__all__ = ["PrivateModule", "make_private"]

_KEY = "dpbam"  # in Lightning's checkpoint
_PRECISIONS = ("32-true", "64-true")


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
    """A LightningModule and its training data, made private: both go into ``Trainer.fit``.

    Args:
        module: its ``training_step`` must return one loss a sample. It is changed in place: its
            class becomes a subclass of :class:`PrivateModule` and of its own class.
        data_loader: a DataLoader, whose data set, collate function and workers are kept and whose
            order and batch size are replaced by the plan's Poisson samples; or a data set.
        plan: the privacy plan. Training stops after its last step, or earlier where the Trainer
            says so.
        method: DPSGD(), DPSAT(lam), BAM(lam), or your own.
        ledger: the file where every step is written down before it can reach the weights; a
            checkpoint holds a copy. A :class:`~dpbam.privacy.ledger.Ledger` is taken as it is.
        seed: reproducible noise and samples: research only.
        options: further arguments of :class:`~dpbam.oracle.PrivateGradientOracle`.

    Returns:
        The module and a loader of Poisson batches; an epoch is n / l of them.

    Example:
        >>> class Net(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(2, 2)
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 2), torch.zeros(100).long())
        >>> plan = PrivacyPlan(n=100, batch_size=20, steps=50, noise_multiplier=1.0, delta=1e-3)
        >>> net, loader = make_private(Net(), DataLoader(data), plan, ledger=plan.ledger())
        >>> type(net).__name__, len(loader)
        ('PrivateNet', 5)
    """
    if not isinstance(module, LightningModule):
        raise ArgumentTypeError(
            f"make_private takes a LightningModule, got {type(module).__name__}"
        )
    state = _Private(plan, method, ledger, {"seed": seed, **options})
    state.loader = _loader(data_loader, plan, joining.EpochSampler(plan, lambda: module.oracle))
    own = type(module)
    module.__class__ = type(f"Private{own.__name__}", (PrivateModule, own), {})
    module._private = state
    return module, state.loader


@dataclass
class _Private:
    """What a private module knows beside its layers."""

    plan: PrivacyPlan
    method: Method | None
    given: Ledger | Path | str
    options: dict[str, Any]
    loader: DataLoader[Any] | None = None
    oracle: PrivateGradientOracle | None = None
    restored: dict[str, Any] = field(default_factory=dict)  # the checkpoint, if resumed
    batch: tuple[Any, ...] = ()  # of the present training step
    computing: bool = False


class PrivateModule(LightningModule):  # type: ignore[misc]
    """What :func:`make_private` puts in front of a LightningModule's class."""

    _private: _Private

    @property
    def oracle(self) -> PrivateGradientOracle:
        """The private gradient oracle; there is one from the start of ``fit`` on."""
        if self._private.oracle is None:
            raise ArgumentError("there is no oracle before trainer.fit(model, loader) has begun")
        return self._private.oracle

    def on_fit_start(self) -> None:
        """Make the oracle, where the ledger says what it says; take in what was resumed from."""
        super().on_fit_start()
        _check_trainer(self.trainer, self)
        state = self._private
        if state.oracle is None:
            ledger = joining.open_ledger(state.plan, state.given)
            if not state.restored:
                joining.check_fresh(ledger, state.given, "trainer.fit(..., ckpt_path=...)")
            state.oracle = PrivateGradientOracle(
                _Losses(self, super().training_step), _as_it_is, state.plan, state.method,
                ledger=ledger, **state.options,
            )  # fmt: skip
        if state.restored:
            joining.restore(state.oracle, state.restored.get(_KEY))
            state.restored = {}

    def on_train_start(self) -> None:
        """Refuse batches that are not the plan's."""
        super().on_train_start()
        if self.trainer.train_dataloader is not self._private.loader:
            raise ArgumentError(
                "trainer.fit got another loader than the one that make_private returned, whose "
                "Poisson samples the plan accounts for: trainer.fit(model, loader)"
            )

    def training_step(self, *args: Any) -> Tensor:
        """Remember the batch. The loss that Lightning sees is 0: the true one is not private."""
        self._private.batch = args
        return torch.zeros((), device=self.device, requires_grad=True)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The private gradient of the remembered batch, in ``.grad``."""
        state, oracle = self._private, self.oracle
        batch, state.batch, state.computing = state.batch[0], (), True
        try:
            oracle.backward({"batch": batch}, torch.arange(rows(batch)))
        finally:
            state.computing = False
        if oracle.step >= state.plan.steps:
            self.trainer.should_stop = True

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Lightning's; but what ``training_step`` would log of the training data is left out."""
        if not self._private.computing:
            super().log(name, *args, **kwargs)
        else:
            warnings.warn(
                f"training_step logs {name!r}, which is computed from the training data without "
                "noise: it is left out; log in validation_step, on data that may be published",
                stacklevel=2,
            )

    def on_train_epoch_end(self) -> None:
        """Show epsilon."""
        super().on_train_epoch_end()
        self.log("epsilon", self.oracle.ledger.epsilon(), prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The oracle's state and the ledger go with the weights."""
        super().on_save_checkpoint(checkpoint)
        if self._private.oracle is not None:
            checkpoint[_KEY] = joining.saved(self._private.oracle)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what was saved until ``fit`` makes the oracle."""
        super().on_load_checkpoint(checkpoint)
        self._private.restored = {_KEY: checkpoint.get(_KEY)}


class _Losses(nn.Module):
    """The user's training step as a model: a batch in, one loss a sample out."""

    def __init__(self, module: nn.Module, step: Any) -> None:
        super().__init__()
        self.module, self._step = module, step
        self._numbered = len(inspect.signature(step).parameters) > 1  # (batch, batch_idx)

    def forward(self, batch: Any) -> Any:
        losses = self._step(batch, 0) if self._numbered else self._step(batch)
        return losses["loss"] if isinstance(losses, dict) else losses


def _as_it_is(losses: Tensor, targets: Tensor) -> Tensor:
    return losses


def _loader(given: Any, plan: PrivacyPlan, sampler: joining.EpochSampler) -> DataLoader[Any]:
    if not isinstance(given, DataLoader):
        given = DataLoader(given) if hasattr(given, "__getitem__") else given
    if not isinstance(given, DataLoader):
        raise ArgumentTypeError(
            f"make_private takes a DataLoader or a data set, got {type(given).__name__}: of a "
            "LightningDataModule, pass its train_dataloader()"
        )
    return joining.poisson_loader(
        given.dataset, given.collate_fn, plan, sampler, num_workers=given.num_workers,
        pin_memory=given.pin_memory, persistent_workers=given.persistent_workers,
    )  # fmt: skip


def _check_trainer(trainer: Any, module: Any) -> None:
    """What the oracle does itself, or cannot do, a Trainer must leave alone."""
    if not module.automatic_optimization:
        raise ArgumentError(
            "the module optimises by hand (automatic_optimization = False), where its own "
            "manual_backward would not be private: use automatic optimisation, or a loop of your "
            "own with oracle.backward"
        )
    if trainer.world_size > 1:
        raise ArgumentError(
            f"the Trainer has {trainer.world_size} processes, but the private gradient is computed "
            "by one: Trainer(devices=1)"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ArgumentError(
            "accumulate_grad_batches splits a batch, but the oracle splits it itself: leave it at "
            "1 and pass physical_batch_size to make_private"
        )
    if str(trainer.precision) not in _PRECISIONS:
        raise ArgumentError(
            f"precision {trainer.precision} is not served: private gradients are computed in the "
            f"parameters' own precision, one of {', '.join(_PRECISIONS)}"
        )
