"""Per-unit directions one unit at a time by ordinary autograd: nothing shared with the engines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpbam.engines.base import PhysicalBatch
from dpbam.engines.draws import KeyedDraws


def one_at_a_time(
    model: nn.Module, loss: Any, batch: PhysicalBatch, penalty: float
) -> list[dict[str, Tensor]]:
    """The gradient of L_u + penalty |g_u| for every unit, by double backward on that unit alone."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    out = []
    for u in range(batch.units):
        value = torch.zeros(())
        r = batch.rows_per_unit
        for i in range(u * r, (u + 1) * r):
            inputs, targets = tree_map(lambda t: t[i : i + 1], (batch.inputs, batch.targets))  # noqa: B023
            with (
                KeyedDraws(batch.row_keys()[i]),
                torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            ):
                if isinstance(inputs, tuple):
                    output = model(*inputs)
                elif isinstance(inputs, dict):
                    output = model(**inputs)
                else:
                    output = model(inputs)
                value = value + (loss(output, targets) / r).sum()
        wanted = list(named.values())
        g = torch.autograd.grad(value, wanted, create_graph=penalty > 0, allow_unused=True)
        if penalty > 0:
            square = sum((t**2).sum() for t in g if t is not None)
            if float(square.detach()) > 0:
                objective = value + penalty * square.sqrt()
                g = torch.autograd.grad(objective, wanted, allow_unused=True)
        out.append(
            {
                n: (torch.zeros_like(p) if t is None else t).detach()
                for (n, p), t in zip(named.items(), g, strict=True)
            }
        )
    return out


def make_batch(inputs: Any, targets: Any, rows: int, per_unit: int = 1) -> PhysicalBatch:
    """Rows in units of ``per_unit`` rows each."""
    assert rows % per_unit == 0
    return PhysicalBatch(inputs, targets, rows // per_unit, torch.arange(rows) + 7, per_unit)
