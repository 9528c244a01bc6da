"""The paper's claims, and the rule by which each is judged.

=============  =================================================================================
claim          verdict, from the 95% t interval of the paired difference over the seeds
=============  =================================================================================
"above"        reproduced: the interval is above 0; not reproduced: below 0; else inconclusive
"below"        the same with the signs exchanged
"same"         reproduced: the interval lies within the margin around 0; not reproduced: it lies
               outside the margin altogether; else inconclusive
"different"    reproduced: the interval excludes 0; else inconclusive
=============  =================================================================================

A comparison is also inconclusive with fewer than two seeds, if its baseline is not above its floor,
or if its interval extends further than the recipe's resolution to either side of its mean: such a
study lacks the power for a verdict, and needs more seeds. An inconclusive claim states the smallest
true difference that these seeds would have shown in 80% of repetitions. Each claim is judged by
itself: of twenty claims at 95%, one may fail by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dpbam.estimates import Estimate

Kind = Literal["above", "below", "same", "different"]
Verdict = Literal["reproduced", "not reproduced", "inconclusive"]


@dataclass(frozen=True)
class Claim:
    """One claim and the difference that was found.

    Attributes:
        text: the claim, as a sentence.
        kind: what it states about the difference; see the table above.
        difference: the estimate.
        unit: "points" (the difference is a share of 1) or "" (as it is).
        margin: of a claim that two are the same.
        over: what the interval is over.
        floor_missed: whether the baseline is not above its floor.
        resolution: the largest half-width of the interval that allows a verdict; None: any.
        paper: the part of the paper that claims it; empty: a question of this study.
        headline: the claim on the first page of results; empty: it is on the details' page alone.
        reading: of accuracies: "last weights" or "averaged weights".
    """

    text: str
    kind: Kind
    difference: Estimate
    unit: str = ""
    margin: float = 0.0
    over: str = "seeds"
    floor_missed: bool = False
    resolution: float | None = None
    paper: str = ""
    headline: str = ""
    reading: str = ""

    @property
    def verdict(self) -> Verdict:
        """The verdict by the rule above.

        Example:
            >>> from dpbam.estimates import estimate
            >>> Claim("BAM is better", "above", estimate([0.01, 0.02, 0.03])).verdict
            'inconclusive'
            >>> Claim("BAM is better", "above", estimate([0.01, 0.011, 0.012])).verdict
            'reproduced'
        """
        low, high = self.difference.low, self.difference.high
        if self.floor_missed or self.too_wide or math.isnan(low):
            return "inconclusive"
        for_it, against_it = {
            "different": (low > 0 or high < 0, False),
            "above": (low > 0, high < 0),
            "below": (high < 0, low > 0),
            "same": (-self.margin < low and high < self.margin,
                     low > self.margin or high < -self.margin),
        }[self.kind]  # fmt: skip
        return "reproduced" if for_it else "not reproduced" if against_it else "inconclusive"

    @property
    def too_wide(self) -> bool:
        """Whether the interval's half-width exceeds the resolution."""
        half = (self.difference.high - self.difference.low) / 2
        return self.resolution is not None and half > self.resolution

    def sentence(self) -> str:
        """Describe what was found."""
        d = self.difference
        if d.count < 2:
            return f"{d.count} of the {self.over}: no interval"
        text = f"{self.interval()}, {d.count} {self.over}"
        if not math.isnan(d.effect_size):
            text += f", d_z {d.effect_size:+.1f}"
        if self.kind == "same":
            text += f"; margin {self._show(self.margin, signed=False)}"
        if self.floor_missed:
            text += "; the baseline is not above its floor"
        elif self.too_wide:
            assert self.resolution is not None
            text += f"; wider than ±{self._show(self.resolution, signed=False)}: needs more seeds"
            if d.low > 0 or d.high < 0:
                text += ", though it excludes 0"
        elif self.verdict == "inconclusive":
            text += f"; visible from {self._show(d.smallest_detectable, signed=False)} on"
        return text

    def interval(self) -> str:
        """Return the mean difference and its interval."""
        d = self.difference
        mean, low, high = (self._show(value) for value in (d.mean, d.low, d.high))
        return f"{mean} [{low}, {high}]"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "claim": self.text,
            "kind": self.kind,
            "unit": self.unit,
            "margin": self.margin,
            "floor_missed": self.floor_missed,
            "resolution": self.resolution,
            "difference": self.difference.to_dict(),
            "verdict": self.verdict,
            "paper": self.paper,
        }

    def _show(self, value: float, *, signed: bool = True) -> str:
        sign = "+" if signed else ""
        return f"{100 * value:{sign}.2f}" if self.unit == "points" else f"{value:{sign}.3g}"


def count_verdicts(claims: Mapping[str, list[Claim]]) -> dict[Verdict, int]:
    """Count the claims of all experiments by verdict."""
    counts: dict[Verdict, int] = {"reproduced": 0, "not reproduced": 0, "inconclusive": 0}
    for claim in (claim for group in claims.values() for claim in group):
        counts[claim.verdict] += 1
    return counts
