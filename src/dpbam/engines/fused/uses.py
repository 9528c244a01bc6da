"""Uses: where a parameter is used, and the per-unit gradient that each use contributes.

With x the input, y the output and L_BAO = L + p |g| (or L alone), a unit's gradient is

    plain   d/dtheta <b, f(theta, x)>                                    b = dL/dy
    BAM     d/dtheta [ <ybar, f(theta, x)> + <hbar, vjp_x f(b)> ]        ybar = dL_BAO/dy,
                                                                         hbar = dL_BAO/dh, h = dL/dx

For a bilinear layer vjp_x f(b) is f's transpose, so the second term is <b, f(theta, hbar)>: the
same expression with (hbar, b) in the place of (x, b). A :class:`Flow` supplies these pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.fused.bilinear import Layer, Pair, Purpose
from dpbam.engines.fused.fold import Fold, reduce_to
from dpbam.engines.fused.weights import Weight
from dpbam.params import Params

Values = Sequence[Tensor | None]


@dataclass(frozen=True)
class Flow:
    """The values at every node after one backward pass (plain) or two (BAM), folded on demand.

    Attributes:
        fold: rows to units.
        x: at the inputs.
        b: dL/dy at the outputs.
        limit: bytes that one norm may take.
        purpose: what follows the norms.
        ybar: dL_BAO/dy at the outputs, or None for plain gradients.
        hbar: dL_BAO/dh at the inputs.
        third_term: for BAM, returns (p / |g_u|) g_u of materialised parameters, by their names.
    """

    fold: Fold
    x: Values
    b: Values
    limit: int
    purpose: Purpose = "sum"
    ybar: Values | None = None
    hbar: Values | None = None
    third_term: Callable[[tuple[str, ...]], Params] | None = None

    def detach(self, purpose: Purpose = "sum") -> Flow:
        """Return the same values without the graph, so that it can be freed."""
        return replace(
            self, x=_bare(self.x), b=_bare(self.b), purpose=purpose,
            ybar=None if self.ybar is None else _bare(self.ybar),
            hbar=None if self.hbar is None else _bare(self.hbar),
        )  # fmt: skip

    def pairs(self, k: int, j: int) -> list[Pair | None]:
        """Return (x, b) and None; or for BAM (x, ybar) and (hbar, b); each [U, R, *row]."""
        x, right = self.x[k], self.right(j)
        assert x is not None
        first = None if right is None else (self.fold(x), right)
        hbar, b = None if self.hbar is None else self.hbar[k], self.b[j]
        if hbar is None or b is None:
            return [first, None]
        return [first, (self.fold(hbar), self.fold(b))]

    def right(self, j: int) -> Tensor | None:
        """Return the gradient at y: b, or ybar for BAM; None if the loss does not depend on y."""
        value = (self.b if self.ybar is None else self.ybar)[j]
        return None if value is None else self.fold(value)


def _bare(values: Values) -> Values:
    return [t if t is None or not t.requires_grad else t.detach() for t in values]


class Use:
    """One use of one or several parameters."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        raise NotImplementedError

    @property
    def factorable(self) -> MatrixUse | None:
        """The use itself, if its gradient can stay factored."""
        return None

    def materialise(self, flow: Flow) -> Params:
        """Return what this use adds to the units' gradients: [U, *shape] per parameter."""
        raise NotImplementedError

    def begin_second_pass(self) -> None:
        """Prepare for the second backward pass."""

    def end_second_pass(self) -> None:
        """Forget the graph of the passes."""


class _WeightUse(Use):
    """A use of one weight D."""

    weight: Weight

    @property
    def names(self) -> tuple[str, ...]:
        return self.weight.names

    def _pull(self, gradients: list[Tensor]) -> Params:
        """Return J_s^T of the sum of gradients in D."""
        if not gradients:
            return {}
        total = reduce(torch.add, gradients)
        shape = self.weight.tensor.shape
        if total.shape[1:] != shape:
            total = total.reshape(total.shape[0], *shape)
        return self.weight.pull_each(total)


@dataclass(frozen=True)
class MatrixUse(_WeightUse):
    """y = f(D, x) for a bilinear layer; ``swap``: x and y are exchanged (transposed)."""

    weight: Weight
    layer: Layer
    x: int
    y: int
    swap: bool = False

    @property
    def factorable(self) -> MatrixUse | None:
        # a weight that is computed in low precision rounds each unit's gradient, never their sum
        return None if len(self.names) != 1 or self.weight.narrow else self

    def pairs(self, flow: Flow) -> list[Pair | None]:
        """Return the flow's pairs in the layer's form: their outer products sum to G_u."""
        pairs: list[Pair | None] = []
        for pair in flow.pairs(self.x, self.y):
            if pair is not None:
                a, b = reversed(pair) if self.swap else pair
                pair = self.layer.left_form(a), self.layer.right_form(b)
            pairs.append(pair)
        return pairs

    def materialise(self, flow: Flow) -> Params:
        """Return J_s^T sum over the pairs of b (x) a."""
        if flow.third_term is not None and self.weight.scaled:
            raise UnsupportedModelError(
                f"{self.names[0]} is standardised with a scale, and used in low precision or in "
                "other ways too"
            )
        pairs = [pair for pair in self.pairs(flow) if pair is not None]
        return self._pull([self.layer.materialise(a, b) for a, b in pairs])


class Bias(NamedTuple):
    """The value of a layer's bias, if it has one, and its weight, if it is trained."""

    value: Tensor | None
    weight: Weight | None


@dataclass(frozen=True)
class SumUse(_WeightUse):
    """y = D + ..., D broadcast as ``shape`` against a row of y: biases, shifts, positions."""

    weight: Weight
    shape: tuple[int, ...]
    y: int

    def materialise(self, flow: Flow) -> Params:
        """Return J_s^T sum_t b_t: the factor of D is the constant 1, which has no second use."""
        b = flow.right(self.y)
        return {} if b is None else self._pull([reduce_to(b, self.shape)])


@dataclass(frozen=True)
class ScaleUse(_WeightUse):
    """y = D * x + ..., D broadcast as ``shape`` against a row of x: norm scales, layer scales."""

    weight: Weight
    shape: tuple[int, ...]
    x: int
    y: int

    def materialise(self, flow: Flow) -> Params:
        """Return J_s^T sum_t b_t a_t, entry by entry."""
        pairs = [pair for pair in flow.pairs(self.x, self.y) if pair is not None]
        return self._pull([reduce_to(a * b, self.shape) for a, b in pairs])


@dataclass
class RecordedUse(_WeightUse):
    """A layer that records its parameters' gradients itself, during the backward passes.

    ``plain`` holds those of the first pass, ``second`` those of the second, each [N, *, *D].
    """

    weight: Weight
    plain: list[Tensor] = field(default_factory=list)
    second: list[Tensor] | None = None

    def record(self, gradient: Tensor) -> None:
        """Add the gradient of every row; called by the layer's backward."""
        (self.plain if self.second is None else self.second).append(gradient)

    def begin_second_pass(self) -> None:
        self.second = []

    def end_second_pass(self) -> None:
        # a layer that holds its own graph would never be freed
        self.plain = [gradient.detach() for gradient in self.plain]

    def materialise(self, flow: Flow) -> Params:
        """Return what was recorded, summed over a unit's rows."""
        recorded = self.plain if flow.ybar is None else self.second or []
        shape = tuple(self.weight.tensor.shape)
        return self._pull([reduce_to(flow.fold(t), shape) for t in recorded])
