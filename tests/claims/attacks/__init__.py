"""Attacks on the mechanism as shipped: lower bounds on its epsilon, at a stated confidence.

An accountant proves an upper bound on what leaks, if the code is what the proof is about. An attack
on the code proves a lower bound. One above the claim means a bug; one far below it means a weak
attack, or a loose claim.
"""

from __future__ import annotations

from attacks.attack import AuditResult, Target, audit, expected_bounds

__all__ = ["AuditResult", "Target", "audit", "expected_bounds"]
