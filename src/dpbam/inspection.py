"""What the operator may ask of an oracle between two steps. Nothing here is charged or released."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbam.batches import LogicalBatch
from dpbam.compute import Runner
from dpbam.engines import PerSampleDirections
from dpbam.methods import Method
from dpbam.params import HALF, Params


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
    def of(cls, runner: Runner, batch: LogicalBatch, method: Method, lam: float) -> PerSample:
        """Materialise the directions of a logical batch, in the order of its units."""
        batches = [
            _materialise(runner.directions(physical, method, lam))
            for physical in runner.physical(batch)
        ]
        gradients = [each.non_private_gradients for each in batches]
        place = batch.order_as_split().argsort()
        return cls(
            torch.cat([each.non_private_norms for each in batches])[place],
            {name: torch.cat([g[name] for g in gradients])[place] for name in gradients[0]},
        )

    @classmethod
    def of_no_units(cls, theta: Mapping[str, Tensor]) -> PerSample:
        """Return what a batch without units has: norms of shape [0]."""
        gradients = {name: t.detach().new_zeros(0, *t.shape) for name, t in theta.items()}
        return cls(next(iter(gradients.values())).new_zeros(0), gradients)


def _materialise(directions: PerSampleDirections) -> PerSample:
    """Materialise the directions of one physical batch: one weighted sum per unit."""
    norms = directions.norms()  # [G, U]
    one_hot = torch.eye(norms.shape[1], dtype=norms.dtype, device=norms.device)
    sums = [directions.weighted_sum(unit.expand_as(norms)) for unit in one_hot]
    gradients = {name: torch.stack([s[name] for s in sums]) for name in sums[0]}
    return PerSample(norms.norm(dim=0), gradients)


class Movement:
    """Notices trained parameters that no optimiser moves, though they get a private gradient.

    By torch's count of in-place changes; a write through ``.data``, which is not counted, shows in
    the first entry, since a private gradient moves every entry. Good enough for a warning.

    Example:
        >>> w, b = torch.zeros(3), torch.zeros(2)
        >>> movement = Movement()
        >>> movement.begin({"w": w, "b": b})
        >>> _ = w.add_(1)
        >>> movement.unmoved({"w": w, "b": b})
        ['b']
    """

    def __init__(self) -> None:
        self._warned = False
        self._places: list[int] = []  # in memory, of those that have entries
        self._entries: list[Tensor] = []  # views of the first of each
        self._versions: dict[str, int] = {}
        self._first = torch.zeros(0)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_places": [], "_entries": []}  # of a copy, they are elsewhere

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Remember the parameters as they are when ``.grad`` is written."""
        places = [p.data_ptr() for p in parameters.values() if p.numel()]
        if places != self._places:  # the views are made once, not at every step
            self._places, self._entries = places, _first_entries(parameters)
        self._versions = {name: p._version for name, p in parameters.items()}
        self._first = _joined(self._entries)

    def forget(self) -> None:
        self._versions, self._first = {}, torch.zeros(0)

    def unmoved(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Return the names of those that are as they were."""
        still = [n for n, p in parameters.items() if self._versions.get(n) == p._version]
        if not still:  # the usual case: the device is not asked
            return still
        same = (_joined(_first_entries(parameters)) == self._first).tolist()
        names = [name for name, p in parameters.items() if p.numel()]
        moved = {name for name, as_before in zip(names, same, strict=True) if not as_before}
        if not moved & set(still):
            return still
        # Writes go through .data. An entry of half precision may round to what it was, so its
        # parameter cannot be told from one that did not move: better no warning than a wrong one.
        return [n for n in still if n not in moved and parameters[n].dtype not in HALF]

    def warn(self, parameters: Mapping[str, Tensor]) -> None:
        """Warn once if a step of the optimiser has moved some trained parameters, not others."""
        still = [] if self._warned else self.unmoved(parameters)
        if still and len(still) < len(parameters):
            self._warned = True
            warnings.warn(
                f"{len(still)} of {len(parameters)} trained parameters did not move since the "
                f"last step, {still[0]} among them, though they got a private gradient: make the "
                "optimiser after the last change of the model, from "
                "[p for p in model.parameters() if p.requires_grad]",
                stacklevel=3,
            )


def _first_entries(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    return [p.detach().as_strided((1,), (1,)) for p in parameters.values() if p.numel()]


def _joined(entries: list[Tensor]) -> Tensor:
    if len({t.device for t in entries}) > 1:
        entries = [t.to(entries[0].device) for t in entries]
    return torch.cat(entries) if entries else torch.zeros(0)
