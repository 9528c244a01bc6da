"""What a run folder holds, as an audit reads it, and what a check found."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.documents import RunFacts, Statement
from dpbam.app.runs.folder import RunFolder
from dpbam.errors import ArgumentError
from dpbam.privacy.accounting import Charge
from dpbam.privacy.ledger import BEFORE


class Finding(NamedTuple):
    """One check: what was asked, whether it is right, and what was seen.

    Attributes:
        skipped: nothing is wrong, but there was nothing to check, such as no signature.
    """

    check: str
    right: bool
    seen: str
    skipped: bool = False

    @property
    def state(self) -> str:
        """What to show: "right", "wrong" or "not checked"."""
        if not self.right:
            return "wrong"
        return "not checked" if self.skipped else "right"


def _composable(sigma: float) -> float:
    if sigma and not 1e-6 <= sigma <= 1e9:
        raise ArgumentError("an accountant needs 0, or a number from 1e-6 to 1e9")
    return sigma


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


class Release(BaseModel):
    """One entry of a ledger, read apart from the ledger's own code; other fields are left alone."""

    model_config = ConfigDict(frozen=True, strict=True)

    stream: str
    step: Annotated[int, Field(ge=0)]
    noise_multiplier: Annotated[float, AfterValidator(_composable)]
    sampling_rate: Annotated[float, Field(gt=0, le=1)]

    @property
    def is_step(self) -> bool:
        """Whether it is a step, and not a release before the first."""
        return not self.stream.endswith(BEFORE)


class Evidence(NamedTuple):
    """What the folder holds."""

    folder: RunFolder
    facts: RunFacts
    config: RunConfig
    releases: list[Release]
    torn: bool
    statement: Statement
    operator_key: str | None = None  # the public key that is expected

    @property
    def charges(self) -> list[Charge]:
        """The ledger's steps, equal ones together."""
        counts = Counter((one.noise_multiplier, one.sampling_rate) for one in self.releases)
        return [Charge(sigma, q, k) for (sigma, q), k in sorted(counts.items())]

    @property
    def steps(self) -> list[Release]:
        """The steps, without releases before the first."""
        return [one for one in self.releases if one.is_step]
