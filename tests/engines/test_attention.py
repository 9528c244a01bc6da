"""Attention of long sequences: exact BAM by some queries at a time agrees with a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import errors
from reference import make_batch
from torch import Tensor, nn

from dpbam.engines import FusedEngine, PhysicalBatch
from dpbam.engines.fused.layers import attention
from dpbam.engines.memory import LiveBytes
from dpbam.methods import BAM

ROWS, LENGTH, SOURCES, HEADS = 3, 7, 5, 4
MASK = torch.rand(LENGTH, SOURCES, generator=torch.Generator().manual_seed(1)) > 0.3
MASK[2] = False  # a query that has no source
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (HEADS, {}),
    "causal": (HEADS, {"is_causal": True}),
    "scaled": (HEADS, {"scale": 0.3}),
    "boolean mask": (HEADS, {"attn_mask": MASK}),
    "additive mask": (HEADS, {"attn_mask": torch.randn(HEADS, LENGTH, SOURCES).double()}),
    "one mask for all queries": (HEADS, {"attn_mask": torch.randn(1, SOURCES).double()}),
    "grouped queries": (2, {"enable_gqa": True}),
    "grouped queries, causal": (2, {"enable_gqa": True, "is_causal": True}),
}


class Attention(nn.Module):
    """Queries of one sequence, keys and values of its first positions."""

    def __init__(self, sources: int, heads: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.sources, self.heads, self.options = sources, heads, options
        self.q, self.k, self.v = (nn.Linear(3, 2 * n) for n in (HEADS, heads, heads))
        self.head = nn.Linear(2 * HEADS, 3)

    def forward(self, x: Tensor) -> Tensor:
        short = x[:, : self.sources]
        q, k, v = (
            f(t).unflatten(-1, (n, 2)).transpose(1, 2)
            for f, t, n in ((self.q, x, HEADS), (self.k, short, self.heads),
                            (self.v, short, self.heads))
        )  # fmt: skip
        mixed = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.head(torch.tanh(mixed).transpose(1, 2).flatten(2).mean(1))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, reduction="none")


def batch_of(x: Tensor) -> PhysicalBatch:
    return make_batch(x, torch.arange(len(x)) % 3, len(x))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("queries", [1, 3, LENGTH])
def test_some_queries_at_a_time_agree(
    options: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_ENTRIES", 0)
    monkeypatch.setattr(attention, "_QUERIES", queries)
    monkeypatch.setattr(attention, "_is_long", lambda *operands: True)
    torch.manual_seed(0)
    model = Attention(SOURCES, *OPTIONS[options]).double()
    batch = batch_of(torch.randn(ROWS, LENGTH, 3).double())
    found = errors(FusedEngine(model, loss), model, loss, batch, "bam-exact")
    assert max(found.values()) < 1e-10


@pytest.mark.parametrize("queries", [16, 4096])
@pytest.mark.slow
def test_memory_of_exact_BAM_is_linear_in_the_length_by_parts_alone(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_ENTRIES", 2**12)
    monkeypatch.setattr(attention, "_QUERIES", queries)
    torch.manual_seed(0)
    peaks = []
    for length in (256, 512, 1024):
        model = Attention(length, HEADS, {"is_causal": True})
        engine, batch = FusedEngine(model, loss), batch_of(torch.randn(1, length, 3))
        with LiveBytes() as live:
            engine.directions(batch, BAM(0.1, exact=True), 0.1).norms()
        peaks.append(live.peak)
    growth = (peaks[2] - peaks[1]) / (peaks[1] - peaks[0])
    assert growth < 2.5 if queries == 16 else growth > 3.5  # twice; four times with all at once
