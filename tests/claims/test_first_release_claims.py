"""What is released before the first step: one unit moves it by at most its bound, jointly."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpbam import PrivacyPlan, PrivateGradientOracle, mechanism
from dpbam.app.runs import first_release
from dpbam.app.runs.feature_model import FixedFeatureImages
from dpbam.app.runs.folder import RunFolder
from dpbam.data import from_arrays
from dpbam.errors import PlanViolationError
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.randomness import Randomness
from planting import Mistake, catches

COUNTS, CENTRE, D = 7.0, 3.5, 6
JOINT = (COUNTS**-2 + CENTRE**-2) ** -0.5


class Rows(FixedFeatureImages):
    """Features that are there already."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows.numpy()

    def uncentred(self) -> Any:
        return self._rows


class Spy(GaussianNoise):
    """Keeps the sums that get noise, and the noise's deviation."""

    def __init__(self) -> None:
        super().__init__(Randomness(0))
        self.sums = torch.zeros(0)
        self.std = 0.0

    def add(self, sums: Any, std: float, step: int, **options: Any) -> Any:
        self.sums, self.std = torch.cat([s.clone() for s in sums.values()]), std
        return super().add(sums, std, step, **options)


def oracle_with_a_release(**options: Any) -> PrivateGradientOracle:
    plan = PrivacyPlan(
        n=20, batch_size=2, steps=1, noise_multiplier=1.0, delta=1e-5, unit="patient",
        max_records=9, released_before=JOINT,
    )  # fmt: skip
    loss = nn.CrossEntropyLoss(reduction="none")
    return PrivateGradientOracle(nn.Linear(2, 2), loss, plan, seed=0, **options)


def released(rows: Tensor, labels: Tensor, units: np.ndarray) -> tuple[Tensor, Ledger]:
    """Return the sums over the units, in deviations of their noise, and the ledger."""
    images = np.zeros((len(rows), 2, 2), np.uint8)
    train = from_arrays(images, labels.numpy(), class_names=["0", "1", "2"])
    prepared: Any = SimpleNamespace(
        config=SimpleNamespace(
            release_counts=COUNTS, release_centre=CENTRE, released_before=JOINT, balance=0.5
        ),
        train=train, units=units, task=SimpleNamespace(class_names=("0", "1", "2")),
        plan=SimpleNamespace(n=len(np.unique(units)), unit="patient"),
        seen=SimpleNamespace(train=SimpleNamespace(images=Rows(rows))),
    )  # fmt: skip
    spy, ledger = Spy(), Ledger(1e-5)
    oracle = oracle_with_a_release(noise=spy, ledger=ledger)
    with tempfile.TemporaryDirectory() as folder:
        first_release._release(RunFolder(Path(folder)), prepared, oracle)
    return spy.sums / spy.std, ledger


def records(count: int) -> tuple[Tensor, Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    rows = nn.functional.normalize(torch.randn(count, D, generator=generator))
    return rows, torch.arange(count) % 3, np.arange(count) // 2


def check_one_unit_moves_the_first_release_by_at_most_the_bound() -> None:
    """Whatever the records of a further unit are, and however many; it may reach the bound."""
    rows, labels, units = records(12)
    before, _ = released(rows, labels, units)
    largest = 0.0
    for length, count in ((1.0, 1), (1.0, 5), (1e3, 2), (0.0, 3), (float("nan"), 2)):
        more = length * torch.eye(D)[:1].repeat(count, 1)
        after, _ = released(
            torch.cat([rows, more]),
            torch.cat([labels, torch.ones(count, dtype=torch.int64)]),
            np.append(units, [99] * count),
        )
        assert after.isfinite().all()  # a row that is not a number counts as zero
        largest = max(largest, (after - before).norm().item())
    assert largest <= (1 + 1e-6) / JOINT
    assert largest >= (1 - 1e-6) / JOINT


def check_the_first_release_is_charged_as_it_is_noised() -> None:
    """One entry at q = 1 with the joint sigma, which is below either's own."""
    _, ledger = released(*records(12))
    (entry,) = ledger.entries()
    assert entry["noise_multiplier"] == JOINT < CENTRE < COUNTS
    assert entry["sampling_rate"] == 1.0


def _added_up(right: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of a unit's features in place of their mean."""

    def wrong(prepared: Any) -> Any:
        return right(SimpleNamespace(**{**vars(prepared), "units": None}))

    return wrong


def _not_cut(right: Callable[..., Any]) -> Callable[..., Any]:
    """Features as long as they come."""
    return lambda prepared: prepared.seen.train.images.uncentred().astype(np.float64).sum(0)


def _charged_as_counts(right: Callable[..., Any]) -> Callable[..., Any]:
    """A charge for the class counts alone."""

    def wrong(self: Ledger, *args: Any, noise_multiplier: float, **options: Any) -> Any:
        return right(self, *args, noise_multiplier=COUNTS, **options)

    return wrong


def check_the_first_release_passes_the_mechanism() -> None:
    """A release before the first step without noise is refused, as any sum of a step is."""
    refused = False
    try:
        oracle_with_a_release().release_before({"count": torch.ones(1)}, std=0.0)
    except PlanViolationError:
        refused = True
    assert refused, "a sum was released without noise"


MISTAKES = {
    "a first release without noise": Mistake(
        check_the_first_release_passes_the_mechanism,
        mechanism, "check_noise", lambda right: lambda queries, terms: None,
    ),
    "features of a unit added up before the first step": Mistake(
        check_one_unit_moves_the_first_release_by_at_most_the_bound,
        first_release, "feature_sum", _added_up,
    ),
    "features of any length before the first step": Mistake(
        check_one_unit_moves_the_first_release_by_at_most_the_bound,
        first_release, "feature_sum", _not_cut,
    ),
    "a centre that is not charged": Mistake(
        check_the_first_release_is_charged_as_it_is_noised, Ledger, "charge", _charged_as_counts,
    ),
}  # fmt: skip


def test_one_unit_moves_the_first_release_by_at_most_the_bound() -> None:
    check_one_unit_moves_the_first_release_by_at_most_the_bound()


def test_the_first_release_passes_the_mechanism() -> None:
    check_the_first_release_passes_the_mechanism()


def test_the_first_release_is_charged_as_it_is_noised() -> None:
    check_the_first_release_is_charged_as_it_is_noised()


@catches(MISTAKES)
def test_planted_mistakes_are_caught(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
