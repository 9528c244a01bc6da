"""Filters against scipy, and DiSK against its formulas by ordinary autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.signal import lfilter
from torch import Tensor

from dpbam import BAM, DPSAT, DPSGD
from dpbam.catalogue import FILTERS
from dpbam.contenders.disk import DiSK, KalmanStep
from dpbam.errors import ArgumentError
from dpbam.filters import Exponential, Filter, LowPass
from dpbam.methods import Method
from support import (
    clip_and_sum,
    cross_entropy,
    each_gradient,
    flat,
    gradients,
    quiet_plan,
    samples,
    sized_oracle,
    smooth_net,
)

SIGNAL = np.random.default_rng(0).normal(size=(12, 3))


def outputs(made: Filter, signal: np.ndarray) -> np.ndarray:
    return np.stack([made.apply({"w": torch.tensor(g)})["w"].numpy() for g in signal])


@pytest.mark.parametrize(
    ("b", "a"), [((0.05, 0.05), (-0.9,)), ((0.2, 0.1, 0.1), (-0.8, 0.2)), ((0.25,) * 4, ())]
)
def test_low_pass_is_scipys_filter_over_its_response_to_a_constant(b, a) -> None:
    expected = lfilter(b, (1.0, *a), SIGNAL, axis=0)
    ones = lfilter(b, (1.0, *a), np.ones(len(SIGNAL)))
    np.testing.assert_allclose(outputs(LowPass(b, a), SIGNAL), expected / ones[:, None], rtol=1e-6)


def test_exponential_is_adams_first_moment() -> None:
    m, beta = np.zeros(3), 0.8
    found = outputs(Exponential(beta), SIGNAL)
    for t, g in enumerate(SIGNAL, 1):
        m = beta * m + (1 - beta) * g
        np.testing.assert_allclose(found[t - 1], m / (1 - beta**t), rtol=1e-6)


@pytest.mark.parametrize("make", [*map(FILTERS.load, FILTERS), lambda: KalmanStep(0.7)])
def test_a_filter_resumes_from_its_state(make) -> None:
    whole = outputs(make(), SIGNAL)
    first, second = make(), make()
    outputs(first, SIGNAL[:5])
    second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(outputs(second, SIGNAL[5:]), whole[5:])


def test_a_filter_that_changes_a_constant_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"sum\(b\) must be 1 \+ sum\(a\)"):
        LowPass(b=(0.5,), a=())


def test_the_filter_gets_the_released_gradient_and_its_state_is_in_the_oracles() -> None:
    model, batch = smooth_net(), samples(6)
    plain = sized_oracle(smooth_net(), cross_entropy, quiet_plan(1.0))
    plain.backward(*batch)
    oracle = sized_oracle(model, cross_entropy, quiet_plan(1.0), filter=Exponential(0.5))
    oracle.backward(*batch)
    torch.testing.assert_close(flat(gradients(model)), flat(gradients(plain.model)))
    assert any(name.startswith("filter/m/0/") for name in oracle.state_dict()["parts"])


def disk_by_autograd(steps: int, kappa: float, gamma: float, lr: float) -> Tensor:
    """Theta after some steps: the formulas of DiSK, one sample after the other."""
    model, (x, y) = smooth_net(), samples(6)
    before, m = None, None
    for _ in range(steps):
        here = each_gradient(model, x, y)
        theta = {n: p.detach().clone() for n, p in model.named_parameters()}
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.add_(gamma * (theta[n] - before[n]) if before else 0)
        ahead = each_gradient(model, x, y)
        a = (1 - kappa) / (kappa * gamma)
        both = [{n: a * g[n] + (1 - a) * h[n] for n in g} for g, h in zip(ahead, here, strict=True)]
        released = clip_and_sum(both, 0.5) / 10
        m = released if m is None else (1 - kappa) * m + kappa * released
        moved = flat(theta) - lr * m
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(moved, list(model.parameters()))
        before = theta
    return flat(dict(model.named_parameters()))


@pytest.mark.parametrize("gamma", [None, 0.5])
def test_disk_is_its_formula(gamma: float | None) -> None:
    model, batch, engine = smooth_net(), samples(6), "functional" if gamma else "fused"
    disk = DiSK(0.7, gamma)
    oracle = sized_oracle(model, cross_entropy, quiet_plan(0.5), disk, engine=engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    for _ in range(4):
        oracle.backward(*batch)
        optimizer.step()
    expected = disk_by_autograd(4, 0.7, gamma or 0.3 / 0.7, 0.8)
    torch.testing.assert_close(flat(dict(model.named_parameters())), expected)
    assert {n.split("/")[0] for n in oracle.state_dict()["parts"]} == {"filter", "history"}


@pytest.mark.parametrize("inner", [BAM(0.1), BAM(0.1, exact=True)])
def test_disk_looks_ahead_with_bam_inside_on_every_engine(inner: Method) -> None:
    found = []
    for engine in ("functional", "fused"):
        model, disk = smooth_net(), DiSK(inner=inner)
        oracle = sized_oracle(model, cross_entropy, quiet_plan(0.5), disk, engine=engine)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
        for _ in range(2):
            oracle.backward(*samples(6))
            optimizer.step()
        found.append(flat(gradients(model)))
    torch.testing.assert_close(*found)


def test_disk_refuses_what_shifts_theta_itself_and_a_second_filter() -> None:
    with pytest.raises(ArgumentError, match="dp-sat cannot be inside"):
        DiSK(inner=DPSAT(0.1))
    with pytest.raises(ArgumentError, match="disk has a filter of its own"):
        sized_oracle(smooth_net(), cross_entropy, quiet_plan(1.0), DiSK(), filter=Exponential())


def test_per_sample_gradients_are_those_of_autograd() -> None:
    model, (x, y) = smooth_net(), samples(5)
    oracle = sized_oracle(model, cross_entropy, quiet_plan(0.5), DPSGD(), physical_batch_size=2)
    found = oracle.per_sample(x, y)
    for i, g in enumerate(each_gradient(model, x, y)):
        mine = {n: t[i] for n, t in found.non_private_gradients.items()}
        torch.testing.assert_close(flat(mine), flat(g))
        assert float(found.non_private_norms[i]) == pytest.approx(float(flat(g).norm()))
    assert oracle.step == 0
    assert len(oracle.ledger) == 0


def test_per_sample_gradients_come_in_the_order_of_the_units() -> None:
    """Also where units of fewer rows are computed first."""
    model, (x, y) = smooth_net(), samples(6)
    units = torch.tensor([9, 9, 4, 9, 2, 2])  # in order: 2 of two rows, 4 of one, 9 of three
    plan = quiet_plan(0.5, unit="patient", max_records=3)
    oracle = sized_oracle(model, cross_entropy, plan, DPSGD(), physical_batch_size=3)
    found = oracle.per_sample(x, y, units).non_private_norms
    each = [flat(g) for g in each_gradient(model, x, y)]
    means = [torch.stack([each[i] for i in rows]).mean(0) for rows in ([4, 5], [2], [0, 1, 3])]
    torch.testing.assert_close(found, torch.stack([m.norm() for m in means]))
