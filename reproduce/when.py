"""When does BAM help? Its gain over DP-SGD against the sizes of bias and noise."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.outcome import Outcome, Study


def when(studies: Sequence[Study]) -> Outcome:
    return Outcome("when", "When does BAM help?", studies=studies)


def page(outcome: Outcome) -> str:
    return ""
