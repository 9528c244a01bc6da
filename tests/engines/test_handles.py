"""The handle of every engine: norms, weighted sums and clipping groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import make_batch
from torch import Tensor, nn

from dpbam.engines import FunctionalEngine, FusedEngine, LoopEngine
from dpbam.methods import BAM, DPSGD, Method

CROSS = nn.CrossEntropyLoss(reduction="none")
EXACT = BAM(0.3, exact=True)
engines = pytest.mark.parametrize("engine", [FusedEngine, FunctionalEngine, LoopEngine])
methods = pytest.mark.parametrize(
    "method", [DPSGD(), EXACT, BAM(0.3)], ids=["dp-sgd", "exact", "ascent"]
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Mish(), nn.Flatten(), nn.Linear(64, 3)
    )


def batch(rows: int = 6, units: int = 1) -> Any:
    return make_batch(torch.randn(rows, 2, 4, 4), torch.arange(rows) % 3, rows, units)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@engines
@methods
def test_non_finite_unit_has_a_non_finite_norm_and_factor_zero_removes_it(
    engine: Any, method: Method, value: float
) -> None:
    model, data = net(), batch()
    data.inputs[2] = value
    lam = 0.0 if isinstance(method, DPSGD) else 0.3
    made = engine(model, CROSS)
    handle = made.directions(data, method, lam)
    bad = ~handle.norms()[0].isfinite()
    assert bad.tolist() == [False, False, True, False, False, False]
    assert not all(t.isfinite().all() for t in handle.weighted_sum(torch.ones(1, 6)).values())
    factors = torch.where(bad, 0.0, 1.0)[None]
    total = handle.weighted_sum(factors)
    keep = [0, 1, 3, 4, 5]
    rest = made.directions(
        make_batch(data.inputs[keep], data.targets[keep], 5), method, lam
    ).weighted_sum(torch.ones(1, 5))
    torch.testing.assert_close(total, rest, rtol=1e-4, atol=1e-5)


@engines
def test_weighted_sum_is_zero_if_all_factors_are(engine: Any) -> None:
    handle = engine(net(), CROSS).directions(batch(), EXACT, 0.3)
    assert all((t == 0).all() for t in handle.weighted_sum(torch.zeros(1, 6)).values())


class Scaled(nn.Module):
    """A parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.tensor(0.7)), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.scale * x.flatten(1)).tanh())


@engines
@methods
def test_plain_handle_sums_a_scalar_parameter(engine: Any, method: Method) -> None:
    """In exact BAM its norms are known before small gradients are joined."""
    torch.manual_seed(0)
    made, data, ones = engine(Scaled(), CROSS), batch(), torch.ones(1, 6)
    lam = 0.0 if isinstance(method, DPSGD) else 0.3
    found = made.directions(data, method, lam, plain=True).plain.weighted_sum(ones)
    wanted = made.directions(data, DPSGD(), 0.0).weighted_sum(ones)
    assert found["scale"].shape == ()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@engines
@methods
def test_a_unit_with_zero_gradient_gives_zeros_not_nan(engine: Any, method: Method) -> None:
    model = net()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return CROSS(output, target) * (target != 2)

    lam = 0.0 if isinstance(method, DPSGD) else 0.3
    handle = engine(model, loss).directions(batch(), method, lam)
    norms = handle.norms()[0]
    assert norms.isfinite().all()
    assert (norms == 0).tolist() == [False, False, True, False, False, True]
    assert all(t.isfinite().all() for t in handle.weighted_sum(torch.ones(1, 6)).values())


@engines
@methods
def test_norms_and_factors_are_per_clipping_group(engine: Any, method: Method) -> None:
    model, data = net(), batch(6, 2)
    names = [n for n, _ in model.named_parameters()]
    groups = {n: i % 3 for i, n in enumerate(names)}
    lam = 0.0 if isinstance(method, DPSGD) else 0.3
    flat = engine(model, CROSS).directions(data, method, lam)
    grouped = engine(model, CROSS, groups).directions(data, method, lam)
    assert grouped.norms().shape == (3, 3)
    torch.testing.assert_close(grouped.norms().square().sum(0), flat.norms()[0].square())
    only = torch.zeros(3, 3)
    only[1] = 1.0
    total = grouped.weighted_sum(only)
    whole = flat.weighted_sum(torch.ones(1, 3))
    for name in names:
        expected = whole[name] if groups[name] == 1 else torch.zeros_like(whole[name])
        torch.testing.assert_close(total[name], expected)
