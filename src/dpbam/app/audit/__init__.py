"""Audits: lower bounds on epsilon by attacking our own mechanism, and a second look at a run.

An accountant proves an upper bound on what leaks, if the code is what the proof is about. An audit
attacks the code and proves a lower bound, at a stated confidence. A lower bound above the claim
means a bug; one far below it means a weak attack, or a claim with room.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpbam.app.audit.attack import AuditResult, Target, audit
    from dpbam.app.audit.check import Finding, check_run

_HOME = {
    "AuditResult": "dpbam.app.audit.attack",
    "Finding": "dpbam.app.audit.check",
    "Target": "dpbam.app.audit.attack",
    "audit": "dpbam.app.audit.attack",
    "check_run": "dpbam.app.audit.check",
}
__all__ = ["AuditResult", "Finding", "Target", "audit", "check_run"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpbam.app.audit' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
