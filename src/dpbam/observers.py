"""What may watch a step of the oracle from inside.

An observer measures, without noise, for the operator only. A joint release publishes statistics of
the same batch with noise of its own; together with the gradient it is one Gaussian event.
:class:`PerSample` holds directions as tensors, for the operator only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dpbam import _validate
from dpbam.distributed import Ranks
from dpbam.engines import PerSampleDirections
from dpbam.methods import Method
from dpbam.params import Params, copied
from dpbam.privacy.clipping import widest_dtype
from dpbam.privacy.noise import Query
from dpbam.privacy.plan import PrivacyPlan


@dataclass(frozen=True)
class StepFacts:
    """What is known before a step.

    Attributes:
        step: its number, from 0.
        lam: lambda at this step.
        previous: the previous private gradient, where the method remembers it.
        sensitivity: C_t, the clipping's at this step; infinite where nothing is clipped.
        shift: by how much theta is shifted for the whole batch during the step (DP-SAT, SAM, DiSK);
            None: it is not.
        in_one_batch: whether the logical batch is computed as one physical batch, by one process.
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
    in_one_batch: bool
    zeros: Callable[[], Params]
    batch_gradient: Callable[[], Params]
    ranks: Ranks


@dataclass(frozen=True)
class Observation:
    """One physical batch of a watched step: **not to be shared**.

    Attributes:
        directions: the engine's handle, for sums, inner products and norms by parameter; it is
            valid during the call.
        ids: [U] the number of each unit: its index in the data set, or what ``units`` named.
        norms: [G, U] of the directions, before the clip.
        factors: [G, U] by which they are multiplied.
    """

    directions: PerSampleDirections
    ids: Tensor
    norms: Tensor
    factors: Tensor

    @property
    def clip_share(self) -> float:
        """The share of units that the clip makes shorter, in any group."""
        return float((self.factors < 1).any(0).double().mean()) if len(self.ids) else 0.0

    def losses(self) -> Tensor:
        """Return the units' losses at theta (shifted, where the method shifts it), [U].

        They are of the same pass: no further one is made.
        """
        return self.directions.losses()

    def layer_norms(self) -> dict[str, Tensor]:
        """Return the norms of the directions by layer, [U] each; computed when asked for."""
        squares: dict[str, Tensor] = {}
        for name, norms in self.directions.parameter_norms().items():
            layer = layer_of(name)
            squares[layer] = squares.get(layer, torch.zeros_like(norms)) + norms**2
        return {layer: total.sqrt() for layer, total in squares.items()}


class Observer(Protocol):
    """Measures steps. What it sees is not protected by privacy: do not share it.

    Of several ranks each has the same observers, which see the units of their rank.
    """

    wants_plain: bool

    def begin(self, facts: StepFacts) -> bool:
        """Return whether to watch the step, before theta is shifted. Sets ``wants_plain``.

        The answer depends on public facts, so that it is the same on every rank.
        """

    def observe(self, batch: Observation) -> None:
        """Receive each physical batch of a watched step."""

    def finish(self, clipped: Params, released: Params) -> None:
        """Receive the clipped sum, and the released gradient (noised, divided), once per step.

        Both are of all ranks.
        """


class TrainingLoss:
    """Measures the mean training loss of each batch, in the pass of the step itself.

    It is not protected by privacy: do not share it.

    Args:
        every: steps between measurements; the first step is measured.

    Attributes:
        non_private_losses: the mean over the units of each measured batch, in the model's present
            mode and with its augmentations; NaN for an empty batch.

    Example:
        >>> from dpbam import PrivateGradientOracle
        >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
        >>> plan = PrivacyPlan(n=20, batch_size=5, steps=3, noise_multiplier=1.0, delta=1e-3)
        >>> watched = TrainingLoss()
        >>> oracle = PrivateGradientOracle(torch.nn.Linear(2, 2), loss, plan, observers=watched)
        >>> for batch in oracle.batches((torch.randn(20, 2), torch.zeros(20).long())):
        ...     oracle.backward(*batch)
        >>> len(watched.non_private_losses)
        3
    """

    wants_plain = False

    def __init__(self, every: int = 1) -> None:
        self.every = _validate.count("every", every)
        self.non_private_losses: list[float] = []
        self._ranks, self._units = Ranks(), 0
        self._sums: list[Tensor] = []  # of each physical batch, on the device

    def begin(self, facts: StepFacts) -> bool:
        self._ranks, self._units, self._sums = facts.ranks, 0, []
        return facts.step % self.every == 0

    def observe(self, batch: Observation) -> None:
        losses = batch.losses()
        self._sums.append(losses.to(widest_dtype(losses)).sum())
        self._units += len(batch.ids)

    def finish(self, clipped: Params, released: Params) -> None:
        # read once per step: a read per physical batch would let a GPU wait each time
        sums, self._sums = self._sums, []
        here = float(torch.stack(sums).sum()) if sums else 0.0
        total, units = self._ranks.sums(here, self._units)
        self.non_private_losses.append(total / units if units else math.nan)


class JointRelease(Protocol):
    """Publishes statistics of the batch, with noise, next to its gradient.

    Guarantee asked of an implementation: each of the :meth:`sums` comes with the standard deviation
    sigma_k times that sum's sensitivity. The mechanism adds the noise, from a stream for each sum.
    Gradient and sums are then one Gaussian mechanism on the concatenated, rescaled sums: with

        1 / sigma_joint^2 = 1 / sigma^2 + sum_k 1 / sigma_k^2

    its noise multiplier is sigma_joint, and it is charged once, by the plan. Two charges, each with
    its own Poisson sample, would be too low: the batch is the same one.
    """

    noise_multipliers: tuple[float, ...]

    def begin(self, facts: StepFacts) -> None:
        """Reset the sums: before each step, and once more if it is refused."""

    def observe(self, batch: Observation) -> None:
        """Receive each physical batch."""

    def sums(self) -> dict[str, tuple[Params, float]]:
        """Return the step's sums over this rank's units, by name, each with its noise's std."""

    def publish(self, released: dict[str, Params]) -> None:
        """Receive the sums by name, of all ranks and noised, with the step on the ledger."""


@dataclass
class Watch:
    """Those that watch one step: observers, and the joint release.

    Attributes:
        observers: those that watch this step.
        statistics: the joint release, if any.
        ids: [U] of all units of this rank, in the order of the physical batches.
        discard: lets go of the sums of a joint release, when the step was refused.
    """

    observers: Sequence[Observer]
    statistics: JointRelease | None
    ids: Tensor
    discard: Callable[[], None] = lambda: None
    _seen: int = 0
    _clipped: Params = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        facts: StepFacts,
        observers: Sequence[Observer],
        statistics: JointRelease | None,
        ids: Tensor,
    ) -> Watch:
        """Begin a step, and return those that watch it."""
        watching = [observer for observer in observers if observer.begin(facts)]
        if statistics is None:
            return cls(watching, None, ids)
        statistics.begin(facts)
        return cls(watching, statistics, ids, discard=partial(statistics.begin, facts))

    @property
    def wants_plain(self) -> bool:
        """Whether an observer asks for the plain gradients of the same pass."""
        return any(observer.wants_plain for observer in self.observers)

    def observe(self, directions: PerSampleDirections, norms: Tensor, factors: Tensor) -> None:
        """Show one physical batch to each, as copies: none changes what the next one sees."""
        if not self.observers and self.statistics is None:
            return
        end = self._seen + norms.shape[1]
        ids, self._seen = self.ids[self._seen : end], end
        watchers: list[Observer | JointRelease] = [*self.observers]
        if self.statistics is not None:
            watchers.append(self.statistics)
        for watcher in watchers:
            watcher.observe(Observation(directions, ids.clone(), norms.clone(), factors.clone()))

    def copy_sum(self, clipped: Params) -> None:
        """Copy the clipped sum for the observers, if there are any."""
        if self.observers:
            self._clipped = copied(clipped)

    def queries(self) -> dict[str, Query]:
        """Return the sums of the joint release, by name."""
        sums = {} if self.statistics is None else self.statistics.sums()
        return {name: Query(s, std, f"statistics-{name}") for name, (s, std) in sums.items()}

    def finish(self, released: Mapping[str, Tensor], ranks: Ranks) -> None:
        """Give each observer the clipped sum over all ranks and the released gradient."""
        if not self.observers:
            return
        clipped, self._clipped = ranks.total(self._clipped), {}
        for observer in self.observers:
            observer.finish(copied(clipped), copied(released))


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
    def joined(cls, batches: Sequence[PerSample], units: Tensor) -> PerSample:
        """Join physical batches, which hold the ``units`` [U] in this order."""
        gradients = [batch.non_private_gradients for batch in batches]
        place = units.argsort()
        return cls(
            torch.cat([batch.non_private_norms for batch in batches])[place],
            {name: torch.cat([g[name] for g in gradients])[place] for name in gradients[0]},
        )


def materialise(directions: PerSampleDirections) -> PerSample:
    """Materialise the directions of one physical batch: one weighted sum per unit."""
    norms = directions.norms()  # [G, U]
    one_hot = torch.eye(norms.shape[1], dtype=norms.dtype, device=norms.device)
    sums = [directions.weighted_sum(unit.expand_as(norms)) for unit in one_hot]
    gradients = {name: torch.stack([s[name] for s in sums]) for name in sums[0]}
    return PerSample(norms.norm(dim=0), gradients)


def layer_of(name: str) -> str:
    """Return the module that a parameter belongs to; a bare parameter is its own layer."""
    return name.rpartition(".")[0] or name
