"""Private heads on features: what they compute without noise, and that they learn with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dpbam.compute import Compute
from dpbam.errors import ArgumentError
from dpbam.heads import (
    Descent,
    bounded_targets,
    class_means,
    class_shares,
    class_targets,
    classifier,
    closed_form_plan,
    fit_by_descent,
    regressor,
    release_moments,
)
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import PrivacyPlan

COMPUTE = Compute(physical_batch_size=512)


def clusters(n: int, classes: int = 3, d: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Records of norm 1 around one centre per class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    noise = torch.randn(n, d, generator=generator) * 0.35
    return nn.functional.normalize(torch.eye(d)[labels] + noise), labels


def quiet(n: int) -> PrivacyPlan:
    return PrivacyPlan.non_private(n=n, batch_size=n, steps=1, delta=1e-3)


def accuracy(head, x: Tensor, y: Tensor) -> float:
    return (head.predict(x) == y).double().mean().item()


def test_moments_without_noise_are_those_of_the_data() -> None:
    x, y = clusters(40)
    targets = class_targets(y, 3)
    moments = release_moments(x, targets, quiet(40), compute=COMPUTE)
    z = nn.functional.pad(x, (0, 1), value=1.0).double() / math.sqrt(2)
    torch.testing.assert_close(moments.gram, z.T @ z / 40, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments.cross, targets.double().T @ z / 40, rtol=1e-5, atol=1e-6)


def test_class_targets_have_norm_one_and_sum_to_zero() -> None:
    for classes in (2, 3, 10):
        targets = class_targets(torch.arange(classes), classes)
        torch.testing.assert_close(targets.norm(dim=1), torch.ones(classes))
        assert targets.sum(1).abs().max() < 1e-5


def test_shares_are_read_from_the_same_release() -> None:
    x, y = clusters(90)
    y = torch.where(y == 2, 0, y)
    moments = release_moments(x, class_targets(y, 3), quiet(90), compute=COMPUTE)
    shares = class_shares(moments)
    assert shares[:2].tolist() == pytest.approx(
        (torch.bincount(y, minlength=3)[:2] / 90 / (1 + 0.2 / 3)).tolist(), rel=1e-3
    )
    assert shares[2] > 0  # a class that was not seen is not impossible


@pytest.mark.parametrize("form", ["ridge", "means", "descent"])
def test_heads_learn_under_privacy(form: str) -> None:
    x, y = clusters(600)
    test_x, test_y = clusters(300, seed=1)
    ledger = Ledger(1e-4)
    if form == "descent":
        plan = PrivacyPlan.calibrate(
            epsilon=2, delta=1e-4, n=600, batch_size=600, steps=10, clip_norm=0.5
        )
        head = fit_by_descent(
            x, y, 3, plan, Descent(lr=8.0), seed=0, ledger=ledger, compute=COMPUTE
        )
    else:
        plan = closed_form_plan(epsilon=2, delta=1e-4, n=600)
        moments = release_moments(
            x, class_targets(y, 3), plan, seed=0, ledger=ledger, compute=COMPUTE
        )
        head = classifier(moments) if form == "ridge" else class_means(moments)
    assert accuracy(head, test_x, test_y) > 0.85
    assert len(ledger) == plan.steps
    assert ledger.epsilon() <= 2


def test_a_balanced_decision_finds_the_rare_class() -> None:
    x, y = clusters(1500, classes=2)
    rare = (y == 0) | (torch.arange(1500) % 20 == 0)
    x, y = x[rare], y[rare]
    test_x, test_y = clusters(400, classes=2, seed=1)
    plan = closed_form_plan(epsilon=3, delta=1e-4, n=len(x))
    moments = release_moments(x, class_targets(y, 2), plan, seed=0, compute=COMPUTE)
    recalls = [
        (classifier(moments, balance=b).predict(test_x[test_y == 1]) == 1).double().mean()
        for b in (0.0, 1.0)
    ]
    assert recalls[1] > recalls[0] + 0.05
    assert recalls[1] > 0.8


def test_a_regression_recovers_a_linear_value() -> None:
    x, _ = clusters(2000)
    values = 50 + 30 * x[:, 0]
    plan = closed_form_plan(epsilon=4, delta=1e-4, n=2000)
    targets = bounded_targets(values, 0, 100)
    moments = release_moments(x, targets, plan, seed=0, compute=COMPUTE)
    scores = regressor(moments, 0, 100).scores(x)[:, 0]
    assert (scores - values).square().mean().sqrt() < 0.4 * values.std()


def test_values_outside_their_bounds_are_moved_inside() -> None:
    values = torch.tensor([-5.0, math.nan, math.inf, 3.0])
    assert bounded_targets(values, 0, 4).flatten().tolist() == [-1.0, 0.0, 1.0, 0.5]
    with pytest.raises(ArgumentError, match="ascending"):
        bounded_targets(values, 4, 4)


def test_rows_that_do_not_fit_are_refused() -> None:
    x, y = clusters(20)
    with pytest.raises(ArgumentError, match="one target per row"):
        release_moments(x, class_targets(y[:10], 3), quiet(20))


def test_descent_by_patients_charges_the_patient() -> None:
    x, y = clusters(60)
    ledger = Ledger(1e-3)
    plan = PrivacyPlan(
        n=20, batch_size=20, steps=2, noise_multiplier=1.0, delta=1e-3, unit="patient",
        max_records=3,
    )  # fmt: skip
    fit_by_descent(
        x, y, 3, plan, Descent(lr=1.0), units=torch.arange(60) // 3, ledger=ledger, seed=0,
        compute=COMPUTE,
    )  # fmt: skip
    assert {e["unit"] for e in ledger.entries()} == {"patient"}
    assert len(ledger) == 2
