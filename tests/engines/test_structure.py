"""Which models count as the same where memory is measured once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dpbam import BAM, DPSGD, Compute, PrivateGradientOracle
from dpbam import compute as compute_module
from dpbam.engines.structure import describe
from support import cross_entropy, private_plan, samples


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    return model


#: pairs of models that print alike, or nearly so, and whose steps differ
DIFFERENT = {
    "tied weights": (tied, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))),
    "a shared layer": (
        lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
    ),
    "frozen weights": (frozen, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))),
    "float64": (lambda: nn.Linear(4, 3).double(), lambda: nn.Linear(4, 3)),
    "eval mode": (lambda: nn.Dropout(0.1).eval(), lambda: nn.Dropout(0.1)),
    "an activation that is not printed": (
        lambda: nn.TransformerEncoderLayer(8, 2, 8, activation=torch.relu),
        lambda: nn.TransformerEncoderLayer(8, 2, 8, activation=torch.tanh),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_models_whose_steps_differ_have_different_descriptions(name: str) -> None:
    one, other = (describe(make(), cross_entropy, DPSGD(), []) for make in DIFFERENT[name])
    assert one is not None
    assert one != other
    assert one == describe(DIFFERENT[name][0](), cross_entropy, DPSGD(), [])


class OfTheUser(nn.Linear):
    pass


def hooked() -> nn.Module:
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda *args: None)
    return model


def replaced() -> nn.Module:
    model = nn.Linear(4, 3)
    model.forward = lambda x: x  # type: ignore[method-assign]
    return model


def noted() -> nn.Module:
    model = nn.Linear(4, 3)
    model.notes = object()  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("make", [lambda: OfTheUser(4, 3), hooked, replaced, noted])
def test_code_of_the_users_own_has_no_description(make: Any) -> None:
    assert describe(nn.Linear(4, 3), cross_entropy, DPSGD(), []) is not None
    assert describe(make(), cross_entropy, DPSGD(), []) is None


def test_losses_and_methods_of_the_users_own_have_no_description() -> None:
    class Mine(DPSGD):
        pass

    model = nn.Linear(4, 3)
    assert describe(model, lambda output, targets: output.sum(1), DPSGD(), []) is None
    assert describe(model, cross_entropy, Mine(), []) is None
    assert describe(model, cross_entropy, BAM(0.1), []) != describe(
        model, cross_entropy, BAM(0.1, exact=True), []
    )


def measured(monkeypatch: pytest.MonkeyPatch, *models: nn.Module, **limits: Any) -> int:
    """How often memory is measured for new oracles of these models."""
    calls, real = [], compute_module.fit_rows
    monkeypatch.setattr(compute_module, "_MEASURED", {})
    monkeypatch.setattr(
        compute_module, "fit_rows", lambda *args, **more: calls.append(1) or real(*args, **more)
    )
    for model in models:
        for limit in limits.get("limits", [2**31]):
            oracle = PrivateGradientOracle(
                model, cross_entropy, private_plan(), compute=Compute(memory_limit=limit)
            )
            oracle.fit(samples(2)[0].float(), samples(2)[1])
    return len(calls)


def test_memory_is_measured_once_for_the_same_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, nn.Linear(4, 3), nn.Linear(4, 3)) == 1


def test_memory_is_measured_anew_for_other_limits_and_the_users_own_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert measured(monkeypatch, nn.Linear(4, 3), limits=[2**31, 2**20]) == 2
    assert measured(monkeypatch, OfTheUser(4, 3), OfTheUser(4, 3)) == 2
