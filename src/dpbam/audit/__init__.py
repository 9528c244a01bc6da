"""Audits: lower bounds on epsilon by attacking our own mechanism, and a second look at a run.

An accountant proves an upper bound on what leaks, if the code is what the proof is about. An audit
attacks the code and proves a lower bound, at a stated confidence. A lower bound above the claim
means a bug; one far below it means a weak attack, or a claim with room.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpbam.audit.attack import AuditResult, Target, audit
    from dpbam.audit.check import Finding, check_run

_HOME = {
    "AuditResult": "dpbam.audit.attack",
    "Finding": "dpbam.audit.check",
    "Target": "dpbam.audit.attack",
    "audit": "dpbam.audit.attack",
    "check_run": "dpbam.audit.check",
}
__all__ = ["AuditResult", "Finding", "Target", "audit", "check_run"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpbam.audit' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
