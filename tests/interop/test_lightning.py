"""Lightning: the same training as a plain loop's, the plan's epsilon, and resuming."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from violations import LONG, VIOLATIONS, draw_with

from dpbam import BAM, DPSAT, Compute, Ledger, PrivacyPlan, PrivateGradientOracle
from dpbam.errors import PlanViolationError
from dpbam.interop import lightning
from dpbam.interop.lightning import make_private
from dpbam.privacy import ledger as ledger_module

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
]

N, L_, STEPS = 40, 8, 13  # five steps an epoch
PLAN = PrivacyPlan(
    n=N, batch_size=L_, steps=STEPS, noise_multiplier=1.0, delta=1e-2, accountant="rdp"
)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="none")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def trainer(folder: Path, **options: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return L.Trainer(default_root_dir=folder, accelerator="cpu", **{**quiet, **options})


def private(folder: Path, module: Any = None, **options: Any) -> tuple[Any, Any]:
    usual = {
        "method": BAM(0.02),
        "ledger": folder / "ledger.jsonl",
        "compute": Compute(physical_batch_size=64),
    }
    options = {**usual, **options}
    return make_private(module or Classifier(), DataLoader(data()), PLAN, **options)


def fit(folder: Path, ckpt_path: Path | None = None, *, epochs: int = 9, **options: Any) -> Any:
    """A training of at most ``epochs``, which leaves folder/last.ckpt."""
    model, loader = private(folder, **options)
    ours = trainer(folder, max_epochs=epochs)
    ours.fit(model, loader, ckpt_path=ckpt_path)
    ours.save_checkpoint(folder / "last.ckpt")
    return model


def weights(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain_loop(method: Any, seed: int) -> Tensor:
    model = Classifier()
    optimizer = model.configure_optimizers()
    loss = nn.CrossEntropyLoss(reduction="none")
    oracle = PrivateGradientOracle(model.net, loss, PLAN, method, seed=seed)
    for x, y, _ in oracle.batches(data()):
        oracle.backward(x, y)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize(
    "method", [BAM(0.02), pytest.param(DPSAT(0.1), marks=pytest.mark.slow)], ids=["bam", "dp-sat"]
)
def test_training_equals_a_plain_loop(tmp_path: Path, method: Any) -> None:
    """At the same seed; and the epsilon is the plan's."""
    model = fit(tmp_path, method=method, seed=5)
    torch.testing.assert_close(weights(model), plain_loop(method, 5), rtol=1e-5, atol=1e-6)
    assert (weights(model) - plain_loop(method, 6)).abs().max() > 1e-2
    assert model.oracle.step == model.trainer.global_step == STEPS
    assert model.oracle.engine.name == "fused"
    assert model.oracle.ledger.epsilon() == PLAN.epsilon()


def test_the_trainer_may_stop_earlier(tmp_path: Path) -> None:
    model = fit(tmp_path, epochs=1)
    assert len(model.oracle.ledger) == 5
    assert model.trainer.callback_metrics["epsilon"] == pytest.approx(PLAN.epsilon(5))


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Seeded: the same weights, step for step, and not one step charged twice."""
    for method in (BAM(0.02), DPSAT(0.1)):  # DP-SAT needs the last private gradient again
        folder = tmp_path / method.name
        fit(folder, epochs=1, seed=5, method=method)
        model = fit(folder, folder / "last.ckpt", seed=5, method=method)
        torch.testing.assert_close(weights(model), plain_loop(method, 5), rtol=1e-5, atol=1e-6)
        assert len(model.oracle.ledger) == STEPS
        assert model.oracle.ledger.epsilon() == PLAN.epsilon()


class Crash(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 9:
            raise KeyboardInterrupt


def test_steps_after_the_checkpoint_are_never_forgotten(tmp_path: Path) -> None:
    """Killed at step 9, in the middle of an epoch, and resumed from step 7: 9 + (13 - 7)."""
    keep = L.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=7)
    model, loader = private(tmp_path)
    killed = trainer(tmp_path, max_epochs=9, callbacks=[keep, Crash()])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        killed.fit(model, loader)
    resumed = fit(tmp_path, keep.best_model_path)
    assert resumed.oracle.step == STEPS
    assert len(resumed.oracle.ledger) == 9 + STEPS - 7
    assert resumed.oracle.ledger.epsilon() > PLAN.epsilon()


def test_a_checkpoint_without_its_ledger_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know what was released after it."""
    fit(tmp_path, epochs=1)
    monkeypatch.setattr(ledger_module, "_SEEN", {})  # as in a new process
    moved = (tmp_path / "ledger.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(ValueError, match="is not there or not whole: what was released after"):
        fit(tmp_path, tmp_path / "last.ckpt")
    model = fit(tmp_path, tmp_path / "last.ckpt", ledger=moved)
    assert model.oracle.ledger.epsilon() == PLAN.epsilon()
    assert len(Ledger(1e-2, path=moved)) == STEPS


def test_the_users_class_loads_the_checkpoint(tmp_path: Path) -> None:
    model = fit(tmp_path, epochs=1)
    assert torch.equal(
        weights(Classifier.load_from_checkpoint(tmp_path / "last.ckpt")), weights(model)
    )


@pytest.mark.filterwarnings("ignore:the ledger .* has")
def test_a_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, epochs=1)
    with pytest.raises(ValueError, match=r"holds 5 steps of an earlier run: resume it"):
        fit(tmp_path)
    model = fit(tmp_path, ledger=PLAN.ledger(tmp_path / "ledger.jsonl"))
    assert len(model.oracle.ledger) == 5 + STEPS


def test_a_checkpoint_without_a_ledger_is_refused(tmp_path: Path) -> None:
    plain = trainer(tmp_path, max_epochs=1)
    plain.fit(Mean(), DataLoader(data(), batch_size=8))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="the checkpoint has no ledger"):
        fit(tmp_path, tmp_path / "plain.ckpt")


def test_no_step_beyond_the_plan(tmp_path: Path) -> None:
    model = fit(tmp_path)
    with pytest.raises(ValueError, match="all 13 steps of the plan are taken"):
        fit(tmp_path, tmp_path / "last.ckpt", epochs=20)
    assert len(Ledger(1e-2, path=tmp_path / "ledger.jsonl")) == len(model.oracle.ledger) == STEPS


@VIOLATIONS
def test_what_the_plan_does_not_account_for_is_refused(
    tmp_path: Path, monkeypatch: Any, batches: Any, options: Any, words: str, taken: int
) -> None:
    draw_with(batches, monkeypatch)
    usual = {
        "ledger": tmp_path / "ledger.jsonl",
        "seed": 0,
        "compute": Compute(physical_batch_size=64),
    }
    model, loader = make_private(Classifier(), DataLoader(data()), LONG, **usual, **options())
    with pytest.raises(PlanViolationError, match=words):
        trainer(tmp_path, max_epochs=9).fit(model, loader)
    assert len(Ledger(1e-2, path=tmp_path / "ledger.jsonl")) == taken


class Mean(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).mean()


class Logs(Classifier):
    def training_step(self, batch: Any) -> dict[str, Tensor]:
        losses = super().training_step(batch, 0)
        self.log("train_loss", losses.mean())
        return {"loss": losses}


class ByHand(Classifier):
    automatic_optimization = False


class ByHandLater(Classifier):
    def on_train_start(self) -> None:
        self.automatic_optimization = False


class OwnBackward(Classifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class WithRate(Classifier):
    lr = 0.1


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


def test_a_training_loss_is_not_logged(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="training_step logs 'train_loss'"):
        model = fit(tmp_path, module=Logs())
    assert "train_loss" not in model.trainer.logged_metrics
    assert model.oracle.ledger.epsilon() == PLAN.epsilon()


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (Mean, {}, "the loss returned a scalar, but private training needs one value per sample"),
        (ByHand, {}, "uses manual optimisation"),
        (Normed, {}, "mixes the samples of a batch"),
        (Classifier, {"accumulate_grad_batches": 2}, "the oracle splits a batch itself"),
        (OwnBackward, {}, "OwnBackward overrides backward"),
        (ByHandLater, {}, "uses manual optimisation"),
        (
            Classifier,
            {"callbacks": [GradientAccumulationScheduler({1: 2})]},
            "GradientAccumulationScheduler is not supported.*the oracle splits a batch itself",
        ),
        (WithRate, {"callbacks": [LearningRateFinder()]}, "LearningRateFinder trains on the data"),
        (Classifier, {"precision": "bf16-mixed"}, "precision bf16-mixed is not supported"),
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, module: Any, options: dict[str, Any], words: str
) -> None:
    model, loader = private(tmp_path, module())
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, max_epochs=1, **options).fit(model, loader)
    assert len(Ledger(1e-2, path=tmp_path / "ledger.jsonl")) == 0


def test_other_strategies_are_refused(tmp_path: Path) -> None:
    model, loader = private(tmp_path)
    try:
        with (
            mock.patch.dict(os.environ),
            pytest.raises(ValueError, match="strategy DDPStrategy is not supported"),
        ):
            trainer(tmp_path, max_epochs=1, strategy="ddp").fit(model, loader)
    finally:
        torch.distributed.destroy_process_group()


class Accumulates(L.Callback):
    def on_train_batch_start(self, ours: Any, module: Any, batch: Any, index: int) -> None:
        ours.accumulate_grad_batches = 1 + (index > 1)


def test_accumulation_that_a_callback_begins_is_refused(tmp_path: Path) -> None:
    """Two steps were charged for each of the optimiser's, which saw the second gradient alone."""
    model, loader = private(tmp_path)
    with pytest.raises(ValueError, match="accumulate_grad_batches must be 1"):
        trainer(tmp_path, max_epochs=2, callbacks=[Accumulates()]).fit(model, loader)
    assert model.oracle.step == model.trainer.global_step == 2


def test_accumulation_is_noticed_before_the_optimisers_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning, "_check_accumulation", lambda trainer: None)
    model, loader = private(tmp_path)
    with pytest.raises(PlanViolationError, match="2 steps for one of the optimiser"):
        trainer(tmp_path, max_epochs=2, callbacks=[Accumulates()]).fit(model, loader)


class Hooks(Classifier):
    """What may be overridden: hooks, of which these see the private gradient, and optimisation."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [*getattr(self, "norms", []), float(self.net[0].weight.grad.norm())]

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")


def test_hooks_of_the_private_gradient_are_used(tmp_path: Path) -> None:
    model = fit(tmp_path, module=Hooks(), epochs=1)
    assert len(model.norms) == len(model.oracle.ledger) == 5
    assert min(model.norms) > 0


@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
def test_resuming_elsewhere_keeps_what_was_released_after_the_checkpoint(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    fit(first, epochs=1)
    model, loader = private(first)
    trainer(first, max_epochs=2).fit(model, loader, ckpt_path=first / "last.ckpt")
    assert len(model.oracle.ledger) == 10
    elsewhere = fit(second, first / "last.ckpt")
    assert len(elsewhere.oracle.ledger) == 10 + STEPS - 5


def test_another_loader_is_refused(tmp_path: Path) -> None:
    model, _ = private(tmp_path)
    with pytest.raises(ValueError, match="another loader than the one that make_private returned"):
        trainer(tmp_path, max_epochs=1).fit(model, DataLoader(data(), batch_size=8))


def test_what_make_private_takes(tmp_path: Path) -> None:
    ledger = PLAN.ledger()
    with pytest.raises(TypeError, match="takes a LightningModule, got Linear"):
        make_private(nn.Linear(2, 2), DataLoader(data()), PLAN, ledger=ledger)
    with pytest.raises(TypeError, match=r"got LightningDataModule: .* its train_dataloader"):
        make_private(Classifier(), L.LightningDataModule(), PLAN, ledger=ledger)
    less = torch.utils.data.Subset(data(), range(39))
    with pytest.raises(ValueError, match="n = 40 records but the data set has 39"):
        make_private(Classifier(), less, PLAN, ledger=ledger)
    with pytest.raises(ValueError, match="there is no oracle before"):
        _ = private(tmp_path)[0].oracle


def test_records_that_are_repeated_or_left_out_are_refused() -> None:
    def given(dataset: Any, **options: Any) -> None:
        make_private(Classifier(), DataLoader(dataset, **options), PLAN, ledger=PLAN.ledger())

    with pytest.raises(ValueError, match="rows 0 and 39 of the Subset are one record but two"):
        given(torch.utils.data.Subset(data(), [*range(39), 0]))
    chosen = torch.utils.data.SubsetRandomSampler(range(30))
    with pytest.raises(ValueError, match="the loader's SubsetRandomSampler may leave records"):
        given(data(), sampler=chosen)
    with pytest.raises(TypeError, match="a Stream returns its records in a fixed order"):
        given(type("Stream", (torch.utils.data.IterableDataset,), {"__iter__": iter})())
    given(data(), shuffle=True, batch_size=7, drop_last=True)
    given(data(), sampler=torch.utils.data.RandomSampler(data(), replacement=True))


def test_unequal_lengths_are_refused_before_a_step(tmp_path: Path) -> None:
    records = [(torch.ones(3 + k % 2), 0) for k in range(N)]
    with pytest.raises(ValueError, match=r"in one record and .* pad every sample to one length"):
        make_private(Classifier(), DataLoader(records), PLAN, ledger=tmp_path / "ledger.jsonl")


def test_bfloat16_parameters_train(tmp_path: Path) -> None:
    model, loader = private(tmp_path)
    before = weights(model).clone()
    trainer(tmp_path, max_epochs=1, precision="bf16-true").fit(model, loader)
    assert weights(model).isfinite().all()
    assert not torch.equal(before, weights(model).to(before.dtype))


class AtBatchStart(L.Callback):
    """What a callback can reach of a batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.seen.append(batch)


def test_callbacks_cannot_change_a_batch(tmp_path: Path) -> None:
    model, loader = private(tmp_path)
    callback = AtBatchStart()
    trainer(tmp_path, max_steps=2, callbacks=[callback]).fit(model, loader)
    assert len(callback.seen) == 2
    for batch in callback.seen:
        with pytest.raises(TypeError, match="cannot open a private training batch"):
            _x, _y = batch


class Mixing(Classifier):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x + x.roll(1, 0)) / 2, y


class MixingData(L.LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def test_hooks_on_whole_batches_are_refused(tmp_path: Path) -> None:
    model, loader = private(tmp_path, Mixing())
    with pytest.raises(
        ValueError, match=r"on_after_batch_transfer is given whole batches.*augment="
    ):
        trainer(tmp_path, max_steps=2).fit(model, loader)
    model, loader = private(tmp_path)
    with pytest.raises(ValueError, match="on_before_batch_transfer is given whole batches"):
        trainer(tmp_path, max_steps=2).fit(model, datamodule=MixingData(loader))
    assert not (tmp_path / "ledger.jsonl").exists() or not len(
        Ledger(1e-2, path=tmp_path / "ledger.jsonl")
    )


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_batches_have_the_trainers_precision(tmp_path: Path, precision: str) -> None:
    model, loader = private(tmp_path)
    trainer(tmp_path, max_steps=2, precision=precision).fit(model, loader)
    assert model.oracle.step == 2


class Reusing(Classifier):
    """Validates by its own training step, and logs what is public."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx).mean())

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("rate", 0.1, on_epoch=True)
        self.log_dict({"other": 0.2}, on_epoch=True)


class SecondOrder(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_an_optimiser_that_evaluates_a_batch_again_is_refused(
    tmp_path: Path, precision: str
) -> None:
    model, loader = private(tmp_path, SecondOrder())
    with pytest.raises(PlanViolationError, match="part of a step before"):
        trainer(tmp_path, max_epochs=1, precision=precision).fit(model, loader)
    assert len(model.oracle.ledger) == 1


def test_a_validation_step_may_use_the_training_step(tmp_path: Path) -> None:
    model, loader = private(tmp_path, Reusing())
    ours = trainer(tmp_path, max_epochs=1)
    ours.fit(model, loader, DataLoader(data(), batch_size=N))
    expected = F.cross_entropy(model.net(data().tensors[0]), data().tensors[1]).detach()
    assert ours.callback_metrics["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert ours.callback_metrics["rate"] == pytest.approx(0.1)
