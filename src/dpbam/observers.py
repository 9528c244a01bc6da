"""What may watch a step of the oracle from inside.

An observer measures, without noise, for the operator only. A joint release publishes statistics of
the same batch with noise of its own; together with the gradient it is one Gaussian event.
:class:`PerSample` holds directions as tensors, for the operator only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpbam.distributed import Ranks
from dpbam.engines import PerSampleDirections
from dpbam.methods import Method
from dpbam.params import Params
from dpbam.privacy.plan import PrivacyPlan


@dataclass(frozen=True)
class StepFacts:
    """What is known before a step.

    Attributes:
        step: its number, from 0.
        lam: lambda at this step.
        previous: the previous private gradient, where the method keeps it.
        sensitivity: C_t, the clipping's at this step; infinite where nothing is clipped.
        shift: by how much theta is shifted for the whole batch during the step (DP-SAT, SAM, DiSK);
            None: it is not.
        whole: whether the logical batch is computed as one physical batch, by one process.
        zeros: returns zeros for each trainable parameter: a sum with nothing in it yet.
        batch_gradient: returns g_hat at the unshifted theta, by a pass of its own. Do not share.
        ranks: the processes that train together; an observer sees the units of its own.
    """

    step: int
    plan: PrivacyPlan
    method: Method
    lam: float
    previous: Params | None
    sensitivity: float
    shift: Params | None
    whole: bool
    zeros: Callable[[], Params]
    batch_gradient: Callable[[], Params]
    ranks: Ranks


class Observer(Protocol):
    """Measures steps. What it sees is not protected by privacy: do not share it.

    Of several ranks each has one, of the same settings, which sees the units of its rank.
    """

    wants_plain: bool

    def begin(self, facts: StepFacts) -> bool:
        """Return whether to watch the step, before theta is shifted. Sets ``wants_plain``.

        The answer depends on public facts, so that it is the same on every rank.
        """

    def observe(self, directions: PerSampleDirections, norms: Tensor, factors: Tensor) -> None:
        """Receive each physical batch of a watched step; norms and factors are [G, U]."""

    def finish(self, clipped: Params, released: Params) -> None:
        """Receive the clipped sum, and the released gradient (noised, divided), once per step.

        Both are of all ranks.
        """


class JointRelease(Protocol):
    """Publishes statistics of the batch, with noise, next to its gradient.

    Guarantee asked of an implementation: :meth:`sums` gives each sum with the standard deviation
    sigma_k times that sum's sensitivity. The oracle adds the noise, from a stream for each sum.
    Gradient and sums are then one Gaussian mechanism on the concatenated, rescaled sums: with

        1 / sigma_joint^2 = 1 / sigma^2 + sum_k 1 / sigma_k^2

    its noise multiplier is sigma_joint, and it is charged once, by the plan. Two charges, each with
    its own Poisson sample, would be too low: the batch is the same one.
    """

    noise_multipliers: tuple[float, ...]

    def begin(self, facts: StepFacts) -> None:
        """Reset the sums, before each step."""

    def observe(self, directions: PerSampleDirections, norms: Tensor, factors: Tensor) -> None:
        """Receive each physical batch; norms and factors are [G, U]."""

    def sums(self) -> dict[str, tuple[Params, float]]:
        """Return the step's sums over this rank's units, by name, each with its noise's std."""

    def publish(self, released: Params) -> None:
        """Receive all entries of the sums, of all ranks and noised, with the step on the ledger."""


def watching(
    facts: StepFacts, observer: Observer | None, statistics: JointRelease | None
) -> list[Observer | JointRelease]:
    """Begin a step, and return those that watch it."""
    watchers: list[Observer | JointRelease] = []
    if observer is not None and observer.begin(facts):
        watchers.append(observer)
    if statistics is not None:
        statistics.begin(facts)
        watchers.append(statistics)
    return watchers


@dataclass(frozen=True)
class PerSample:
    """The directions of a batch's units before clipping: **not to be shared**.

    Attributes:
        non_private_norms: [U], in the order of the units.
        non_private_gradients: by parameter, [U, *shape].
    """

    non_private_norms: Tensor
    non_private_gradients: Params

    @classmethod
    def joined(cls, parts: Sequence[PerSample], units: Tensor) -> PerSample:
        """Join physical batches, which hold the ``units`` [U] in this order."""
        gradients = [part.non_private_gradients for part in parts]
        place = units.argsort()
        return cls(
            torch.cat([part.non_private_norms for part in parts])[place],
            {name: torch.cat([g[name] for g in gradients])[place] for name in gradients[0]},
        )


def each(directions: PerSampleDirections) -> PerSample:
    """Materialise the directions of one physical batch: one weighted sum per unit."""
    norms = directions.norms()  # [G, U]
    alone = torch.eye(norms.shape[1], dtype=norms.dtype, device=norms.device)
    sums = [directions.weighted_sum(one.expand_as(norms)) for one in alone]
    gradients = {name: torch.stack([s[name] for s in sums]) for name in sums[0]}
    return PerSample(norms.norm(dim=0), gradients)
