"""Every batching rule of the torch that is installed agrees with a loop over rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

SAMPLE = [
    "nn.functional.linear", "nn.functional.conv2d", "nn.functional.layer_norm",
    "nn.functional.group_norm", "nn.functional.embedding", "nn.functional.cross_entropy",
    "nn.functional.scaled_dot_product_attention", "nn.functional.max_pool2d", "softmax", "einsum",
    "matmul", "cumsum", "index_select", "gather", "where", "cat", "sort",
    "nn.functional.pad constant",
]  # fmt: skip


@pytest.fixture(scope="module")
def sweep() -> Any:
    import operators  # takes seconds: torch's tests come with it

    return operators


def test_common_operators_agree_with_a_loop(sweep: Any) -> None:
    known = sweep.operators()
    assert {name: sweep.outcome(known[name]) for name in SAMPLE} == dict.fromkeys(
        SAMPLE, sweep.AGREES
    )


@pytest.mark.slow
def test_every_operator_agrees_with_a_loop_or_is_refused(sweep: Any) -> None:
    found = {name: sweep.outcome(op) for name, op in sweep.operators().items()}
    wrong = {n: o for n, o in found.items() if o not in (sweep.AGREES, sweep.REFUSED)}
    assert set(wrong) <= sweep.UNINITIALISED, wrong
    assert sum(o == sweep.AGREES for o in found.values()) > 500


class Mixes(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return x + x.mean(in_dims[0], keepdim=True), in_dims[0]


def test_batching_rule_that_mixes_rows_is_detected(sweep: Any) -> None:
    sample = SimpleNamespace(input=torch.ones(2), args=(), kwargs={})
    planted = SimpleNamespace(
        op=Mixes.apply,
        sample_inputs=lambda device, dtype: [sample],
        supported_dtypes=lambda device: {torch.float64},
    )
    assert "result 0" in sweep.outcome(planted)
