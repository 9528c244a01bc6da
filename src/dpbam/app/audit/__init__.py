"""Audits: lower bounds on epsilon by attacking our own mechanism, and checks of a finished run.

An accountant proves an upper bound on what leaks, if the code is what the proof is about. An audit
attacks the code and proves a lower bound, at a stated confidence. A lower bound above the claim
means a bug; one far below it means a weak attack, or a loose claim.
"""

from __future__ import annotations

from dpbam.app.audit.attack import AuditResult, Target, audit, expected_bounds
from dpbam.app.audit.check import check_run
from dpbam.app.audit.evidence import Finding
from dpbam.app.audit.membership import MembershipResult, attack_run

__all__ = [
    "AuditResult",
    "Finding",
    "MembershipResult",
    "Target",
    "attack_run",
    "audit",
    "check_run",
    "expected_bounds",
]
