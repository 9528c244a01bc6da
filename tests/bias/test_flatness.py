"""Flatness against dense truth: the Hessian formed, the gradients one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpbam.bias import measure_flatness
from support import ENGINES, cross_entropy, each_gradient, flat, samples, smooth_net


def dense_hessian(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    names = [n for n, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def loss(vector: torch.Tensor) -> torch.Tensor:
        parts = torch.split(vector, [shape.numel() for shape in shapes])
        state = {n: t.view(s) for n, t, s in zip(names, parts, shapes, strict=True)}
        return cross_entropy(torch.func.functional_call(model, state, (x,)), y).mean()

    return torch.autograd.functional.hessian(loss, flat(dict(model.named_parameters())))


@pytest.mark.parametrize("size", [100, 7])
@pytest.mark.parametrize("seed", range(3))
def test_the_largest_eigenvalue_is_the_hessians(seed: int, size: int) -> None:
    model, (x, y) = smooth_net(seed=seed), samples(20, seed=seed)
    expected = float(torch.linalg.eigvalsh(dense_hessian(model, x, y))[-1])
    found = measure_flatness(model, cross_entropy, x, y, lam=0.1, physical_batch_size=size)
    assert found.non_private_top_eigenvalue == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_objectives_and_their_bound(engine: str) -> None:
    model, (x, y), lam = smooth_net(), samples(20), 0.3
    g = torch.stack([flat(one) for one in each_gradient(model, x, y)])
    loss = float(cross_entropy(model(x), y).detach().mean())
    found = measure_flatness(
        model, cross_entropy, x, y, lam=lam, eigenvalue=False, engine=engine, physical_batch_size=7
    )
    assert found.non_private_l_z == pytest.approx(loss + lam * float(g.mean(0).norm()))
    assert found.non_private_l_bao == pytest.approx(loss + lam * float(g.norm(dim=1).mean()))
    assert found.non_private_slack == pytest.approx(found.non_private_l_bao - found.non_private_l_z)
    assert found.non_private_slack > 0
    assert found.non_private_top_eigenvalue is None


def test_dropout_is_off_and_the_mode_comes_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = samples(10)
    found = [measure_flatness(model, cross_entropy, x, y, lam=0.1) for _ in range(2)]
    assert found[0] == found[1]
    assert model.training


def test_no_samples_are_refused() -> None:
    x, y = samples(0)
    with pytest.raises(ValueError, match="samples must be at least 1"):
        measure_flatness(smooth_net(), cross_entropy, x, y, lam=0.1)
