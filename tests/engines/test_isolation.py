"""What could join rows in a vmapped engine, and how each is refused or made harmless."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from reference import make_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpbam import Compute, PrivateGradientOracle
from dpbam.compute import Runner
from dpbam.engines import StatefulModelError, UnsupportedModelError
from dpbam.engines.state import Snapshot
from dpbam.methods import BAM, DPSGD
from support import clipped_sum, private_plan, samples, smooth_net

CROSS = nn.CrossEntropyLoss(reduction="none")
VMAPPED = ("fused", "functional")
KEPT: list[Tensor] = []


class Code(nn.Module):
    """Ordinary code between two layers."""

    def __init__(self, code: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.code, self.first, self.last = code, nn.Linear(4, 4), nn.Linear(4, 3)
        self.cache: Any = None
        self.seen: list[Any] = []
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.code(self, self.first(x)))


def run(model: nn.Module, engine: str, rows: int = 5, method: Any = None) -> Any:
    torch.manual_seed(0)
    groups = {n: 0 for n, p in model.named_parameters() if p.requires_grad}
    made = Runner(Compute(engine=engine), model, CROSS, groups)
    batch = make_batch(torch.randn(rows, 4), torch.arange(rows) % 3, rows)
    method = method or DPSGD()
    return made.directions(batch, method, method.lam_at(0, {}))


def keeps_an_attribute(model: Any, x: Tensor) -> Tensor:
    model.cache = x
    return x


def appends_to_a_list(model: Any, x: Tensor) -> Tensor:
    model.seen.append(x)
    return x


def keeps_a_global(model: Any, x: Tensor) -> Tensor:
    KEPT[:] = [x]
    return x


def counts_calls(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x


def replaces_a_buffer(model: Any, x: Tensor) -> Tensor:
    model.calls = torch.ones(())
    return x


def keeps_and_then_branches(model: Any, x: Tensor) -> Tensor:
    """The branch makes vmap fail; what was kept must not reach the next engine."""
    KEPT[:] = KEPT or [x]
    return x + KEPT[0] if bool(x.sum() > 0) else x


def keeps_a_parameter(model: Any, x: Tensor) -> Tensor:
    """torch.nn.Parameter is made without a torch function."""
    KEPT[:] = KEPT or [nn.Parameter(x.detach(), requires_grad=False)]
    return x + KEPT[0]


def keeps_and_collects(model: Any, x: Tensor) -> Tensor:
    """The collector moves what is kept out of the youngest generation."""
    KEPT[:] = [x]
    gc.collect()
    return x


STATE = {
    "kept and collected": (keeps_and_collects, "keeps a tensor"),
    "parameter made of a row": (keeps_a_parameter, "keeps a tensor"),
    "attribute": (keeps_an_attribute, "cache"),
    "list": (appends_to_a_list, "seen"),
    "global": (keeps_a_global, "keeps a tensor"),
    "buffer in place": (counts_calls, "calls"),
    "buffer replaced": (replaces_a_buffer, "calls"),
    "kept by a pass that fails": (keeps_and_then_branches, "keeps a tensor"),
}


@pytest.mark.parametrize("engine", [*VMAPPED, pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STATE)
def test_state_that_outlives_a_pass_is_refused_by_name(name: str, engine: str) -> None:
    KEPT.clear()
    code, word = STATE[name]
    error: Any = StatefulModelError
    if (name, engine) == ("buffer in place", "functional"):  # torch refuses it before
        error, word = UnsupportedModelError, "in-place operation"
    with pytest.raises(error, match=word):
        run(Code(code), engine)
    KEPT.clear()


class Holder:
    """An object of the user's own class."""

    def __init__(self) -> None:
        self.calls = 0


class Unregistered(nn.Module):
    """A module that is no submodule, since a list holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


def count_in(holder: Any) -> None:
    holder.calls += 1


class Registry(OrderedDict[str, int]):
    """As the registries of transformers: its items are computed, or cannot be."""

    def items(self) -> Any:
        raise ValueError("this imports a module that is not there")

    keys = values = __iter__ = items


class Wrapping(Mapping[str, int]):
    """A mapping that stores its items in an attribute, and may not be asked for them."""

    def __init__(self) -> None:
        self.stored = {"calls": 0}

    def __getitem__(self, key: str) -> int:
        raise ValueError("this imports a module that is not there")

    def __iter__(self) -> Any:
        raise ValueError("this imports a module that is not there")

    def __len__(self) -> int:
        return 1


COUNTS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "a list in a dict": (lambda: {"a": [0]}, lambda kept: kept["a"].append(0)),
    "a counter": (Counter, lambda kept: kept.update(["calls"])),
    "a deque": (deque, lambda kept: kept.append(0)),
    "an ordered dict": (OrderedDict, lambda kept: kept.update(calls=len(kept))),
    "the order of a dict": (
        lambda: OrderedDict(a=0, b=0, c=0),
        lambda kept: kept.move_to_end(next(iter(kept))),
    ),
    "items that a class computes": (Registry, lambda kept: kept.__setitem__("calls", 1)),
    "items in an attribute": (Wrapping, lambda kept: kept.stored.update(calls=1)),
    "an object": (Holder, count_in),
    "an object in a tuple": (lambda: (Holder(),), lambda kept: count_in(kept[0])),
    "an array": (lambda: np.zeros(1), lambda kept: kept.__iadd__(1)),
    "an array in a list": (lambda: [np.zeros(1)], lambda kept: kept[0].__iadd__(1)),
    "a module in a list": (lambda: [Unregistered()], lambda kept: count_in(kept[0])),
    "a tensor in a list": (lambda: [torch.zeros(1)], lambda kept: kept[0].add_(1)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_count_inside_an_attribute_is_refused_by_name(name: str) -> None:
    """How many passes there are follows the size of the batch."""
    make, count = COUNTS[name]

    def code(model: Any, x: Tensor) -> Tensor:
        count(model.cache)
        return x

    model = Code(code)
    model.cache = make()
    with pytest.raises(StatefulModelError, match="cache"):
        run(model, "fused")


@pytest.mark.parametrize("name", COUNTS)
def test_attribute_that_stays_as_it_is_is_not_refused(name: str) -> None:
    model = Code(lambda model, x: x)
    model.cache = COUNTS[name][0]()
    assert run(model, "fused").norms().shape == (1, 5)


def test_attribute_that_refers_to_itself_is_not_refused() -> None:
    model = Code(lambda model, x: x)
    model.cache = [SimpleNamespace(back=model)]
    model.cache.append(model.cache)
    assert run(model, "fused").norms().shape == (1, 5)


@pytest.mark.parametrize("engine", VMAPPED)
def test_model_refused_for_kept_state_stays_refused(engine: str) -> None:
    """The first to come is kept for ever: nothing is kept anew in the second pass."""
    KEPT.clear()
    model = Code(keeps_a_parameter)
    for word in ("keeps a tensor", "in an earlier pass"):
        with pytest.raises(StatefulModelError, match=word):
            run(model, engine)
    KEPT.clear()


class Alternating(nn.Module):
    """A loss that turns its sign at each call; the batch's size says how many calls there are."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return CROSS(out, y) * (-1) ** self.calls


def moved_by_the_first_record(engine: str) -> float:
    """How far the clipped sum moves, in units of C, in physical batches of 4 records."""
    (x, y), sums = samples(12), []
    for start in (0, 1):
        oracle = PrivateGradientOracle(
            smooth_net(), Alternating(), private_plan(clip_norm=0.01),
            compute=Compute(engine=engine, physical_batch_size=4),
        )  # fmt: skip
        sums.append(clipped_sum(oracle, x[start:], y[start:]))
    return float((sums[0] - sums[1]).norm()) / 0.01


@pytest.mark.parametrize("engine", [*VMAPPED, "auto"])
def test_loss_that_counts_its_calls_is_refused(engine: str) -> None:
    with pytest.raises(
        StatefulModelError, match=r"attribute \'calls\' of the loss\'s module \'\' \(Alternating\)"
    ):
        moved_by_the_first_record(engine)


def test_loss_that_counts_its_calls_would_exceed_the_bound(monkeypatch: Any) -> None:
    monkeypatch.setattr(Snapshot, "check", lambda self: None)
    assert moved_by_the_first_record("fused") > 1.5


def test_local_tensors_are_not_refused() -> None:
    """The control: code that keeps nothing is served, also where locals form a cycle."""

    def cycle(model: Any, x: Tensor) -> Tensor:
        circle: list[Any] = [x]
        circle.append(circle)
        return x.tanh()

    for engine in VMAPPED:
        assert run(Code(cycle), engine).norms().isfinite().all()


class Subtracts(torch.autograd.Function):
    """Code with a batching rule of its own, which subtracts the mean over the rows."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x - x.mean(0, keepdim=True), 0


@torch.library.custom_op("dpbam_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


def its_own_gradient(model: Any, x: Tensor) -> Tensor:
    return x + torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]


FOREIGN = {
    "a function with its own vmap": (lambda m, x: Subtracts.apply(x), "custom_function_call"),
    "an operator that is not torch's": (lambda m, x: twice(x), "dpbam_tests::twice"),
    "a transform inside": (lambda m, x: torch.func.vmap(torch.tanh)(x), "torch.func transform"),
    "gradients inside": (its_own_gradient, "computes gradients"),
    "a hook on a tensor": (lambda m, x: (x.register_hook(lambda g: g), x)[1], "hook"),
    "checkpointing": (lambda m, x: checkpoint(torch.tanh, x, use_reentrant=False), "hooks"),
}


@pytest.mark.parametrize("engine", VMAPPED)
@pytest.mark.parametrize("name", FOREIGN)
def test_code_that_vmap_cannot_isolate_is_refused(name: str, engine: str) -> None:
    code, word = FOREIGN[name]
    with pytest.raises(UnsupportedModelError, match=word):
        run(Code(code), engine)


@pytest.mark.parametrize("engine", VMAPPED)
def test_hooks_on_gradients_are_refused(engine: str) -> None:
    hooked = Code(lambda m, x: x)
    hooked.first.register_full_backward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="module 'first' has a backward hook"):
        run(hooked, engine)
    hooked = Code(lambda m, x: x)
    hooked.first.weight.register_hook(lambda g: g)
    with pytest.raises(UnsupportedModelError, match=r"parameter first\.weight has a gradient hook"):
        run(hooked, engine)


@pytest.mark.parametrize("engine", VMAPPED)
def test_printing_a_row_shows_only_its_shape(engine: str) -> None:
    printed: list[str] = []

    def prints(model: Any, x: Tensor) -> Tensor:
        printed.append(f"{x} {x!r}")
        return x

    run(Code(prints), engine)
    assert printed[0] == " ".join(["<tensor of one row, shape (1, 4)>"] * 2)


@pytest.mark.parametrize("method", [DPSGD(), BAM(0.1), BAM(0.1, exact=True)], ids=repr)
@pytest.mark.parametrize("engine", [*VMAPPED, "loop"])
def test_model_is_unchanged_after_a_pass(engine: str, method: Any) -> None:
    model = Code(lambda m, x: x.tanh())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    run(model, engine, method=method)
    assert attributes == {n: set(vars(m)) for n, m in model.named_modules()}
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_auto_warns_once_with_the_engine_and_the_reason() -> None:
    def branches(model: Any, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 1e9) else x.tanh()

    model = Code(branches)
    made = Runner(Compute(engine="auto"), model, CROSS, {n: 0 for n, _ in model.named_parameters()})
    batch = make_batch(torch.randn(5, 4), torch.arange(5) % 3, 5)
    expected = r"fused engine does not support this: .*loop engine is used"
    with pytest.warns(UserWarning, match=expected) as seen:
        made.directions(batch, DPSGD(), 0.0)
    assert len(seen) == 1
    assert made.name == "loop"
    made.directions(batch, DPSGD(), 0.0)  # and not again: warnings are errors here


def test_auto_raises_the_loop_engines_error_if_no_engine_supports_the_model() -> None:
    def wrong(model: Any, x: Tensor) -> Tensor:
        raise KeyError("my own mistake")

    with pytest.raises(KeyError, match="my own mistake"):
        run(Code(wrong), "auto")


def through_data(model: Any, x: Tensor) -> Tensor:
    model.calls.data += 1
    return x * model.calls


def through_numpy(model: Any, x: Tensor) -> Tensor:
    model.calls.numpy()[...] += 1
    return x * model.calls


def in_a_namespace(model: Any, x: Tensor) -> Tensor:
    model.cache.count += 1
    return x * model.cache.count


@pytest.mark.parametrize("count", [through_data, through_numpy])
def test_a_buffer_that_changes_without_a_new_version_is_refused(count: Any) -> None:
    with pytest.raises(StatefulModelError, match=r"changes buffer 'calls' of module '' \(Code\)"):
        run(Code(count), "fused")


@pytest.mark.parametrize("kind", [SimpleNamespace, Namespace])
def test_a_count_in_a_namespace_is_refused(kind: Any) -> None:
    model = Code(in_a_namespace)
    model.cache = kind(count=0)
    with pytest.raises(
        StatefulModelError, match=r"changes attribute 'cache' of module '' \(Code\)"
    ):
        run(model, "fused")


def hooked_where_there_is_a_graph(model: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(torch.neg)
    return x


@pytest.mark.parametrize("engine", VMAPPED)
def test_code_sees_whether_a_tensor_has_a_graph(engine: str) -> None:
    """Else the hook would be left out, and the gradient another than the loop engine's."""
    with pytest.raises(UnsupportedModelError, match="registers a hook on a gradient"):
        run(Code(hooked_where_there_is_a_graph), engine)


def without_features(model: Any, x: Tensor) -> Tensor:
    return x + nn.functional.linear(x[:, :0], model.first.weight[:, :0])


def test_a_linear_layer_may_have_no_input_features() -> None:
    norms = []
    for engine in ("fused", "loop"):
        torch.manual_seed(0)
        norms.append(run(Code(without_features), engine).norms())
    torch.testing.assert_close(*norms)


class Clock:
    """As the monitor of tqdm, which a thread of its own writes to at any time."""

    woken = 0


def with_a_clock(model: Any, x: Tensor) -> Tensor:
    Clock.woken += 1
    return x


@pytest.mark.parametrize(("module", "refused"), [("tqdm.std", False), ("of_a_user", True)])
def test_what_tqdm_writes_is_no_state_of_the_model(
    module: str, refused: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Clock, "__module__", module)
    expected = pytest.raises(StatefulModelError, match="woken") if refused else nullcontext()
    with expected:
        run(Code(with_a_clock), "loop")


class Largest(torch.autograd.Function):
    """Divides by the largest entry of all rows, by a batching rule of its own."""

    generate_vmap_rule = False

    @staticmethod
    def forward(g: Tensor) -> Tensor:
        return g.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, axes: Any, g: Tensor) -> tuple[Tensor, int]:
        return g / g.abs().max(), 0


class Mixing(DPSGD):
    """A method of a user's own whose direction depends on other units."""

    def direction(self, grad: Any, theta: Any, lam: float) -> Any:
        return {name: Largest.apply(g) for name, g in grad(theta).items()}


def test_a_method_with_a_batching_rule_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="the method calls custom_function_call"):
        run(smooth_net().float(), "functional", method=Mixing())


def test_on_the_loop_engine_such_a_method_gets_one_unit() -> None:
    found = run(smooth_net().float(), "loop", method=Mixing()).norms()
    assert torch.equal(found, run(smooth_net().float(), "loop").norms())
