"""Hugging Face: a ``Trainer`` that trains privately, LoRA (peft) included.

::

    trainer = PrivateTrainer(model, args, train_dataset=data, plan=plan, method=BAM(0.02))

Everything else stays the ``Trainer``'s: arguments, optimiser and scheduler, callbacks, evaluation,
checkpoints. The model's own loss is a mean over the batch; private training needs one a sample, and
takes it from the model's logits: :func:`sequence_loss`, :func:`token_loss`, :func:`causal_loss`.

What a log of a usual training tells of its data is left out: the training loss, and the number of
tokens seen. Epsilon takes their place.
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
from dpbam.interop import joining
from dpbam.methods import Method
from dpbam.oracle import PrivateGradientOracle
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import PrivacyPlan

try:
    import accelerate  # noqa: F401
    from transformers import Trainer
except ImportError as error:
    raise ImportError(
        "dpbam.interop.huggingface needs the packages transformers, accelerate and peft: "
        "pip install 'dpbam[transformers]'"
    ) from error

__all__ = ["PrivateTrainer", "causal_loss", "sequence_loss", "token_loss"]

_FILE = "dpbam.pt"  # in a checkpoint's folder
_PRIVATE = ("loss", "train_loss", "total_flos")  # computed from the training data without noise
_IGNORED = -100  # the label of a token that has none

PerSampleLoss = Callable[[Any, Any], Tensor]


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """Hugging Face's ``Trainer`` with private gradients.

    Args:
        model: any model whose samples do not mix; parameters that do not require a gradient stay
            frozen and cost nothing, so a LoRA model trains its adapters alone.
        args: ``TrainingArguments``. The plan decides the steps and the expected batch size;
            ``max_steps``, ``num_train_epochs`` and ``per_device_train_batch_size`` do not, and
            ``max_grad_norm`` is not applied.
        plan: the privacy plan.
        method: DPSGD(), DPSAT(lam), BAM(lam), or your own.
        per_sample_loss: (model output, labels) -> one value a sample; None: :func:`sequence_loss`.
        ledger: the file where every step is written down before it can reach the weights; None:
            ``ledger.jsonl`` in the output folder. A checkpoint holds a copy.
        oracle_options: further arguments of :class:`~dpbam.oracle.PrivateGradientOracle`, such as
            ``compute``.
        options: further arguments of ``Trainer``.

    Batches must be padded to one length: padding to the longest of a batch would let one sample
    change the others.

    Example:
        >>> import tempfile
        >>> from transformers import TrainingArguments, ViTConfig, ViTForImageClassification
        >>> small = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                   intermediate_size=8, image_size=8, patch_size=4)
        >>> args = TrainingArguments(tempfile.mkdtemp(), report_to=[], use_cpu=True)
        >>> plan = PrivacyPlan(n=100, batch_size=20, steps=7, noise_multiplier=1.0, delta=1e-3)
        >>> data = [{"pixel_values": torch.randn(3, 8, 8), "labels": 0}] * 100
        >>> trainer = PrivateTrainer(
        ...     ViTForImageClassification(small), args, train_dataset=data, plan=plan)
        >>> trainer.args.max_steps, len(trainer.get_train_dataloader())
        (7, 5)
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
        args = _arguments(args, plan)
        super().__init__(model=model, args=args, **options)
        given = Path(args.output_dir) / "ledger.jsonl" if ledger is None else ledger
        self._given: Ledger | Path | str = given
        self.oracle = PrivateGradientOracle(
            self.model, per_sample_loss or sequence_loss, plan, method,
            ledger=joining.open_ledger(plan, given), **(oracle_options or {}),
        )  # fmt: skip
        self._sampler = joining.EpochSampler(plan, lambda: self.oracle)
        self._shapes: dict[str, torch.Size] = {}

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's, on a ledger that is this run's."""
        if not resume_from_checkpoint:
            how = "trainer.train(resume_from_checkpoint=True)"
            joining.check_fresh(self.oracle.ledger, self._given, how)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Poisson batches."""
        if self.train_dataset is None:
            raise ArgumentError("training needs a train_dataset: PrivateTrainer(train_dataset=...)")
        collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        return joining.poisson_loader(
            self.train_dataset, collate, self.oracle.plan, self._sampler,
            num_workers=self.args.dataloader_num_workers,
        )  # fmt: skip

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any) -> Tensor:
        """The private gradient of one logical batch, in ``.grad``; returns NaN for the loss."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = dict(self._prepare_inputs(inputs))
        self._check_shapes(inputs)
        targets = {name: inputs.pop(name) for name in self.label_names if name in inputs}
        if not targets:
            raise ArgumentError(
                f"the batch has none of the labels {self.label_names}, only {sorted(inputs)}: give "
                "the data set a column 'labels', or name yours in TrainingArguments(label_names=)"
            )
        self.oracle.backward(inputs, targets if len(targets) > 1 else next(iter(targets.values())))
        return torch.tensor(math.nan, device=self.args.device)

    def _check_shapes(self, inputs: dict[str, Any]) -> None:
        """One length for all batches, or a sample's padding would depend on the others."""
        for name, t in inputs.items():
            known = self._shapes.setdefault(name, t.shape[1:])
            if t.shape[1:] != known:
                raise ArgumentError(
                    f"{name} has shape {tuple(t.shape[1:])} a sample here and {tuple(known)} "
                    "before: pad every sample to one length (padding='max_length'), since padding "
                    "to the longest of a batch lets one sample change the others"
                )

    def floating_point_ops(self, inputs: Any) -> int:
        """Nothing: they tell how many samples were drawn."""
        return 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Hugging Face's, with epsilon, and without what is not private."""
        of_training = [logs.pop(name) for name in _PRIVATE if name in logs]
        if of_training:
            logs["epsilon"] = self.oracle.ledger.epsilon()
        super().log(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        torch.save(joining.saved(self.oracle), Path(output_dir) / _FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / _FILE
        state = torch.load(path, weights_only=True) if path.exists() else None
        joining.restore(self.oracle, state)


def sequence_loss(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of one label a sample; squared error where labels are real numbers.

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
            f"the model's logits have shape {tuple(logits.shape)}, one prediction a token: pass "
            "per_sample_loss=causal_loss (language models) or token_loss (masked ones, tagging)"
        )
    if labels.is_floating_point():
        return F.mse_loss(logits, labels.view_as(logits), reduction="none").mean(1)
    return F.cross_entropy(logits, labels, reduction="none")


def token_loss(output: Any, labels: Tensor) -> Tensor:
    """The mean over a sample's own labelled tokens; 0 if it has none. Labels of -100 do not count.

    Shapes: logits [N, T, classes], labels [N, T] -> [N].

    Example:
        >>> from types import SimpleNamespace
        >>> output = SimpleNamespace(logits=torch.zeros(2, 3, 2))
        >>> token_loss(output, torch.tensor([[0, 1, -100], [-100, -100, -100]]))
        tensor([0.6931, 0.0000])
    """
    return _mean_over_tokens(output.logits, labels)


def causal_loss(output: Any, labels: Tensor) -> Tensor:
    """The mean over a sample's own tokens, each predicted from those before it.

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


_UNSERVED = {
    "gradient_accumulation_steps": (1, "the oracle splits a batch itself: oracle_options="
                                       "{'physical_batch_size': ...}"),
    "fp16": (False, "private gradients are computed in the parameters' own precision"),
    "bf16": (False, "private gradients are computed in the parameters' own precision"),
    "label_smoothing_factor": (0.0, "the loss is the per_sample_loss: smooth it there"),
    "neftune_noise_alpha": (None, "noise on embeddings is not known to the engine"),
    "gradient_checkpointing": (False, "pass oracle_options={'physical_batch_size': ...} instead"),
    "torch_compile": (False, "the engine has to see the model's layers"),
    "auto_find_batch_size": (False, "the oracle chooses how many rows fit"),
}  # fmt: skip


def _arguments(args: Any, plan: PrivacyPlan) -> Any:
    """A copy of the arguments with what the plan decides; refused where it cannot be served."""
    for name, (wanted, why) in _UNSERVED.items():
        if getattr(args, name, wanted) != wanted:
            raise ArgumentError(f"{name}={getattr(args, name)} is not served: {why}")
    if args.world_size > 1 or args.n_gpu > 1:
        raise ArgumentError(
            f"{max(args.world_size, args.n_gpu)} devices are used, but the private gradient is "
            "computed by one: run on one device (CUDA_VISIBLE_DEVICES=0)"
        )
    if getattr(args, "include_num_input_tokens_seen", False) not in (False, "no"):
        raise ArgumentError(
            "include_num_input_tokens_seen tells how many samples were drawn: drop it"
        )
    args = copy.copy(args)
    args.max_steps = plan.steps
    args.max_grad_norm = 0.0  # the oracle has clipped every sample
    args.ignore_data_skip = True  # the sampler starts at the present step by itself
    args.logging_nan_inf_filter = False  # the loss is NaN on purpose
    return args
