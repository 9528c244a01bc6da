"""Appendix D on vectors whose decomposition is known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpbam.bias import Reading, decompose, flat

finite = st.floats(-10, 10, allow_nan=False)
vectors = st.lists(st.tuples(finite, finite, finite), min_size=2, max_size=8)


def wide(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def clip(g: Tensor, bound: float) -> Tensor:
    return g / max(1.0, float(g.norm()) / bound)


def test_figure_1_by_hand() -> None:
    clipped, reference = wide([0.5, 0.5]), wide([2.0, 0.5])
    reading = decompose(clipped, reference, clipped, variance=0.0)
    a = (0.5 * 2 + 0.5 * 0.5) / (4 + 0.25)
    assert reading.a == pytest.approx(a)
    assert reading.bias == pytest.approx(1.5)
    assert reading.relative_bias == pytest.approx(1.5 / math.sqrt(4.25))
    assert reading.c_norm == pytest.approx(math.hypot(0.5 - 2 * a, 0.5 - 0.5 * a))
    assert reading.cosine == pytest.approx(1.25 / math.sqrt(0.5 * 4.25))


@given(vectors, st.floats(0.1, 5))
def test_shares_add_up_and_c_is_orthogonal(rows: list[tuple[float, ...]], bound: float) -> None:
    g = wide([list(row) for row in rows])
    reference = g.sum(0) / len(g)
    clipped = torch.stack([clip(row, bound) for row in g]).sum(0) / len(g)
    reading = decompose(clipped, reference, clipped, variance=1.0)
    if reading.reference_norm < 1e-3 or reading.bias < 1e-3:
        return
    eta = g @ reference / reference.square().sum()
    factors = wide([1 / max(1.0, float(row.norm()) / bound) for row in g])
    assert reading.a == pytest.approx(float((eta * factors).sum()) / len(g), rel=1e-9, abs=1e-9)
    assert reading.magnitude_share + reading.direction_share == pytest.approx(1)
    assert reading.noise_share == pytest.approx(1 / (1 + reading.bias**2))


def test_a_wrong_a_shows_in_the_orthogonality() -> None:
    """The negative control: with M_i upside down, as printed, c is not orthogonal."""
    g, bound = wide([[3.0, 1.0], [0.2, 0.4], [-1.0, 2.0]]), 1.0
    reference, norms = g.mean(0), g.norm(dim=1)
    clipped = torch.stack([clip(row, bound) for row in g]).mean(0)
    eta = g @ reference / reference.square().sum()

    def reading(m: Tensor) -> Reading:
        a = float((eta / m.clamp(min=1)).mean())
        return decompose(clipped, reference, clipped, variance=0.0, a=a)

    right, printed = reading(norms / bound), reading(bound / norms)
    assert abs(right.orthogonality) < 1e-12
    assert right.magnitude_share + right.direction_share == pytest.approx(1)
    assert abs(printed.orthogonality) > 0.1
    assert abs(printed.magnitude_share + printed.direction_share - 1) > 0.1


def test_noise_enters_the_private_values_alone() -> None:
    clipped, reference = wide([1.0, 0.0, 0.0]), wide([2.0, 0.0, 0.0])
    private = clipped + wide([0.5, 2.0, 0.0])
    reading = decompose(clipped, reference, private, variance=4.25)
    assert (reading.a, reading.c_norm, reading.cosine) == (0.5, 0.0, 1.0)
    assert reading.private_a == pytest.approx(0.75)
    assert reading.private_c_norm == pytest.approx(2.0)
    assert reading.private_cosine == pytest.approx(1.5 / math.hypot(1.5, 2))


def test_nothing_to_compare_with_is_nan_and_no_error() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    reading = decompose(zero, zero, zero, variance=0.0)
    assert reading.bias == 0
    assert math.isnan(reading.cosine)
    assert math.isnan(reading.relative_bias)


def test_flat_is_float64_in_the_order_of_the_parameters() -> None:
    tree = {"w": torch.ones(2, 2, dtype=torch.float16), "b": torch.full((1,), 3.0)}
    assert torch.equal(flat(tree, 0.5), wide([0.5, 0.5, 0.5, 0.5, 1.5]))
