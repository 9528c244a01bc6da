"""The interface between the oracle and its engines.

An engine need not materialise per-unit directions; the fused engine seldom does. It returns a
handle, :class:`PerSampleDirections`. Clipping is a pure function from the handle's norms to
factors, and the clipped sum is the handle's weighted sum.

Shapes: U units of privacy with R rows each (views and records), N = U R rows, G clipping groups. A
unit's loss is the mean over its rows, so that augmentation multiplicity and several records per
patient are the same: a unit with more than one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dpbam.errors import ArgumentError, ArgumentTypeError, DPBAMError
from dpbam.methods import Method
from dpbam.params import Params

Loss = Callable[[Any, Any], Tensor]


class UnsupportedModelError(DPBAMError, ValueError):
    """An engine does not support this method on this model; the message gives the reason."""


class StatefulModelError(DPBAMError, ValueError):
    """A forward pass changes state that a later one could read; the message names it."""


@dataclass(frozen=True)
class PhysicalBatch:
    """Whole units of one logical batch, [U R, ...]: small enough to compute at once.

    All units have the same number of rows, and the rows of a unit follow one another: row n belongs
    to unit n // R. A unit's loss is the mean over its rows.

    Attributes:
        inputs: a tensor, or a tuple or dict of tensors; leading axis U R. A tuple is passed to the
            model as positional arguments, a dict as keywords.
        targets: likewise.
        units: U.
        keys: [U R] int64, on which a row's random draws depend, or a function that returns them.
        rows_per_unit: R.
    """

    inputs: Any
    targets: Any
    units: int
    keys: Tensor | Callable[[], Tensor]
    rows_per_unit: int = 1

    @property
    def rows(self) -> int:
        """U R."""
        return self.units * self.rows_per_unit

    def total(self, losses: Tensor) -> Tensor:
        """Return sum_u L_u of the rows' losses [U R] (or, for one unit, L_u of [R]): scalar."""
        r = self.rows_per_unit
        return (losses if r == 1 else losses * (1 / r)).sum()

    def row_keys(self) -> Tensor:
        """Return the keys of the rows."""
        return self.keys if isinstance(self.keys, Tensor) else self.keys()


class PerSampleDirections(Protocol):
    """The directions d_1 .. d_U of one physical batch, possibly never materialised."""

    def norms(self) -> Tensor:
        """Return |d_i| by clipping group, [G, U]: float32 or better, non-finite where d_i is."""

    def weighted_sum(self, factors: Tensor, span: slice | None = None) -> Params:
        """Return sum_i factors[g, i] * d_i for each parameter of group g; factors [G, U].

        A factor of exactly 0 removes the unit, even one that is NaN or infinite. Sums are float32
        or better.

        Args:
            factors: [G, U].
            span: units outside of which all factors are 0, if the caller knows: then the device
                need not be asked which are.
        """

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Return <d_i, vector>, for measurements, not to be shared: [U]."""

    def parameter_norms(self) -> dict[str, Tensor]:
        """Return the norms of d_i's entries by parameter, for measurements: [U] each."""

    def losses(self) -> Tensor:
        """Return the units' losses at theta, of the same pass, for measurements: a new [U].

        NaN for a method of the user's own that never asks for the gradient at theta.
        """

    @property
    def plain(self) -> PerSampleDirections | None:
        """The plain gradients g_i of the same pass if requested, for measurements."""


class Engine(Protocol):
    """Compute directions for one model and loss."""

    @property
    def name(self) -> str:
        """The name by which a user selects it."""

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> PerSampleDirections:
        """Return the directions of ``method`` at the model's present parameters.

        Args:
            batch: whole units.
            method: defines a direction.
            lam: its lambda at this step.
            plain: also keep the plain gradients, for measurements.

        Raises:
            UnsupportedModelError: if this engine does not support the method or the model.
            StatefulModelError: if a forward pass leaves state that the next could read.
        """


def check_direction(direction: object, theta: Mapping[str, Tensor]) -> None:
    """Refuse a unit's direction that has not the names and shapes of theta, or is not real.

    Guarantee: the norm of a direction is that of what is added to the sum. An entry of another
    shape would be broadcast there: a scalar per parameter then moves the sum by sqrt(d) times its
    norm.

    Assumptions: an engine calls it for every direction that a method's code returns.

    Proof: equal names and shapes, so that adding broadcasts nothing.
    """
    if not isinstance(direction, Mapping) or set(direction) != set(theta):
        names = sorted(map(str, direction)) if isinstance(direction, Mapping) else direction
        raise ArgumentError(
            "a method's direction must return a dict with an entry for each trained parameter, "
            f"{sorted(theta)}, got {names}"
        )
    for name, d in direction.items():
        if not isinstance(d, Tensor) or not d.is_floating_point() or d.shape != theta[name].shape:
            kind = f"{d.dtype} {tuple(d.shape)}" if isinstance(d, Tensor) else type(d).__name__
            raise ArgumentError(
                f"a method's direction must have the shapes of the parameters: {name} is "
                f"{theta[name].dtype} {tuple(theta[name].shape)}, its direction {kind}"
            )


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Return model(x), model(*tuple) or model(**dict)."""
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs)


def per_row_loss(loss: Loss, output: Any, targets: Any, rows: int) -> Tensor:
    """Return the loss as [rows]."""
    return check_losses(loss(output, targets), rows)


def check_losses(values: object, rows: int) -> Tensor:
    """Return what a loss returned, or refuse what is not [rows]."""
    if not isinstance(values, Tensor):
        raise ArgumentTypeError(f"the loss must return a tensor, got {type(values).__name__}")
    if values.shape == (rows,):
        return values
    if values.ndim == 0:
        raise ArgumentError(
            "the loss returned a scalar, but private training needs one value per sample: pass "
            "reduction='none', for example torch.nn.CrossEntropyLoss(reduction='none')"
        )
    raise ArgumentError(
        f"the loss must return one value per sample, shape ({rows},), got {tuple(values.shape)}: "
        "reduce the other axes, for example with .flatten(1).mean(1)"
    )
