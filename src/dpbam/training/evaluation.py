"""A model's outputs on a whole data set, and its metrics."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from dpbam.data import DataSet
from dpbam.data.dataset import model_input
from dpbam.params import device_of, evaluating
from dpbam.training.tasks import Task


def spare(model: nn.Module) -> nn.Module | None:
    """Return a copy of the modules with the model's own parameters; None if it cannot be made.

    A pass outside of the oracle runs on it: what eval mode leaves in attributes and buffers goes
    with the copy, so that no step reads it.
    """
    try:
        return copy.deepcopy(model, {id(p): p for p in model.parameters()})
    except Exception:  # any attribute may refuse, in any way
        return None


@torch.no_grad()
def predict_logits(model: nn.Module, dataset: DataSet, *, rows: int = 512) -> tuple[Tensor, Tensor]:
    """Return logits [N, K] float32 and labels [N] of all records, in order, on the CPU.

    The model runs in eval mode on the device of its parameters, and keeps the mode that it had.
    """
    device = device_of(model)
    logits, labels = [], []
    with evaluating(model):
        for start in range(0, len(dataset), rows):
            images, targets = dataset.batch(np.arange(start, min(start + rows, len(dataset))))
            logits.append(model(model_input(images.to(device))).float().cpu())
            labels.append(targets)
    return torch.cat(logits), torch.cat(labels)


@torch.no_grad()
def summarise(
    model: nn.Module, dataset: DataSet, task: Task, *, rows: int = 256
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a task's metrics need of all records (see :class:`Task`), and the losses [N].

    Outputs of a segmentation, of which a whole set might not fit into memory, are counted batch by
    batch.
    """
    device = device_of(model)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with evaluating(model):
        for start in range(0, len(dataset), rows):
            images, targets = dataset.batch(np.arange(start, min(start + rows, len(dataset))))
            output = model(model_input(images.to(device))).float()
            losses = task(output, targets.to(device)).cpu()
            parts.append((*task.summary(output.cpu(), targets), losses))
    kept, targets, losses = (torch.cat(part) for part in zip(*parts, strict=True))
    return kept, targets, losses
