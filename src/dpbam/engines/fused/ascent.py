"""BAM's ascent step without per-sample weights: every unit at theta + (lambda / |g_u|) g_u.

The paper's BAM (Eq. 12) takes a unit's gradient at weights moved along that unit's own gradient.
The moved weights W + eps_u G_u need not be materialised, since G_u = sum_t b_t (x) a_t is known
from the plain pass: on a new input x,

    (W + eps_u G_u) x_s = W x_s + sum_t (eps_u b_t) <a_t, x_s>

a shared layer, a Gram matrix between old and new inputs, and a product. Where T is so large that
the norm materialised G_u, the layer is one whose groups are the units. Parameters whose gradients
are small are moved as they are.

The whole forward pass uses the moved weights: a parameter that the model detaches moves too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.fused.bilinear import Pair
from dpbam.engines.fused.directions import FusedDirections
from dpbam.engines.fused.fold import Fold, per_unit
from dpbam.engines.fused.gradients import Factored, Norm
from dpbam.engines.fused.uses import Bias, MatrixUse
from dpbam.engines.fused.weights import Weight
from dpbam.engines.precision import full_precision
from dpbam.params import Params

_OTHER_STEPS = "the forward pass calls other layers when its parameters move"


class Ascent:
    """The step that the second forward pass adds to each use, from the plain pass.

    ``steps`` [U] is eps_u = lambda / |g_u|, 0 where g_u = 0.
    """

    def __init__(self, plain: FusedDirections, steps: Tensor, fold: Fold) -> None:
        self._plain, self._norms, self._steps = plain.collected, plain.each_norm(), steps
        self._fold = fold
        self._computed: dict[tuple[str, int], tuple[Weight, Tensor]] = {}
        self._scaled: dict[int, list[Pair]] = {}
        self._row_steps: dict[int, tuple[Weight, Tensor | None]] = {}
        self._large = {g.name: g for g in plain.large}
        self._small: Params = {}  # eps_u g_u of joined gradients: [U, *shape]
        for gradient in plain.joined:
            self._small |= gradient.scale_by(steps)
        self._materialised = self._large.keys() | self._small.keys()
        self._factored = {g.name for g in self._plain.factored} - self._materialised

    def matrix(
        self, use: MatrixUse, place: int, x: Tensor, shared: Callable[[], Tensor], bias: Bias,
        channel_axes: int,
    ) -> Tensor:  # fmt: skip
        """Return f(D + eps_u G_u, x) + bias, moved too; ``shared`` computes f(D, x) + bias.

        Args:
            use: the use.
            place: its place on the tape, the same as that of the plain pass.
            x: [N, *row].
            shared: the layer at the present parameters.
            bias: its value, and its weight if it is trained.
            channel_axes: the number of axes of y after its channels.
        """
        gradient, norm = self._gradient_at(place, use)
        same = gradient is not None and gradient.layer.uncentred == use.layer
        by_gram = same and not use.swap and norm is not None and norm.by_gram
        if gradient is None:
            weights = self._step_by_unit(use.weight)
            y = shared() if weights is None else self._add_layer(use, x, shared(), weights)
        elif by_gram:
            y = self._add(shared(), self._by_gram(use, gradient, x))
        elif not same or not use.layer.has_input_gradient:
            with full_precision():
                g = _materialise(gradient, norm)
                weights = g * per_unit(self._steps, g)  # eps_u G_u: [U, *D]
            y = self._add_layer(use, x, shared(), weights)
        else:
            with full_precision():
                g = _materialise(gradient, norm)
            return self._run_moved(use, x, g, bias)
        return y if bias.weight is None else self.shifted(y, bias.weight, channel_axes)

    def products(self, use: MatrixUse, place: int) -> list[tuple[Tensor, ...]]:
        """Return D^T of every unit at D + eps_u G_u as a sum of products: of a linear layer.

        Each factor is [U, in, out], or [1, in, out] where units share it. For a layer that reads
        what it computed before, so that its steps cannot be one call of :meth:`matrix`.
        """
        shared = use.weight.tensor.detach()
        gradient, norm = self._gradient_at(place, use)
        if gradient is None:
            step = self._step_by_unit(use.weight)
            return [((shared[None] if step is None else shared + step).mT,)]
        if norm is not None and norm.by_gram and gradient.layer == use.layer:
            pairs = self._scale_pairs(gradient)
            return [(shared[None].mT,), *((a.mT, b) for a, b in pairs)]
        g = _materialise(gradient, norm)
        return [(self._once("weight", use.weight, lambda: self._move_weight(use.weight, g)).mT,)]

    def _run_moved(self, use: MatrixUse, x: Tensor, g: Tensor, bias: Bias) -> Tensor:
        """Return f(D + eps_u G_u, x) + bias + its step: one layer whose groups are the units."""
        with full_precision():
            weights = self._once("weight", use.weight, lambda: self._move_weight(use.weight, g))
            if bias.weight is None:  # a constant one may differ from use to use
                offset = None if bias.value is None else bias.value.flatten().to(g.dtype)
            else:
                offset = self._once("offset", bias.weight, lambda: self._move_offset(bias, g))
            form = use.layer.right_form if use.swap else use.layer.left_form
            y = use.layer.run_each(form(self._fold(x)), weights, offset, swap=use.swap)
            # a row of y has x's leading axes, then those that the layer computes: channels, space
            axes = len(use.layer.shape) - 1
            row = (*x.shape[1 : x.ndim - axes], *y.shape[y.ndim - axes :])
            return self._fold.undo(y, row).to(x.dtype)

    def _once(self, kind: str, weight: Weight, compute: Callable[[], Tensor]) -> Tensor:
        """Return what was computed for this weight in this pass: a recurrent layer uses it often.

        Weights live as long as the capture of the pass, so that no id is used twice in it.
        """
        key = kind, id(weight)
        if key not in self._computed:
            self._computed[key] = weight, compute()
        return self._computed[key][1]

    def _move_weight(self, weight: Weight, g: Tensor) -> Tensor:
        """Return D + eps_u G_u: [U, *D]."""
        shared = weight.tensor.detach().to(g.dtype)
        return torch.addcmul(shared, g, per_unit(self._steps, g))

    def _move_offset(self, bias: Bias, g: Tensor) -> Tensor:
        """Return a trained bias, plus its step: [out] or [U, out]."""
        assert bias.value is not None
        assert bias.weight is not None
        offset, step = bias.value.flatten().to(g.dtype), self._step_by_unit(bias.weight)
        return offset if step is None else offset + step.flatten(1)

    def _by_gram(self, use: MatrixUse, gradient: Factored, x: Tensor) -> Tensor:
        """Return sum_t (eps_u b_t) <a_t, x_s>."""
        with full_precision():
            pairs = self._scale_pairs(gradient)
            a = use.layer.left_form(self._fold(x))
            return gradient.layer.ascend(a, pairs)

    def _scale_pairs(self, gradient: Factored) -> list[Pair]:
        """Return the pairs of eps_u G_u, computed once per pass."""
        key = id(gradient)  # the plain pass holds it
        if key not in self._scaled:
            self._scaled[key] = [(c, b * per_unit(self._steps, b)) for c, b in gradient.pairs]
        return self._scaled[key]

    def _add_layer(self, use: MatrixUse, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """Return y + f(weights_u, x)."""
        with full_precision():
            if not use.swap:
                a = use.layer.left_form(self._fold(x))
                return self._add(y, use.layer.apply_each(weights, a))
            b = use.layer.right_form(self._fold(x))
            template = use.layer.left_form(self._fold(y))
            return self._add(y, use.layer.transpose_each(weights, b, template))

    def _gradient_at(self, place: int, use: MatrixUse) -> tuple[Factored | None, Norm | None]:
        """Return the plain pass's gradient at this place of the tape, if it is factored."""
        index = self._plain.of_use.get(place)
        if index is None:
            return None, None
        gradient = self._plain.factored[index].as_pairs()
        if gradient.weight.names != use.names:
            raise UnsupportedModelError(_OTHER_STEPS)
        return gradient, self._norms[index]

    def _add(self, y: Tensor, more: Tensor) -> Tensor:
        return y + self._fold.undo(more, y.shape[1:]).to(y.dtype)

    def _step_by_unit(self, weight: Weight) -> Tensor | None:
        """Return eps_u J_s g_u for a linear weight, from materialised gradients: [U, *D]."""
        if not weight.linear:
            raise UnsupportedModelError(f"{weight.names[0]} is moved through a non-linear function")
        if weight.narrow:  # s(theta + step) rounds the sum, not the step
            raise UnsupportedModelError(
                f"{weight.names[0]} is moved through a cast to low precision"
            )
        missing = [n for n in weight.names if n not in self._materialised]
        if self._factored.intersection(missing):
            raise UnsupportedModelError(_OTHER_STEPS)
        if missing:  # the loss does not depend on it
            return None
        moved = {n: self._move(n) for n in weight.names}
        return moved[weight.names[0]] if weight.func is None else vmap(weight.evaluate)(moved)

    def _move(self, name: str) -> Tensor:
        """Return eps_u g_u of a materialised gradient: [U, *shape]."""
        small = self._small.get(name)
        return self._large[name].scale_by(self._steps)[name] if small is None else small

    def step_of(self, weight: Weight) -> Tensor | None:
        """Return eps_u J_s g_u of every row, [N, *D], or None if it does not move."""
        if id(weight) not in self._row_steps:
            step = self._step_by_unit(weight)
            self._row_steps[id(weight)] = weight, None if step is None else self._fold.to_rows(step)
        return self._row_steps[id(weight)][1]

    def shifted(self, y: Tensor, bias: Weight, channel_axes: int) -> Tensor:
        """Return y, [N, *, channels, *], plus the step of the bias."""
        step = self.step_of(bias)
        if step is None:
            return y
        lead = y.ndim - 1 - (step.ndim - 1) - channel_axes
        row = (*(1,) * lead, *step.shape[1:], *(1,) * channel_axes)
        return y + step.reshape(-1, *row).to(y.dtype)

    def parameters(self, theta: Params) -> Params:
        """Return theta + eps_u g_u of every row: [N, *shape]."""
        moved = {}
        for name, value in theta.items():
            step = self._materialise_step(name, value)
            moved[name] = value + self._fold.to_rows(step).to(value.dtype)
        return moved

    def _materialise_step(self, name: str, value: Tensor) -> Tensor:
        """Return eps_u g_u of a parameter, whatever its uses: [U, *shape]."""
        total = value.new_zeros(self._steps.shape[0], *value.shape)
        for gradient in self._plain.factored:
            if gradient.name == name:
                total = total + gradient.by_unit()[name]
        for materialised in self._plain.materialised:
            if materialised.name == name:
                total = total + materialised.values
        return total * per_unit(self._steps, total)


def _materialise(gradient: Factored, norm: Norm | None) -> Tensor:
    """Return G_u, which the norm may have computed: [U, *D]."""
    known = None if norm is None else norm.materialised
    return gradient.materialise() if known is None else known
