"""The seam between the oracle and what looks at a step from inside.

A lens measures, without noise, for the operator alone. A joint release hands out statistics of the
same batch with noise of its own; together with the gradient it is one Gaussian event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dpbam.engines import PerSampleDirections
from dpbam.methods import Method
from dpbam.params import Params
from dpbam.privacy.clipping import Clipping
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.plan import PrivacyPlan


@dataclass(frozen=True)
class StepFacts:
    """What a lens is told before a step.

    Attributes:
        step: its number, from 0.
        plan: the privacy plan.
        clipping: what bounds the directions.
        method: says what a direction is.
        lam: its lambda at this step.
        previous: the previous private gradient, where the method keeps it.
        shifted: whether theta is shifted for the whole batch during the step (DP-SAT, SAM).
        whole: whether the logical batch is computed as one physical batch.
        zeros: a tensor of zeros for each trainable parameter: a sum with nothing in it yet.
        batch_gradient: g_hat at the unshifted theta, by a pass of its own. Not private.
    """

    step: int
    plan: PrivacyPlan
    clipping: Clipping
    method: Method
    lam: float
    previous: Params | None
    shifted: bool
    whole: bool
    zeros: Callable[[], Params]
    batch_gradient: Callable[[], Params]


class Observer(Protocol):
    """Watches a step from inside, for measuring. What it sees is not private."""

    wants_plain: bool

    def begin(self, facts: StepFacts) -> bool:
        """Called before a step, theta unshifted; whether to watch it. Sets ``wants_plain``."""

    def observe(self, directions: PerSampleDirections, norms: Tensor, factors: Tensor) -> None:
        """Called for each physical batch of a watched step."""

    def finish(self, clipped: Params, released: Params) -> None:
        """Called once a watched step: the clipped sum; the released gradient (noised, divided)."""


class JointRelease(Protocol):
    """Statistics of the batch, released with noise beside its gradient.

    Guarantee asked of an implementation: ``noised`` adds, to each of its sums, Gaussian noise of
    standard deviation sigma_k times that sum's sensitivity, from a stream that nothing else uses.
    Gradient and sums are then one Gaussian mechanism on the concatenated, rescaled sums: with

        1 / sigma_joint^2 = 1 / sigma^2 + sum_k 1 / sigma_k^2

    its noise multiplier is sigma_joint, and it is charged once, by the plan. Two charges, each with
    its own Poisson sample, would be too low: the batch is the same one.
    """

    noise_multipliers: tuple[float, ...]

    def begin(self, facts: StepFacts) -> None:
        """Called before a step: forget the last one's sums."""

    def observe(self, directions: PerSampleDirections, norms: Tensor, factors: Tensor) -> None:
        """Called for each physical batch."""

    def noised(self, noise: GaussianNoise) -> Params:
        """The step's sums with their noise, by name; called once a step."""

    def publish(self, released: Params) -> None:
        """Called with what :meth:`noised` returned when the step is on the ledger."""
