"""Trained parameters that no optimiser moves are reported."""

from __future__ import annotations

import pytest
import torch

from support import cross_entropy, private_plan, samples, sized_oracle, smooth_net


def test_parameters_that_the_optimiser_does_not_have_are_named_once() -> None:
    model = smooth_net()
    oracle = sized_oracle(model, cross_entropy, private_plan(), seed=0)
    optimizer = torch.optim.Adam(model[0].parameters(), lr=0.1)
    oracle.backward(*samples(9))
    optimizer.step()
    assert oracle.unmoved() == ["2.weight", "2.bias"]
    with pytest.warns(UserWarning, match=r"2 of 4 trained parameters did not move .* 2\.weight"):
        oracle.backward(*samples(10))
    optimizer.step()
    oracle.backward(*samples(9))  # no second warning: tests fail on any


def test_nothing_is_reported_when_all_move() -> None:
    model = smooth_net()
    oracle = sized_oracle(model, cross_entropy, private_plan(), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in (9, 10):
        oracle.backward(*samples(size))
        optimizer.step()
    assert oracle.unmoved() == []


def test_a_write_through_data_counts_as_a_move() -> None:
    """Some optimisers write to ``.data``, which torch does not count as a change."""
    model = smooth_net()
    oracle = sized_oracle(model, cross_entropy, private_plan(), seed=0)
    oracle.backward(*samples(9))
    for parameter in model[0].parameters():
        parameter.data.add_(parameter.grad)
    assert oracle.unmoved() == ["2.weight", "2.bias"]
