"""The functional engine against autograd on one unit alone."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from reference import make_batch, one_at_a_time
from torch import Tensor, nn
from zoo import ROWS, ZOO, loss

from dpbam.engines import FunctionalEngine, PhysicalBatch
from dpbam.engines.base import UnsupportedModelError, call_model, per_row_loss
from dpbam.methods import BAM, DPSGD, Method

METHODS = {"dp-sgd": (DPSGD(), 0.0), "bam-exact": (BAM(0.2, exact=True), 0.2)}
SLOW = {"wide_resnet_16_4", "resnet9_scaled", "vit"}  # their layers are in the others


def made(name: str) -> tuple[nn.Module, object, Tensor]:
    torch.manual_seed(0)
    model, inputs, targets = ZOO[name]()
    if name == "text_transformer":  # a padding row has no gradient, and no Hessian either
        inputs = inputs.clamp(min=1)
    double = torch.utils._pytree.tree_map(
        lambda t: t.double() if t.is_floating_point() else t, inputs
    )
    return model.double(), double, targets


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, for bilinear layers
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(set(ZOO) - SLOW))
def test_directions_equal_those_of_one_unit_alone(name: str, method: str) -> None:
    model, inputs, targets = made(name)
    batch = make_batch(inputs, targets, ROWS)
    chosen, lam = METHODS[method]
    found = FunctionalEngine(model, loss).directions(batch, chosen, lam)
    expected = one_at_a_time(model, loss, batch, lam)
    factors = torch.rand(1, ROWS, dtype=torch.float64)
    total = found.weighted_sum(factors)
    norms = torch.stack([torch.cat([t.flatten() for t in d.values()]).norm() for d in expected])
    assert torch.allclose(found.norms()[0], norms, rtol=1e-9)
    for key in total:
        sums = sum(f * d[key] for f, d in zip(factors[0], expected, strict=True))
        assert torch.allclose(total[key], sums, rtol=1e-8, atol=1e-10)


def engine_and_batch(per_unit: int) -> tuple[FunctionalEngine, PhysicalBatch]:
    model, inputs, targets = made("mlp")
    return FunctionalEngine(model, loss), make_batch(inputs, targets, ROWS, per_unit)


@pytest.mark.parametrize("per_unit", [2, 4])
@pytest.mark.parametrize("name", ["mlp", "dropout"])
def test_units_with_several_rows_equal_the_reference(name: str, per_unit: int) -> None:
    model, inputs, targets = made(name)
    batch = make_batch(inputs, targets, ROWS, per_unit)
    found = FunctionalEngine(model, loss).directions(batch, BAM(0.2, exact=True), 0.2)
    expected = one_at_a_time(model, loss, batch, 0.2)
    total = found.weighted_sum(torch.ones(1, batch.units, dtype=torch.float64))
    for key in total:
        assert torch.allclose(total[key], sum(d[key] for d in expected), atol=1e-10)


def test_inner_products_equal_those_of_single_gradients() -> None:
    engine, batch = engine_and_batch(1)
    directions = engine.directions(batch, BAM(0.3), 0.3, plain=True)
    plain = engine.directions(batch, DPSGD(), 0.0)
    assert plain.plain is None
    assert torch.equal(directions.plain.norms(), plain.norms())
    vector = plain.weighted_sum(torch.ones(1, ROWS))
    each = [plain.weighted_sum(row[None]) for row in torch.eye(ROWS)]
    expected = [sum(float((d[k] * vector[k]).sum()) for k in d) for d in each]
    assert plain.inner(vector).tolist() == pytest.approx(expected)


class Mixing(nn.Module):
    """A layer of one's own that subtracts the batch mean: no guard can know it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - x.mean(0, keepdim=True))


def test_batch_mean_is_that_of_one_row() -> None:
    batch = make_batch(torch.randn(ROWS, 6), torch.arange(ROWS) % 3, ROWS)
    directions = FunctionalEngine(Mixing(), loss).directions(batch, DPSGD(), 0.0)
    each = directions.weighted_sum(torch.ones(1, ROWS))
    assert not each["head.weight"].any()  # alone, every sample is its own mean
    assert each["head.bias"].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_and_sums_are_float32_or_better(dtype: torch.dtype) -> None:
    model = nn.Linear(6, 3).to(dtype)
    batch = make_batch(torch.randn(ROWS, 6, dtype=dtype), torch.arange(ROWS) % 3, ROWS)
    directions = FunctionalEngine(model, loss).directions(batch, BAM(0.1), 0.1)
    wide = torch.promote_types(dtype, torch.float32)
    norms = directions.norms()
    assert norms.dtype == directions.weighted_sum(torch.ones_like(norms))["weight"].dtype == wide
    assert bool(norms.isfinite().all())


def test_embedding_padding_gets_no_gradient() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.words(ids).mean(1))

    batch = make_batch(torch.randint(0, 3, (ROWS, 5)), torch.arange(ROWS) % 3, ROWS)
    directions = FunctionalEngine(Words(), loss).directions(batch, DPSGD(), 0.0)
    total = directions.weighted_sum(torch.ones(1, ROWS))["words.weight"]
    assert not total[0].any()
    assert total[1].any()


def test_a_layer_that_keeps_state_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.detach().sum(0)
            return self.head(x)

    batch = make_batch(torch.randn(ROWS, 6), torch.arange(ROWS) % 3, ROWS)
    model = Counting()
    with pytest.raises(UnsupportedModelError, match="in-place operation"):
        FunctionalEngine(model, loss).directions(batch, DPSGD(), 0.0)
    assert not model.seen.any()


def test_call_model_unpacks_inputs_and_loss_shapes_are_checked() -> None:
    assert call_model(lambda a, b: (a, b), (1, 2)) == (1, 2)
    assert call_model(lambda a, b: (a, b), {"b": 2, "a": 1}) == (1, 2)
    assert call_model(lambda a: a, 5) == 5
    ones = torch.ones(3)
    assert torch.equal(per_row_loss(lambda out, y: out, ones, None, 3), ones)
    with pytest.raises(ValueError, match=r"shape \(2,\), got \(3,\)"):
        per_row_loss(lambda out, y: out, ones, None, 2)


def test_custom_method_is_supported() -> None:
    class Half(Method):
        name = "half"

        def direction(self, grad, theta, lam):
            return {k: g / 2 for k, g in grad(theta).items()}

    engine, batch = engine_and_batch(1)
    half, whole = engine.directions(batch, Half(), 0.0), engine.directions(batch, DPSGD(), 0.0)
    assert torch.allclose(half.norms() * 2, whole.norms())


class Hidden(nn.Module):
    """Parameters inside a named tuple, which no torch function mode looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(5, 3).double()) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(3).double())

    def forward(self, x):
        return x @ torch.stack(namedtuple("Pair", "a b")(self.a, self.b)).sum(0) + self.bias


class Ahead(Method):
    def direction(self, grad, theta, lam):
        return grad({n: t + 1 for n, t in theta.items()})


class ForwardMode(Method):
    def direction(self, grad, theta, lam):
        return torch.func.jvp(grad, (theta,), (theta,))[1]


class WithGraph(Method):
    """Shifts theta by a tensor that requires a gradient."""

    def direction(self, grad, theta, lam):
        step = torch.ones((), dtype=torch.float64, requires_grad=True)
        return grad({n: t + step for n, t in theta.items()})


class Constant(Method):
    def direction(self, grad, theta, lam):
        return {n: 2 * t for n, t in theta.items()}


@pytest.mark.parametrize(
    "method",
    [DPSGD(), BAM(0.1), BAM(0.1, exact=True), Ahead(), ForwardMode(), WithGraph(), Constant()],
    ids=lambda m: repr(m),
)
def test_a_parameter_that_is_not_substituted_is_refused_wherever_a_method_begins(method) -> None:
    batch = make_batch(torch.randn(6, 5).double(), torch.arange(6) % 3, 6)
    with pytest.raises(UnsupportedModelError, match="cannot be intercepted"):
        FunctionalEngine(Hidden(), loss).directions(batch, method, 0.1)


@pytest.mark.parametrize("method", [Ahead(), ForwardMode(), WithGraph(), Constant()])
def test_methods_that_never_ask_for_the_gradient_at_theta(method) -> None:
    """Their plain gradients, for measurements, are those at theta all the same."""
    engine, batch = engine_and_batch(1)
    handle = engine.directions(batch, method, 0.1, plain=True)
    expected = engine.directions(batch, DPSGD(), 0.0).norms()
    assert torch.allclose(handle.plain.norms(), expected, rtol=1e-5)
    assert not torch.allclose(handle.norms(), expected, rtol=1e-2)
    assert not any(t.requires_grad for t in handle.weighted_sum(torch.ones_like(expected)).values())


def test_both_of_bams_gradients_have_the_same_dropout_mask() -> None:
    """With lambda towards 0, BAM tends to the plain gradient only if the mask is the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 20), nn.Dropout(0.5), nn.Tanh(), nn.Linear(20, 3)).double()
    batch = make_batch(torch.randn(6, 5).double(), torch.arange(6) % 3, 6)
    engine = FunctionalEngine(model, loss)
    plain = engine.directions(batch, DPSGD(), 0.0).norms()
    for method in (BAM(1e-9), BAM(1e-9, exact=True)):
        assert torch.allclose(engine.directions(batch, method, 1e-9).norms(), plain, rtol=1e-6)
