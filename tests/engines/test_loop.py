"""The loop engine: what only it serves, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import make_batch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from dpbam.engines import LoopEngine
from dpbam.engines.base import PhysicalBatch, UnsupportedModelError
from dpbam.methods import BAM, DPSGD, Method
from dpbam.params import Params, add, norm, shifted, unit_vector

LAM = 0.3
SERVED: dict[str, Callable[[], nn.Module]] = {}
ROWS, WIDTH = 4, 6


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def batch_of(rows: int = ROWS, per_unit: int = 1) -> PhysicalBatch:
    x = torch.randn(rows, WIDTH, dtype=torch.float64)
    return make_batch(x, torch.arange(rows) % 3, rows, per_unit)


def served(cls: type[nn.Module]) -> type[nn.Module]:
    SERVED[cls.__name__] = cls
    return cls


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 5), nn.Linear(5, 3)


@served
class Branch(Base):
    """The code that runs depends on the values."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h.tanh()) if float(x.sum()) > 0 else self.second(h.sigmoid() * 2)


@served
class DynamicShape(Base):
    """Keeps as many entries as are positive."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        chosen = h[h > 0]
        return self.second(h.tanh()) * (1 + chosen.square().sum() / (1 + chosen.numel()))


@served
class Checkpointed(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda t: self.first(t).tanh(), x, use_reentrant=False)
        return checkpoint(self.second, h, use_reentrant=False)


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.square() @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * x * (g @ w.t()), x.square().t() @ g


@served
class OldStyleFunction(Base):
    def forward(self, x: Tensor) -> Tensor:
        return OldStyle.apply(self.first(x), self.second.weight.t())


@served
class PackedSequence(Base):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(2, 5, num_layers=2, bidirectional=True, proj_size=4, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        packed = pack_padded_sequence(
            x.view(-1, 3, 2), lengths, batch_first=True, enforce_sorted=False
        )
        _, (last, _) = self.cell(packed)
        return self.head(last[-2:].transpose(0, 1).flatten(1))


@served
class GradientInside(Base):
    """A force: the derivative of an energy by the input is part of the output."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.second(self.first(x).tanh())
        (force,) = torch.autograd.grad(energy.square().sum(), x, create_graph=True)
        return energy + force[:, :3]


@served
class TwoNames(Base):
    """One module registered twice, and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.first
        self.free = nn.Parameter(self.second.weight.detach().clone())
        self.tied = self.free

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x) + self.again(x).tanh(), self.free) * self.tied.exp().sum()


def gradient(model: nn.Module, batch: PhysicalBatch, u: int, theta: Params) -> Params:
    """The gradient of unit u's loss at theta, by autograd on each of its rows alone."""
    named = dict(model.named_parameters())
    with shifted(named, {n: theta[n] - p.detach() for n, p in named.items()}):
        r = batch.rows_per_unit
        rows = range(u * r, (u + 1) * r)
        each = [
            cross_entropy(model(batch.inputs[i : i + 1]), batch.targets[i : i + 1]) for i in rows
        ]
        torch.cat(each).mean().backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    for p in named.values():
        p.grad = None
    return found


def directions(model: nn.Module, batch: PhysicalBatch, method: Method) -> list[Params]:
    handle = LoopEngine(model, cross_entropy).directions(batch, method, LAM)
    return [handle.weighted_sum(row[None]) for row in torch.eye(batch.units, dtype=torch.float64)]


@pytest.mark.parametrize("per_unit", [1, 2], ids=["records", "units"])
@pytest.mark.parametrize("name", SERVED)
def test_directions_equal_the_formulas(name: str, per_unit: int) -> None:
    """g_i; BAM's g_i(theta + lam u); exact BAM with H_i u as a central difference of g_i."""
    model, batch, h = SERVED[name]().double(), batch_of(per_unit=per_unit), 1e-5
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    plain = directions(model, batch, DPSGD())
    ascended = directions(model, batch, BAM(LAM))
    exact = directions(model, batch, BAM(LAM, exact=True))
    for i in range(batch.units):
        g = gradient(model, batch, i, theta)
        u = unit_vector(g)
        there = gradient(model, batch, i, add(theta, u, LAM))
        ahead, back = (gradient(model, batch, i, add(theta, u, step)) for step in (h, -h))
        curvature = {n: (ahead[n] - back[n]) / (2 * h) for n in g}
        torch.testing.assert_close(plain[i], g, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(ascended[i], there, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(exact[i], add(g, curvature, LAM), rtol=1e-5, atol=1e-7)
    for n, p in model.named_parameters():
        assert torch.equal(p, theta[n])
        assert p.grad is None


class Recomputed(torch.autograd.Function):
    """Checkpointing as older libraries do it: ``backward`` inside of backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run, ctx.x = run, x.detach()
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        y.backward(g)
        return None, x.grad


def in_forward(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = run(x)
    y.sum().backward(retain_graph=True)
    return y


@pytest.mark.parametrize("way", ["reentrant", "function", "forward"])
@pytest.mark.parametrize("method", [DPSGD(), BAM(LAM, exact=True)], ids=["DP-SGD", "exact BAM"])
def test_backward_inside_a_pass_is_refused_and_reaches_no_tensor(way: str, method: Method) -> None:
    """A tensor that forward closes over would get the gradient of a record, without noise."""
    outside = torch.ones(1, dtype=torch.float64, requires_grad=True)
    ways: dict[str, Callable[..., Tensor]] = {
        "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
        "function": Recomputed.apply,
        "forward": in_forward,
    }

    class Net(Base):
        def forward(self, x: Tensor) -> Tensor:
            return ways[way](lambda t: self.second(t) * outside, self.first(x).tanh())

    model = Net().double()
    with pytest.raises(UnsupportedModelError, match=r"writes gradients of single records"):
        directions(model, batch_of(), method)
    assert outside.grad is None
    (outside * 2).backward()  # allowed again after the pass
    assert outside.grad is not None
    assert all(p.grad is None for p in model.parameters())


def test_dropout_in_a_checkpointed_segment_is_refused() -> None:
    """Its second draw would not be the first one."""

    class Segment(Base):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(lambda t: F.dropout(self.first(t)), x, use_reentrant=False)
            return self.second(h)

    with pytest.raises(ValueError, match="checkpointing recomputes"):
        directions(Segment().double(), batch_of(), DPSGD())


def test_backward_hooks_act_on_each_record() -> None:
    class Hooked(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model, batch = Hooked().double(), batch_of()
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    wanted = [gradient(model, batch, i, theta) for i in range(ROWS)]
    model.second.register_full_backward_hook(lambda module, gx, gy: (3 * gx[0],))
    for found, g in zip(directions(model, batch, DPSGD()), wanted, strict=True):
        torch.testing.assert_close(found["first.weight"], 3 * g["first.weight"])
        torch.testing.assert_close(found["second.weight"], g["second.weight"])


# --- parameters in the loss; detached ones


class Uncertainty(nn.Module):
    """The model's last parameter weights the loss; nothing in forward uses it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.log_variance = model.log_variance

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (-self.log_variance).exp() * cross_entropy(output, target) + self.log_variance


class WithVariance(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.tensor(0.4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("kind", ["module", "closure", "bound"])
def test_parameters_of_the_loss_are_trained_and_move_with_theta(kind: str) -> None:
    model, batch = WithVariance().double(), batch_of(1)
    weighted = Uncertainty(model)
    losses = {"module": weighted, "closure": lambda o, t: weighted(o, t), "bound": weighted.forward}
    named = dict(model.named_parameters())

    def reference(theta: Params) -> Params:
        with shifted(named, {n: theta[n] - p.detach() for n, p in named.items()}):
            value = weighted(model(batch.inputs), batch.targets).sum()
            return dict(zip(named, torch.autograd.grad(value, named.values()), strict=True))

    theta = {n: p.detach().clone() for n, p in named.items()}
    there = add(theta, unit_vector(reference(theta)), LAM)
    found = LoopEngine(model, losses[kind]).directions(batch, BAM(LAM), LAM, plain=True)
    torch.testing.assert_close(found.weighted_sum(torch.ones(1, 1)), reference(there))
    torch.testing.assert_close(found.plain.weighted_sum(torch.ones(1, 1)), reference(theta))


@pytest.mark.parametrize("how", ["detach", "data", "no_grad"])
def test_detached_uses_move_in_the_ascent_and_are_constants_for_exact_bam(how: str) -> None:
    """L = w sg(w)^2 x: g = w^2 x; at w + lam it is (w + lam)^2 x; exactly, d|g|/dw = 0."""

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def still(self) -> Tensor:
            if how == "no_grad":
                with torch.no_grad():
                    return self.w * 1
            return self.w.detach() if how == "detach" else self.w.data

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * self.still() ** 2 * x)[:, 0]

    x = torch.tensor([[2.0]], dtype=torch.float64)
    batch = make_batch(x, torch.zeros(1), 1)
    engine = LoopEngine(Detached(), lambda output, target: output)
    one = torch.ones(1, 1, dtype=torch.float64)
    for method, wanted in ((BAM(LAM), (1.5 + LAM) ** 2 * 2), (BAM(LAM, exact=True), 1.5**2 * 2)):
        found = engine.directions(batch, method, LAM).weighted_sum(one)["w"]
        assert float(found) == pytest.approx(wanted, rel=1e-12)


def test_a_zero_gradient_gets_no_penalty_and_no_nan() -> None:
    class Flat(Base):
        def forward(self, x: Tensor) -> Tensor:
            return (self.first(x) * 0).norm(dim=1)

    model, batch = Flat().double(), batch_of()
    for method in (BAM(LAM), BAM(LAM, exact=True)):
        handle = LoopEngine(model, lambda o, t: o.square()).directions(batch, method, LAM)
        assert torch.equal(handle.norms(), torch.zeros(1, ROWS, dtype=torch.float64))


def test_custom_method_is_supported_and_one_with_jvp_refused() -> None:
    class Mixture(Method):
        def direction(self, grad: Any, theta: Params, lam: float) -> Params:
            g = grad(theta)
            return add(g, grad(add(theta, unit_vector(g), lam)), 1.0)

    class ForwardMode(Method):
        def direction(self, grad: Any, theta: Params, lam: float) -> Params:
            return torch.func.jvp(grad, (theta,), (theta,))[1]

    model, batch = TwoNames().double(), batch_of()
    both = directions(model, batch, Mixture(LAM))
    parts = directions(model, batch, DPSGD()), directions(model, batch, BAM(LAM))
    for found, g, there in zip(both, *parts, strict=True):
        torch.testing.assert_close(found, add(g, there))
    with pytest.raises(UnsupportedModelError, match="computed_as"):
        directions(model, batch, ForwardMode(LAM))


def test_ascent_inside_autocast_does_not_use_cached_weights() -> None:
    """Autocast keeps the weights' casts until it ends; the values underneath have changed."""

    class Plain(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh()).double()

    model, batch = Plain().float(), batch_of()
    batch = make_batch(batch.inputs.float(), batch.targets, ROWS)
    with torch.autocast("cpu", torch.bfloat16):
        outer = directions(model, batch, BAM(3.0))
    forward = model.forward

    def fresh(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return forward(x)

    model.forward = fresh  # type: ignore[method-assign]
    for a, b in zip(outer, directions(model, batch, BAM(3.0)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# --- the handle


def test_the_handle_agrees_with_its_directions() -> None:
    model, batch = Branch().double(), batch_of()
    groups = {n: int(n.startswith("second")) for n, _ in model.named_parameters()}
    handle = LoopEngine(model, cross_entropy, groups).directions(batch, DPSGD(), 0.0)
    each = directions(model, batch, DPSGD())
    vector = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    for i, d in enumerate(each):
        for group, layer in enumerate(("first", "second")):
            wanted = norm({n: t for n, t in d.items() if n.startswith(layer)})
            torch.testing.assert_close(handle.norms()[group, i], wanted)
        torch.testing.assert_close(
            handle.inner(vector)[i], sum((d[n] * vector[n]).sum() for n in d)
        )
        for n, t in d.items():
            torch.testing.assert_close(handle.parameter_norms()[n][i], t.norm())
