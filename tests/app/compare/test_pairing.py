"""What paired runs must share: any digest that differs is caught, and named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dpbam.app.compare.pairing import WHAT, check_pairs
from dpbam.app.runs import ConfigError

SHARED = {"data": "d", "test_data": "t", "initial_weights": "w", "batches": "b", "batch_size": "64"}


def run(arm, seed, **changes):
    return SimpleNamespace(arm=arm, seed=seed, pairing={**SHARED, **changes})


def test_pairs_pass():
    check_pairs([run("a", 0), run("b", 0), run("a", 1, batches="c"), run("b", 1, batches="c")])


@pytest.mark.parametrize("key", WHAT)
def test_each_difference_is_named(key):
    with pytest.raises(ConfigError, match=f"b and a of seed 0 do not share their {WHAT[key]}"):
        check_pairs([run("a", 0), run("b", 0, **{key: "other"})])


def test_other_batch_sizes_have_other_batches():
    check_pairs([run("a", 0), run("b", 0, batch_size="128", batches="other")])
    with pytest.raises(ConfigError, match="initial weights"):
        check_pairs([run("a", 0), run("b", 0, batch_size="128", initial_weights="other")])
