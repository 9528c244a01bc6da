"""A model's outputs on a whole data set, and its metrics."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from dpbam.data import DataSet
from dpbam.data.dataset import model_input
from dpbam.params import device_of, evaluating
from dpbam.tasks.base import Task


def spare(model: nn.Module) -> nn.Module | None:
    """Return a copy of the modules with the model's own parameters; None if it cannot be made.

    A pass outside of the oracle runs on it: what eval mode leaves in attributes and buffers goes
    with the copy, so that no step reads it.
    """
    try:
        return copy.deepcopy(model, {id(p): p for p in model.parameters()})
    except Exception:  # any attribute may refuse, in any way
        return None


def predict_logits(model: nn.Module, dataset: DataSet, *, rows: int = 512) -> tuple[Tensor, Tensor]:
    """Return logits [N, K] float32 and labels [N] of all records, in order, on the CPU.

    The model runs in eval mode on the device of its parameters, and keeps the mode that it had.
    """
    parts = [(output.cpu(), labels) for output, labels in _outputs(model, dataset, rows)]
    logits, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    return logits, labels


def summarise(
    model: nn.Module, dataset: DataSet, task: Task, *, rows: int = 256
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a task's metrics need of all records (see :class:`Task`), and the losses [N].

    Outputs of a segmentation, of which a whole set might not fit into memory, are counted batch by
    batch.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for output, targets in _outputs(model, dataset, rows):
        losses = task(output, targets.to(output.device)).cpu()
        parts.append((*task.summary(output.cpu(), targets), losses))
    summaries, targets, losses = (torch.cat(column) for column in zip(*parts, strict=True))
    return summaries, targets, losses


@torch.no_grad()
def _outputs(model: nn.Module, dataset: DataSet, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    device = device_of(model)
    with evaluating(model):
        for start in range(0, len(dataset), rows):
            images, targets = dataset.batch(np.arange(start, min(start + rows, len(dataset))))
            yield model(model_input(images.to(device))).float(), targets
