"""Arithmetic on parameter-shaped trees and nested batches."""

from __future__ import annotations

import pytest
import torch

from dpbam import params

TREE = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[2.0], [4.0]])}


def test_norm_and_inner_are_those_of_one_long_vector() -> None:
    assert float(params.norm(TREE)) == 5
    other = {"a": torch.tensor([3.0, 0.0]), "b": torch.ones(2, 1)}
    assert float(params.inner(TREE, other)) == 9


def test_norms_of_half_precision_neither_underflow_nor_overflow() -> None:
    small = {"w": torch.full((10_000,), 1e-5, dtype=torch.float16)}
    large = {"w": torch.full((10_000,), 1e3, dtype=torch.float16)}
    assert float(params.norm(small)) == pytest.approx(1e-3, rel=0.01)
    assert float(params.norm(large)) == pytest.approx(1e5, rel=0.01)
    assert params.norm(small).dtype == torch.float32
    assert params.norm({"w": torch.ones(2, dtype=torch.float64)}).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_unit_vector_has_norm_one_even_of_tiny_vectors(dtype: torch.dtype) -> None:
    tree = {"w": torch.full((3, 4), 1e-6, dtype=dtype)}
    plain = params.unit_vector({"w": tree["w"][0]})
    mapped = torch.func.vmap(params.unit_vector)(tree)
    assert float(plain["w"].double().norm()) == pytest.approx(1, rel=0.01)
    assert torch.equal(mapped["w"][0], plain["w"])
    assert plain["w"].dtype == dtype


def test_unit_vector_of_zero_is_zero() -> None:
    assert float(params.norm(params.unit_vector({"w": torch.zeros(3)}))) == 0


def test_add_scales_the_second() -> None:
    assert torch.equal(params.add(TREE, TREE, 0.5)["a"], torch.tensor([1.5, 3.0]))


def test_rows_and_selection_of_nested_batches() -> None:
    batch = ({"x": torch.arange(4)}, torch.arange(8).reshape(4, 2))
    assert params.rows(batch) == 4
    picked = params.select_rows(batch, torch.tensor([2, 0]))
    assert picked[0]["x"].tolist() == [2, 0]
    assert picked[1].tolist() == [[4, 5], [0, 1]]


@pytest.mark.parametrize("batch", [(), {"x": 3}, torch.tensor(1.0), ["text"]])
def test_what_is_no_batch_is_refused(batch: object) -> None:
    with pytest.raises(TypeError, match="a batch must be a tensor, or a tuple or dict"):
        params.rows(batch)


@pytest.mark.parametrize("size", [0, 100, 1100], ids=["empty", "small", "of large pages"])
def test_new_memory_is_an_ordinary_tensor(size: int) -> None:
    memory = params.new_memory((size, 1000), torch.float32, torch.device("cpu"))
    assert memory.shape == (size, 1000)
    assert memory.dtype == torch.float32
    assert memory.is_contiguous()
    assert not memory.requires_grad
    left, right = torch.randn(7, size), torch.randn(7, 1000)
    assert torch.equal(torch.mm(left.t(), right, out=memory), left.t() @ right)
