from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbam.data import DataError, DataSet, from_arrays, held_out

from .helpers import random_pixels


def patients(counts: list[tuple[int, int]]) -> DataSet:
    """Each pair (records, class) is a patient; every record has that class."""
    who = np.repeat([f"patient-{k}" for k in range(len(counts))], [c for c, _ in counts])
    labels = np.repeat([label for _, label in counts], [c for c, _ in counts])
    return from_arrays(
        random_pixels(len(who), 1, (4, 4)), labels, class_names="abc", columns={"patient": who}
    )


def identities(data: DataSet) -> set[bytes]:
    return set(data.images.identities())


def test_every_class_gives_its_share():
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    train, test = held_out(from_arrays(random_pixels(160, 0, (4, 4)), labels))
    assert np.bincount(test.labels).tolist() == [20, 10, 2]
    assert np.bincount(train.labels).tolist() == [80, 40, 8]
    assert (train.name, test.name) == ("arrays/train", "arrays/held-out")
    again = held_out(train)  # as a file whose only split is called so
    assert [part.name for part in again] == ["arrays/train", "arrays/held-out"]


def test_the_fraction_is_an_option():
    data = from_arrays(random_pixels(100, 0, (4, 4)), np.arange(100) % 2)
    assert len(held_out(data, fraction=0.5)[1]) == 50


@given(st.permutations(range(30)))
@settings(deadline=None, max_examples=20, derandomize=True)
def test_the_order_of_the_records_does_not_matter(order):
    data = from_arrays(random_pixels(30, 0, (4, 4)), np.arange(30) % 3)
    shuffled = data.subset(np.array(order))
    for a, b in zip(held_out(data), held_out(shuffled), strict=True):
        assert identities(a) == identities(b)


units = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2)), min_size=4, max_size=25)


@given(units)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_it_is_a_partition_that_keeps_patients_whole(counts):
    data = patients([*counts, (1, 0), (1, 0)])
    train, test = held_out(data, unit="patient")
    assert len(train) + len(test) == len(data)
    assert identities(train) | identities(test) == identities(data)
    assert not set(train.columns["patient"]) & set(test.columns["patient"])


def test_without_the_unit_patients_do_straddle():
    """The negative control: it is the unit that keeps them whole."""
    data = patients([(6, k % 3) for k in range(12)])
    train, test = held_out(data)
    assert set(train.columns["patient"]) & set(test.columns["patient"])


@given(units, st.integers(0, 24))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_removing_one_patient_changes_training_by_one_swap_at_most(counts, gone):
    data = patients([*counts, (1, 0), (1, 0)])
    gone %= len(counts)
    without = data.subset(np.flatnonzero(data.columns["patient"] != f"patient-{gone}"))
    before = set(held_out(data, unit="patient")[0].columns["patient"])
    after = set(held_out(without, unit="patient")[0].columns["patient"])
    assert len(before - after) <= 1
    assert len(after - before) <= 1


def test_copies_of_an_image_go_together():
    """All but those at the cut, of which there is one a class."""
    once = random_pixels(50, 0, (4, 4))
    data = from_arrays(np.concatenate([once, once]), np.tile(np.arange(50) % 2, 2))
    train, test = held_out(data)
    assert len(identities(train) & identities(test)) <= 2
    assert len(test) == 20


def test_a_patient_counts_to_its_majority_class():
    who = np.repeat(["a", "b", "c", "d"], 3)
    labels = [0, 0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1]  # a and b mostly 0, c and d mostly 1
    data = from_arrays(random_pixels(12, 0, (4, 4)), labels, columns={"patient": who})
    train, test = held_out(data, unit="patient")
    for half in ({"a", "b"}, {"c", "d"}):
        assert len(half & set(test.columns["patient"])) == 1
        assert len(half & set(train.columns["patient"])) == 1


def test_a_class_with_one_record_stays_in_training():
    train, test = held_out(from_arrays(random_pixels(11, 0, (4, 4)), [0] * 10 + [1]))
    assert 1 in train.labels
    assert 1 not in test.labels


def test_nothing_to_hold_out():
    data = from_arrays(random_pixels(2, 0, (4, 4)), [0, 1])
    with pytest.raises(DataError, match=r"too small to hold out"):
        held_out(data)


@pytest.mark.parametrize("fraction", [0, 1, -0.5])
def test_bad_fractions(fraction):
    with pytest.raises(DataError, match=r"between 0 and 1"):
        held_out(patients([(1, 0), (1, 0)]), fraction=fraction)


def test_an_unknown_unit_is_named():
    with pytest.raises(DataError, match=r"no column .person.: did you mean the column .patient."):
        held_out(patients([(1, 0), (1, 0)]), unit="person")
