"""Poisson means Poisson: a shuffled sampler fails the same check."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from checks import check_poisson
from dpbam.privacy.randomness import Randomness
from dpbam.privacy.sampling import PoissonSampler, UnitIndex

N, Q, STEPS = 200, 0.1, 400


def batches(**changes: object) -> list[list[int]]:
    fields = {"n": N, "sampling_rate": Q, "steps": STEPS, "randomness": Randomness(11)}
    return list(PoissonSampler(**{**fields, **changes}))


def test_poisson() -> None:
    check_poisson(batches(), N, Q)


def shuffled(generator: np.random.Generator) -> list[np.ndarray]:
    """What a shuffled loader gives: epochs, each index once, batches of one size."""
    size = round(N * Q)
    order = np.concatenate([generator.permutation(N) for _ in range(STEPS * size // N)])
    return list(order.reshape(STEPS, size))


def fixed_size(generator: np.random.Generator) -> list[np.ndarray]:
    return [generator.choice(N, round(N * Q), replace=False) for _ in range(STEPS)]


def with_replacement(generator: np.random.Generator) -> list[np.ndarray]:
    return [generator.choice(N, generator.binomial(N, Q)) for _ in range(STEPS)]


def wrong_rate(generator: np.random.Generator) -> list[np.ndarray]:
    return [np.flatnonzero(generator.random(N) < 1.05 * Q) for _ in range(STEPS)]


def sticky(generator: np.random.Generator) -> list[np.ndarray]:
    """Right frequencies and sizes, but every batch is drawn twice."""
    draws = [np.flatnonzero(generator.random(N) < Q) for _ in range(STEPS // 2)]
    return [draw for draw in draws for _ in range(2)]


@pytest.mark.parametrize("wrong", [shuffled, fixed_size, with_replacement, wrong_rate, sticky])
def test_what_is_not_poisson_fails_the_same_check(wrong) -> None:
    with pytest.raises(AssertionError):
        check_poisson(wrong(np.random.default_rng(1)), N, Q)


def test_unseeded_draws_are_poisson_and_never_the_same() -> None:
    one, two = (batches(randomness=None, steps=20) for _ in range(2))
    assert one != two
    assert 20 * N * Q * 0.7 < sum(map(len, one)) < 20 * N * Q * 1.3


def test_a_seeded_sampler_resumes_where_it_would_have_been() -> None:
    assert batches(start=390) == batches()[390:]
    sampler = PoissonSampler(N, Q, STEPS, Randomness(11), start=390)
    assert len(sampler) == 10


def test_empty_batches_are_batches() -> None:
    sizes = [len(b) for b in batches(n=3, sampling_rate=0.05, steps=100)]
    assert len(sizes) == 100
    assert sizes.count(0) > 70


def test_rate_one_takes_everything() -> None:
    assert batches(n=5, sampling_rate=1.0, steps=2) == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_it_drives_a_data_loader(workers: int) -> None:
    data = TensorDataset(torch.arange(N))
    sampler = PoissonSampler(N, Q, 5, Randomness(11))
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    assert len(loader) == 5
    assert [rows.tolist() for (rows,) in loader] == batches()[:5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling_rate": 0.0}, "sampling_rate must be positive"),
        ({"sampling_rate": 1.5}, "sampling_rate must be at most 1"),
        ({"sampling_rate": float("nan")}, "sampling_rate must be a number, got NaN"),
        ({"n": 0}, "n must be at least 1"),
        ({"steps": -1}, "steps must be at least 0"),
        ({"start": -1}, "start must be at least 0"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        batches(**changes)


# --- units with several records


LABELS = ["ann"] * 5 + ["bob"] + ["cy"] * 2 + ["ann"]


def test_records_come_with_their_unit_and_within_the_cap() -> None:
    index = UnitIndex(LABELS, max_records=3)
    records, units = index.records(np.arange(3), Randomness(0), step=0)
    assert units.tolist() == [0, 0, 0, 1, 2, 2]
    assert [LABELS[r] for r in records] == ["ann"] * 3 + ["bob", "cy", "cy"]
    assert len(set(records.tolist())) == len(records)


def test_a_unit_above_the_cap_draws_anew_and_evenly() -> None:
    index = UnitIndex(LABELS, max_records=2)
    seen = np.zeros(len(LABELS))
    for step in range(600):
        seen[index.records(np.array([0]), Randomness(0), step)[0]] += 1
    own = seen[[0, 1, 2, 3, 4, 8]]
    assert seen.sum() == own.sum() == 1200
    assert np.abs(own - 200).max() < 3.5 * np.sqrt(600 / 3 * 2 / 3)


def test_no_units_no_records() -> None:
    records, units = UnitIndex(LABELS, 2).records(np.array([], dtype=int), Randomness(0), 0)
    assert len(records) == len(units) == 0


def test_labels_may_be_numbers_or_a_tensor() -> None:
    assert UnitIndex(torch.tensor([4, 4, 9]), 1).n == UnitIndex([4, 4, 9], 1).n == 2
    with pytest.raises(ValueError, match="max_records must be at least 1"):
        UnitIndex(LABELS, 0)
