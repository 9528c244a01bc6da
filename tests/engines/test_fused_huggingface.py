"""Hugging Face's models from small configurations: the fused engine against one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from agreement import METHODS, errors
from reference import make_batch, one_at_a_time
from torch import nn

from dpbam.engines.fused import FusedEngine
from dpbam.interop.huggingface import causal_loss, sequence_loss, token_loss
from dpbam.methods import BAM
from dpbam.oracle import shifted
from dpbam.params import unit_vector

N, T, VOCABULARY = 4, 6, 20
SMALL = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
}  # fmt: skip
TEXT = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 10, "pad_token_id": 0}


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=3))


def bert_tokens() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**TEXT))


def roberta() -> nn.Module:
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT, num_labels=3))


def distilbert() -> nn.Module:
    config = hf.DistilBertConfig(vocab_size=VOCABULARY, dim=8, n_layers=2, n_heads=2, hidden_dim=12,
                                 max_position_embeddings=10, num_labels=3)  # fmt: skip
    return hf.DistilBertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=2, n_head=2, n_positions=10,
                           bos_token_id=1, eos_token_id=1)  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=1))


def vit() -> nn.Module:
    config = hf.ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=3)
    return hf.ViTForImageClassification(config)


def lora(make: Callable[[], nn.Module], **options: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, **options)
        model = peft.get_peft_model(make(), config)
        with torch.no_grad():  # B starts at zero, where A's gradient is zero too
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.3)
        return model

    return made


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "bert": (bert, sequence_loss),
    "bert, masked": (bert_tokens, token_loss),
    "roberta": (roberta, sequence_loss),
    "distilbert": (distilbert, sequence_loss),
    "gpt2": (gpt2, causal_loss),
    "llama": (llama, causal_loss),
    "vit": (vit, sequence_loss),
    "bert, lora": (lora(bert, task_type="SEQ_CLS"), sequence_loss),
    "gpt2, lora": (lora(gpt2, task_type="CAUSAL_LM", fan_in_fan_out=True), causal_loss),
    "llama, lora": (lora(llama, task_type="CAUSAL_LM"), causal_loss),
}


def case(name: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(2)
    make, loss = MODELS[name]
    model = make().double().train()
    if name == "vit":
        pixels = torch.randn(N, 3, 8, 8, dtype=torch.float64)
        batch = make_batch({"pixel_values": pixels}, torch.arange(N) % 3, N)
        return model, loss, batch
    mask = (torch.arange(T) < torch.tensor([[6], [4], [6], [3]])).long()
    ids = torch.randint(2, VOCABULARY, (N, T)) * mask
    labels = torch.arange(N) % 3 if loss is sequence_loss else ids.masked_fill(mask == 0, -100)
    inputs = {"input_ids": ids, "attention_mask": mask}
    return model, loss, make_batch(inputs, labels, N)


@pytest.mark.parametrize("name", MODELS)
def test_directions_agree(name: str) -> None:
    model, loss, batch = case(name)
    engine = FusedEngine(model, loss)
    for method in METHODS:
        found = errors(engine, model, loss, batch, method)
        assert max(found.values()) < 1e-9, (method, found)


@pytest.mark.parametrize("name", ["bert", "gpt2, lora"])
def test_bams_ascent_step_agrees(name: str) -> None:
    """g_i at theta + lambda g_i / |g_i|, sample by sample."""
    model, loss, batch = case(name)
    theta = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in theta.items()}
    for i, g in enumerate(one_at_a_time(model, loss, batch, 0.0)):
        with shifted(theta, {n: 0.2 * u for n, u in unit_vector(g).items()}):
            there = one_at_a_time(model, loss, batch, 0.0)[i]
        total = {n: total[n] + there[n] for n in total}
    fused = FusedEngine(model, loss).directions(batch, BAM(0.2), 0.2)
    found = fused.weighted_sum(torch.ones(1, N, dtype=torch.float64))
    torch.testing.assert_close(found, total, rtol=1e-9, atol=1e-11)
