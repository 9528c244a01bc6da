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

P and R are computed for all t at once, so that a step takes three kernels. da_t = dL/dz_t is also
the gradient at W_hh h_{t-1} + b_hh: the uses of W_hh and b_hh are those of one layer with T
positions, whose input is h_{t-1} and whose output's gradient is that of z.

For exact BAM, v is the gradient of L_BAO at da. That at dh is the tangent of h in direction v, and
it pairs with da as the hbar of W_hh:

    w_t = v_t + W_hh lambda_{t-1},    lambda_t = <P, [w mu]>,    mu_{t+1} = <R, [w mu]>

with lambda = dL_BAO/dh, mu = dL_BAO/de. That at a and c_ has the source d<[w mu], dh P + e R>,
which autograd computes for all t at once, and runs back through the steps as above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpbam.engines.batching import apply, is_batched
from dpbam.engines.decomposed.recurrent import lstm_gates, lstm_layer, lstm_steps
from dpbam.engines.fused.bilinear import Pair
from dpbam.engines.fused.fold import cached_slices, split_axis
from dpbam.engines.fused.layers.linear import Linear
from dpbam.engines.fused.rules import Call, bare, ready, rule
from dpbam.engines.fused.tape import COMPOSED, Capture
from dpbam.engines.fused.uses import Flow, MatrixUse, SumUse

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
                products = ascent.products(use, len(tape.uses))
        if shift and ascent is not None and (step := ascent.step_of(shift)) is not None:
            offset = (offset + step)[:, None]  # [N, 1, gates]
        hidden = None
        if not moved:
            weights = [t.detach() for t in (w_ih, w_hh, b_ih, b_hh) if t is not None]
            hidden = _hidden_states(x.detach(), h.detach(), c.detach(), weights)
        steps = Steps(products, offset, hidden, None if use is None else use.hbar)
        out, last = apply(Scan, z, h, c, steps, capture.twice)
        if use is not None:
            previous = torch.cat([h.unsqueeze(1), out[:, :-1]], 1)
            tape.input(previous if capture.twice else previous.detach(), what)
            tape.uses.append(use)
        if shift:
            tape.uses.append(SumUse(shift, tuple(shift.tensor.shape), j))
        return (out.flip(1) if reverse else out), last

    return capture.all_rows(for_all_rows, x, z, h, c)


def _supports(capture: Capture, call: Call) -> bool:
    """Whether all rows share weights that are parameters, and all is of one full precision."""
    x, h, c, w_ih, w_hh, b_ih, b_hh, _ = call.args
    tensors = [t for t in (x, h, c, w_ih, w_hh, b_ih, b_hh) if t is not None]
    source = capture.weight(w_hh)
    return (
        all(map(is_batched, (x, h, c)))
        and not any(is_batched(t) for t in tensors[3:])
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


class Coefficients(NamedTuple):
    """P and R: [T, M, 5, hidden]."""

    p: Tensor
    r: Tensor

    @classmethod
    def of(cls, states: States) -> Coefficients:
        gates, g, c = states
        p, r = (g.new_empty(*g.shape[:2], 5, g.shape[2]) for _ in range(2))
        for at in cached_slices(p):
            _fill(p[at], r[at], gates[at], g[at], c[:-1][at], c[1:][at])
        return cls(p, r)


def _fill(p: Tensor, r: Tensor, gates: Tensor, g: Tensor, before: Tensor, c: Tensor) -> None:
    i, f, _, o = gates.chunk(4, -1)
    slope_i, slope_f, _, slope_o = torch.addcmul(gates, gates, gates, value=-1).chunk(4, -1)
    one, tanh = g.new_ones(()), c.tanh()
    torch.mul(slope_i, g, out=r[:, :, 0])
    torch.mul(slope_f, before, out=r[:, :, 1])
    torch.mul(i, torch.addcmul(one, g, g, value=-1), out=r[:, :, 2])
    r[:, :, 3] = 0
    r[:, :, 4] = f
    torch.mul(r, torch.addcmul(one, tanh, tanh, value=-1).mul_(o).unsqueeze(2), out=p)
    torch.mul(tanh, slope_o, out=p[:, :, 3])


def _run_back(
    coefficients: Coefficients, steps: Steps, dh: Tensor, e: Tensor, source: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return [da_t e_{t-1}], [T, M, 5, hidden], plus a source, and da_1 W_hh.

    Args:
        coefficients: P and R; without a source P is overwritten.
        steps: the products.
        dh: dL/dh_t, in the end in all: [T, M, hidden].
        e: dL/dc of the last step: [M, hidden].
        source: what is added to [da_t e_{t-1}] before it runs back; it is overwritten.
    """
    p, r = coefficients
    results = p if source is None else source
    first = torch.zeros_like(e)
    da = results[:, :, :4].flatten(2)
    e = e.unsqueeze(1)
    before = [first, *dh[:-1]]
    each = zip(p, r, results, da, dh.unsqueeze(2), before, strict=True)
    for p_t, r_t, result, da_t, dh_t, dh_before in reversed(list(each)):
        if source is None:
            result.mul_(dh_t)
        else:
            result.addcmul_(p_t, dh_t)
        result.addcmul_(r_t, e)
        e = result[:, 4:]
        steps.project_back(dh_before, da_t)
    return results, first


class Scan(torch.autograd.Function):
    """(z, h, c), [N, T, B, gates] and [N, B, hidden] -> (h_t, [N, T, B, hidden], the last c)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, h: Tensor, c: Tensor, steps: Steps, twice: bool) -> Any:
        hidden, states = _run(z, h, c, steps)
        ctx.steps, ctx.twice = steps._replace(hidden=None), twice
        ctx.save_for_backward(*states, *((z, h, c) if twice else ()))
        return _by_row(hidden, len(z)), states.c[-1].view(c.shape).clone()

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dc: Tensor) -> Any:
        states = ctx.saved_tensors[:3]
        if ctx.twice:
            inputs = ctx.saved_tensors[3:]
            return *apply(ScanBack, dh, dc, *inputs, States(*states), ctx.steps), None, None
        coefficients = Coefficients.of(States(*states))
        results, first = _run_back(coefficients, ctx.steps, _by_time(dh), dc.flatten(0, 1))
        return *_gradients(results, first, dc), None, None


def _gradients(results: Tensor, first: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients in z, h and c."""
    rows = len(c)
    dz = _by_row(results[:, :, :4].flatten(2), rows)
    return dz, first.view(c.shape), results[0, :, 4].reshape(c.shape)


class ScanBack(torch.autograd.Function):
    """(dh, dc, z, h, c) -> the gradients of Scan in z, h and c."""

    @staticmethod
    def forward(
        ctx: Any, dh: Tensor, dc: Tensor, z: Tensor, h: Tensor, c: Tensor, states: States,
        steps: Steps,
    ) -> Any:  # fmt: skip
        p, r = Coefficients.of(states)
        dh_all, e = _by_time(dh), dc.flatten(0, 1)
        results, first = _run_back(Coefficients(p, r), steps, dh_all, e, r.new_zeros(r.shape))
        ctx.steps = steps
        ctx.save_for_backward(*states, p, r, results, dh_all, dc)
        return _gradients(results, first, dc)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, v_h: Tensor, v_c: Tensor) -> Any:
        *states, p, r, results, dh, dc = ctx.saved_tensors
        length, rows_of_all, _, size = p.shape
        tangent = p.new_empty(length + 1, rows_of_all, 5, size)  # w and mu
        tangent[:-1, :, :4] = split_axis(_by_time(v), 2, (4, size))
        tangent[0, :, 4] = v_c.flatten(0, 1)
        tangent_h = p.new_empty(length + 1, rows_of_all, size)  # lambda, with the first
        tangent_h[0] = v_h.flatten(0, 1)
        w = tangent[:, :, :4].flatten(2)
        for t in range(length):
            ctx.steps.project(w[t], tangent_h[t])
            torch.sum(p[t] * tangent[t], 1, out=tangent_h[t + 1])
            torch.sum(r[t] * tangent[t], 1, out=tangent[t + 1, :, 4])
        if ctx.steps.hbar is not None:
            ctx.steps.hbar.append(_by_row(tangent_h[:-1], len(v)))
        e = torch.cat([results[1:, :, 4], dc.flatten(0, 1)[None]])
        gates, g, c = states
        source = torch.empty_like(p)
        for at in cached_slices(p):
            source[at] = _source(gates[at], g[at], c[:-1][at], tangent[:-1][at], dh[at], e[at])
        none = torch.zeros_like(dh), torch.zeros_like(e[0])
        second, first = _run_back(Coefficients(p, r), ctx.steps, *none, source)
        in_dc = tangent[-1, :, 4].reshape(dc.shape)
        return _by_row(tangent_h[1:], len(v)), in_dc, *_gradients(second, first, dc), None, None


def _source(gates: Tensor, g: Tensor, c: Tensor, tangent: Tensor, dh: Tensor, e: Tensor) -> Tensor:
    """Return the gradient of <dh, tangent of h> + <e, tangent of c> at a and c_.

    The tangent of a step is that in direction [w mu]; all t at once: [T, M, 5, hidden].
    """
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (*gates.chunk(4, -1), c)]
        i, f, _, o, c = leaves
        leaves[2] = g = g.detach().requires_grad_()
        slopes = [i * (1 - i), f * (1 - f), 1 - g * g, o * (1 - o)]
        of_i, of_f, of_g, of_o = (s * w for s, w in zip(slopes, tangent.unbind(2), strict=False))
        tanh = torch.tanh(f * c + i * g)
        of_c = of_i * g + of_f * c + i * of_g + f * tangent[:, :, 4]
        of_h = of_o * tanh + o * (1 - tanh * tanh) * of_c
        total = (dh * of_h + e * of_c).sum()
    *in_gates, in_c = torch.autograd.grad(total, leaves)
    in_a = [t * slope.detach() for t, slope in zip(in_gates, slopes, strict=True)]
    return torch.stack([*in_a, in_c], 2)
