"""Hugging Face: a ``Trainer`` with private gradients, also for LoRA (peft).

::

    trainer = PrivateTrainer(model, args, train_dataset=data, plan=plan, method=BAM(0.02))

Everything else is unchanged: arguments, optimiser and scheduler, callbacks, evaluation,
checkpoints. The model's own loss is a mean over the batch; private training needs one loss per
sample, computed from the model's logits: :func:`sequence_loss`, :func:`token_loss`,
:func:`causal_loss`.

The log omits what is computed from the training data without noise, the training loss and the
number of tokens seen, and has epsilon instead.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.errors import ArgumentError
from dpbam.interop import trainers
from dpbam.methods import Method
from dpbam.oracle import PrivateGradientOracle
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import PrivacyPlan

try:
    import accelerate  # noqa: F401
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "dpbam.interop.huggingface needs the packages transformers, accelerate and peft: "
        "pip install 'dpbam[transformers]'"
    ) from error

__all__ = ["PrivateTrainer", "causal_loss", "sequence_loss", "token_loss"]

_FILE = "dpbam.pt"  # in a checkpoint's folder
#: Computed from the training data without noise, or times, which depend on the samples' sizes.
_PRIVATE = ("loss", "train_loss", "total_flos", "train_runtime", "train_samples_per_second",
            "train_steps_per_second")  # fmt: skip
_IGNORED = -100  # the label of a token that has none

PerSampleLoss = Callable[[Any, Any], Tensor]


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """Hugging Face's ``Trainer`` with private gradients.

    Args:
        model: any model that does not mix samples; parameters that do not require a gradient stay
            frozen, so a LoRA model trains only its adapters.
        args: ``TrainingArguments``. The plan determines the steps and the expected batch size:
            ``max_steps``, ``num_train_epochs``, ``per_device_train_batch_size`` and
            ``max_grad_norm`` are ignored.
        plan: the privacy plan.
        method: DPSGD(), DPSAT(lam), BAM(lam), or your own.
        per_sample_loss: (model output, labels) -> [N]; None: :func:`sequence_loss`.
        ledger: the file where every step is recorded before it changes the weights; None:
            ``ledger.jsonl`` in the output folder. A checkpoint holds a copy.
        oracle_options: further arguments of :class:`~dpbam.oracle.PrivateGradientOracle`, such as
            ``compute``.
        options: further arguments of ``Trainer``.

    A subclass may override what concerns evaluation, logging, saving, optimiser and scheduler, and
    add methods of its own. Whatever else it overrides of ``Trainer`` is refused: it would replace a
    part of the private step, or be ignored by it.

    The data set and the collator see one record at a time, so all records must be padded to one
    length: with padding to the longest sample of a batch, one sample would change the others.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        *,
        plan: PrivacyPlan,
        method: Method | None = None,
        per_sample_loss: PerSampleLoss | None = None,
        ledger: Ledger | Path | str | None = None,
        oracle_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._mixed = bool(args.bf16)  # the step's own autocast, below
        args = _arguments(args, plan)
        _check_options(options)
        self._check_overrides()
        super().__init__(model=model, args=args, **options)
        if self.accelerator.mixed_precision != "no":  # by accelerate's own configuration
            raise ArgumentError(
                f"accelerate computes in {self.accelerator.mixed_precision}, which is not "
                "supported: it wraps the model's forward; set its mixed precision to 'no', and "
                "TrainingArguments(bf16=True)"
            )
        ledger_place = Path(args.output_dir) / "ledger.jsonl" if ledger is None else ledger
        self._ledger_place: Ledger | Path | str = ledger_place
        self.oracle = PrivateGradientOracle(
            self.model, per_sample_loss or sequence_loss, plan, method,
            ledger=trainers.open_ledger(plan, ledger_place), **(oracle_options or {}),
        )  # fmt: skip
        self._sampler = trainers.EpochSampler(plan, lambda: self.oracle)
        self.add_callback(_PrivateSteps(self.oracle))
        if self.train_dataset is not None:
            self.get_train_dataloader()  # refuses what cannot be trained on, before a step

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as ``Trainer`` does, on a ledger without another run's entries."""
        self._check_overrides()  # what was set on the object since it was made, too
        if not resume_from_checkpoint:
            how = "trainer.train(resume_from_checkpoint=True)"
            trainers.check_fresh(self.oracle.ledger, self._ledger_place, how)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return a loader of Poisson batches."""
        if self.train_dataset is None:
            raise ArgumentError("training needs a train_dataset: PrivateTrainer(train_dataset=...)")
        collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        return trainers.poisson_loader(
            self.train_dataset, collate, self.oracle.plan, self._sampler,
            num_workers=self.args.dataloader_num_workers,
        )  # fmt: skip

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any) -> Tensor:
        """Write the private gradient of one logical batch to ``.grad``; the loss is NaN."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = dict(self._prepare_inputs(inputs))
        trainers.warn_unmoved(self.oracle)
        targets = {name: inputs.pop(name) for name in self.label_names if name in inputs}
        if not targets:
            raise ArgumentError(
                f"the batch has none of the labels {self.label_names}, only {sorted(inputs)}: add "
                "a column 'labels' to the data set, or set TrainingArguments(label_names=)"
            )
        # matrix products in bfloat16; norms, clip factors and sums stay in float32 or better
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self._mixed):
            self.oracle.backward(
                inputs, targets if len(targets) > 1 else next(iter(targets.values()))
            )
        return torch.tensor(math.nan, device=self.args.device)

    def _check_overrides(self) -> None:
        for name, owner in trainers.overrides(self, PrivateTrainer):
            if name not in _MAY_OVERRIDE:
                way = _INSTEAD.get(name, "leave it to PrivateTrainer, or write the loop yourself, "
                                         "with oracle.backward")  # fmt: skip
                raise ArgumentError(
                    f"{owner} overrides {name}, which is a part of the private step or replaced by "
                    f"it: {way}"
                )

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: the true number would reveal how many samples were drawn."""
        return 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log epsilon in place of what is not protected by privacy."""
        of_training = [logs.pop(name) for name in _PRIVATE if name in logs]
        if of_training:
            logs["epsilon"] = self.oracle.ledger.epsilon()
        super().log(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        torch.save(trainers.saved(self.oracle), Path(output_dir) / _FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / _FILE
        state = torch.load(path, weights_only=True) if path.exists() else None
        trainers.restore(self.oracle, state)


class _PrivateSteps(TrainerCallback):  # type: ignore[misc]
    """Refuses a step of the optimiser on a gradient that is not the oracle's."""

    def __init__(self, oracle: PrivateGradientOracle) -> None:
        self._steps = trainers.PrivateSteps(oracle)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._steps.begin()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._steps.check()


def sequence_loss(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of one label per sample; squared error if labels are real numbers.

    Shapes: logits [N, classes], labels [N] -> [N].

    Example:
        >>> from types import SimpleNamespace
        >>> output = SimpleNamespace(logits=torch.zeros(3, 2))
        >>> sequence_loss(output, torch.tensor([0, 1, 1]))
        tensor([0.6931, 0.6931, 0.6931])
    """
    logits = output.logits
    if logits.ndim != 2:
        raise ArgumentError(
            f"the model's logits have shape {tuple(logits.shape)}, one prediction per token: pass "
            "per_sample_loss=causal_loss (language models) or token_loss (masked ones, tagging)"
        )
    if labels.is_floating_point():
        return F.mse_loss(logits, labels.view_as(logits), reduction="none").mean(1)
    return F.cross_entropy(logits, labels, reduction="none")


def token_loss(output: Any, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the labelled tokens of a sample; 0 if it has none.

    Labels of -100 are ignored.

    Shapes: logits [N, T, classes], labels [N, T] -> [N].

    Example:
        >>> from types import SimpleNamespace
        >>> output = SimpleNamespace(logits=torch.zeros(2, 3, 2))
        >>> token_loss(output, torch.tensor([[0, 1, -100], [-100, -100, -100]]))
        tensor([0.6931, 0.0000])
    """
    return _mean_over_tokens(output.logits, labels)


def causal_loss(output: Any, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens of a sample, each predicted from those before it.

    Shapes: logits [N, T, vocabulary], labels [N, T] -> [N].

    Example:
        >>> from types import SimpleNamespace
        >>> output = SimpleNamespace(logits=torch.zeros(1, 3, 4))
        >>> causal_loss(output, torch.tensor([[2, 1, 3]]))
        tensor([1.3863])
    """
    return _mean_over_tokens(output.logits[:, :-1], labels[:, 1:])


def _mean_over_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", ignore_index=_IGNORED
    )  # [N, T]
    return each.sum(1) / (labels != _IGNORED).sum(1).clamp(min=1)


_LOSS = (
    "pass per_sample_loss=, a function of the model's output and the labels, one loss per sample"
)
#: Methods of ``Trainer`` that see no training data, or only what was released.
_MAY_OVERRIDE = {
    "evaluate", "evaluation_loop", "predict", "prediction_step", "get_eval_dataloader",
    "get_test_dataloader", "_get_eval_sampler", "_evaluate", "_determine_best_metric",
    "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler",
    "get_optimizer_cls_and_kwargs", "get_decay_parameter_names", "_get_learning_rate",
    "get_learning_rates", "get_num_trainable_parameters", "get_optimizer_group",
    "log", "log_metrics", "metrics_format", "save_metrics", "save_state", "save_model", "_save",
    "init_hf_repo", "create_model_card", "push_to_hub", "_push_from_checkpoint",
    "_finish_current_push", "_set_signature_columns_if_needed",
}  # fmt: skip
_INSTEAD = {
    "compute_loss": _LOSS,
    "_get_train_sampler": "the plan's Poisson samples of the whole data set replace it; pass "
    "train_dataset=torch.utils.data.Subset(dataset, indices), with the records to train on",
    "get_train_dataloader": "pass the data as train_dataset= and data_collator=",
    "_prepare_inputs": "change each record in the data set or the collator, or pass augment= in "
    "oracle_options",
}
_SPLIT = "oracle_options={'compute': dpbam.Compute(physical_batch_size=...)}"
_UNSUPPORTED = {
    "gradient_accumulation_steps": (1, f"the oracle splits a batch itself: pass {_SPLIT}"),
    "fp16": (False, "float16 needs loss scaling, which the engines do not have: use bf16=True"),
    "label_smoothing_factor": (0.0, "the loss is the per_sample_loss: smooth it there"),
    "neftune_noise_alpha": (None, "the engine does not support noise on embeddings"),
    "gradient_checkpointing": (False, f"pass {_SPLIT} instead"),
    "torch_compile": (False, "the engine needs access to the model's layers"),
    "auto_find_batch_size": (False, "the oracle measures how many rows fit"),
    "use_liger_kernel": (False, "the engine needs the model's own layers"),
    "deepspeed": (None, "the private gradient is computed on one device, without DeepSpeed"),
    "train_sampling_strategy": ("random", "the plan's Poisson samples are drawn instead"),
}  # fmt: skip


def _check_options(options: dict[str, Any]) -> None:
    """Refuse arguments of ``Trainer`` that would be ignored."""
    if options.get("compute_loss_func") is not None:
        raise ArgumentError(f"compute_loss_func would not be used: {_LOSS}")
    if options.get("model_init") is not None:
        raise ArgumentError(
            "model_init makes a new model in every train(), which the oracle does not train: pass "
            "the model itself"
        )


def _arguments(args: Any, plan: PrivacyPlan) -> Any:
    """Copy the arguments, with the values that the plan determines; refuse unsupported ones."""
    for name, (wanted, why) in _UNSUPPORTED.items():
        if getattr(args, name, wanted) != wanted:
            raise ArgumentError(f"{name}={getattr(args, name)} is not supported: {why}")
    if getattr(args, "fsdp", None):
        raise ArgumentError("fsdp is not supported: the private gradient is computed on one device")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "layerwise" in optimizer or "lomo" in optimizer:
        raise ArgumentError(
            f"optim={optimizer} steps inside the backward pass, before there is a private "
            "gradient: choose another optimiser"
        )
    if args.world_size > 1 or args.n_gpu > 1:
        raise ArgumentError(
            f"{max(args.world_size, args.n_gpu)} devices are used, but the private gradient is "
            "computed on one: run on one device (CUDA_VISIBLE_DEVICES=0)"
        )
    if getattr(args, "include_num_input_tokens_seen", False) not in (False, "no"):
        raise ArgumentError(
            "include_num_input_tokens_seen reveals how many samples were drawn: remove it"
        )
    args = copy.copy(args)
    if args.bf16:  # accelerate would wrap the model's forward; the private step casts by itself
        args.bf16, args.mixed_precision = False, "no"
    args.max_steps = plan.steps
    args.max_grad_norm = 0.0  # the oracle has clipped every sample
    args.ignore_data_skip = True  # the sampler itself starts at the current step
    args.logging_nan_inf_filter = False  # the loss is NaN deliberately
    return args
