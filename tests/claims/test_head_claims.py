"""The closed-form head: one unit moves what is released by at most the bound, and it is charged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpbam.auto import GRAM_WEIGHT
from dpbam.compute import Compute
from dpbam.errors import ArgumentError
from dpbam.heads import class_targets, closed_form, closed_form_plan, release_moments
from dpbam.heads.closed_form import BOUND
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.plan import PrivacyPlan
from dpbam.privacy.randomness import Randomness
from planting import Mistake, catches

D, K = 3, 2
COMPUTE = Compute(engine="functional", physical_batch_size=16)


def plan_of(n: int, sigma: float = 1.0, **further: Any) -> PrivacyPlan:
    return PrivacyPlan(
        n=n, batch_size=n, steps=1, noise_multiplier=sigma, delta=1e-5, clip_norm=BOUND, **further
    )


class Spy(GaussianNoise):
    """Keeps the sums that get noise, and the noise's deviation."""

    def __init__(self) -> None:
        super().__init__(Randomness(0))
        self.sums: list[Tensor] = []
        self.stds: list[float] = []

    def add(self, sums: Any, std: float, step: int, **options: Any) -> Any:
        self.sums += [s.clone() for s in sums.values()]
        self.stds.append(std)
        return super().add(sums, std, step, **options)


def summed(features: Tensor, labels: Tensor, units: Tensor | None = None) -> Tensor:
    """Return the sum over the units, as the noise mechanism gets it."""
    spy = Spy()
    grouped = {} if units is None else {"unit": "patient", "max_records": 8}
    n = len(features) if units is None else len(units.unique())
    targets = closed_form.class_targets(labels, K)
    release_moments(
        features, targets, plan_of(n, **grouped), units=units, noise=spy, compute=COMPUTE
    )
    (released,) = spy.sums
    return released


def records(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = nn.functional.normalize(torch.randn(count, D, generator=generator))
    return x, torch.randint(0, K, (count,), generator=generator)


def check_one_unit_moves_the_moments_by_at_most_the_bound() -> None:
    """Whatever a further unit's records are, the sum moves by at most C; it may reach it."""
    x, y = records(12)
    before = summed(x, y)
    largest = 0.0
    hostile = [
        [1.0, 0, 0],
        [1e3, -1e3, 5.0],
        [1e-9, 0, 0],
        [0.0, 0, 0],
        [math.nan, 0, 0],
        [1e30] * 3,
    ]
    for row in hostile:
        for label in range(K):
            after = summed(
                torch.cat([x, torch.tensor([row])]), torch.cat([y, torch.tensor([label])])
            )
            largest = max(largest, (after - before).norm().item())
    assert largest <= BOUND * (1 + 1e-5)
    assert largest >= BOUND * (1 - 1e-5)  # no noise is wasted


def check_one_patient_moves_the_moments_by_at_most_the_bound() -> None:
    """The same for a unit with several records: their mean is clipped, jointly."""
    x, y = records(10)
    owners = torch.arange(10) // 2
    more, labels = 7 * records(6, seed=1)[0], records(6, seed=1)[1]
    before = summed(x, y, owners)
    after = summed(
        torch.cat([x, more]), torch.cat([y, labels]), torch.cat([owners, owners[:6] * 0 + 9])
    )
    assert (after - before).norm() <= BOUND * (1 + 1e-5)


def check_the_release_is_charged_as_it_is_noised() -> None:
    """One entry at q = 1, with the sigma whose sigma C the noise has; before anything returns."""
    x, y = records(12)
    spy, ledger = Spy(), Ledger(1e-5)
    release_moments(
        x, class_targets(y, K), plan_of(12, sigma=2.0), noise=spy, ledger=ledger, compute=COMPUTE
    )
    assert len(ledger) == 1
    (entry,) = ledger.entries()
    assert (entry["noise_multiplier"], entry["sampling_rate"]) == (2.0, 1.0)
    assert spy.stds == [2.0 * BOUND]


def check_an_attack_comes_near_the_claim_and_not_beyond(trials: int = 40) -> None:
    """The best test for one record's presence has the claim's mu = 1 / sigma, in both directions.

    mu is estimated from ``trials`` releases with the record and as many without it; the standard
    error is that of the difference of means, and of the deviation.
    """
    sigma = 0.25
    x, y = records(12)
    canary, label = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([1])
    z = torch.cat([canary[0], torch.ones(1)]).double() / math.sqrt(2)
    target = class_targets(label, K)[0].double()
    scores: list[np.ndarray] = []
    for inputs, labels in ((x, y), (torch.cat([x, canary]), torch.cat([y, label]))):
        values = []
        for _ in range(trials):
            moments = release_moments(
                inputs, class_targets(labels, K), plan_of(len(inputs), sigma), compute=COMPUTE
            )
            score = GRAM_WEIGHT**2 * (z @ moments.gram @ z) + target @ moments.cross @ z
            values.append(len(inputs) * score.item())
        scores.append(np.array(values))
    deviation = math.sqrt((scores[0].var(ddof=1) + scores[1].var(ddof=1)) / 2)
    mu = (scores[1].mean() - scores[0].mean()) / deviation
    error = math.sqrt(2 / trials + 1 / (4 * trials * sigma**2))
    assert abs(mu - 1 / sigma) <= 5.5 * error  # a false alarm once in 10^7


def _shares_of_this_data(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Targets weighted by the inverse of the data's own class counts: every row moves."""

    def wrong(labels: Tensor, classes: int) -> Tensor:
        counts = torch.bincount(labels, minlength=classes).float()
        return right(labels, classes) * (len(labels) / counts)[labels, None].clamp(max=9)

    return wrong


def _half(right: Any) -> Any:
    return lambda self, step: right(self, step) / 2


def _uncharged(right: Any) -> Any:
    return lambda self, *args, **options: None


MISTAKES = {
    "targets weighted by the data's own class counts": Mistake(
        check_one_unit_moves_the_moments_by_at_most_the_bound,
        closed_form, "class_targets", _shares_of_this_data,
    ),
    "moments with half of the noise": Mistake(
        check_the_release_is_charged_as_it_is_noised,
        PrivacyPlan, "noise_multiplier_at", _half,
    ),
    "moments that are not charged": Mistake(
        check_the_release_is_charged_as_it_is_noised, Ledger, "charge", _uncharged,
    ),
    "half of the noise, by an attack": Mistake(
        check_an_attack_comes_near_the_claim_and_not_beyond,
        PrivacyPlan, "noise_multiplier_at", _half,
    ),
}  # fmt: skip


def test_one_unit_moves_the_moments_by_at_most_the_bound() -> None:
    check_one_unit_moves_the_moments_by_at_most_the_bound()


def test_one_patient_moves_the_moments_by_at_most_the_bound() -> None:
    check_one_patient_moves_the_moments_by_at_most_the_bound()


@pytest.mark.slow
def test_an_attack_comes_near_the_claim_and_not_beyond() -> None:
    check_an_attack_comes_near_the_claim_and_not_beyond(trials=400)


@catches(MISTAKES, slow={"half of the noise, by an attack"})
def test_planted_mistakes_are_caught(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)


@pytest.mark.parametrize(
    "change", [{"steps": 2}, {"batch_size": 5}, {"clip_norm": 1.0}], ids=["steps", "q", "bound"]
)
def test_a_plan_of_something_else_is_refused(change: dict[str, Any]) -> None:
    x, y = records(12)
    facts = {"n": 12, "batch_size": 12, "steps": 1, "clip_norm": BOUND} | change
    plan = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, **facts)
    with pytest.raises(ArgumentError, match="closed_form_plan"):
        release_moments(x, class_targets(y, K), plan)


def test_the_plan_stays_within_epsilon() -> None:
    plan = closed_form_plan(epsilon=2, delta=1e-5, n=100)
    assert 1.99 < plan.epsilon() <= 2
