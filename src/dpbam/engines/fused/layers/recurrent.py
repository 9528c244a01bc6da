"""LSTM layers: the steps of one layer in one direction as one function, for all rows at once.

With z_t = W_ih x_t + b_ih, computed before for all t, and c = c_t, c_ = c_{t-1}:

    a_t = z_t + W_hh h_{t-1} + b_hh
    i, f, o = sigmoid, g = tanh of their quarters of a_t
    c = f c_ + i g,    h_t = o tanh(c)

Backward, with dh = dL/dh_t in all and e = dL/dc by later steps, both [hidden]:

    A = o (1 - tanh(c)^2)                                     dc = e + dh A
    R = [g i(1-i)   c_ f(1-f)   i(1-g^2)   0             f]
    P = A R + [0    0           0          tanh(c) o(1-o) 0]
    [da_t  e_{t-1}] = dh P + e R,    dh_{t-1} = dL/dh_{t-1} + da_t W_hh

P and R are computed for many t at once, so that a step takes three kernels. da_t = dL/dz_t is also
the gradient at W_hh h_{t-1} + b_hh: the uses of W_hh and b_hh are those of one layer with T
positions, whose input is h_{t-1} and whose output's gradient is that of z.

For exact BAM, let v be the gradient of L_BAO at da. Those at dh and e, lambda and mu, are the
tangents of h and c_ in direction v:

    w_t = v_t + W_hh lambda_{t-1},    lambda_t = <P, [w mu]>,    mu_{t+1} = <R, [w mu]>

with inner products over the five blocks; lambda_{t-1} pairs with da_t as hbar of W_hh. The gradient
of <[w mu], dh P + e R> at a and c_ is added to [da e] of the second backward pass, and runs back
with it. For many t at once, with rho = mu_{t+1}, i' = i(1-i) and so on, g' = 1-g^2:

    dc = e + dh A,    k = dL/dc = dh (1 - tanh(c)^2) (o' w_o - 2 tanh(c) o rho)
    at i: i' (dc ((1-2i) g w_i + g' w_g) + k g)         at f: f' (dc ((1-2f) c_ w_f + mu) + k c_)
    at g: g' (dc (i' w_i - 2 g i w_g) + k i)            at c_: dc f' w_f + k f
    at o: o' dh ((1 - tanh(c)^2) rho + (1-2o) tanh(c) w_o)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpbam.engines.batching import apply, is_batched
from dpbam.engines.decomposed.recurrent import lstm_gates, lstm_layer, lstm_steps
from dpbam.engines.fused.bilinear import Pair
from dpbam.engines.fused.fold import cached_slices, split_axis
from dpbam.engines.fused.layers.linear import Linear
from dpbam.engines.fused.rules import Call, bare, ready, rule
from dpbam.engines.fused.tape import COMPOSED, Capture
from dpbam.engines.fused.uses import Flow, MatrixUse, SumUse
from dpbam.engines.precision import full_precision

Product = tuple[Tensor, ...]  # factors [U or 1, in, out]
COMPOSED[lstm_layer] = lstm_steps


@rule(lstm_gates, always=True)
def _lstm_gates(capture: Capture, call: Call) -> Any:
    return capture.all_rows(lstm_gates, *call.args)


@rule(lstm_layer, always=True)
def _lstm_layer(capture: Capture, call: Call) -> Any:
    x, h, c, w_ih, w_hh, b_ih, b_hh, reverse = call.args
    if not _supports(capture, call):
        with capture:
            return lstm_steps(*call.args)
    with capture:
        z = F.linear(x, w_ih, b_ih)
    tape, ascent, what = capture.tape, capture.ascent, capture.name_of(call, w_hh)
    source, shift = capture.weight(w_hh), capture.weight(b_hh)
    layer = Linear(tuple(w_hh.shape))
    moved = ascent is not None and any(capture.weight(w) for w in (w_ih, w_hh, b_ih, b_hh))

    def for_all_rows(x: Tensor, z: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        if reverse:
            x, z = x.flip(1), z.flip(1)
        if source or shift:
            z, j = tape.output(z, what)
        products: list[Product] = [(w_hh.detach().t()[None],)]
        offset, use = bare(b_hh), None
        if source:
            use = HiddenUse(source, layer, len(tape.inputs), j)
            if ascent is not None:
                with full_precision():
                    products = ascent.products(use, len(tape.uses))
        if shift and ascent is not None and (step := ascent.step_of(shift)) is not None:
            offset = (offset + step)[:, None]  # [N, 1, gates]
        hidden = None
        if not moved:
            weights = [t.detach() for t in (w_ih, w_hh, b_ih, b_hh) if t is not None]
            hidden = _hidden_states(x.detach(), h.detach(), c.detach(), weights)
        steps = Steps(products, offset, hidden, None if use is None else use.hbar)
        with full_precision():  # as the moved weights, and as the backward pass
            out, last, _ = apply(Scan, z, h, c, steps)
        if use is not None:
            previous = torch.cat([h.unsqueeze(1), out[:, :-1]], 1)
            tape.input(previous if capture.twice else previous.detach(), what)
            tape.uses.append(use)
        if shift:
            tape.uses.append(SumUse(shift, tuple(shift.tensor.shape), j))
        return (out.flip(1) if reverse else out), last

    return capture.all_rows(for_all_rows, x, z, h, c)


def _supports(capture: Capture, call: Call) -> bool:
    """Whether all rows share trained or frozen weights, and all is of one full precision."""
    x, h, c, w_ih, w_hh, b_ih, b_hh, _ = call.args
    weights = [t for t in (w_ih, w_hh, b_ih, b_hh) if t is not None]
    tensors, source = [x, h, c, *weights], capture.weight(w_hh)
    return (
        all(map(is_batched, (x, h, c)))
        # not a detached parameter, which the ascent step moves, and which only that pass knows
        and all(capture.weight(w) or isinstance(w, nn.Parameter) for w in weights)
        and ready(capture, h, w_hh, b_hh)
        and (source is None or not source.centred)
        and {t.dtype for t in tensors} in ({torch.float32}, {torch.float64})
        and not torch.is_autocast_enabled(x.device.type)
    )


@dataclass(frozen=True)
class HiddenUse(MatrixUse):
    """The use of W_hh by all steps; the second backward pass of exact BAM records its hbar."""

    hbar: list[Tensor] = field(default_factory=list, compare=False)

    def pairs(self, flow: Flow) -> list[Pair | None]:
        if flow.ybar is not None and self.hbar:
            hbar: list[Tensor | None] = [None] * len(flow.x)
            hbar[self.x] = self.hbar[-1]
            flow = replace(flow, hbar=hbar)
        return super().pairs(flow)


class Steps(NamedTuple):
    """What the steps of a layer need besides z and the first state.

    Attributes:
        products: W_hh^T, perhaps moved per unit: a sum of products.
        offset: b_hh, [gates] or [N, 1, gates].
        hidden: h_t of all steps, [T, M, hidden], if known.
        hbar: where the second backward pass puts the hbar of W_hh.
    """

    products: Sequence[Product]
    offset: Tensor | None
    hidden: Tensor | None
    hbar: list[Tensor] | None

    def project(self, total: Tensor, h: Tensor) -> None:
        """Add W_hh h to [M, gates]."""
        for product in self.products:
            _add_product(total, h, product)

    def project_back(self, total: Tensor, da: Tensor) -> None:
        """Add da W_hh to [M, hidden]."""
        for product in self.products:
            _add_product(total, da, [factor.mT for factor in reversed(product)])


def _add_product(total: Tensor, x: Tensor, factors: Sequence[Tensor]) -> None:
    *first, last = factors
    for factor in first:
        x = torch.bmm(_grouped(x, factor), factor)
    _grouped(total, last).baddbmm_(_grouped(x, last), last)


def _grouped(x: Tensor, factor: Tensor) -> Tensor:
    """Return [M, *] by the groups of rows that have a factor of their own."""
    return split_axis(x, 0, (len(factor), -1)) if x.ndim == 2 else x


def _hidden_states(x: Tensor, h: Tensor, c: Tensor, weights: list[Tensor]) -> Tensor:
    """Return h_t by torch's own function, which is one kernel where it has one: [T, M, hidden]."""
    state = h.flatten(0, 1)[None], c.flatten(0, 1)[None]
    with torch.no_grad():
        hidden: Tensor = torch.lstm(
            _by_time(x), state, weights, len(weights) == 4, 1, 0.0, False, False, False
        )[0]
    return hidden


def _by_time(t: Tensor) -> Tensor:
    """Return [N, T, B, *] as a new [T, M, *], M = N B."""
    return t.movedim(1, 0).clone(memory_format=torch.contiguous_format).flatten(1, 2)


def _by_row(t: Tensor, rows: int) -> Tensor:
    """Return [T, M, *] as a new [N, T, B, *]."""
    by_row = split_axis(t, 1, (rows, -1)).movedim(0, 1)
    return by_row.clone(memory_format=torch.contiguous_format)


class States(NamedTuple):
    """What the forward steps leave for the backward ones, each [T, M, *]."""

    gates: Tensor  # sigmoid of a: i, f, -, o
    g: Tensor
    c: Tensor  # with the first: [T + 1, M, hidden]


def _run(z: Tensor, h: Tensor, c: Tensor, steps: Steps) -> tuple[Tensor, States]:
    """Return h_t, [T, M, hidden], and the states."""
    rows, length, batch, width = z.shape
    gates = z.new_empty(length, rows, batch, width)
    if steps.offset is None:
        gates.copy_(z.movedim(1, 0))
    else:
        torch.add(z.movedim(1, 0), steps.offset, out=gates)
    gates = gates.flatten(1, 2)
    size = width // 4
    g, cs = (z.new_empty(length + n, rows * batch, size) for n in (0, 1))
    cs[0] = c.flatten(0, 1)
    i, f, quarter, o = gates.chunk(4, -1)
    if steps.hidden is not None:
        hidden = steps.hidden
        previous = torch.cat([h.flatten(0, 1)[None], hidden[:-1]])
        steps.project(gates.flatten(0, 1), previous.flatten(0, 1))
        torch.tanh(quarter, out=g)
        gates.sigmoid_()
        torch.mul(i, g, out=cs[1:])
        for f_t, last, now in zip(f, cs, cs[1:], strict=False):
            now.addcmul_(f_t, last)
    else:
        hidden, last_h = torch.empty_like(g), h.flatten(0, 1)
        each = zip(gates, i, f, quarter, o, g, cs, cs[1:], hidden, strict=False)
        for a_t, i_t, f_t, quarter_t, o_t, g_t, last, now, h_t in each:
            steps.project(a_t, last_h)
            torch.tanh(quarter_t, out=g_t)
            a_t.sigmoid_()
            torch.mul(f_t, last, out=now).addcmul_(i_t, g_t)
            last_h = torch.mul(o_t, now.tanh(), out=h_t)
    return hidden, States(gates, g, cs)


def _coefficients(states: States, at: slice) -> Tensor:
    """Return P and R of some steps: [T, M, 2, 5, hidden]."""
    gates, g, before, c = (t[at] for t in (states.gates, states.g, states.c[:-1], states.c[1:]))
    i, f, _, o = gates.chunk(4, -1)
    slope_i, slope_f, _, slope_o = torch.addcmul(gates, gates, gates, value=-1).chunk(4, -1)
    one, tanh = g.new_ones(()), c.tanh()
    both = g.new_empty(*g.shape[:2], 2, 5, g.shape[2])
    p, r = both.unbind(2)
    torch.mul(slope_i, g, out=r[:, :, 0])
    torch.mul(slope_f, before, out=r[:, :, 1])
    torch.mul(i, torch.addcmul(one, g, g, value=-1), out=r[:, :, 2])
    r[:, :, 3] = 0
    r[:, :, 4] = f
    torch.mul(r, torch.addcmul(one, tanh, tanh, value=-1).mul_(o).unsqueeze(2), out=p)
    torch.mul(tanh, slope_o, out=p[:, :, 3])
    return both


def _run_back(
    states: States, steps: Steps, dh: Tensor, e: Tensor, source: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return [da_t e_{t-1}], [T, M, 5, hidden], and da_1 W_hh.

    Args:
        states: of the forward steps.
        steps: the products.
        dh: dL/dh_t, in the end in all: [T, M, hidden].
        e: dL/dc of the last step: [M, hidden].
        source: what is added to [da_t e_{t-1}] at each step; it is overwritten.
    """
    d = dh.new_empty(*dh.shape[:2], 5, dh.shape[2]) if source is None else source
    first, e = torch.zeros_like(e), e.unsqueeze(1)
    before, da = [first, *dh[:-1]], d[:, :, :4].flatten(2)
    for at in reversed(cached_slices(d)):
        p, r = _coefficients(states, at).unbind(2)
        each = list(zip(p, r, d[at], da[at], dh[at].unsqueeze(2), before[at], strict=True))
        for p_t, r_t, d_t, da_t, dh_t, dh_before in reversed(each):
            if source is None:
                torch.mul(p_t, dh_t, out=d_t)
            else:
                d_t.addcmul_(p_t, dh_t)
            d_t.addcmul_(r_t, e)
            e = d_t[:, 4:]
            steps.project_back(dh_before, da_t)
    return d, first


def _run_tangent(states: States, steps: Steps, w: Tensor, first: Tensor) -> Tensor:
    """Add W_hh lambda_{t-1} to w, [T, M, gates]; return lambda_{t-1} and mu_t.

    ``first`` and each step of the result are [M, 2, hidden]; the result has one step more than w.
    """
    tangent = torch.cat([first[None], first.new_empty(len(w), *first.shape)])
    for at in cached_slices(w):
        blocks = split_axis(w[at], 2, (4, -1)).unsqueeze(2)
        nows, afters = tangent[:-1][at], tangent[1:][at]
        each = zip(_coefficients(states, at), w[at], blocks, nows, afters, strict=True)
        for both, w_t, blocks_t, now, after in each:
            steps.project(w_t, now[:, 0])
            torch.sum(both[:, :, :4] * blocks_t, 2, out=after)
            after.addcmul_(both[:, :, 4], now[:, 1:])
    return tangent


class Scan(torch.autograd.Function):
    """(z, h, c), [N, T, B, gates] and [N, B, hidden] -> (h_t, [N, T, B, hidden], the last c, _).

    The third result has no values. Its gradient is what :class:`ScanBack` adds to [da e].
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, h: Tensor, c: Tensor, steps: Steps) -> Any:
        hidden, states = _run(z, h, c, steps)
        hidden_by_row, last = _by_row(hidden, len(z)), states.c[-1].view(c.shape).clone()
        source = z.new_empty(1).expand(*hidden.shape[:2], 5, hidden.shape[2])
        ctx.steps, ctx.shapes = steps._replace(hidden=None), (hidden_by_row.shape, c.shape)
        ctx.save_for_backward(*states, source)
        ctx.set_materialize_grads(False)
        return hidden_by_row, last, source

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dc: Tensor | None, source: Tensor | None) -> Any:
        *tensors, no_values = ctx.saved_tensors
        states = States(*tensors)
        dh, dc = (
            states.c.new_zeros(shape) if t is None else t
            for t, shape in zip((dh, dc), ctx.shapes, strict=True)
        )
        if torch.is_grad_enabled():  # a second backward pass follows
            return *apply(ScanBack, dh, dc, no_values, states, ctx.steps), None
        d, first = _run_back(states, ctx.steps, _by_time(dh), dc.flatten(0, 1), source)
        return *_gradients(d, first, dc), None


def _gradients(d: Tensor, first: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients in z, h and c."""
    dz = _by_row(d[:, :, :4].flatten(2), len(c))
    return dz, first.view(c.shape), d[0, :, 4].reshape(c.shape)


class ScanBack(torch.autograd.Function):
    """(dh, dc, the third result of Scan) -> the gradients in z, h and c."""

    @staticmethod
    def forward(
        ctx: Any, dh: Tensor, dc: Tensor, no_values: Tensor, states: States, steps: Steps
    ) -> Any:
        dh = _by_time(dh)
        d, first = _run_back(states, steps, dh, dc.flatten(0, 1), None)
        ctx.steps = steps
        ctx.save_for_backward(*states, d, dh, dc)
        return _gradients(d, first, dc)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, v_h: Tensor, v_c: Tensor) -> Any:
        gates, g, c, d, dh, dc = ctx.saved_tensors
        w, first = _by_time(v), torch.stack([v_h, v_c], 2).flatten(0, 1)
        tangent = _run_tangent(States(gates, g, c), ctx.steps, w, first)
        in_h, in_c = tangent.unbind(2)
        if ctx.steps.hbar is not None:
            ctx.steps.hbar.append(_by_row(in_h[:-1], len(v)))
        e = torch.cat([d[1:, :, 4], dc.flatten(0, 1)[None]])
        source = torch.empty_like(d)
        for at in cached_slices(d):
            values = gates[at], g[at], c[:-1][at], c[1:][at]
            _fill_source(source[at], *values, w[at], in_c[:-1][at], in_c[1:][at], dh[at], e[at])
        return _by_row(in_h[1:], len(v)), in_c[-1].reshape(dc.shape), source, None, None


def _fill_source(
    source: Tensor, gates: Tensor, g: Tensor, before: Tensor, c: Tensor, w: Tensor, mu: Tensor,
    rho: Tensor, dh: Tensor, e: Tensor,
) -> None:  # fmt: skip
    """Fill the gradient of <[w mu], dh P + e R> at a and c_ of some steps: [T, M, 5, hidden]."""
    i, f, _, o = gates.chunk(4, -1)
    w_i, w_f, w_g, w_o = w.chunk(4, -1)
    slopes = torch.addcmul(gates, gates, gates, value=-1)  # i', f', -, o'
    slope_i, slope_f, _, slope_o = slopes.chunk(4, -1)
    i2, f2, _, o2 = (1 - 2 * gates).chunk(4, -1)  # 1-2i, 1-2f, -, 1-2o
    slope_g, tanh = 1 - g * g, c.tanh()
    slope_tanh = 1 - tanh * tanh
    dc = torch.addcmul(e, dh, slope_tanh * o)
    k = dh * slope_tanh * (slope_o * w_o - 2 * tanh * o * rho)
    source[:, :, 0] = slope_i * (dc * (i2 * g * w_i + slope_g * w_g) + k * g)
    source[:, :, 1] = slope_f * (dc * (f2 * before * w_f + mu) + k * before)
    source[:, :, 2] = slope_g * (dc * (slope_i * w_i - 2 * g * i * w_g) + k * i)
    source[:, :, 3] = slope_o * dh * (slope_tanh * rho + o2 * tanh * w_o)
    source[:, :, 4] = dc * slope_f * w_f + k * f
