"""Every batching rule of the torch that is installed agrees with a loop over rows."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import operators
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F


def called(function: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator with one input, as torch's database has them."""
    sample = SimpleNamespace(input=first, args=args, kwargs=kwargs)
    return SimpleNamespace(
        op=function,
        sample_inputs=lambda device, dtype: [sample],
        supported_dtypes=lambda device: {torch.float64},
    )


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def common() -> dict[str, Any]:
    """Operators that most models have: the sweep below looks at all, which takes long."""
    index = torch.tensor([2, 0, 1])
    return {
        "linear": called(F.linear, drawn(4, 3), drawn(5, 3), drawn(5)),
        "conv2d": called(F.conv2d, drawn(2, 3, 5, 5), drawn(4, 3, 3, 3), drawn(4), padding=1),
        "layer_norm": called(F.layer_norm, drawn(2, 3, 4), (4,), drawn(4), drawn(4)),
        "group_norm": called(F.group_norm, drawn(2, 4, 3), 2, drawn(4), drawn(4)),
        "embedding": called(F.embedding, index, drawn(5, 4)),
        "cross_entropy": called(F.cross_entropy, drawn(3, 4), index, reduction="none"),
        "attention": called(
            F.scaled_dot_product_attention, drawn(2, 4, 3), drawn(2, 5, 3), drawn(2, 5, 3)
        ),
        "max_pool2d": called(F.max_pool2d, drawn(2, 3, 4, 4), 2),
        "softmax": called(torch.softmax, drawn(3, 4), -1),
        "einsum": called(lambda a, b: torch.einsum("ij,kj->ik", a, b), drawn(3, 4), drawn(2, 4)),
        "matmul": called(torch.matmul, drawn(2, 3, 4), drawn(2, 4, 5)),
        "cumsum": called(torch.cumsum, drawn(3, 4), 1),
        "index_select": called(torch.index_select, drawn(3, 4), 0, index),
        "gather": called(torch.gather, drawn(3, 4), 1, index.repeat(3, 1)),
        "where": called(lambda a, b: torch.where(a > 0, a, b), drawn(3, 4), drawn(3, 4)),
        "cat": called(lambda a, b: torch.cat([a, b], 1), drawn(3, 4), drawn(3, 2)),
        "sort": called(torch.sort, drawn(3, 4), -1),
        "pad": called(F.pad, drawn(2, 3), (1, 2), value=0.5),
    }


def test_common_operators_agree_with_a_loop() -> None:
    found = {name: operators.outcome(op) for name, op in common().items()}
    assert found == dict.fromkeys(found, operators.AGREES)


@pytest.mark.slow
def test_every_operator_agrees_with_a_loop_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # torch's list imports setuptools, which adds
    found = {name: operators.outcome(op) for name, op in operators.operators().items()}
    wrong = {n: o for n, o in found.items() if o not in (operators.AGREES, operators.REFUSED)}
    assert set(wrong) <= operators.UNINITIALISED, wrong
    assert sum(o == operators.AGREES for o in found.values()) > 500


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


def test_batching_rule_that_mixes_rows_is_detected() -> None:
    assert "result 0" in operators.outcome(called(Mixes.apply, torch.ones(2)))
