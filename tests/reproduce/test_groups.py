"""Groups of test records: rare classes are thinned, hard records chosen within each class."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpbam.app.runs import ConfigError
from dpbam.data import from_arrays
from reproduce import groups, small_data


def halves():
    """The first 180 of the 359 test records of the digits, and the others."""
    is_first = np.arange(359) < 180
    return {"first": is_first, "second": ~is_first}


def test_rare_classes_keep_the_first_half_of_their_records_and_others_all():
    labels = np.arange(400) % 10
    pixels = np.arange(400, dtype=np.uint16).view(np.uint8).reshape(400, 1, 1, 2)
    thinned = small_data._thinned(from_arrays(pixels, labels))
    images, left = (values.numpy() for values in thinned.batch(np.arange(len(thinned))))
    counts = np.bincount(left, minlength=10)
    assert [counts[k] for k in small_data.RARE] == [20, 20, 20]
    assert len(left) == 7 * 40 + 3 * 20
    numbers = images.reshape(-1, 2).copy().view(np.uint16)[:, 0]
    assert numbers[left == small_data.RARE[0]].tolist() == list(range(2, 200, 10))


def test_hard_records_are_half_of_each_class_whatever_their_confidence():
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(60) % 3)
    confidence = rng.random(60) / (1 + 9 * (labels == 2))  # class 2 is hard as a whole
    is_hard = groups.lowest_half(confidence, labels)
    for k in range(3):
        here = labels == k
        assert is_hard[here].sum() == 10
        assert confidence[here & is_hard].max() < confidence[here & ~is_hard].min()


def test_accuracy_is_counted_within_each_group():
    logits = torch.eye(4)
    labels = torch.tensor([0, 1, 2, 0])
    masks = {"all": np.ones(4, bool), "last": np.arange(4) == 3}
    assert groups.accuracies(logits, labels, masks) == {"all": 0.75, "last": 0.0}


def test_groups_that_do_not_exist_are_named():
    with pytest.raises(ConfigError, match=r"'reproduce\.groups:nothing' are not module:function"):
        groups.load_groups("reproduce.groups:nothing")
