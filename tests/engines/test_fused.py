"""What the fused engine promises apart from numbers: refusals, NaNs, groups, tidiness."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import METHODS, errors
from reference import make_batch, one_at_a_time
from torch import Tensor, nn

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.fused import FusedEngine
from dpbam.engines.fused.rules import RULES, Call, rule
from dpbam.engines.fused.uses import ScaleUse
from dpbam.methods import BAM, DPSGD, Method

CROSS = nn.CrossEntropyLoss(reduction="none")
EXACT = BAM(0.3, exact=True)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Mish(), nn.Flatten(), nn.Linear(64, 3)
    )


def batch(rows: int = 6, units: Any = 1, x: Tensor | None = None) -> Any:
    x = torch.randn(rows, 2, 4, 4) if x is None else x
    return make_batch(x, torch.arange(rows) % 3, rows, units)


# --- refusals, each by name


class Wrapped(nn.Module):
    """Ordinary code around a linear layer."""

    def __init__(self, code: Any, size: int = 4) -> None:
        super().__init__()
        self.code, self.layer, self.head = code, nn.Linear(4, size), nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.code(self.layer(x)))


MIXING = {
    "mean": lambda x: x - x.mean(0),
    "small mean": lambda x: x - 1e-6 * x.mean(0),
    "softmax over the batch": lambda x: x.softmax(0),
    "neighbour": lambda x: x + x.roll(1, 0),
    "attention over the batch": lambda x: (x @ x.t()).softmax(-1) @ x,
    "no gradient": lambda x: x / (1e-3 + x.detach().abs().mean(0)),
    "flip": lambda x: x.flip(0),
}


@pytest.mark.parametrize("code", MIXING)
@pytest.mark.parametrize("method", METHODS)
def test_models_that_mix_rows_run_on_each_row_alone(code: str, method: str) -> None:
    torch.manual_seed(0)
    model = Wrapped(MIXING[code]).double()
    data = make_batch(torch.randn(5, 4).double(), torch.arange(5) % 3, 5)
    found = errors(FusedEngine(model, CROSS), model, CROSS, data, method)
    assert max(found.values()) < 1e-9, found


def test_operations_within_a_row_are_supported() -> None:
    for code in (lambda x: x - x.mean(1, keepdim=True), lambda x: x.softmax(1), torch.tanh):
        model = Wrapped(code)
        data = make_batch(torch.randn(5, 4), torch.arange(5) % 3, 5)
        assert FusedEngine(model, CROSS).directions(data, EXACT, 0.3).norms().isfinite().all()


class Sequence(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        out = out[0] if isinstance(out, tuple) else out
        return self.head(out.flatten(1)[:, :4])


@pytest.mark.parametrize(
    ("layer", "word"),
    [
        (nn.BatchNorm1d(5, track_running_stats=False), "batch norm"),
        (nn.InstanceNorm1d(5, affine=True, track_running_stats=True), "running"),
    ],
    ids=["batch norm", "instance norm"],
)
def test_batch_norm_and_running_statistics_are_refused_by_name(layer: nn.Module, word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=word):
        FusedEngine(Sequence(layer), CROSS).directions(
            make_batch(torch.randn(5, 5, 4), torch.arange(5) % 3, 5), DPSGD(), 0.0
        )


def test_custom_autograd_function_is_refused() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum(0)

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.hidden = nn.Linear(4, 3), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(Double.apply(x, self.hidden))

    with pytest.raises(UnsupportedModelError, match=r"autograd\.Function"):
        FusedEngine(Hidden(), CROSS).directions(
            make_batch(torch.randn(5, 4), torch.arange(5) % 3, 5), DPSGD(), 0.0
        )


def test_an_input_overwritten_later_is_refused() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).clone()
            y = self.b(x)
            x.mul_(2)
            return self.c(x + y)

    with pytest.raises(UnsupportedModelError, match="in place"):
        FusedEngine(Overwrites(), CROSS).directions(
            make_batch(torch.randn(5, 4), torch.arange(5) % 3, 5), DPSGD(), 0.0
        )


def test_custom_method_is_refused() -> None:
    class Odd(Method):
        name = "odd"

        def direction(self, grad: Any, theta: Any, lam: float) -> Any:
            return grad(theta)

    with pytest.raises(UnsupportedModelError, match="Odd"):
        FusedEngine(net(), CROSS).directions(batch(), Odd(0.1), 0.1)


# --- weights, dtypes, state


def test_frozen_parameters_are_left_out_and_the_model_is_unchanged() -> None:
    model = net()
    model[0].requires_grad_(False)
    before = {n: (p.requires_grad, p.clone()) for n, p in model.named_parameters()}
    handle = FusedEngine(model, CROSS).directions(batch(), EXACT, 0.3)
    total = handle.weighted_sum(torch.ones(1, 6))
    assert set(total) == {"1.weight", "1.bias", "4.weight", "4.bias"}
    for n, p in model.named_parameters():
        assert p.requires_grad == before[n][0]
        assert torch.equal(p, before[n][1])
        assert p.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_failed_forward_leaves_the_model_and_torch_unchanged() -> None:
    model = Wrapped(lambda x: x @ torch.ones(3, 3))
    with pytest.raises(RuntimeError):
        FusedEngine(model, CROSS).directions(
            make_batch(torch.randn(5, 4), torch.arange(5) % 3, 5), DPSGD(), 0.0
        )
    assert all(p.requires_grad for p in model.parameters())
    assert type(F.linear(torch.ones(1, 1), torch.ones(1, 1))) is Tensor


@pytest.mark.parametrize("method", [DPSGD(), EXACT, BAM(0.3)], ids=["dp-sgd", "exact", "ascent"])
def test_bfloat16_activations_have_float32_norms(method: Method) -> None:
    model, data = net(), batch()
    lam = 0.0 if isinstance(method, DPSGD) else 0.3
    full = FusedEngine(model, CROSS).directions(data, method, lam)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = FusedEngine(model, CROSS).directions(data, method, lam)
    assert half.norms().dtype == torch.float32
    torch.testing.assert_close(half.norms(), full.norms(), rtol=0.05, atol=0.0)
    ones = torch.ones(1, 6)
    for name, t in half.weighted_sum(ones).items():
        assert t.dtype == torch.float32
        wanted = full.weighted_sum(ones)[name]
        assert (t - wanted).norm() < 0.1 * wanted.norm() + 1e-3


class Odd(nn.Module):
    """Rows second, rows merged with positions, parameters added in place, rows repeated oddly."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.flat = nn.Linear(4, 4), nn.Linear(4, 4)
        self.token, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3, 1, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # [N, 3, 4]
        n = x.shape[0]
        x = self.mix(x.transpose(0, 1))  # [3, N, 4]
        x += self.shift
        x = torch.tanh(self.flat(x.reshape(3 * n, 4)))  # row is the faster index
        x = x.view(3, n, 4).transpose(0, 1)
        token = self.token.repeat(n, 1, 1)
        x = torch.cat([token, x], 1).flatten(0, 1)  # row is the slower index
        return self.head(torch.tanh(self.flat(x)).view(n, 4, 4).mean(1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [1, 3, 4, 6])  # 3 and 4: sizes that other axes have too
def test_directions_are_right_for_rows_on_any_axis(method: str, rows: int) -> None:
    torch.manual_seed(0)
    model = Odd().double()
    data = make_batch(torch.randn(rows, 3, 4).double(), torch.arange(rows) % 3, rows)
    found = errors(FusedEngine(model, CROSS), model, CROSS, data, method)
    assert max(found.values()) < 1e-9, found


def test_one_engine_computes_batches_of_different_sizes() -> None:
    model = net().double()
    engine = FusedEngine(model, CROSS)
    for rows in (1, 5, 2, 8):
        data = make_batch(torch.randn(rows, 2, 4, 4).double(), torch.arange(rows) % 3, rows)
        found = errors(engine, model, CROSS, data, "bam-exact")
        assert max(found.values()) < 1e-9


@pytest.mark.parametrize("side", [2, 8])
@pytest.mark.parametrize("method", METHODS)
def test_directions_do_not_depend_on_the_memory_limit(method: str, side: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Mish(), nn.Conv2d(4, 4, 3), nn.Flatten()
    )
    if side == 2:
        model[2] = nn.Conv2d(4, 4, 1)
    model = model.double()
    data = make_batch(torch.randn(6, 2, side, side).double(), torch.arange(6) % 3, 6, 2)
    for limit in (1, 3000, 10**9):
        found = errors(FusedEngine(model, CROSS, memory_limit=limit), model, CROSS, data, method)
        assert max(found.values()) < 1e-9, (limit, found)


def test_documented_custom_rule_gives_exact_directions() -> None:
    """The example of the documentation."""

    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        if torch.overrides.has_torch_function((x, weight)):
            return torch.overrides.handle_torch_function(scaled, (x, weight), x, weight)
        return x * weight

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(4, 3), nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return scaled(self.first(x), self.weight).tanh()

    calls = []

    @rule(scaled)
    def _(capture: Any, call: Call) -> Tensor:
        calls.append(call.func)
        x, k = capture.input(call.args[0], "scaled")
        weight = capture.weight(call.args[1])
        y, j = capture.output(x * call.args[1].detach(), "scaled")
        capture.tape.uses.append(ScaleUse(weight, tuple(weight.tensor.shape), k, j))
        return y

    try:
        model = Layer().double()
        data = make_batch(torch.randn(5, 4).double(), torch.arange(5) % 3, 5)
        found = errors(FusedEngine(model, CROSS), model, CROSS, data, "bam-exact")
    finally:
        del RULES[scaled]
    assert calls
    assert max(found.values()) < 1e-9


def test_reference_distinguishes_exact_bam_from_the_plain_gradient() -> None:
    """A check of the check: BAM's directions are not DP-SGD's, by far more than the tolerance."""
    model, data = net().double(), batch(4, 1, torch.randn(4, 2, 4, 4).double())
    data = make_batch(data.inputs, data.targets, 4)
    plain = one_at_a_time(model, CROSS, data, 0.0)
    exact = one_at_a_time(model, CROSS, data, 0.3)
    assert (plain[0]["4.weight"] - exact[0]["4.weight"]).norm() > 1e-3
