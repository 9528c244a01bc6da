"""What may watch a step of the oracle from inside: without noise, for the operator only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from dpbam import _validate
from dpbam.distributed import Ranks
from dpbam.engines import PerSampleDirections
from dpbam.methods import Method
from dpbam.params import Params, copied
from dpbam.privacy.clipping import widest_dtype
from dpbam.privacy.plan import PrivacyPlan


@dataclass(frozen=True)
class StepFacts:
    """What is known before a step.

    Attributes:
        step: its number, from 0.
        method: as it is at this step: a copy.
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

    def copy(self) -> StepFacts:
        """Return the same facts, with a method and tensors that nothing else uses."""
        return replace(
            self,
            method=_copied(self.method),
            previous=None if self.previous is None else copied(self.previous),
            shift=None if self.shift is None else copied(self.shift),
        )


def _copied(method: Method) -> Method:
    """Copy a method, so that an observer cannot change what the step uses."""
    try:
        return deepcopy(method)
    except Exception:  # it holds a lock, a file or a generator, which cannot be copied
        return copy(method)


@dataclass(frozen=True)
class UnitFacts:
    """What statistics may use of the units of one physical batch: **not to be shared**.

    Attributes:
        ids: [U] the number of each unit: its index in the data set, or what ``units`` named.
        norms: [G, U] of the directions, before the clip.
        factors: [G, U] by which they are multiplied.
    """

    ids: Tensor
    norms: Tensor
    factors: Tensor
    _handle: PerSampleDirections
    _places: Tensor | None = None  # of the units in the handle, where they are not all of it

    def select(self, places: Tensor) -> UnitFacts:
        """Return the facts of the units at some places alone; a unit may come repeatedly."""
        tensors = self.ids[places.cpu()], self.norms[:, places], self.factors[:, places]
        in_handle = places if self._places is None else self._places[places]
        return UnitFacts(*tensors, self._handle, in_handle)

    @property
    def clip_share(self) -> float:
        """The share of units that the clip makes shorter, in any group."""
        return float((self.factors < 1).any(0).double().mean()) if len(self.ids) else 0.0

    def losses(self) -> Tensor:
        """Return the units' losses at theta (shifted, where the method shifts it), [U].

        They are of the same pass: no further one is made. The tensor is the caller's.
        """
        return self._select(self._handle.losses())

    def layer_norms(self) -> dict[str, Tensor]:
        """Return the norms of the directions by layer, [U] each; computed when asked for."""
        squares: dict[str, Tensor] = {}
        for name, norms in self._handle.parameter_norms().items():
            layer = layer_of(name)
            squares[layer] = squares.get(layer, torch.zeros_like(norms)) + norms.square()
        return {layer: self._select(total.sqrt()) for layer, total in squares.items()}

    def copy(self) -> UnitFacts:
        """Return the same facts, in memory of their own."""
        tensors = self.ids.clone(), self.norms.clone(), self.factors.clone()
        return UnitFacts(*tensors, self._handle, self._places)

    def _select(self, values: Tensor) -> Tensor:
        return values if self._places is None else values[self._places]


@dataclass(frozen=True)
class Observation(UnitFacts):
    """One physical batch of a watched step, with the engine's handle: **not to be shared**."""

    @property
    def directions(self) -> PerSampleDirections:
        """The engine's handle, for sums, inner products and norms by parameter.

        It is valid during the call. Its sums have no noise, so that statistics do not get it.
        """
        return self._handle

    def facts(self) -> UnitFacts:
        """Return the same without the handle's sums."""
        return UnitFacts(self.ids, self.norms, self.factors, self._handle)

    def copy(self) -> Observation:
        """Return the same observation, in memory of its own."""
        tensors = self.ids.clone(), self.norms.clone(), self.factors.clone()
        return Observation(*tensors, self._handle)


def no_units(theta: Mapping[str, Tensor], groups: int) -> UnitFacts:
    """Return the facts of a physical batch without units."""
    nothing = next(iter(theta.values())).new_zeros(0)
    handle: Any = SimpleNamespace(
        losses=lambda: nothing,
        parameter_norms=lambda: {name: t.new_zeros(0) for name, t in theta.items()},
    )
    numbers = nothing.expand(groups, 0)
    return UnitFacts(torch.zeros(0, dtype=torch.int64), numbers, numbers, handle)


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


class Watch:
    """The observers that watch one step.

    Args:
        observers: those that watch this step.
        ids: [U] of all units of this rank, in the order of the physical batches.
    """

    def __init__(self, observers: Sequence[Observer], ids: Tensor) -> None:
        self.observers = observers
        self._ids = ids
        self._seen = 0
        self._clipped: Params = {}

    @property
    def wants_plain(self) -> bool:
        """Whether an observer asks for the plain gradients of the same pass."""
        return any(observer.wants_plain for observer in self.observers)

    def next_ids(self, units: int) -> Tensor:
        """Return [U] the numbers of the next physical batch's units."""
        start, self._seen = self._seen, self._seen + units
        return self._ids[start : self._seen]

    def observe(self, batch: Observation) -> None:
        """Show one physical batch to each, as copies: none changes what the next one sees."""
        for observer in self.observers:
            observer.observe(batch.copy())

    def copy_sum(self, clipped: Params) -> None:
        """Copy the clipped sum for the observers, if there are any."""
        if self.observers:
            self._clipped = copied(clipped)

    def finish(self, released: Mapping[str, Tensor], ranks: Ranks) -> None:
        """Give each observer the clipped sum over all ranks and the released gradient."""
        if not self.observers:
            return
        clipped, self._clipped = ranks.total(self._clipped), {}
        for observer in self.observers:
            observer.finish(copied(clipped), copied(released))


def layer_of(name: str) -> str:
    """Return the module that a parameter belongs to; a bare parameter is its own layer."""
    return name.rpartition(".")[0] or name
