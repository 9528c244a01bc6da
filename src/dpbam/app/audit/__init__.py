"""Audits of a finished run: is its folder consistent, and what does an attack on its model show?"""

from __future__ import annotations

from dpbam.app.audit.check import check_run
from dpbam.app.audit.membership import MembershipResult, attack_run
from dpbam.app.audit.stated import Finding

__all__ = ["Finding", "MembershipResult", "attack_run", "check_run"]
