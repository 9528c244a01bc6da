"""The seam between the oracle and its engines.

An engine computes per-unit directions without having to hand them over: the fused engine never
forms them. It returns a handle, :class:`PerSampleDirections`; clipping is a pure function from the
handle's norms to factors; the clipped sum is the handle's weighted sum.

Shapes: N rows (views and records), U units of privacy, G clipping groups. A unit's loss is the
weighted mean over its rows, so that augmentation multiplicity and several records a patient are
the same thing: a unit with more than one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dpbam.errors import ArgumentError, ArgumentTypeError, DPBAMError
from dpbam.methods import Method
from dpbam.params import Params

Loss = Callable[[Any, Any], Tensor]


class UnsupportedModelError(DPBAMError, ValueError):
    """This engine cannot compute this method on this model; the message says why."""


class StatefulModelError(DPBAMError, ValueError):
    """A forward pass changes something that a later one could read; the message names it."""


@dataclass(frozen=True)
class PhysicalBatch:
    """Whole units of one logical batch, small enough to compute at once.

    Attributes:
        inputs: a tensor, or a tuple or dict of tensors; leading axis N. A tuple is passed to the
            model as positional arguments, a dict as keywords.
        targets: likewise.
        unit: [N] int64, the unit of each row, 0..U-1, non-decreasing; every unit has a row.
        units: U.
        weights: [N] float, a row's share of its unit's loss; they sum to 1 over a unit.
        keys: [N] int64, what a row's dropout draws hang on.
    """

    inputs: Any
    targets: Any
    unit: Tensor
    units: int
    weights: Tensor
    keys: Tensor

    @property
    def rows_per_unit(self) -> int | None:
        """R if every unit has R rows, else None."""
        n = self.unit.shape[0]
        if n % self.units:
            return None
        expected = torch.arange(self.units, device=self.unit.device)
        same = torch.equal(self.unit, expected.repeat_interleave(n // self.units))
        return n // self.units if same else None


class PerSampleDirections(Protocol):
    """The directions d_1 .. d_U of one physical batch, perhaps never formed."""

    def norms(self) -> Tensor:
        """[G, U] Euclidean norms by clipping group, float32 or better; non-finite where d_i is."""

    def weighted_sum(self, factors: Tensor) -> Params:
        """sum_i factors[g, i] * d_i for each parameter of group g; factors [G, U].

        A factor of exactly 0 removes the unit, even one that is NaN or infinite. Sums are float32
        or better.
        """

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """[U] inner products <d_i, vector>, for measuring (never released)."""

    def parameter_norms(self) -> dict[str, Tensor]:
        """[U] norms of d_i's entries by parameter, for measuring which layers are long."""

    @property
    def plain(self) -> PerSampleDirections | None:
        """The plain gradients g_i of the same pass, if they were asked for (for measuring)."""


class Engine(Protocol):
    """Computes directions for one model and loss."""

    @property
    def name(self) -> str:
        """How a user asks for it."""

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> PerSampleDirections:
        """The directions of ``method`` at the model's present parameters.

        Args:
            batch: whole units.
            method: says what a direction is.
            lam: its lambda at this step.
            plain: keep the plain gradients too, for measuring.

        Raises:
            UnsupportedModelError: if this engine does not know how.
        """


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """model(x), model(*tuple) or model(**dict)."""
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs)


def per_row_loss(loss: Loss, output: Any, targets: Any, rows: int) -> Tensor:
    """The loss as [rows], or an error that teaches."""
    values = loss(output, targets)
    if not isinstance(values, Tensor):
        raise ArgumentTypeError(f"the loss must return a tensor, got {type(values).__name__}")
    if values.shape == (rows,):
        return values
    if values.ndim == 0:
        raise ArgumentError(
            "the loss returned a scalar, but private training needs one value a sample: pass "
            "reduction='none', for example torch.nn.CrossEntropyLoss(reduction='none')"
        )
    raise ArgumentError(
        f"the loss must return one value a sample, shape ({rows},), got {tuple(values.shape)}: "
        "reduce the other axes, for example with .flatten(1).mean(1)"
    )
