"""The table of promises names tests and mistakes that are there, and leaves nothing out."""

from __future__ import annotations

import pytest
from gallery import GALLERY
from promises import PROMISES, Promise, _links, functions, mistakes, table


def test_the_table_has_a_row_per_promise() -> None:
    rows = table().strip().splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [p.says for p in PROMISES]
    assert all(row.count("](../tests/") >= 2 for row in rows)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.says[:40])
def test_every_promise_has_a_test_and_a_mistake_that_it_fails_on(promise: Promise) -> None:
    assert promise.tested_by
    assert mistakes(promise) or promise.controls
    assert {*promise.tested_by, *promise.controls} <= set(functions())


def test_every_planted_mistake_belongs_to_a_promise() -> None:
    planted = {(section, name) for section, found in GALLERY.items() for name in found}
    listed = {one for promise in PROMISES for one in mistakes(promise)}
    assert planted - listed == set()
    assert len(planted) > 80


def test_a_reference_to_nothing_is_found_out() -> None:
    with pytest.raises(KeyError, match="check_that_was_renamed"):
        _links(("check_that_was_renamed",))
    assert mistakes(Promise("nothing", ("check_that_was_renamed",))) == []
