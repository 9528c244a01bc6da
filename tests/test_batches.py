"""The logical batch: ordered by unit, split without splitting a unit, keyed row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpbam.batches import LogicalBatch, Views
from dpbam.engines import PhysicalBatch
from dpbam.privacy.randomness import Randomness

CPU = torch.device("cpu")


def split(units: list[int], most_rows: int, views: Views | None = None) -> list[PhysicalBatch]:
    x = torch.arange(len(units))
    batch = LogicalBatch.of(x, x * 10, torch.tensor(units), max_records=100)
    return list(batch.keyed(Randomness(1), 0).split(most_rows, views or Views(), CPU))


@given(
    units=st.lists(st.integers(0, 6), max_size=20),
    most_rows=st.integers(1, 12),
    views=st.integers(1, 3),
)
def test_every_row_comes_once_with_its_whole_unit(
    units: list[int], most_rows: int, views: int
) -> None:
    parts = split(units, most_rows, Views(multiplicity=views))
    rows = torch.cat([p.inputs for p in parts]).tolist() if parts else []
    assert sorted(rows) == sorted(list(range(len(units))) * views)
    owners = [{units[i] for i in p.inputs.tolist()} for p in parts]
    assert sum(map(len, owners)) == len(set(units))  # no unit in two parts
    for part in parts:
        assert torch.equal(part.targets, part.inputs * 10)
        assert part.units == len({units[i] for i in part.inputs.tolist()})
        assert len(part.inputs) == part.rows == part.units * part.rows_per_unit
        owner = [units[i] for i in part.inputs.tolist()]  # row n is of unit n // R
        r = part.rows_per_unit
        assert all(len(set(owner[u * r : (u + 1) * r])) == 1 for u in range(part.units))
        assert part.rows <= most_rows or part.units == 1


@given(units=st.lists(st.integers(0, 6), min_size=1, max_size=15), most_rows=st.integers(1, 9))
def test_keys_do_not_depend_on_the_split(units: list[int], most_rows: int) -> None:
    def keys(parts: list[PhysicalBatch]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for part in parts:
            for row, key in zip(part.inputs.tolist(), part.row_keys().tolist(), strict=True):
                found.setdefault(row, []).append(key)
        return found

    whole, parts = (keys(split(units, size, Views(multiplicity=2))) for size in (1000, most_rows))
    assert whole == parts
    flat = [key for row in whole.values() for key in row]
    assert len(set(flat)) == len(flat)  # every view of every row has its own


def test_keys_change_from_step_to_step() -> None:
    batch = LogicalBatch.of(torch.zeros(4, 1), torch.zeros(4), None, 1)
    first, second = (batch.keyed(Randomness(1), step).keys() for step in (0, 1))
    assert not torch.isin(first, second).any()


def test_augmentation_draws_are_not_the_dropout_draws() -> None:
    seen: list[torch.Tensor] = []
    views = Views(augment=lambda x, keys: (seen.append(keys), x)[1], multiplicity=2)
    (part,) = split([0, 1, 2], 100, views)
    assert not torch.isin(seen[0], part.row_keys()).any()


def test_targets_follow_their_views() -> None:
    one, two = split([4, 4, 2], 100, Views(multiplicity=2))
    assert one.inputs.tolist() == [2, 2]
    assert two.inputs.tolist() == [0, 0, 1, 1]
    assert (one.units, two.units) == (1, 1)
    assert (one.rows_per_unit, two.rows_per_unit) == (2, 4)


def test_an_empty_batch_has_no_parts() -> None:
    assert split([], 10) == []


def test_multiplicity_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="multiplicity must be at least 1"):
        Views(multiplicity=0)


@pytest.mark.parametrize(("dtype", "reach"), [(torch.float32, 4.2e9), (torch.float64, 1.1e77)])
def test_numbers_whose_products_could_overflow_become_nan(dtype: torch.dtype, reach: float) -> None:
    mask = torch.finfo(dtype).min
    rows = [[0.0, -reach], [0.0, reach * 1.1], [mask, -torch.inf]]
    batch = LogicalBatch.of(torch.tensor(rows, dtype=dtype), torch.tensor([1, 2**40, 3]), None, 1)
    (part,) = batch.split(10, Views(), torch.device("cpu"))
    assert part.inputs.isnan().tolist() == [[False, False], [False, True], [False, False]]
    assert part.inputs[0].square().square().isfinite().all()
    assert part.targets.tolist() == [1, 2**40, 3]  # whole numbers stay


def test_units_that_are_no_whole_numbers_are_refused():
    with pytest.raises(ValueError, match=r"units must be whole numbers, got torch\.float32"):
        LogicalBatch.of(torch.zeros(2, 3), torch.zeros(2), torch.tensor([12.1, 12.2]), 4)
