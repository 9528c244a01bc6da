"""What is summed: clipped after averaging, float32 norms, one mask, DP-SAT's public ascent."""

from __future__ import annotations

import contextlib
import copy
import functools
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from dpbam import (
    BAM,
    DPSAT,
    DPSGD,
    Method,
    PrivateGradientOracle,
    guard,
    mechanism,
    params,
    scratch,
)
from dpbam.batches import LogicalBatch, Views
from dpbam.engines import UnsupportedModelError, functional, loop, materialised, state
from dpbam.engines.base import PhysicalBatch
from dpbam.engines.draws import KeyedDraws
from dpbam.engines.fused import engine as fused_engine
from dpbam.engines.state import _SMALL as SMALL
from dpbam.engines.state import Snapshot
from dpbam.errors import PlanViolationError
from dpbam.params import Params
from dpbam.privacy.randomness import derive, keyed_uniform
from dpbam.scratch import ParameterBits, SumMemory
from planting import Mistake, catches
from support import (
    clip_and_sum,
    cross_entropy,
    each_gradient,
    flat,
    gradients,
    one_step,
    private_plan,
    quiet_plan,
    samples,
    sized_oracle,
    smooth_net,
)

L = 10


def assert_close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-10) -> None:
    assert float((found - expected).abs().max()) < atol  # False for NaN, too


def check_division() -> None:
    """By the declared expected batch size, whatever was realised."""
    model, (x, y) = smooth_net(), samples(7)
    expected = clip_and_sum(each_gradient(model, x, y), 0.5) / L
    assert_close(flat(one_step(model, quiet_plan(0.5), x, y)), expected)


def tripled(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return x * (1 + 2 * keyed_uniform(keys, (1,)).to(x.dtype))


def check_views_are_averaged_before_the_clip() -> None:
    model, (x, y), seen = smooth_net(), samples(4), []

    def augment(x, keys):
        views = tripled(x, keys)
        if len(x) == 12:  # not the views of the row on which the engine is chosen
            seen.append(views)
        return views

    options = {"augment": augment, "multiplicity": 3, "engine": "functional"}
    options["physical_batch_size"] = 12
    found = flat(one_step(model, quiet_plan(0.3), x, y, **options))
    each = [flat(g) for g in each_gradient(model, seen[0], y.repeat_interleave(3))]
    means = [torch.stack(each[3 * i : 3 * i + 3]).mean(0) for i in range(4)]
    assert_close(found, clip_and_sum([{"d": m} for m in means], 0.3) / L)


def check_a_unit_is_the_mean_of_its_rows() -> None:
    """Two units of three rows, in every engine."""
    model, (x, y) = smooth_net(), samples(6)
    each = [flat(g) for g in each_gradient(model, x, y)]
    means = [torch.stack(each[:3]).mean(0), torch.stack(each[3:]).mean(0)]
    batch = PhysicalBatch(x, y, 2, torch.arange(6), 3)
    for engine in (fused_engine.FusedEngine, functional.FunctionalEngine, loop.LoopEngine):
        directions = engine(model, cross_entropy).directions(batch, DPSGD(), 0.0)
        total = directions.weighted_sum(torch.ones(1, 2))  # a clip could hide the scale
        assert_close(flat(total), means[0] + means[1])


def check_half_precision_norms() -> None:
    """4096 entries of 1e-4: their squares vanish in float16, their norm is 6.4e-3."""
    model = nn.Linear(4096, 1, bias=False).half()
    x, y = torch.full((1, 4096), 1e-4, dtype=torch.float16), torch.zeros(1)
    found = one_step(
        model, quiet_plan(1e-3, batch_size=1), x, y, loss=lambda out, y: out[:, 0],
        engine="functional",
    )  # fmt: skip
    assert float(flat(found).norm()) <= 1e-3 * 1.01


def check_bad_samples_vanish() -> None:
    model, (x, y) = smooth_net(), samples(5)
    expected = flat(one_step(model, quiet_plan(0.5), x[1:], y[1:], engine="functional"))
    x[0] = torch.nan
    assert_close(flat(one_step(model, quiet_plan(0.5), x, y, engine="functional")), expected)


def check_bam_at_a_zero_gradient() -> None:
    model = nn.Linear(4, 3, bias=False).double()
    engine = functional.FunctionalEngine(model, cross_entropy)
    batch = LogicalBatch.of(torch.zeros(2, 4).double(), torch.zeros(2).long(), None, 1)
    (physical,) = batch.split(2, Views(), torch.device("cpu"))
    for method in (BAM(0.1), BAM(0.1, exact=True)):
        assert engine.directions(physical, method, 0.1).norms().tolist() == [[0, 0]]


def dropout_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3)).double()


def check_micro_batches() -> None:
    """Dropout, augmentation and views, in one piece and in four."""
    model, (x, y), found = dropout_net(), samples(8), []
    for size in (1000, 5):
        options = {"seed": 1, "physical_batch_size": size, "augment": tripled, "multiplicity": 2}
        found.append(flat(one_step(model, quiet_plan(0.5), x, y, method=BAM(0.1), **options)))
    assert_close(*found)


def check_one_mask_for_both_gradients() -> None:
    """Towards lambda = 0 BAM is the plain gradient, if both passes drop the same."""
    model, (x, y) = dropout_net(), samples(8)
    options = {"seed": 1, "engine": "functional"}
    plain = flat(one_step(model, quiet_plan(), x, y, **options))
    bam = flat(one_step(model, quiet_plan(), x, y, method=BAM(1e-9), **options))
    assert_close(plain, bam, atol=1e-6)


def check_batch_norm_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model.eval()  # when the oracle is made it is off
    oracle = sized_oracle(model, cross_entropy, private_plan())
    model.train()
    refused = False
    try:
        oracle.backward(*samples(3))
    except Exception as error:  # the engines refuse its running state, later
        refused = "mixes the samples" in str(error)
    assert refused


class WritesItsWeight(nn.Linear):
    """Changes its weight in each pass, where torch does not count it."""

    way = "data"

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "nothing":
            pass
        elif self.way == "frozen":
            self.bias.data.mul_(1.5)
        elif self.way == "buffer":
            self.table.data.add_(1)
        elif self.way == "permuted":
            self.bias.data.copy_(self.bias.flip(0))
        elif self.way == "permuted large":
            self.unused.data.copy_(self.unused.flip(0))
        elif self.way == "data":
            self.weight.data.mul_(1.5)
        elif self.way == "assigned":
            self.weight.data = self.weight.data * 1.5
        else:
            self.weight.detach().numpy()[0, 0] += 1e-3
        return super().forward(x)


def check_a_pass_writes_to_no_parameter(
    way: str = "data", *, steps: int = 0, copied: bool = False
) -> None:
    """One physical batch more would move all others: refused, and the weights are as they were.

    After some steps without a write, and by a copy of the oracle: what is kept from step to step
    must be that of these parameters.
    """
    model = nn.Sequential(WritesItsWeight(4, 3))
    model[0].unused = nn.Parameter(torch.randn(5 * scratch._ROW + 7, 5), requires_grad=False)
    model[0].register_buffer("table", torch.zeros(2 * SMALL))
    model[0].bias.requires_grad_(way not in ("frozen", "permuted"))
    x, y = torch.randn(9, 4), torch.zeros(9, dtype=torch.long)
    oracle = sized_oracle(
        model, cross_entropy, private_plan(steps=9), engine="fused", physical_batch_size=4
    )
    model[0].way = "nothing"
    for _ in range(steps):
        oracle.backward(x.clone(), y)
        with torch.no_grad():
            model[0].weight.add_(1)
            model[0].bias.add_(1)
    if copied:
        oracle = copy.deepcopy(oracle)
        model = oracle.model
    model[0].way = way
    before, refused = model[0].weight.detach().clone(), False
    try:
        oracle.backward(x, y)
    except PlanViolationError:
        refused = len(oracle.ledger) == oracle.step == steps
    assert refused, "a pass has changed the weights of the next one"
    assert torch.equal(before, model[0].weight)


def check_a_pass_assigns_no_parameter() -> None:
    """As above, where a pass leaves the memory of the weights as it is, and gives them another."""
    check_a_pass_writes_to_no_parameter("assigned")


@pytest.mark.parametrize(
    "way", ["data", "numpy", "frozen", "assigned", "buffer", "permuted", "permuted large"]
)
def test_a_pass_writes_to_no_parameter(way: str) -> None:
    check_a_pass_writes_to_no_parameter(way)


@pytest.mark.parametrize("way", ["data", "numpy", "frozen", "assigned", "permuted"])
def test_a_pass_writes_to_no_parameter_of_a_large_model(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is compared where it is, without joining its parameters."""
    monkeypatch.setattr(scratch, "_LARGE", 1)
    check_a_pass_writes_to_no_parameter(way)
    check_a_pass_writes_to_no_parameter(way, steps=2)
    check_a_pass_writes_to_no_parameter(way, steps=2, copied=True)


class WritesItsTemperature(nn.Module):
    """A loss whose frozen parameter each pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.temperature.data.mul_(0.5)
        return cross_entropy(output / self.temperature, target)


def check_a_loss_writes_to_no_parameter() -> None:
    model, refused = nn.Linear(4, 3), False
    oracle = sized_oracle(
        model, WritesItsTemperature(), private_plan(), engine="fused", physical_batch_size=4
    )
    try:
        oracle.backward(torch.randn(9, 4), torch.zeros(9, dtype=torch.long))
    except PlanViolationError:
        refused = len(oracle.ledger) == oracle.step == 0
    assert refused, "a pass has changed the loss of the next one"


def test_a_loss_writes_to_no_parameter() -> None:
    check_a_loss_writes_to_no_parameter()


def check_a_pass_writes_to_no_buffer() -> None:
    check_a_pass_writes_to_no_parameter("buffer")


def check_later_steps_write_to_no_parameter() -> None:
    check_a_pass_writes_to_no_parameter(steps=2)


def test_a_pass_of_a_later_step_writes_to_no_parameter() -> None:
    check_later_steps_write_to_no_parameter()
    check_a_pass_writes_to_no_parameter("assigned", steps=2)


def check_a_pass_permutes_no_parameter() -> None:
    check_a_pass_writes_to_no_parameter("permuted large")


def test_a_pass_of_a_copied_oracle_writes_to_no_parameter() -> None:
    check_a_pass_writes_to_no_parameter(steps=2, copied=True)


def check_a_sample_enters_once() -> None:
    """A sample may enter a logical batch once."""
    model, (x, y), refused = smooth_net(), samples(3), False
    try:
        one_step(model, private_plan(), x, y, units=torch.tensor([1, 2, 1]))
    except ValueError:
        refused = True
    assert refused


# --- DP-SAT


def after_two_steps(method: Method) -> tuple[torch.Tensor, torch.Tensor]:
    """(first release, second release) of DP-SAT over three micro-batches, noise included."""
    model, (x, y) = smooth_net(), samples(9)
    plan = quiet_plan(0.5, noise_multiplier=2.0)
    oracle = sized_oracle(
        model, cross_entropy, plan, method, engine="functional", physical_batch_size=3, seed=1
    )
    before = flat(dict(model.named_parameters()))
    oracle.backward(x, y)
    first = flat(gradients(model))
    oracle.backward(x, y)
    after = flat(dict(model.named_parameters()))
    assert torch.equal(before, after), "the ascent was not undone exactly"
    return first, flat(gradients(model))


def check_dp_sat() -> None:
    """The second step is DP-SGD's at theta + lambda * (what the first released) / its norm."""
    lam = 0.3
    first, second = after_two_steps(DPSAT(lam))
    model, (x, y) = smooth_net(), samples(9)
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(start + lam * first / first.norm(), model.parameters())
    plan = quiet_plan(0.5, noise_multiplier=2.0)
    plain = sized_oracle(model, cross_entropy, plan, DPSGD(), engine="functional", seed=1)
    plain.load_state_dict({"step": 1})
    plain.backward(x, y)
    assert_close(second, flat(gradients(model)))


# --- a method of the user's own


class Negative(DPSGD):
    def direction(self, grad, theta, lam):
        return {name: -g for name, g in grad(theta).items()}


class Wrapped(DPSGD):
    @functools.wraps(DPSGD.direction)
    def direction(self, grad, theta, lam):
        return {name: -g for name, g in grad(theta).items()}


def check_the_direction_in_force_is_summed() -> None:
    """Whatever engine is chosen, a subclass is never trained as the class that it derives from."""
    model, (x, y) = smooth_net(), samples(4)
    expected = -clip_and_sum(each_gradient(model, x, y), 0.5) / L
    for method in (Negative(), Wrapped()):
        for engine in ("fused", "loop"):
            with contextlib.suppress(UnsupportedModelError):
                found = one_step(model, quiet_plan(0.5), x, y, method=method, engine=engine)
                assert_close(flat(found), expected)


class Averaging(Method):
    """One number per parameter, which would be added to each of its entries."""

    def direction(self, grad, theta, lam):
        return {name: g.mean() for name, g in grad(theta).items()}


def check_a_direction_is_summed_as_it_was_measured() -> None:
    for engine in ("functional", "loop"):
        model, (x, y) = smooth_net(), samples(1)
        with contextlib.suppress(ValueError):
            moved = one_step(model, quiet_plan(0.01), x, y, method=Averaging(), engine=engine)
            assert float(flat(moved).norm()) * L <= 0.01 * (1 + 1e-6)


class Writing(Method):
    """Adds a record's gradient to theta itself, not to a copy."""

    def direction(self, grad, theta, lam):
        g = grad(theta)
        for name, t in theta.items():
            t.add_(g[name])
        return g


def check_a_method_writes_nothing_into_the_model() -> None:
    model, (x, y) = smooth_net(), samples(3)
    before = flat(dict(model.named_parameters()))
    # by the engine alone: the mechanism would restore what was written
    oracle = sized_oracle(model, cross_entropy, private_plan(), Writing(), engine="loop")
    with contextlib.suppress(ValueError):
        oracle.per_sample(x, y)
    assert torch.equal(before, flat(dict(model.named_parameters())))


class Carrying(Method):
    """Adds the gradient of the unit before to that of the unit."""

    last: Params | None = None

    def direction(self, grad, theta, lam):
        before, self.last = self.last, grad(theta)
        return self.last if before is None else params.add(self.last, before)


def check_a_method_carries_nothing_from_unit_to_unit() -> None:
    """With the first unit gone, the direction of the second is what it was."""
    model, (x, y) = smooth_net(), samples(2)
    with contextlib.suppress(ValueError):
        both = [
            flat(one_step(model, quiet_plan(), x[k:], y[k:], method=Carrying(), engine="loop"))
            for k in (0, 1)
        ]
        first = flat(each_gradient(model, x[:1], y[:1])[0]) / L
        assert_close(both[0] - both[1], first)


@dataclass(slots=True)
class Kept:
    largest: float = 0.0


KEPT, LARGEST = Kept(), {"x": 0.0}


class KeepsInSlot(nn.Linear):
    """Scales by the largest input so far, kept in a slot of a global object."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KEPT.largest = max(KEPT.largest, float(x.abs().max()))
        return super().forward(x) * (1 + KEPT.largest)


class KeepsInNested(nn.Linear):
    """The same, in a global that only a function inside the method names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def scale() -> float:
            LARGEST["x"] = max(LARGEST["x"], float(x.abs().max()))
            return 1 + LARGEST["x"]

        return super().forward(x) * scale()


def check_kept(kind: type[nn.Linear]) -> None:
    """Without the first record, which is large, the sum of the others is what it was."""
    x, y = samples(4)
    # the others are below what the row without a record has, so that they change nothing
    x = torch.cat([torch.full_like(x[:1], 50.0), 0.01 * x[1:].tanh()])
    sums = []
    for k in (0, 1):
        KEPT.largest = LARGEST["x"] = 0.0
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), kind(x[0].numel(), 3)).to(x.dtype)
        try:
            sums.append(flat(one_step(model, quiet_plan(1.0), x[k:], y[k:], engine="loop")) * L)
        except ValueError:  # refused
            return
    assert float((sums[0] - sums[1]).norm()) <= 1 + 1e-6


def check_slots_keep_nothing() -> None:
    """Of one record for the others."""
    check_kept(KeepsInSlot)


def check_nested_functions_keep_nothing() -> None:
    """Of one record for the others."""
    check_kept(KeepsInNested)


# --- the mistakes


def without_slots(original):
    return lambda cls: ()


def names_of_the_function_alone(original):
    return lambda code: code.co_names


def inherited(original):
    """The rule that was wrong: a class has the form of whatever class it derives from."""

    def form_of(method, lam):
        for cls in type(method).__mro__:
            declared = getattr(vars(cls).get("direction"), "_declared_form", None)
            if declared is not None:
                return declared[1](method, lam)
        return None

    return form_of


def whatever_was_copied(original):
    """A declaration that does not name its function: functools.wraps copies it."""

    def form_of(method, lam):
        declared = getattr(method.direction, "_declared_form", None)
        return None if declared is None else declared[1](method, lam)

    return form_of


def unseen(original):
    return lambda *args: None


def empty_snapshot(original):
    return lambda method: Snapshot()


def its_own_values(original):
    def init(self, model):
        original(self, model)
        self.public = self.values

    return init


def by_the_realised_batch(original):
    def backward(self, inputs, targets, units=None):
        original(self, inputs, targets, units)
        for p in self.model.parameters():
            p.grad *= self.plan.batch_size / len(inputs)

    return backward


def each_view_clipped(original):
    def clipped_sums(step):
        queries = original(step)
        total = params.zeros(step.theta)
        for physical in step.computation.physical(step.batch):
            views = replace(physical, units=physical.rows, rows_per_unit=1)
            directions = step.computation.directions(views, step.method, step.lam)
            factors = step.clipping.clip(directions.norms())[0] / physical.rows_per_unit
            for name, part in directions.weighted_sum(factors).items():
                total[name] += part
        return {**queries, "gradient": replace(queries["gradient"], sums=total)}

    return clipped_sums


def rows_added_up(original):
    return lambda batch, losses: losses.sum()


def as_it_comes(original):
    return lambda dtype: dtype


def plain_product(original):
    return lambda factors, d, **_: (factors @ materialised._rows(d)).reshape(d.shape[1:])


def divided_by_zero(original):
    def unit_vector(tree):
        length = torch.stack([g.square().sum() for g in tree.values()]).sum().sqrt()
        return {n: g / length for n, g in tree.items()}

    return unit_vector


def keyed_by_place_in_the_micro_batch(original):
    def of(self, inputs, keys, units):
        return original(self, inputs, lambda: torch.arange(len(keys())), units)

    return of


def a_new_mask_each_pass(original):
    passes = iter(range(10**6))
    return lambda self, keys: original(self, derive(keys, next(passes)))


def looks_away(original):
    return lambda model: None


def every_row_a_unit(original):
    return staticmethod(lambda inputs, targets, units, most: original(inputs, targets, None, most))


def along_the_sum_without_noise(original):
    def write(self, released, parameters):
        original(self, released, parameters)
        std = self.plan.noise_multiplier * self.plan.clip_norm
        zeros = {n: torch.zeros_like(t) for n, t in released.items()}
        noise = self.noise.add(zeros, std, self.step - 1)
        plain = {n: t - noise[n] / self.plan.batch_size for n, t in released.items()}
        self._releases = [(plain, theta) for _, theta in self._releases]

    return write


def undone_by_subtraction(original):
    @contextmanager
    def shifted(parameters, shift, saved=None):
        with torch.no_grad():
            for n, p in parameters.items():
                p.add_(shift[n] if shift else 0)
            yield
            for n, p in parameters.items():
                p.sub_(shift[n] if shift else 0)

    return shifted


def again_for_each_micro_batch(original):
    def clipped_sums(step):
        queries = original(step)
        total, shift = params.zeros(step.theta), step.shift
        with params.restored(step.theta):
            for physical in step.computation.physical(step.batch):
                with torch.no_grad():
                    for n, p in step.theta.items():
                        p.add_(shift[n] if shift else 0)
                directions = step.computation.directions(physical, step.method, step.lam)
                factors, _ = step.clipping.clip(directions.norms())
                for name, part in directions.weighted_sum(factors).items():
                    total[name] += part
        return {**queries, "gradient": replace(queries["gradient"], sums=total)}

    return clipped_sums


Oracle = PrivateGradientOracle
MISTAKES = {
    "a number kept in a slot": Mistake(check_slots_keep_nothing, state, "_slots_of", without_slots),
    "a number kept by a nested function": Mistake(
        check_nested_functions_keep_nothing, state, "_names_in", names_of_the_function_alone
    ),
    "divided by the realised batch": Mistake(
        check_division, Oracle, "backward", by_the_realised_batch
    ),
    "each view clipped by itself": Mistake(
        check_views_are_averaged_before_the_clip, mechanism, "clipped_sums", each_view_clipped
    ),
    "the sum of a unit's rows": Mistake(
        check_a_unit_is_the_mean_of_its_rows, PhysicalBatch, "total", rows_added_up
    ),
    "norms in float16": Mistake(
        check_half_precision_norms, materialised, "accumulation_dtype", as_it_comes
    ),
    "a factor of 0 times NaN": Mistake(
        check_bad_samples_vanish, materialised, "_contract", plain_product
    ),
    "0 / 0 in BAM's ascent": Mistake(
        check_bam_at_a_zero_gradient, params, "unit_vector", divided_by_zero
    ),
    "draws by place in the micro-batch": Mistake(
        check_micro_batches, Views, "of", keyed_by_place_in_the_micro_batch
    ),
    "another mask in BAM's second gradient": Mistake(
        check_one_mask_for_both_gradients, KeyedDraws, "__init__", a_new_mask_each_pass
    ),
    "weights that a pass has changed": Mistake(
        check_a_pass_writes_to_no_parameter,
        SumMemory,
        "fixed",
        lambda original: lambda self, theta, constants: nullcontext(lambda: torch.zeros(())),
    ),
    "weights that a later pass has changed": Mistake(
        check_later_steps_write_to_no_parameter,
        ParameterBits,
        "changes",
        lambda original: lambda self: [torch.zeros((), dtype=torch.bool)],
    ),
    "a large buffer that a pass has changed": Mistake(
        check_a_pass_writes_to_no_buffer,
        params,
        "_buffers_of",
        lambda original: lambda module: [],
    ),
    "a loss's parameter that a pass has changed": Mistake(
        check_a_loss_writes_to_no_parameter,
        guard,
        "trained_and_constant",
        lambda original: lambda model, loss: original(model),
    ),
    "frozen weights that a pass has permuted": Mistake(
        check_a_pass_permutes_no_parameter,
        scratch,
        "_sums_of_bits",
        lambda original: lambda tensors: [t.view(torch.int32).sum().view(1) for t in tensors],
    ),
    "weights that a pass has put elsewhere": Mistake(
        check_a_pass_assigns_no_parameter,
        ParameterBits,
        "restore_memory",
        lambda original: lambda self, parameters: True,
    ),
    "batch norm let through": Mistake(
        check_batch_norm_is_refused, guard, "check_model", looks_away
    ),
    "a sample twice in a logical batch": Mistake(
        check_a_sample_enters_once, LogicalBatch, "of", every_row_a_unit
    ),
    "DP-SAT along the gradient without noise": Mistake(
        check_dp_sat, Oracle, "_write", along_the_sum_without_noise
    ),
    "the form of a class for its subclasses": Mistake(
        check_the_direction_in_force_is_summed, fused_engine, "form_of", inherited
    ),
    "the form of a class for its subclasses, loop": Mistake(
        check_the_direction_in_force_is_summed, loop, "form_of", inherited
    ),
    "a form that functools.wraps has copied": Mistake(
        check_the_direction_in_force_is_summed, fused_engine, "form_of", whatever_was_copied
    ),
    "a direction that is broadcast": Mistake(
        check_a_direction_is_summed_as_it_was_measured, functional, "check_direction", unseen
    ),
    "a direction that is broadcast, loop": Mistake(
        check_a_direction_is_summed_as_it_was_measured, loop, "check_direction", unseen
    ),
    "a method that gets theta itself": Mistake(
        check_a_method_writes_nothing_into_the_model, loop._Theta, "__init__", its_own_values
    ),
    "a method with a state": Mistake(
        check_a_method_carries_nothing_from_unit_to_unit, state, "snapshot_method", empty_snapshot
    ),
    "DP-SAT's ascent undone by subtraction": Mistake(
        check_dp_sat, mechanism, "shifted", undone_by_subtraction
    ),
    "DP-SAT's ascent once per micro-batch": Mistake(
        check_dp_sat, mechanism, "clipped_sums", again_for_each_micro_batch
    ),
}


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
