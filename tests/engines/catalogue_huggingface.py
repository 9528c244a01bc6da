"""Hugging Face's models from small configurations, with and without padding masks; LoRA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers as hf
from catalogue import ROWS, Example, register
from torch import nn

from dpbam.interop.huggingface import causal_loss, sequence_loss, token_loss

T, WORDS = 6, 20
SMALL = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12,
}  # fmt: skip
TEXT = {**SMALL, "vocab_size": WORDS, "max_position_embeddings": 10, "pad_token_id": 0}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": WORDS, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 10,
        "bos_token_id": 1, "eos_token_id": 1}  # fmt: skip
Make = Callable[[], nn.Module]


#: their norms compute in float32 whatever the model's dtype, so that engines differ by its rounding
RMS_NORM = ("Llama", "Mistral", "Qwen2", "T5")
ROUNDED, EXACT = 1e-5, 1e-8


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=3))


def bert_quiet() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**TEXT, **QUIET, num_labels=3))


def bert_tokens() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**TEXT, **QUIET))


def roberta() -> nn.Module:
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT, **QUIET, num_labels=3))


def distilbert() -> nn.Module:
    config = hf.DistilBertConfig(
        vocab_size=WORDS, dim=8, n_layers=1, n_heads=2, hidden_dim=12, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, max_position_embeddings=10, num_labels=3,
    )  # fmt: skip
    return hf.DistilBertForSequenceClassification(config)


def electra() -> nn.Module:
    config = hf.ElectraConfig(**TEXT, **QUIET, embedding_size=8, num_labels=3)
    return hf.ElectraForSequenceClassification(config)


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=1))


def mistral() -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**TEXT, num_key_value_heads=1))


def qwen2() -> nn.Module:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT, num_key_value_heads=1))


def opt() -> nn.Module:
    config = hf.OPTConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=12,
        max_position_embeddings=10, word_embed_proj_dim=8, dropout=0.0, pad_token_id=0,
    )  # fmt: skip
    return hf.OPTForCausalLM(config).eval()  # in training it draws for layers to drop


class T5Classifier(nn.Module):
    """The encoder of T5 with a head on the mean over the tokens that are there."""

    def __init__(self) -> None:
        super().__init__()
        config = hf.T5Config(vocab_size=WORDS, d_model=8, d_kv=4, d_ff=12, num_layers=1,
                             num_heads=2, dropout_rate=0.0)  # fmt: skip
        self.encoder, self.head = hf.T5EncoderModel(config), nn.Linear(8, 3)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        return hf.modeling_outputs.SequenceClassifierOutput(logits=self.head(hidden.mean(1)))


def lora(make: Make, **options: Any) -> Make:
    def made() -> nn.Module:
        config = peft.LoraConfig(r=2, lora_alpha=4, **options)
        model = peft.get_peft_model(make(), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # B starts at zero, where A's gradient is zero too
                nn.init.normal_(parameter, std=0.3)
        return model

    return made


MODELS: dict[str, tuple[Make, Any]] = {
    "BERT": (bert_quiet, sequence_loss),
    "BERT with dropout": (bert, sequence_loss),
    "BERT, masked tokens": (bert_tokens, token_loss),
    "RoBERTa": (roberta, sequence_loss),
    "DistilBERT": (distilbert, sequence_loss),
    "Electra": (electra, sequence_loss),
    "GPT-2": (gpt2, causal_loss),
    "Llama": (llama, causal_loss),
    "Mistral": (mistral, causal_loss),
    "Qwen2": (qwen2, causal_loss),
    "OPT": (opt, causal_loss),
    "T5 encoder": (T5Classifier, sequence_loss),
    "BERT with LoRA": (lora(bert_quiet, task_type="SEQ_CLS"), sequence_loss),
    "GPT-2 with LoRA": (lora(gpt2, task_type="CAUSAL_LM", fan_in_fan_out=True), causal_loss),
    "Llama with LoRA": (lora(llama, task_type="CAUSAL_LM"), causal_loss),
}


def _text(name: str, make: Make, loss: Any, *, padded: bool) -> None:
    def made() -> Example:
        model = make()
        ends = torch.tensor([[6], [4], [5], [3]]) if padded else torch.full((ROWS, 1), T)
        mask = (torch.arange(T) < ends).long()
        ids = torch.randint(2, WORDS, (ROWS, T)) * mask
        inputs = {"input_ids": ids} | ({"attention_mask": mask} if padded else {})
        of_sequence = loss is sequence_loss
        labels = torch.arange(ROWS) % 3 if of_sequence else ids.masked_fill(mask == 0, -100)
        tolerance = ROUNDED if name.startswith(RMS_NORM) else EXACT
        return Example(model, inputs, labels, loss, tolerance=tolerance)

    made.__module__ = __name__
    register(name + (", padded" if padded else ""), made)


for _name, (_make, _loss) in MODELS.items():
    for _padded in (False, True):
        _text(_name, _make, _loss, padded=_padded)


def _vit() -> Example:
    config = hf.ViTConfig(**SMALL, **QUIET, image_size=8, patch_size=4, num_labels=3)
    model = hf.ViTForImageClassification(config)
    pixels = {"pixel_values": torch.randn(ROWS, 3, 8, 8)}
    return Example(model, pixels, torch.arange(ROWS) % 3, sequence_loss)


register("ViT", _vit)
