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
from dpbam.params import Params, Snapshot


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


def _materialise(directions: PerSampleDirections) -> PerSample:
    """Materialise the directions of one physical batch: one weighted sum per unit."""
    norms = directions.norms()  # [G, U]
    one_hot = torch.eye(norms.shape[1], dtype=norms.dtype, device=norms.device)
    sums = [directions.weighted_sum(unit.expand_as(norms)) for unit in one_hot]
    gradients = {name: torch.stack([s[name] for s in sums]) for name in sums[0]}
    return PerSample(norms.norm(dim=0), gradients)


class Movement:
    """Notices trained parameters that no optimiser moves, though they get a private gradient."""

    def __init__(self) -> None:
        self._written: Snapshot | None = None  # the parameters when ``.grad`` was written
        self._warned = False

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Remember the parameters as they are now."""
        self._written = Snapshot(parameters)

    def forget(self) -> None:
        self._written = None

    def unmoved(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Return the names of those that are as they were."""
        return [] if self._written is None else self._written.unmoved(parameters)

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
