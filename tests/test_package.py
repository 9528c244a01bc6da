"""The package as a whole: lazy, typed, every public name there."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import dpbam


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def test_import_is_lazy() -> None:
    assert not {"torch", "dp_accounting", "scipy", "numpy"} & loaded_by("import dpbam")


def test_a_plan_needs_no_torch() -> None:
    """Calculators start fast."""
    statement = "import dpbam; dpbam.PrivacyPlan; import dpbam.privacy.accounting"
    assert "torch" not in loaded_by(statement)


def test_what_is_imported_is_seen() -> None:
    """The control of the tests above."""
    assert "numpy" in loaded_by("import dpbam, numpy")


@pytest.mark.slow  # every test of an oracle needs it
def test_torch_is_loaded_when_needed() -> None:
    assert "torch" in loaded_by("import dpbam; dpbam.PrivateGradientOracle")


@pytest.mark.parametrize("name", dpbam.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    thing = getattr(dpbam, name)
    assert name in dir(dpbam)
    assert isinstance(thing, str) or thing.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'DPADAM'"):
        dpbam.DPADAM  # noqa: B018


def test_the_version_is_the_installed_one() -> None:
    assert dpbam.__version__ == importlib.metadata.version("dpbam")


def test_types_are_shipped() -> None:
    assert (Path(dpbam.__file__).parent / "py.typed").exists()
