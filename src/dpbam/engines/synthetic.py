"""Rows without a record: what a model is tried on before it sees one.

A model may fix a Python number at its first use, such as a scale that it takes from its first
input. From a record, the number would move every later step by many times C, without noise; so the
first use is on these rows, whose values are the same for every data set of the same form.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpbam.engines.base import Engine, PhysicalBatch, StatefulModelError
from dpbam.methods import Method
from dpbam.params import map_rows

_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly
#: Whole numbers in inputs and in targets: 0 is within the range of every index; 1 is a length, or a
#: mask that leaves something, where the model needs one.
_WHOLE = ((0, 0), (1, 0), (1, 1))


def synthetic_rows(inputs: Any, targets: Any) -> list[tuple[Any, Any]]:
    """Return rows, one at a time, of the same form as those of the batch, the best guess first.

    Floats are numbers between 0 and 1, which are also probabilities; whole numbers and booleans are
    all 0, or all 1. Nothing but shapes and types is read.

    Example:
        >>> synthetic_rows(torch.randn(5, 3), torch.tensor([2, 0, 1, 1, 2]))[0]
        (tensor([[0.6180, 0.2361, 0.8541]]), tensor([0]))
    """
    choices = _WHOLE if _has_whole((inputs, targets)) else _WHOLE[:1]
    return [
        (
            map_rows(partial(_row, integer=first), inputs),
            map_rows(partial(_row, integer=last), targets),
        )
        for first, last in choices
    ]


def synthetic_units(batch: PhysicalBatch) -> list[PhysicalBatch]:
    """Return units of one such row each, of the same form as those of ``batch``."""
    return [
        PhysicalBatch(inputs, targets, 1, torch.zeros_like(batch.row_keys()[:1]))
        for inputs, targets in synthetic_rows(batch.inputs, batch.targets)
    ]


def use_first(engine: Engine, batch: PhysicalBatch, method: Method, lam: float = 0.0) -> None:
    """Run the engine's model on a unit without a record, before it sees the first of ``batch``.

    For code that gives a model records without an oracle, whose first batch does the same. A model
    that fails on each of these units runs on records only.

    Raises:
        StatefulModelError: if a forward pass leaves state that the next could read.
    """
    for unit in synthetic_units(batch):
        try:
            engine.directions(unit, method, lam).norms()
        except (StatefulModelError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception:  # the next may suit the model
            continue
        return


def _has_whole(tree: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return any(not (t.is_floating_point() or t.is_complex()) for t in tensors)


def _rows(tree: Any, integer: int) -> Any:
    return map_rows(partial(_row, integer=integer), tree)


def _row(t: Tensor, integer: int) -> Tensor:
    """Return one row [1, ...] of the type and shape of those of ``t`` [N, ...]."""
    shape = (1, *t.shape[1:])
    if not (t.is_floating_point() or t.is_complex()):
        return torch.full(shape, integer, dtype=t.dtype, device=t.device)
    numbers = torch.arange(1, t.shape[1:].numel() + 1, dtype=torch.float64)
    return ((numbers * _GOLDEN) % 1).reshape(shape).to(device=t.device, dtype=t.dtype)
