"""Every mistake of the gallery is caught; those of an audit by the audit."""

from __future__ import annotations

import pytest
from attacks import Target
from gallery import AUDITED, GALLERY, MANY, ONE_STEP, OTHERS, SECURE, attack
from promises import PROMISES, Promise, _links, functions, mistakes, table

from planting import Mistake, catches


@pytest.mark.parametrize("target", [ONE_STEP, MANY], ids=["many runs", "many canaries"])
def test_the_code_as_it_is_withstands_the_attack(target: Target) -> None:
    attack(target)()


@catches(AUDITED)
def test_the_audit_refutes(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mistake.wrong(getattr(mistake.owner, mistake.name))
    monkeypatch.setattr(mistake.owner, mistake.name, wrong)
    with pytest.raises(AssertionError, match="the claim is refuted"):
        mistake.check()


@catches({**SECURE, **OTHERS})
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)


def test_every_mistake_has_a_name_of_its_own_in_its_section() -> None:
    assert sum(len(section) for section in GALLERY.values()) >= 50
    for section in GALLERY.values():
        for mistake in section.values():
            assert hasattr(mistake.owner, mistake.name)
            assert mistake.check.__name__ != "<lambda>"


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
