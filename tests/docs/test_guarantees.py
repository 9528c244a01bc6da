"""Every function of the mechanism states guarantee, assumptions and proof; the page has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT


@pytest.fixture
def guarantees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from docs_site import guarantees

    return guarantees


def test_every_function_of_the_mechanism_states_all_three(guarantees) -> None:
    modules = [module for part in guarantees.MODULES.values() for module in part]
    found = [one for module in modules for one in guarantees.members(module)]
    lacking = [name for name, made in found if set(guarantees.stated(made)) != {*guarantees.PARTS}]
    assert lacking == []
    assert len(found) > 50


def test_a_docstring_without_a_proof_is_noticed(guarantees) -> None:
    def careless() -> None:
        """Do it.

        Guarantee: none is known.
        """

    assert guarantees.stated(careless) == {"Guarantee": "none is known."}


def test_every_helper_is_there(guarantees) -> None:
    from importlib import import_module

    modules = [module for part in guarantees.MODULES.values() for module in part]
    names = {name for module in modules for name in vars(import_module(module))}
    assert names >= guarantees.HELPERS


def test_the_page_has_each_with_a_link_to_its_code(guarantees) -> None:
    text = guarantees.page()
    assert text.count("**Guarantee.**") == text.count("**Proof.**") == text.count("\n### ")
    assert "### [`FlatClipping`](../src/dpbam/privacy/clipping.py#FlatClipping)" in text
    for line in text.splitlines():
        if line.startswith("### "):
            assert (ROOT / line.partition("../")[2].partition("#")[0]).is_file()
            assert Path(line).suffix
