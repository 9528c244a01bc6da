"""Every mistake of the gallery is caught; those of an audit by the audit."""

from __future__ import annotations

import pytest
from attacks import Target
from gallery import AUDITED, GALLERY, MANY, ONE_STEP, OTHERS, SECURE, attack

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
