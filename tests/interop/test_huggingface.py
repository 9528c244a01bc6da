"""Hugging Face's Trainer: the same training as a plain loop's, the plan's epsilon, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from violations import LONG, VIOLATIONS, draw_with

from dpbam import BAM, DPSAT, Compute, Ledger, PrivacyPlan, PrivateGradientOracle
from dpbam.errors import PlanViolationError
from dpbam.interop import trainers
from dpbam.interop.huggingface import PrivateTrainer, causal_loss, sequence_loss, token_loss
from dpbam.privacy import ledger as ledger_module

N, T, VOCABULARY, STEPS = 40, 6, 20, 8  # five steps per epoch
PLAN = PrivacyPlan(
    n=N, batch_size=8, steps=STEPS, noise_multiplier=1.0, delta=1e-2, accountant="rdp"
)


class Texts(torch.utils.data.Dataset[Any]):
    """Random tokens, padded to one length; the label is whether the first is large."""

    def __init__(self, n: int = N, columns: dict[str, Any] | None = None) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(2, VOCABULARY, (n, T), generator=generator)
        self.lengths = torch.randint(3, T + 1, (n,), generator=generator)
        self.columns = columns or {}

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        mask = (torch.arange(T) < self.lengths[i]).long()
        label = int(self.ids[i, 0] > VOCABULARY // 2)
        item = {"input_ids": self.ids[i] * mask, "attention_mask": mask, "labels": label}
        return {**item, **self.columns}


def bert(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=T, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return hf.BertForSequenceClassification(config)


def lora(dropout: float = 0.0) -> nn.Module:
    return peft.get_peft_model(bert(dropout), peft.LoraConfig(task_type="SEQ_CLS", r=2))


def arguments(folder: Path, **options: Any) -> Any:
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    usual = {"save_steps": 3, "logging_steps": 100, "lr_scheduler_type": "constant"}
    return hf.TrainingArguments(
        output_dir=str(folder), learning_rate=0.01, **{**quiet, **usual, **options}
    )


def trainer(folder: Path, model: nn.Module | None = None, **options: Any) -> PrivateTrainer:
    args = options.pop("args", None) or arguments(folder)
    usual = {"method": BAM(0.02), "train_dataset": Texts(), "plan": PLAN}
    whole = {"compute": Compute(physical_batch_size=64), **options.pop("oracle_options", {})}
    return PrivateTrainer(model or bert(), args, oracle_options=whole, **{**usual, **options})


def weights(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def plain_loop(model: Any, method: Any, seed: int) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    oracle = PrivateGradientOracle(
        model.train(),
        sequence_loss,
        PLAN,
        method,
        seed=seed,
        compute=Compute(physical_batch_size=64),
    )
    texts = Texts()
    batch = hf.default_data_collator([texts[i] for i in range(N)])
    labels = batch.pop("labels")
    for inputs, y, _ in oracle.batches((dict(batch), labels)):
        oracle.backward(inputs, y)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("make", [bert, pytest.param(lora, marks=pytest.mark.slow)])
def test_training_equals_a_plain_loop(tmp_path: Path, make: Any) -> None:
    """At the same seed, for all weights or LoRA's alone; and the epsilon is the plan's."""
    ours = trainer(tmp_path, make(), oracle_options={"seed": 5})
    ours.train()
    torch.testing.assert_close(
        weights(ours.model), plain_loop(make(), BAM(0.02), 5), rtol=1e-4, atol=1e-5
    )
    assert (weights(ours.model) - plain_loop(make(), BAM(0.02), 6)).abs().max() > 1e-2
    assert ours.oracle.engine.name == "fused"
    assert ours.oracle.step == ours.state.global_step == STEPS
    assert ours.oracle.ledger.epsilon() == PLAN.epsilon()


def test_lora_leaves_the_base_as_it_was(tmp_path: Path) -> None:
    model = lora(dropout=0.1)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    before = weights(model)
    trainer(tmp_path, model).train()
    assert frozen
    assert all(torch.equal(frozen[n], p) for n, p in model.named_parameters() if n in frozen)
    assert (weights(model) - before).abs().max() > 0


@pytest.mark.parametrize(
    "method",
    [
        DPSAT(0.1),  # which needs the last private gradient again
        pytest.param(BAM(0.02), marks=pytest.mark.slow),
    ],
    ids=["dp-sat", "bam"],
)
def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path, method: Any) -> None:
    """From the middle of an epoch; seeded: the same weights, and no step charged twice."""
    options = {"method": method, "oracle_options": {"seed": 5}}
    whole = trainer(tmp_path, **options)
    whole.train()
    resumed = trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    torch.testing.assert_close(weights(resumed.model), weights(whole.model))
    assert resumed.oracle.ledger.epsilon() == PLAN.epsilon()


class Crash(hf.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_steps_after_the_checkpoint_are_never_forgotten(tmp_path: Path) -> None:
    """Killed at step 5 and resumed from step 3: 5 + (8 - 3)."""
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, callbacks=[Crash()]).train()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.oracle.step == STEPS
    assert len(resumed.oracle.ledger) == 5 + STEPS - 3
    assert resumed.oracle.ledger.epsilon() > PLAN.epsilon()


def test_a_checkpoint_without_its_ledger_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know what was released after it: two steps here."""
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, callbacks=[Crash()]).train()
    monkeypatch.setattr(ledger_module, "_SEEN", {})  # as in a new process
    moved = (tmp_path / "ledger.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(ValueError, match=r"is not there or not whole: what was released after"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    resumed = trainer(tmp_path, ledger=moved)
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed.oracle.ledger) == 5 + STEPS - 3
    (tmp_path / "checkpoint-6" / "dpbam.pt").unlink()
    with pytest.raises(ValueError, match="the checkpoint has no ledger"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


@pytest.mark.parametrize("how", ["elsewhere", "a copy", "moved"])
def test_resuming_elsewhere_keeps_what_was_released_after_the_checkpoint(
    tmp_path: Path, how: str
) -> None:
    """Eight steps, then five from the third on, with another ledger: 13 are charged."""
    first, second = tmp_path / "first", tmp_path / "second"
    trainer(first).train()
    if how == "a copy":  # of the time of the checkpoint
        second.mkdir()
        lines = (first / "ledger.jsonl").read_text().splitlines(keepends=True)
        (second / "ledger.jsonl").write_text("".join(lines[:3]))
    elif how == "moved":
        first.rename(second)
        first = second
    resumed = trainer(second)
    resumed.train(resume_from_checkpoint=str(first / "checkpoint-3"))
    assert len(resumed.oracle.ledger) == len(Ledger(1e-2, path=second / "ledger.jsonl")) == 13


def test_a_checkpoint_whose_ledger_was_in_memory_is_refused(tmp_path: Path) -> None:
    ours = trainer(tmp_path, ledger=PLAN.ledger())
    ours.train()
    with pytest.raises(ValueError, match="the ledger of this checkpoint was in memory"):
        trainer(tmp_path, ledger=PLAN.ledger()).train(resume_from_checkpoint=True)
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # the same ledger
    assert len(ours.oracle.ledger) == STEPS + STEPS - 3


class OwnStep(PrivateTrainer):
    """Trains on the records themselves, as many examples of ``Trainer`` do."""

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()


class OwnLoss(PrivateTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class Mixes(PrivateTrainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs({k: v.flip(0) for k, v in inputs.items()})


class OwnEpoch:
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        return None


class Inherits(OwnEpoch, PrivateTrainer):
    pass


class Behind(PrivateTrainer, type("Other", (hf.Trainer,), {"_run_epoch": OwnEpoch._run_epoch})):
    pass


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OwnStep, "OwnStep overrides training_step.*leave it to PrivateTrainer"),
        (OwnLoss, "OwnLoss overrides compute_loss.*per_sample_loss="),
        (Mixes, "Mixes overrides _prepare_inputs.*change each record in the data set"),
        (Inherits, "OwnEpoch overrides _run_epoch"),
        (Behind, "Other overrides _run_epoch"),
    ],
)
def test_what_would_go_past_the_oracle_is_refused(tmp_path: Path, kind: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(bert(), arguments(tmp_path), train_dataset=Texts(), plan=PLAN)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_method_set_on_the_trainer_is_refused(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    ours.training_step = OwnStep.training_step.__get__(ours)
    with pytest.raises(ValueError, match="this PrivateTrainer overrides training_step"):
        ours.train()


def test_a_step_without_the_oracle_is_refused_before_the_optimiser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second guard; and, without both, the attack: weights that move at epsilon 0."""
    monkeypatch.setattr(PrivateTrainer, "_check_overrides", lambda self: None)
    ours = OwnStep(bert(), arguments(tmp_path), train_dataset=Texts(), plan=PLAN)
    before = weights(ours.model)
    with pytest.raises(PlanViolationError, match="a gradient that is not the oracle's"):
        ours.train()
    assert torch.equal(weights(ours.model), before)
    monkeypatch.setattr(trainers.PrivateSteps, "check", lambda self: None)
    ours.train()
    assert not torch.equal(weights(ours.model), before)
    assert ours.oracle.ledger.epsilon() == 0


class Evaluates(PrivateTrainer):
    """What may be overridden: evaluation, the optimiser, logs; and methods of its own."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        return self.optimizer

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "own": self.figure()}, *args, **kwargs)

    def figure(self) -> float:
        return 1.0


def test_what_sees_no_training_data_may_be_overridden(tmp_path: Path) -> None:
    ours = Evaluates(
        bert(),
        arguments(tmp_path),
        train_dataset=Texts(),
        plan=PLAN,
        oracle_options={"compute": Compute(physical_batch_size=64)},
    )
    ours.train()
    assert ours.oracle.ledger.epsilon() == PLAN.epsilon()
    assert ours.state.log_history[-1]["own"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compute_loss_func": lambda *args, **kwargs: None}, "compute_loss_func would not be"),
        ({"model_init": lambda: bert(), "model": None}, "model_init makes a new model"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    usual = {"model": bert(), "args": arguments(tmp_path), "train_dataset": Texts(), "plan": PLAN}
    with pytest.raises(ValueError, match=words):
        PrivateTrainer(**{**usual, **options})


def test_logs_tell_epsilon_and_nothing_of_the_training_data(tmp_path: Path) -> None:
    ours = trainer(tmp_path, args=arguments(tmp_path, logging_steps=4), eval_dataset=Texts(8))
    result = ours.train()
    ours.evaluate()
    names = {name for row in ours.state.log_history for name in row}
    assert {"epsilon", "eval_loss"} <= names
    assert not {"loss", "train_loss", "total_flos"} & (names | result.metrics.keys())
    logged = {row["step"]: row["epsilon"] for row in ours.state.log_history if "epsilon" in row}
    assert logged == {k: pytest.approx(PLAN.epsilon(k)) for k in (4, 8)}
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["total_flos"] == 0


@pytest.mark.filterwarnings("ignore:the ledger .* has")
def test_a_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    with pytest.raises(ValueError, match=r"holds 8 steps of an earlier run: resume it"):
        trainer(tmp_path).train()
    both = trainer(tmp_path, ledger=PLAN.ledger(tmp_path / "ledger.jsonl"))
    both.train()
    assert len(both.oracle.ledger) == 2 * STEPS
    with pytest.raises(ValueError, match="all 8 steps of the plan are taken"):
        both.train()
    assert len(Ledger(1e-2, path=tmp_path / "ledger.jsonl")) == 2 * STEPS


def test_padding_to_the_longest_is_refused(tmp_path: Path) -> None:
    calls = iter(range(100))

    def collate(items: list[Any]) -> Any:
        batch = hf.default_data_collator(items)
        cut = T - next(calls) % 2
        return {k: t[:, :cut] if t.ndim > 1 else t for k, t in batch.items()}

    with pytest.raises(ValueError, match="pad every sample to one length"):
        trainer(tmp_path, data_collator=collate).train()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "the oracle splits a batch itself"),
        ({"fp16": True}, "float16 needs loss scaling"),
        ({"label_smoothing_factor": 0.1}, "smooth it there"),
        ({"include_num_input_tokens_seen": True}, "how many samples were drawn"),
        ({"train_sampling_strategy": "group_by_length"}, "the plan's Poisson samples"),
        ({"optim": "galore_adamw_layerwise"}, "steps inside the backward pass"),
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, args=arguments(tmp_path, **options))


def test_data_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n = 40 records but the data set has 39"):
        trainer(tmp_path, train_dataset=Texts(39)).train()
    with pytest.raises(ValueError, match="training needs a train_dataset"):
        trainer(tmp_path, train_dataset=None).train()
    args = arguments(tmp_path, label_names=["answers"])
    with pytest.raises(ValueError, match=r"none of the labels \['answers'\]"):
        trainer(tmp_path, args=args).train()


def test_records_that_are_repeated_or_left_out_are_refused(tmp_path: Path) -> None:
    class Chosen(PrivateTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SubsetRandomSampler(range(30))

    twice = torch.utils.data.ConcatDataset([half := Texts(N // 2), half])
    with pytest.raises(ValueError, match="rows 0 and 20 of the ConcatDataset are one record"):
        trainer(tmp_path, train_dataset=twice)
    with pytest.raises(ValueError, match="Chosen overrides _get_train_sampler"):
        Chosen(bert(), arguments(tmp_path), train_dataset=Texts(), plan=PLAN)


@VIOLATIONS
def test_what_the_plan_does_not_account_for_is_refused(
    tmp_path: Path, monkeypatch: Any, batches: Any, options: Any, words: str, taken: int
) -> None:
    draw_with(batches, monkeypatch)
    ours = trainer(tmp_path, plan=LONG, oracle_options={"seed": 0, **options()})
    with pytest.raises(PlanViolationError, match=words):
        ours.train()
    assert len(ours.oracle.ledger) == len(Ledger(1e-2, path=tmp_path / "ledger.jsonl")) == taken


def test_no_step_beyond_the_plan(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    ours.train()
    inputs = hf.default_data_collator([Texts()[i] for i in range(8)])
    with pytest.raises(PlanViolationError, match=f"all {STEPS} steps of the plan are taken"):
        ours.training_step(ours.model, inputs)
    assert len(ours.oracle.ledger) == STEPS


def test_losses_do_not_see_other_samples_padding() -> None:
    logits = torch.randn(2, 4, 5)
    output = hf.modeling_outputs.MaskedLMOutput(logits=logits)
    labels = torch.tensor([[1, 2, -100, -100], [3, 0, 4, 1]])
    expected = nn.functional.cross_entropy(logits[0, :2], labels[0, :2])
    torch.testing.assert_close(token_loss(output, labels)[0], expected)
    expected = nn.functional.cross_entropy(logits[0, :1], labels[0, 1:2])
    torch.testing.assert_close(causal_loss(output, labels)[0], expected)
    with pytest.raises(ValueError, match="per_sample_loss=causal_loss"):
        sequence_loss(output, labels)
    scores = hf.modeling_outputs.SequenceClassifierOutput(logits=torch.tensor([[1.0], [3.0]]))
    found = sequence_loss(scores, torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(found, torch.tensor([0.0, 4.0]))


class Unequal(Texts):
    def __getitem__(self, i: int) -> dict[str, Any]:
        item, length = super().__getitem__(i), int(self.lengths[i])
        return {k: v[:length] if isinstance(v, Tensor) else v for k, v in item.items()}


def test_unequal_lengths_are_refused_before_a_step_with_or_without_a_collator(
    tmp_path: Path,
) -> None:
    def longest(items: list[Any]) -> Any:
        most = max(len(item["input_ids"]) for item in items)
        padded = [
            {k: F.pad(v, (0, most - len(v))) if isinstance(v, Tensor) else v for k, v in x.items()}
            for x in items
        ]
        return hf.default_data_collator(padded)

    for options in ({}, {"data_collator": longest}):
        with pytest.raises(ValueError, match=r"in one record and .* pad every sample to one"):
            trainer(tmp_path, train_dataset=Unequal(), **options)
    assert not len(Ledger(1e-2, path=tmp_path / "ledger.jsonl"))


def test_mixed_precision_is_a_plain_loop_inside_autocast(tmp_path: Path) -> None:
    """The model keeps float32, and accelerate does not wrap its forward."""
    args = arguments(tmp_path, bf16=True)
    ours = trainer(tmp_path, args=args, oracle_options={"seed": 5})
    ours.train()
    assert args.bf16
    assert ours.accelerator.mixed_precision == "no"
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain_loop(bert(), BAM(0.02), 5)
    torch.testing.assert_close(weights(ours.model), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(expected, plain_loop(bert(), BAM(0.02), 5))
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}


def test_a_model_in_bfloat16_trains(tmp_path: Path) -> None:
    model = lora().bfloat16()
    before = weights(model).clone()
    made = trainer(tmp_path, model)
    made.train()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert weights(model).isfinite().all()
    assert not torch.equal(before, weights(model))
    assert made.oracle.unmoved() == []


def test_an_optimiser_of_other_parameters_is_noticed(tmp_path: Path) -> None:
    model = lora()
    stale = torch.optim.SGD(bert().parameters(), lr=0.1)  # made for another copy
    made = trainer(tmp_path, model, optimizers=(stale, None))
    with pytest.warns(UserWarning, match="no trained parameter has moved since the last step"):
        made.train()


def masked(items: list[Any]) -> Any:
    """Hide random tokens, drawn for the whole batch at once, as a masked model's collator does."""
    batch = hf.default_data_collator(items)
    hidden = torch.rand(batch["input_ids"].shape) < 0.3
    return {**batch, "input_ids": torch.where(hidden, 1, batch["input_ids"])}


def test_a_record_does_not_change_the_masks_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer seeds torch with a public number."""

    def ids(records: range) -> Tensor:
        draw_with(lambda self: iter([[(i, 100 + i) for i in records]]), monkeypatch)
        hf.set_seed(42)
        (batch,) = trainer(tmp_path, data_collator=masked).get_train_dataloader()
        hidden: Tensor = batch["input_ids"]
        return hidden

    together, without = ids(range(N)), ids(range(1, N))
    assert torch.equal(together[1:], without)
    assert (together == 1).any()
    assert not torch.equal(together[0] == 1, together[1] == 1)


def test_times_are_not_logged(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    ours.train()
    logged = {name for entry in ours.state.log_history for name in entry}
    assert "epsilon" in logged
    assert not {name for name in logged if "second" in name or "runtime" in name}
