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
        for i in (batch.unit == u).nonzero()[:, 0].tolist():
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
                value = value + (loss(output, targets) * batch.weights[i]).sum()
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


def make_batch(
    inputs: Any, targets: Any, rows: int, per_unit: int | list[int] = 1, *, dtype: Any = None
) -> PhysicalBatch:
    """Rows in units: ``per_unit`` rows each, or a list of counts (ragged)."""
    counts = per_unit if isinstance(per_unit, list) else [per_unit] * (rows // per_unit)
    assert sum(counts) == rows
    unit = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    weights = torch.cat([torch.full((c,), 1.0 / c) for c in counts])
    if dtype is not None:
        weights = weights.to(dtype)
    return PhysicalBatch(inputs, targets, unit, len(counts), weights, torch.arange(rows) + 7)
