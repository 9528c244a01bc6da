import pytest
import torch
from torch import nn

from dpbam.training.averaging import WeightAverage, dense, exponential


def trajectory(model, average, steps=6):
    """Weights after each step of a random walk, seen by the average."""
    seen = []
    for step in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        average.update(step)
        seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return seen


def test_dense_is_the_plain_mean_from_its_start_on():
    model = nn.Linear(3, 2)
    average = WeightAverage(model, dense(start=2))
    seen = trajectory(model, average)
    with average.applied():
        for name, p in model.named_parameters():
            mean = torch.stack([weights[name] for weights in seen[2:]]).mean(0)
            assert torch.allclose(p, mean, atol=1e-6)


def test_exponential_is_its_recursion():
    model = nn.Linear(3, 2)
    start = model.weight.detach().clone()
    average = WeightAverage(model, exponential(0.5))
    expected = start
    for t, weights in enumerate(trajectory(model, average)):
        beta = min(0.5, (1 + t) / (10 + t))
        expected = beta * expected + (1 - beta) * weights["weight"]
    assert torch.allclose(average.state_dict()["weight"], expected, atol=1e-6)


def test_the_models_own_weights_come_back_bit_for_bit_even_after_an_error():
    model = nn.Linear(3, 2)
    average = WeightAverage(model, exponential(0.9))
    trajectory(model, average)
    before = model.weight.detach().clone()
    with pytest.raises(KeyError), average.applied():
        raise KeyError
    assert torch.equal(model.weight, before)


def test_frozen_parameters_are_left_alone():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert list(WeightAverage(model, dense(0)).state_dict()) == ["weight"]


def test_half_precision_weights_are_averaged_in_float32():
    model = nn.Linear(3, 2).half()
    average = WeightAverage(model, exponential(0.999))
    assert average.state_dict()["weight"].dtype == torch.float32


def test_a_loaded_state_continues_the_average():
    model = nn.Linear(3, 2)
    average, other = (WeightAverage(model, dense(0)) for _ in range(2))
    trajectory(model, average)
    other.load_state_dict(average.state_dict())
    average.update(6)
    other.update(6)
    assert torch.equal(average.state_dict()["weight"], other.state_dict()["weight"])
