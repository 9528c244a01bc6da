"""Hugging Face models with padding masks under vmap, against one row at a time."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpbam.engines.attention_masks import explicit_masks
from dpbam.engines.draws import KeyedDraws
from dpbam.privacy.randomness import derive

masking_utils = pytest.importorskip("transformers.masking_utils")
AttentionMaskInterface = masking_utils.AttentionMaskInterface
# vmap runs torch's fused attention row by row
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

T = 6
LENGTHS = torch.tensor([6, 3, 1, 5])[:, None]
IDS = torch.randint(2, 20, (4, T), generator=torch.Generator().manual_seed(0))
PADDING = {
    "right": (torch.arange(T) < LENGTHS).long(),
    "left": (torch.arange(T) >= T - LENGTHS).long(),
}
SMALL = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SMALL, "intermediate_size": 12, "max_position_embeddings": 16}
GROUPED = {**TEXT, "num_key_value_heads": 1}
TOKENS = {"bos_token_id": 1, "eos_token_id": 1}
CONFIGS: dict[str, Any] = {
    "BERT": lambda: hf.BertConfig(**TEXT),
    "RoBERTa": lambda: hf.RobertaConfig(**TEXT, pad_token_id=1),
    "DistilBERT": lambda: hf.DistilBertConfig(
        vocab_size=20, dim=8, n_layers=2, n_heads=2, hidden_dim=12, max_position_embeddings=16
    ),
    "Electra": lambda: hf.ElectraConfig(**TEXT, embedding_size=4),
    "GPT-2": lambda: hf.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=16, **TOKENS
    ),
    "Llama": lambda: hf.LlamaConfig(**GROUPED),
    "Mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=3),
    "Mistral, wide window": lambda: hf.MistralConfig(**GROUPED, sliding_window=30),
    "Qwen2": lambda: hf.Qwen2Config(**GROUPED),
    "OPT": lambda: hf.OPTConfig(
        **SMALL, ffn_dim=12, word_embed_proj_dim=8, max_position_embeddings=16
    ),
    "T5": lambda: hf.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2),
}


def make(name: str, implementation: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    eager = name == "T5" and not hf.T5EncoderModel._supports_sdpa  # in older transformers
    config._attn_implementation = "eager" if eager else implementation
    model = hf.T5EncoderModel(config) if name == "T5" else hf.AutoModel.from_config(config)
    return model.double().eval()


def hidden(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return model(input_ids=ids[None], attention_mask=mask[None]).last_hidden_state[0]


def by_vmap(model: nn.Module, mask: Tensor) -> Tensor:
    with torch.no_grad():
        return vmap(lambda ids, mask: hidden(model, ids, mask))(IDS, mask)


def by_rows(model: nn.Module, mask: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.stack([hidden(model, ids, row) for ids, row in zip(IDS, mask, strict=True)])


@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("name", CONFIGS)
def test_padded_rows_under_vmap_equal_a_loop(name: str, side: str) -> None:
    model, mask = make(name), PADDING[side]
    config = copy.deepcopy(model.config.to_dict())
    implementation = model.config._attn_implementation
    with explicit_masks(model):
        got = by_vmap(model, mask)
    torch.testing.assert_close(got, by_rows(model, mask), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(got[1], by_rows(model, torch.ones_like(mask))[1])  # masks matter
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("name", ["BERT", "Llama", "T5"])
def test_eager_attention_under_vmap_equals_a_loop(name: str) -> None:
    model, mask = make(name, "eager"), PADDING["right"]
    with explicit_masks(model):
        torch.testing.assert_close(
            by_vmap(model, mask), by_rows(model, mask), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "T5"])
def test_gradients_equal_a_loop(name: str) -> None:
    """By autograd inside vmap, and outside: there T5's learned bias needs the math kernel."""
    model, mask = make(name), PADDING["right"]
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], ids: Tensor, mask: Tensor) -> Tensor:
        inputs = {"input_ids": ids[None], "attention_mask": mask[None]}
        out = functional_call(model, parameters, (), inputs).last_hidden_state
        return (out.square() * mask[:, None]).sum() * ids[0]

    with explicit_masks(model), sdpa_kernel(SDPBackend.MATH):
        inside = vmap(grad(loss), (None, 0, 0))(parameters, IDS, mask)
        losses = vmap(loss, (None, 0, 0))(parameters, IDS, mask)
    outside = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    rows = [loss(parameters, ids, row) for ids, row in zip(IDS, mask, strict=True)]
    for n, row in enumerate(rows):
        wanted = torch.autograd.grad(row, list(parameters.values()), allow_unused=True)
        for name_, value in zip(parameters, wanted, strict=True):
            expected = torch.zeros_like(parameters[name_]) if value is None else value
            torch.testing.assert_close(inside[name_][n], expected, rtol=1e-9, atol=1e-9)
    for name_, value in zip(parameters, outside, strict=True):
        if value is not None:
            torch.testing.assert_close(value, inside[name_].sum(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "OPT", "T5"])
def test_keyed_dropout_under_vmap_equals_a_loop(name: str) -> None:
    model, mask, keys = make(name).train(), PADDING["right"], derive(torch.arange(4), 0)

    def one(ids: Tensor, mask: Tensor, key: Tensor) -> Tensor:
        with KeyedDraws(key):
            return hidden(model, ids, mask)

    with explicit_masks(model), torch.no_grad():
        got = vmap(one, randomness="error")(IDS, mask, keys)
        rows = [one(*row) for row in zip(IDS, mask, keys, strict=True)]
        other = one(IDS[0], mask[0], keys[1])
    torch.testing.assert_close(got, torch.stack(rows), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(other, rows[0])


def test_vmap_cannot_run_a_padding_mask_without_explicit_masks() -> None:
    """And afterwards transformers is as it was, also after an error."""
    model, mask = make("BERT"), PADDING["right"]
    before = dict(AttentionMaskInterface._global_mapping)
    with pytest.raises(RuntimeError, match="size"), explicit_masks(model):
        by_vmap(model, mask[:, 1:])
    assert AttentionMaskInterface._global_mapping == before
    with pytest.raises(RuntimeError, match="data-dependent"):
        by_vmap(model, mask)


def test_masks_are_skipped_as_before_without_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of ones is still left out where no vmap batches it."""
    seen = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs["attn_mask"])
        return attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model, ones = make("BERT"), torch.ones(4, T, dtype=torch.int64)
    with explicit_masks(model):
        model(input_ids=IDS, attention_mask=ones)
        assert seen == [None, None]
        by_vmap(model, ones)
    assert all(mask is not None for mask in seen[2:])


def test_custom_model_with_a_pretrained_part_is_supported() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make("BERT")

        def forward(self, **inputs: Tensor) -> Any:
            return self.inner(**inputs)

    model, mask = Wrapped(), PADDING["right"]
    with explicit_masks(model):
        torch.testing.assert_close(by_vmap(model, mask), by_rows(model, mask))


def test_explicit_masks_do_nothing_for_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(AttentionMaskInterface._global_mapping)
    with explicit_masks(nn.Linear(2, 2)):
        assert AttentionMaskInterface._global_mapping == before
    model = make("BERT")  # before: making it may import its class, and with it what is removed here
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    with explicit_masks(model):
        assert AttentionMaskInterface._global_mapping == before
