"""What leaves a run: names stay text, a signature follows a check, settings hide paths."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from app.runs.test_escaping import HOSTILE, check_name, stated_values
from dpbam.app.audit import accountant, check
from dpbam.app.runs import RunConfig, RunError, card, escaping, execute, identity, statement_text
from dpbam.app.runs.identity import config_digest
from planting import Mistake, catches


@functools.cache
def _stated() -> dict[str, Any]:
    return stated_values()


def check_names_are_text() -> None:
    """Links, HTML, headings, table cells and terminal codes of a name stay text."""
    for name in HOSTILE:
        if name.strip():
            check_name(_stated(), name.strip())


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def _run() -> Path:
    """A finished run whose statement claims less than its ledger holds."""
    config = RunConfig(
        data="digits", model="mlp", model_options={"hidden": [4]}, noise_multiplier=3.0, epochs=1,
        batch_size=700, engine="functional", num_workers=0, accountant="rdp",
    )  # fmt: skip
    out = execute(config, Path(_home().name) / "run").out
    path = out / "privacy-statement.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "epsilon": 0.01}))
    return out


def check_what_is_signed_was_checked() -> None:
    """A statement that the ledger refutes is not signed."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    run, key = _run(), Path(_home().name) / "key.pem"
    key.write_bytes(ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ))  # fmt: skip
    (run / "privacy-statement.sig").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accountant, "_POINTS", 2**12)
        with contextlib.suppress(RunError):  # the refusal; what counts is that nothing is signed
            check.sign(run, key)
    assert not (run / "privacy-statement.sig").exists()


def check_settings_hide_paths() -> None:
    """The published digest of the settings is the same wherever their files are."""
    digests = {
        config_digest(RunConfig(epsilon=3, data=f"{folder}/scans", init=Path(folder, "w"),
                                budget=Path(folder, "b.json")))
        for folder in ("/home/ann", "/srv/b")
    }  # fmt: skip
    assert len(digests) == 1


MISTAKES = {
    "names as they are in the card": Mistake(
        check_names_are_text, card, "markdown", lambda real: str
    ),
    "names as they are in the statement": Mistake(
        check_names_are_text, statement_text, "each_text", lambda real: lambda values, _: values
    ),
    "terminal codes left in": Mistake(
        check_names_are_text, escaping, "visible", lambda real: str
    ),
    "a signature without a look": Mistake(
        check_what_is_signed_was_checked, check, "audit",
        lambda real: lambda folder: check.Audit([], "", ""),
    ),
    "paths in the digest of the settings": Mistake(
        check_settings_hide_paths, identity, "_last_part", lambda real: str
    ),
}  # fmt: skip


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
