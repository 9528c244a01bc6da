"""Tiny public encoders: made from a configuration and saved in a folder, as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from dpbam.nn.encoders import _quiet

TRANSFORMER: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8,
    "vocab_size": 10, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
WINDOWS: dict[str, Any] = {
    "image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
    "window_size": 2,
}  # fmt: skip
CONVOLUTIONS: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
# as they are on the hub: DINOv2 and DINOv3 without a classifier, CLIP and SigLIP with both towers
MODELS: dict[str, Any] = {
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**TRANSFORMER, num_labels=3)),
    "dinov2": lambda: hf.Dinov2Model(hf.Dinov2Config(**TRANSFORMER, mlp_ratio=2)),
    "dinov2_with_registers": lambda: hf.Dinov2WithRegistersModel(
        hf.Dinov2WithRegistersConfig(**TRANSFORMER, mlp_ratio=2)
    ),
    "resnet": lambda: hf.ResNetForImageClassification(
        hf.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
            downsample_in_first_stage=False,
        )
    ),
    "convnext": lambda: hf.ConvNextForImageClassification(
        hf.ConvNextConfig(**CONVOLUTIONS, patch_size=2)
    ),
    "convnextv2": lambda: hf.ConvNextV2ForImageClassification(
        hf.ConvNextV2Config(**CONVOLUTIONS, patch_size=2)
    ),
    "swin": lambda: hf.SwinForImageClassification(hf.SwinConfig(**WINDOWS)),
    "efficientnet": lambda: hf.EfficientNetForImageClassification(
        hf.EfficientNetConfig(
            image_size=8, width_coefficient=0.1, depth_coefficient=0.1, kernel_sizes=[3, 3],
            in_channels=[32, 16], out_channels=[16, 24], strides=[1, 2], num_block_repeats=[1, 1],
            expand_ratios=[1, 6], depthwise_padding=[], hidden_dim=128,
        )
    ),
    "dinov3_vit": lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**TRANSFORMER)),
    "dinov3_convnext": lambda: hf.DINOv3ConvNextModel(
        hf.DINOv3ConvNextConfig(hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1])
    ),
    "clip": lambda: hf.CLIPModel(hf.CLIPConfig(vision_config=TRANSFORMER, text_config=TEXT)),
    "clip_vision_model": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**TRANSFORMER)),
    "siglip": lambda: hf.SiglipModel(
        hf.SiglipConfig(vision_config=TRANSFORMER, text_config=TEXT)
    ),
    "siglip_vision_model": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**TRANSFORMER)),
}  # fmt: skip
PREPROCESSING: dict[str, Any] = {
    "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "resample": 2,
    "size": {"height": 8, "width": 8}, "do_rescale": True, "rescale_factor": 1 / 255,
}  # fmt: skip


def save_encoder(folder: Path, family: str = "vit", **preprocessing: Any) -> Path:
    """Save an encoder of a family; batch norms get running statistics that are not the default.

    Their means are around zero: else every feature of a ResNet were zero after its ReLU.
    """
    torch.manual_seed(0)
    model = MODELS[family]()
    for name, buffer in model.named_buffers():
        if "running" in name:
            centre = 0.0 if "mean" in name else 1.0
            buffer.copy_(torch.rand_like(buffer) - 0.5 + centre)
    with _quiet():
        model.save_pretrained(folder)
    if family == "dinov3_convnext":  # it halves the sides five times
        preprocessing = {"size": {"height": 32, "width": 32}, **preprocessing}
    text = json.dumps({**PREPROCESSING, **preprocessing})
    (folder / "preprocessor_config.json").write_text(text)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Change values of a JSON file; None removes one."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
