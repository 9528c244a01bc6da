"""The choice between Gram matrices and materialised gradients, and their joined form."""

from __future__ import annotations

import torch

from dpbam.engines.fused.bilinear import Costs
from dpbam.engines.fused.fold import reduce_to, split_axis
from dpbam.engines.fused.gradients import Joined, Materialised
from dpbam.engines.fused.layers.embedding import Embedding
from dpbam.engines.fused.layers.linear import Linear


def test_gram_matrices_are_chosen_for_few_positions_and_wide_layers() -> None:
    layer = Linear((512, 128))
    assert layer.prefers_gram(16, 1, "sum")
    assert not layer.prefers_gram(64, 1, "sum")


def test_an_ascent_step_or_a_second_pair_makes_gram_matrices_dearer() -> None:
    costs = Costs(positions=64, pixels=64, weights=(128, 512), channels=128, entry=50)
    assert costs.gram_is_cheaper(1, "sum")
    assert not costs.gram_is_cheaper(1, "ascent")
    assert not costs.gram_is_cheaper(2, "sum")
    assert costs.gram_is_cheaper(1, "derivative")


def test_a_gradient_far_larger_than_its_factors_is_never_materialised() -> None:
    costs = Costs(positions=1, pixels=1, weights=(1024, 1024), channels=1024, entry=0)
    assert costs.gram_is_cheaper(1, "ascent")


def test_joined_gradients_are_scaled_by_unit() -> None:
    parts = [Materialised("a", torch.randn(3, 2, 2)), Materialised("b", torch.randn(3, 5))]
    factors = torch.tensor([0.5, 0.0, 2.0])
    found = Joined.of(parts).scale_by(factors)
    for part in parts:
        expected = torch.stack([c * v for c, v in zip(factors, part.values, strict=True)])
        assert torch.equal(found[part.name], expected)
        assert torch.equal(part.scale_by(factors)[part.name], expected)


def test_an_axis_is_split_as_torch_does() -> None:
    x = torch.randn(4, 6, 2)
    for axis, sizes in ((0, (4, 1)), (0, (4, -1)), (0, (2, 2)), (1, (6, 1)), (1, (1, 6))):
        assert torch.equal(split_axis(x, axis, sizes), x.unflatten(axis, sizes))


def test_a_sum_over_axes_of_size_one_is_the_tensor() -> None:
    x = torch.randn(4, 1, 1, 5)
    assert torch.equal(reduce_to(x, (1, 5)), x.sum(1))
    assert torch.equal(reduce_to(x, (5,)), x.sum((1, 2)))


def test_an_embedding_of_a_small_table_and_long_rows_is_materialised() -> None:
    layer = Embedding((256, 64))
    assert layer.prefers_gram(64, 1, "sum")
    assert not layer.prefers_gram(512, 1, "sum")
