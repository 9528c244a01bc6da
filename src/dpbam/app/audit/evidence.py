"""What a run folder holds, as an audit reads it, and what a check found."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.documents import RunFacts, Statement
from dpbam.app.runs.folder import RunFolder
from dpbam.privacy.accounting import Charge
from dpbam.privacy.ledger import BEFORE


class Finding(NamedTuple):
    """One check: what was asked, whether it is right, and what was seen.

    Attributes:
        missing: nothing is wrong, but there was nothing to check, such as no signature.
    """

    check: str
    right: bool
    seen: str
    missing: bool = False

    @property
    def state(self) -> str:
        """What to show: "right", "wrong" or "missing"."""
        if not self.right:
            return "wrong"
        return "missing" if self.missing else "right"


def digits(*values: float) -> str:
    """Return numbers with six significant digits; with all where six would hide a difference.

    Example:
        >>> digits(1.4400783973845355, 1.4400783973845355), digits(1.0, 1.0000001)
        ('1.44008', '1.0; 1.0000001')
    """
    short = [f"{value:.6g}" for value in values]
    if len({*values}) > len({*short}):
        return "; ".join(map(repr, values))
    return "; ".join(dict.fromkeys(short))


class Evidence(NamedTuple):
    """What the folder holds."""

    folder: RunFolder
    facts: RunFacts
    config: RunConfig
    entries: list[dict[str, Any]]
    torn: bool
    statement: Statement
    operator_key: str | None = None  # the public key that is expected

    @property
    def charges(self) -> list[Charge]:
        """The ledger's steps, equal ones together."""
        counts = Counter((float(e["noise_multiplier"]), float(e["sampling_rate"]))
                         for e in self.entries)  # fmt: skip
        return [Charge(sigma, q, k) for (sigma, q), k in sorted(counts.items())]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The entries that are steps, not releases before the first."""
        return [e for e in self.entries if not str(e["stream"]).endswith(BEFORE)]
