"""Sites: where a parameter is used, and the per-unit gradient that each use contributes.

With x the input, y the output and L_BAO = L + p |g| (or L alone), a unit's gradient is

    plain   d/dtheta <b, f(theta, x)>                                    b = dL/dy
    BAM     d/dtheta [ <ybar, f(theta, x)> + <hbar, vjp_x f(b)> ]        ybar = dL_BAO/dy,
                                                                         hbar = dL_BAO/dh, h = dL/dx

For a bilinear layer vjp_x f(b) is f's transpose, so the second term is <b, f(theta, hbar)>: the
same question with (hbar, b) in the place of (x, b). A :class:`Flow` hands a site these pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dpbam.engines.layer_math import Family, reduce_to, split_axis
from dpbam.engines.sources import Source
from dpbam.trees import Params, accumulation_dtype

if TYPE_CHECKING:
    from dpbam.engines.base import PhysicalBatch


@dataclass(frozen=True)
class Layout:
    """Where the N rows are in a tensor: ``axis`` has N * many entries.

    ``minor``: the row is the faster index of the merged axis ([many, N]), else the slower.
    """

    axis: int = 0
    many: int = 1
    minor: bool = False

    def rows_first(self, t: Tensor, rows: int) -> Tensor:
        """[..., N * many, ...] -> [N, many, *rest]."""
        t = t.movedim(self.axis, 0)
        if self.minor:
            return split_axis(t, 0, (self.many, rows)).transpose(0, 1)
        return split_axis(t, 0, (rows, self.many))

    def place(self, t: Tensor) -> Tensor:
        """[N, many, *rest] -> [..., N * many, ...], the way back."""
        merged = t.transpose(0, 1).flatten(0, 1) if self.minor else t.flatten(0, 1)
        return merged.movedim(0, self.axis)


class Fold:
    """Rows to units: [N, ...] -> [U, q, ...], a unit with fewer rows padded with zeros."""

    def __init__(self, batch: PhysicalBatch) -> None:
        self.rows, self.units = batch.unit.shape[0], batch.units
        self._regular, self._unit = batch.rows_per_unit, batch.unit
        self._slot: Tensor | None = None
        if self._regular is None:
            counts = torch.bincount(batch.unit, minlength=batch.units)
            first = counts.cumsum(0) - counts
            place = torch.arange(self.rows, device=batch.unit.device) - first[batch.unit]
            self._most = int(counts.max())
            self._slot = batch.unit * self._most + place

    def __call__(self, t: Tensor, layout: Layout) -> Tensor:
        """[.., N * many, ..] -> [U, q, *rest], q = (most rows of a unit) * many; floats widened."""
        if t.is_floating_point():
            t = t.to(accumulation_dtype(t.dtype))
        return self.by_unit(layout.rows_first(t, self.rows)).flatten(1, 2)

    def undo(self, t: Tensor, layout: Layout) -> Tensor:
        """[U, q, *rest] -> [.., N * many, ..], the way back."""
        rows = split_axis(t, 1, (-1, layout.many)).flatten(0, 1)  # [U * most, many, *rest]
        return layout.place(rows if self._slot is None else rows[self._slot])

    def to_rows(self, t: Tensor) -> Tensor:
        """[U, ...] -> [N, ...]: each row gets its unit's value."""
        return t[self._unit]

    def by_unit(self, t: Tensor) -> Tensor:
        """[N, ...] -> [U, most rows of a unit, ...]."""
        if self._slot is None:
            return split_axis(t, 0, (self.units, self._regular or 1))
        padded = t.new_zeros((self.units * self._most, *t.shape[1:]))
        return split_axis(padded.index_copy(0, self._slot, t), 0, (self.units, self._most))


@dataclass
class Flow:
    """The values at every node in one backward pass (plain) or two (BAM), folded on demand."""

    fold: Fold
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    ndim: list[int]  # of every y
    x: list[Tensor]
    b: list[Tensor | None]
    ybar: list[Tensor | None] | None = None
    hbar: list[Tensor | None] | None = None
    limit: int = 2**28  # bytes that one norm may take

    def detached(self) -> Flow:
        """The same values without the graph, so that it can be freed."""

        def bare(values: list[Any] | None) -> Any:
            return None if values is None else [t if t is None else t.detach() for t in values]

        return replace(
            self, x=bare(self.x), b=bare(self.b), ybar=bare(self.ybar), hbar=bare(self.hbar)
        )

    def pairs(self, x: int, y: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(x, b); or for BAM (x, ybar) and (hbar, b)."""
        left = self.fold(self.x[x], self.inputs[x])
        for right in self.right(y):
            yield left, right
        if self.hbar is None:
            return
        hbar, b = self.hbar[x], self.b[y]
        if hbar is not None and b is not None:
            yield self.fold(hbar, self.inputs[x]), self.fold(b, self.outputs[y])

    def right(self, y: int) -> Iterator[Tensor]:
        """The gradient at y: b, or ybar for BAM; nothing where the loss does not depend on y."""
        values = self.b if self.ybar is None else self.ybar
        value = values[y]
        if value is not None:
            yield self.fold(value, self.outputs[y])


class Site(Protocol):
    """One use of one or several parameters."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters it uses."""

    def instantiate(self, flow: Flow) -> Params:
        """[U, *shape] per parameter: what this use contributes to the units' gradients."""


@dataclass
class MatrixSite:
    """y = f(D, x) for a family of bilinear layers; ``swap``: x and y change places (transposed)."""

    source: Source
    family: Family
    x: int
    y: int
    swap: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters behind D."""
        return self.source.names

    def terms(self, flow: Flow) -> list[tuple[Tensor, Tensor]]:
        """The pairs (a, b) whose outer products sum to G_u."""
        pairs = flow.pairs(self.x, self.y)
        return [(b, a) if self.swap else (a, b) for a, b in pairs]

    def instantiate(self, flow: Flow) -> Params:
        """J_s^T sum over the pairs of b (x) a."""
        parts = [self.family.instantiate(a, b) for a, b in self.terms(flow)]
        return self.source.pull_each(_total(parts)) if parts else {}


@dataclass
class SumSite:
    """y = D + ..., D broadcast as ``shape`` against y: biases, shifts, tokens, positions."""

    source: Source
    shape: tuple[int, ...]
    y: int

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters behind D."""
        return self.source.names

    def instantiate(self, flow: Flow) -> Params:
        """J_s^T sum_t b_t: D met the constant 1, which has no second use."""
        like = _without_rows(self.shape, flow, self.y)
        parts = [reduce_to(b, like) for b in flow.right(self.y)]
        return _pull_each(self.source, parts)


@dataclass
class ScaleSite:
    """y = D * x + ..., D broadcast as ``shape`` against x: norm scales, layer scales."""

    source: Source
    shape: tuple[int, ...]
    x: int
    y: int

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters behind D."""
        return self.source.names

    def instantiate(self, flow: Flow) -> Params:
        """J_s^T sum_t b_t a_t, entry by entry."""
        like = _without_rows(self.shape, flow, self.y)
        parts = [reduce_to(a * b, like) for a, b in flow.pairs(self.x, self.y)]
        return _pull_each(self.source, parts)


@dataclass
class RecordSite:
    """A layer that tells its parameters' per-row gradients itself, during the backward passes.

    ``plain`` gets what the first pass tells, ``second`` what the second one does, each [rows, *D].
    """

    source: Source
    y: int
    plain: list[Tensor] = field(default_factory=list)
    second: list[Tensor] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters behind D."""
        return self.source.names

    def record(self, gradient: Tensor) -> None:
        """Told by the layer."""
        (self.plain if self.second is None else self.second).append(gradient)

    def instantiate(self, flow: Flow) -> Params:
        """What was told, summed over a unit's rows."""
        told = self.plain if flow.ybar is None else self.second or []
        return _pull_each(self.source, [flow.fold(t, flow.outputs[self.y]).sum(1) for t in told])


def _without_rows(shape: tuple[int, ...], flow: Flow, y: int) -> tuple[int, ...]:
    """The shape that broadcasts against y, without the axis of the rows."""
    layout = flow.outputs[y]
    place = layout.axis - (flow.ndim[y] - len(shape))
    return shape if place < 0 else shape[:place] + shape[place + 1 :]


def _pull_each(source: Source, parts: list[Tensor]) -> Params:
    if not parts:
        return {}
    gradient = _total(parts)
    return source.pull_each(gradient.reshape(gradient.shape[0], *source.tensor.shape))


def _total(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
