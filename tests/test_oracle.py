"""The oracle: what it writes into .grad, whatever the model, the inputs and the micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dpbam import BAM, DPSAT, DPSGD, Compute, Method, PrivateGradientOracle
from dpbam.engines.memory import LOOP_ROWS, MOST_ROWS
from dpbam.methods import SAM, SGD
from dpbam.params import add, unit_vector
from dpbam.privacy.randomness import keyed_uniform
from support import (
    CLIPPINGS,
    ENGINES,
    METHODS,
    SERVED,
    clip_and_sum,
    cross_entropy,
    each_gradient,
    flat,
    gradients,
    in_turn,
    one_step,
    private_plan,
    quiet_plan,
    released_before,
    samples,
    sized_oracle,
    smooth_net,
)

L = 10  # the expected batch size of the plans here


# --- agreements


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", [DPSGD(), SGD()])
def test_no_clipping_and_no_noise_is_sgd(engine: str, method: Method) -> None:
    model, (x, y) = smooth_net(), samples(7)
    (cross_entropy(model(x), y).sum() / L).backward()  # by the expected batch size, not by 7
    expected = flat(gradients(model))
    found = flat(one_step(model, quiet_plan(), x, y, engine=engine, method=method))
    assert float((found - expected).abs().max()) < 1e-10


@pytest.mark.parametrize(("engine", "method", "clipping"), in_turn(SERVED, CLIPPINGS))
def test_lambda_zero_is_dp_sgd(engine: str, method: str, clipping: str) -> None:
    model, (x, y) = smooth_net(), samples(7)
    options = {"engine": engine, "clipping": None}
    found = []
    for chosen in (METHODS[method](0.0), DPSGD()):
        oracle = sized_oracle(
            model, cross_entropy, quiet_plan(0.3, clipping=clipping), chosen, **options
        )
        oracle.backward(x, y)  # DP-SAT's first step has nothing to ascend along
        oracle.backward(x, y)
        found.append(flat(gradients(model)))
    assert float((found[0] - found[1]).abs().max()) < 1e-10


def test_approximate_and_exact_bam_agree_to_second_order() -> None:
    """Halving lambda divides their difference by about 4."""
    model, (x, y) = smooth_net(), samples(7)

    def difference(lam: float) -> float:
        approximate = one_step(model, quiet_plan(), x, y, method=BAM(lam), engine="functional")
        exact = one_step(model, quiet_plan(), x, y, method=BAM(lam, exact=True))
        return float((flat(approximate) - flat(exact)).norm())

    for lam in (0.02, 0.01):
        assert difference(lam) / difference(lam / 2) == pytest.approx(4, rel=0.05)


def reverse_over_reverse(model: nn.Module, x: Tensor, y: Tensor, lam: float) -> list[Tensor]:
    """The gradient of L_i + lambda |g_i| by double backward, sample by sample."""
    parameters, found = list(model.parameters()), []
    for i in range(len(x)):
        value = cross_entropy(model(x[i : i + 1]), y[i : i + 1]).sum()
        g = torch.autograd.grad(value, parameters, create_graph=True)
        norm = torch.cat([t.flatten() for t in g]).norm()
        bao = torch.autograd.grad(value + lam * norm, parameters)
        found.append(torch.cat([t.flatten() for t in bao]))
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip_norm", [math.inf, 0.5])
def test_exact_bam_is_the_gradient_of_the_bias_aware_objective(
    engine: str, clip_norm: float
) -> None:
    model, (x, y) = smooth_net(), samples(7)
    expected = clip_and_sum([{"d": d} for d in reverse_over_reverse(model, x, y, 0.3)], clip_norm)
    method = BAM(0.3, exact=True)
    found = one_step(model, quiet_plan(clip_norm), x, y, method=method, engine=engine)
    assert float((flat(found) - expected / L).abs().max()) < 1e-12


def test_approximate_bam_is_the_gradient_at_the_ascended_point() -> None:
    """Eq. 12: the plain loss's gradient at theta + lambda g_i / |g_i|, sample by sample."""
    model, (x, y), lam = smooth_net(), samples(5), 0.2
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    directions = []
    for i, g in enumerate(each_gradient(model, x, y)):
        length = flat(g).norm()
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(start[n] + lam * g[n] / length)
        directions += each_gradient(model, x[i : i + 1], y[i : i + 1])
        model.load_state_dict(start)
    found = one_step(model, quiet_plan(0.5), x, y, method=BAM(lam), engine="functional")
    assert float((flat(found) - clip_and_sum(directions, 0.5) / L).abs().max()) < 1e-12


def test_sam_ascends_along_the_batch_gradient() -> None:
    model, (x, y), lam = smooth_net(), samples(6), 0.2
    found = flat(one_step(model, quiet_plan(), x, y, method=SAM(lam)))
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    g = torch.autograd.grad(cross_entropy(model(x), y).sum(), model.parameters())
    length = torch.cat([t.flatten() for t in g]).norm()
    with torch.no_grad():
        for p, t in zip(model.parameters(), g, strict=True):
            p.add_(lam * t / length)
    expected = sum(flat(d) for d in each_gradient(model, x, y)) / L
    model.load_state_dict(start)
    assert float((found - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("engine", ENGINES)
def test_per_layer_clipping_clips_each_layer_to_its_share(engine: str) -> None:
    model, (x, y) = smooth_net(), samples(6)
    share = 0.4 / math.sqrt(2)
    expected = torch.cat(
        [
            clip_and_sum(
                [{n: t for n, t in g.items() if n.startswith(layer)} for g in found], share
            )
            for found in [each_gradient(model, x, y)]
            for layer in ("0.", "2.")
        ]
    )
    found = one_step(model, quiet_plan(0.4, clipping="per-layer"), x, y, engine=engine)
    assert float((flat(found) - expected / L).abs().max()) < 1e-12


# --- the split into micro-batches


def jitter(x: Tensor, keys: Tensor) -> Tensor:
    """An augmentation that draws from the keys."""
    return x + 0.3 * keyed_uniform(keys, tuple(x.shape[1:])).to(x.dtype)


@pytest.mark.parametrize(
    ("engine", "method", "sizes"), in_turn(SERVED, [(7, 1000), (1, 1000), (16, 1000)])
)
def test_the_result_does_not_depend_on_the_physical_batch(
    engine: str, method: str, sizes: tuple[int, int]
) -> None:
    """With dropout, augmentation, three views and ragged groups at once."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, 3), nn.Dropout(0.2)
    ).double()
    x, y = samples(11)
    units = torch.tensor([5, 0, 5, 2, 9, 2, 5, 7, 1, 9, 30])
    plan = quiet_plan(0.5, unit="patient", max_records=3)
    found = []
    for size in sizes:
        oracle = sized_oracle(
            model, cross_entropy, plan, METHODS[method](0.2), engine=engine, seed=3,
            physical_batch_size=size, augment=jitter, multiplicity=3,
        )  # fmt: skip
        oracle.load_state_dict({"step": 4, "parts": released_before(oracle)})
        oracle.backward(x, y, units)
        found.append(flat(gradients(model)))
    assert float((found[1] - found[0]).abs().max()) < 1e-12
    assert float(found[0].norm()) > 1e-3


@pytest.mark.parametrize(("engine", "method"), SERVED)
@pytest.mark.slow
def test_the_first_batch_chooses_the_physical_batch_size(engine: str, method: str) -> None:
    model, (x, y) = nn.Linear(2, 2, bias=False).double(), samples(3, 2, 2)
    chosen = METHODS[method](0.1)
    given = one_step(model, quiet_plan(0.3), x, y, engine=engine, method=chosen)
    oracle = PrivateGradientOracle(
        model, cross_entropy, quiet_plan(0.3), chosen, compute=Compute(engine=engine)
    )
    oracle.backward(x, y)
    assert oracle.physical_batch_size == (LOOP_ROWS if engine == "loop" else MOST_ROWS)
    assert torch.allclose(flat(gradients(model)), flat(given), atol=1e-12)


def test_the_order_of_the_rows_does_not_matter() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    x, y = samples(8)
    units, order = torch.arange(8) * 3, torch.randperm(8)
    one = one_step(model, quiet_plan(0.5), x, y, units=units, seed=1)
    two = one_step(model, quiet_plan(0.5), x[order], y[order], units=units[order], seed=1)
    assert torch.allclose(flat(one), flat(two), atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_views_and_records_are_averaged_before_the_clip(engine: str) -> None:
    model, (x, y) = smooth_net(), samples(6)
    units = torch.tensor([0, 0, 0, 1, 1, 2])
    each = [flat(g) for g in each_gradient(model, x, y)]
    means = [torch.stack(part).mean(0) for part in (each[:3], each[3:5], each[5:])]
    expected = clip_and_sum([{"d": m} for m in means], 0.3)
    plan = quiet_plan(0.3, unit="patient", max_records=3)
    found = one_step(model, plan, x, y, units=units, engine=engine)
    assert float((flat(found) - expected / L).abs().max()) < 1e-12


# --- DP-SAT


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dp_sat_leaves_the_parameters_bit_for_bit(engine: str, dtype: torch.dtype) -> None:
    model, (x, y) = smooth_net().to(dtype), samples(9)
    x = x.to(dtype)
    plan = private_plan()
    oracle = sized_oracle(
        model, cross_entropy, plan, DPSAT(0.37), engine=engine, physical_batch_size=2
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(3):
        oracle.backward(x.clone(), y)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_dp_sat_undoes_the_ascent_after_an_error_too() -> None:
    model, (x, y) = smooth_net(), samples(4)
    oracle = sized_oracle(model, cross_entropy, private_plan(), DPSAT(0.5))
    oracle.backward(x, y)
    before = flat(dict(model.named_parameters()))
    with pytest.raises((IndexError, RuntimeError)):
        oracle.backward(x.clone(), y + 7)  # no such class
    assert torch.equal(flat(dict(model.named_parameters())), before)
    assert (oracle.step, len(oracle.ledger)) == (1, 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_dp_sat_ascends_once_along_the_noised_previous_gradient(engine: str) -> None:
    model, (x, y), lam = smooth_net(), samples(9), 0.3
    plan = quiet_plan(0.5, noise_multiplier=2.0)
    oracle = sized_oracle(
        model, cross_entropy, plan, DPSAT(lam), engine=engine, physical_batch_size=2, seed=1
    )
    oracle.backward(x, y)
    released = gradients(model)  # with noise
    oracle.backward(x, y)
    second = flat(gradients(model))

    length, start = flat(released).norm(), flat(dict(model.named_parameters()))
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.add_(lam * released[n] / length)
    plain = sized_oracle(model, cross_entropy, plan, DPSGD(), engine=engine, seed=1)
    plain.load_state_dict({"step": 1})  # the same noise
    plain.backward(x, y)
    assert float((flat(gradients(model)) - second).abs().max()) < 1e-12
    assert not torch.equal(flat(dict(model.named_parameters())), start)


def test_dp_sat_continues_after_a_resume() -> None:
    model, (x, y) = smooth_net(), samples(9)
    whole = sized_oracle(model, cross_entropy, private_plan(), DPSAT(0.3), seed=1)
    whole.backward(x, y)
    state, x = whole.state_dict(), x.clone()
    whole.backward(x, y)
    expected = gradients(model)
    resumed = sized_oracle(
        model, cross_entropy, private_plan(), DPSAT(0.3), seed=1, ledger=whole.ledger
    )
    resumed.load_state_dict(state)
    resumed.backward(x, y)
    assert torch.equal(flat(gradients(model)), flat(expected))


# --- models, inputs and methods of one's own


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.left(a) + self.right(b).tanh()


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_may_be_a_tensor_a_tuple_or_a_dict(engine: str) -> None:
    model, (a, y), (b, _) = TwoParts().double(), samples(5), samples(5, seed=9)
    pair = one_step(model, quiet_plan(0.5), (a, b), y, engine=engine)
    named = one_step(model, quiet_plan(0.5), {"b": b, "a": a}, y, engine=engine)
    assert torch.allclose(flat(pair), flat(named), atol=1e-14)
    single = nn.Linear(4, 3).double()
    assert flat(one_step(single, quiet_plan(0.5), a, y, engine=engine)).norm() > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_targets_may_be_a_dict(engine: str) -> None:
    model, (x, y) = smooth_net(), samples(5)
    weight = torch.rand(5, dtype=torch.float64)

    def loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return cross_entropy(output, target["y"]) * target["weight"]

    found = one_step(model, quiet_plan(), x, {"y": y, "weight": weight}, loss=loss, engine=engine)
    model.zero_grad()
    (cross_entropy(model(x), y) * weight).sum().div(L).backward()
    assert torch.allclose(flat(found), flat(gradients(model)), atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_parameters_stay_frozen(engine: str) -> None:
    model, (x, y) = smooth_net(), samples(5)
    model[0].requires_grad_(False)
    found = one_step(model, quiet_plan(0.3), x, y, engine=engine)
    assert set(found) == {"2.weight", "2.bias"}
    assert model[0].weight.grad is None
    expected = clip_and_sum(each_gradient(model, x, y), 0.3)
    assert torch.allclose(flat(found), expected / L, atol=1e-12)


@pytest.mark.parametrize(
    ("engine", "method", "dtype"), in_turn(SERVED, [torch.float16, torch.bfloat16])
)
def test_half_precision_models(engine: str, method: str, dtype: torch.dtype) -> None:
    """The sum is as in float32 up to the half precision of the gradients themselves."""
    model, (x, y) = smooth_net().to(dtype), samples(8)
    options = {"method": METHODS[method](0.1), "engine": engine}
    found = one_step(model, quiet_plan(0.5), x.to(dtype), y, **options)
    assert all(g.dtype == dtype for g in found.values())
    wide = smooth_net().float()
    wide.load_state_dict({n: p.float() for n, p in model.state_dict().items()})
    expected = one_step(wide, quiet_plan(0.5), x.to(dtype).float(), y, **options)
    assert float((flat(found) - flat(expected)).norm()) < 0.03 * float(flat(expected).norm())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids).mean(1).tanh())


@pytest.mark.parametrize(("engine", "method"), SERVED)
def test_tied_weights_count_once(engine: str, method: str) -> None:
    model, ids, y = Tied().double(), torch.randint(0, 7, (6, 3)), torch.randint(0, 7, (6,))
    found = one_step(model, quiet_plan(0.2), ids, y, method=METHODS[method](0.0), engine=engine)
    assert list(found) == ["words.weight"]
    expected = clip_and_sum(each_gradient(model, ids, y), 0.2)
    assert torch.allclose(flat(found), expected / L, atol=1e-12)


class Mixture(Method):
    """A user's own: the mean of the plain and the perturbed gradient."""

    name = "mixture"

    def direction(self, grad, theta, lam):
        plain = grad(theta)
        perturbed = grad(add(theta, unit_vector(plain), lam))
        return {k: (plain[k] + perturbed[k]) / 2 for k in plain}


def test_a_method_of_ones_own() -> None:
    model, (x, y) = smooth_net(), samples(6)
    found = flat(one_step(model, quiet_plan(), x, y, method=Mixture(0.2), engine="functional"))
    plain = flat(one_step(model, quiet_plan(), x, y))
    bam = flat(one_step(model, quiet_plan(), x, y, method=BAM(0.2)))
    assert torch.allclose(found, (plain + bam) / 2, atol=1e-12)


def test_a_schedule_sets_lambda_by_the_step() -> None:
    model, (x, y) = smooth_net(), samples(6)
    scheduled = sized_oracle(
        model, cross_entropy, quiet_plan(), BAM(lambda step, theta: 0.1 * step)
    )
    for step in range(3):
        scheduled.backward(x, y)
        found = flat(gradients(model))
        expected = flat(one_step(model, quiet_plan(), x, y, method=BAM(0.1 * step)))
        assert torch.equal(found, expected)


def test_an_observer_sees_the_step_and_may_skip_it() -> None:
    model, (x, y) = smooth_net(), samples(6)
    seen: list[str] = []

    class Recorder:
        wants_plain = True

        def begin(self, facts):
            seen.append(f"begin {facts.step} {facts.lam} {facts.in_one_batch}")
            return facts.step == 0

        def observe(self, batch):
            plain, norms = batch.directions.plain.norms(), batch.norms
            seen.append(f"observe {tuple(norms.shape)} {torch.equal(plain, norms)}")

        def finish(self, clipped, released):
            seen.append(f"finish {float((flat(clipped) / L - flat(released)).norm())}")

    oracle = sized_oracle(
        model, cross_entropy, quiet_plan(0.3), BAM(0.1), observers=Recorder(), physical_batch_size=4
    )
    oracle.backward(x, y)
    oracle.backward(x, y)
    assert seen == [
        "begin 0 0.1 False", "observe (1, 4) False", "observe (1, 2) False", "finish 0.0",
        "begin 1 0.1 False",
    ]  # fmt: skip


def test_any_optimiser_takes_the_gradient() -> None:
    model, x = smooth_net(), samples(60)[0]
    y = x[:, :3].argmax(1)
    oracle = sized_oracle(model, cross_entropy, quiet_plan(1.0, batch_size=60), BAM(0.02))
    optimiser = torch.optim.NAdam(model.parameters(), lr=0.05)
    before = float(cross_entropy(model(x), y).detach().mean())
    for _ in range(15):
        oracle.backward(x, y)
        optimiser.step()
    assert float(cross_entropy(model(x), y).detach().mean()) < 0.9 * before


def test_memory_of_a_sum_is_used_again_without_what_was_in_it() -> None:
    """An empty batch after a full one releases its noise alone."""
    model, (x, y) = smooth_net(), samples(9)
    oracle = sized_oracle(model, cross_entropy, private_plan(noise_multiplier=1e-6), seed=0)
    oracle.backward(x, y)
    assert max(float(p.grad.abs().max()) for p in model.parameters()) > 1e-3
    oracle.backward(x[:0], y[:0])
    assert max(float(p.grad.abs().max()) for p in model.parameters()) < 1e-6


def test_parameters_that_the_optimiser_does_not_have_are_named_once() -> None:
    model = smooth_net()
    oracle = sized_oracle(model, cross_entropy, private_plan(), seed=0)
    optimizer = torch.optim.Adam(model[0].parameters(), lr=0.1)
    oracle.backward(*samples(9))
    optimizer.step()
    assert oracle.unmoved() == ["2.weight", "2.bias"]
    with pytest.warns(UserWarning, match=r"2 of 4 trained parameters did not move .* 2\.weight"):
        oracle.backward(*samples(10))
    optimizer.step()
    oracle.backward(*samples(9))  # no second warning: tests fail on any


def test_nothing_is_reported_when_all_move() -> None:
    model = smooth_net()
    oracle = sized_oracle(model, cross_entropy, private_plan(), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in (9, 10):
        oracle.backward(*samples(size))
        optimizer.step()
    assert oracle.unmoved() == []


def test_a_write_through_data_counts_as_a_move() -> None:
    """Some optimisers write to ``.data``, which torch does not count as a change."""
    model = smooth_net()
    oracle = sized_oracle(model, cross_entropy, private_plan(), seed=0)
    oracle.backward(*samples(9))
    for parameter in model[0].parameters():
        parameter.data.add_(parameter.grad)
    assert oracle.unmoved() == ["2.weight", "2.bias"]
