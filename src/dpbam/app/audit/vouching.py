"""``dpbam sign``: a statement is checked against ledger and model before its operator signs it."""

from __future__ import annotations

from pathlib import Path

from dpbam.app.audit import check, exported
from dpbam.app.audit.evidence import Finding
from dpbam.app.audit.stated import SIGNATURE
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.identity import is_export, write_signature
from dpbam.app.runs.run import RunError


def sign(folder: str | Path, key: Path) -> str:
    """Sign the statement of a run, or the digests of an export, and return the public key.

    What is signed passes every check of ``dpbam audit``; an older signature is replaced.

    Raises:
        RunError: if a check fails, or a file is missing; nothing is written then.
        ArgumentError: if there is no such key, or no package for it.
    """
    run = RunFolder(folder)
    wrong = [finding for finding in _findings(run) if not finding.right]
    if wrong:
        more = f", and {len(wrong) - 1} other checks fail" if len(wrong) > 1 else ""
        raise RunError(
            f"nothing was signed: in {run.path} it does not hold that {wrong[0].check} "
            f"({wrong[0].seen}){more}; see dpbam audit {run.path}"
        )
    return write_signature(run, key)


def _findings(run: RunFolder) -> list[Finding]:
    audited = exported if is_export(run) else check
    return [f for f in audited.check_run(run.path) if f.check not in SIGNATURE]
