"""Numbers that a training shows while it runs."""

from __future__ import annotations

import math

from dpbam.privacy.plan import PrivacyPlan

_POINTS = 10  # epsilons that a run computes for its display, and evaluations by default


class EpsilonCurve:
    """Epsilon by the number of charged steps, rounded up to a grid: cheap enough for every step."""

    def __init__(self, plan: PrivacyPlan) -> None:
        self._plan = plan
        self._width = max(1, math.ceil(plan.steps / _POINTS))
        self._known: dict[int, float] = {}

    def bound(self, charged: int) -> float:
        """Return at least the epsilon of ``charged`` steps, at most that of the next grid point."""
        point = math.ceil(charged / self._width) * self._width
        if charged <= self._plan.steps:
            point = min(point, self._plan.steps)
        if point not in self._known:
            self._known[point] = self._plan.epsilon(point)
        return self._known[point]


def evaluation_steps(plan: PrivacyPlan, epochs: int | None) -> int:
    """Return the steps of ``epochs`` expected passes, or a tenth of the run if None."""
    if epochs is None:
        return max(1, math.ceil(plan.steps / _POINTS))
    return max(1, round(epochs / plan.sampling_rate))
