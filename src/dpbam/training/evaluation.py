"""A model's outputs on a whole data set, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from dpbam.data import DataSet, to_float


@torch.no_grad()
def predict_logits(model: nn.Module, dataset: DataSet, *, rows: int = 512) -> tuple[Tensor, Tensor]:
    """Logits [N, K] float32 and labels [N] of every record, in order, on the CPU.

    The model runs in eval mode on the device of its parameters, and keeps the mode that it had.

    Example:
        >>> from dpbam.data import load
        >>> from dpbam.nn import build_model
        >>> model = build_model("mlp", in_channels=1, image_size=8, num_classes=10)
        >>> logits, labels = predict_logits(model, load("digits", split="test"))
        >>> logits.shape, labels.shape
        (torch.Size([359, 10]), torch.Size([359]))
    """
    device = next(model.parameters()).device
    logits, labels = [], []
    with evaluating(model):
        for start in range(0, len(dataset), rows):
            images, targets = dataset.batch(np.arange(start, min(start + rows, len(dataset))))
            logits.append(model(to_float(images.to(device))).float().cpu())
            labels.append(targets)
    return torch.cat(logits), torch.cat(labels)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module has the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
