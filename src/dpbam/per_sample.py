"""Per-sample directions as tensors, for the operator: nothing here is private."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbam.engines import PerSampleDirections
from dpbam.params import Params


@dataclass(frozen=True)
class PerSample:
    """The directions of a batch's units before clipping: **not private**.

    Attributes:
        non_private_norms: [U], in the order of the units.
        non_private_gradients: by parameter, [U, *shape].
    """

    non_private_norms: Tensor
    non_private_gradients: Params

    @classmethod
    def joined(cls, parts: Sequence[PerSample]) -> PerSample:
        """Join the units of several physical batches."""
        gradients = [part.non_private_gradients for part in parts]
        return cls(
            torch.cat([part.non_private_norms for part in parts]),
            {name: torch.cat([g[name] for g in gradients]) for name in gradients[0]},
        )


def each(directions: PerSampleDirections) -> PerSample:
    """Materialise the directions of one physical batch: one weighted sum per unit."""
    norms = directions.norms()  # [G, U]
    alone = torch.eye(norms.shape[1], dtype=norms.dtype, device=norms.device)
    sums = [directions.weighted_sum(one.expand_as(norms)) for one in alone]
    gradients = {name: torch.stack([s[name] for s in sums]) for name in sums[0]}
    return PerSample(norms.norm(dim=0), gradients)
