"""Recurrent layers over F.linear: torch's numbers and gradients, row by row under vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import make_batch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from dpbam.engines import FusedEngine, LoopEngine
from dpbam.engines.decomposed.recurrent import DECOMPOSED, lstm_layer, lstm_steps
from dpbam.engines.fused.layers import recurrent as rules
from dpbam.methods import BAM, DPSGD
from support import one_step, private_plan, samples

# torch's own inversion of a permutation, of one number per row
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
VARIANTS: list[dict[str, Any]] = [  # every pair of settings occurs
    {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
    for layers, both, first, bias in [
        (1, False, False, True),
        (1, True, True, False),
        (3, False, True, True),
        (3, True, False, False),
        (3, True, True, True),
        (1, False, False, False),
    ]
]
CELLS = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "tanh": nn.RNNCell}


class Decomposed(TorchFunctionMode):
    """Replace torch's functions as an engine does, and count the linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.linear += func is torch.nn.functional.linear
        if func in DECOMPOSED or func is lstm_layer:
            with self:
                return {**DECOMPOSED, lstm_layer: lstm_steps}[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def make(kind: str, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return KINDS[kind](3, 4, **options).double()


def flat(result: Any) -> list[Tensor]:
    """The tensors of any nest of tuples."""
    if isinstance(result, Tensor):
        return [result]
    return [t for part in result if part is not None for t in flat(part)]


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    weights = [torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view_as(t) for t in outputs]
    loss = sum((w * t).sum() for w, t in zip(weights, outputs, strict=True))
    return list(torch.autograd.grad(loss, inputs))  # type: ignore[arg-type]


def assert_as_torch(f: Callable[[], Any], inputs: list[Tensor]) -> None:
    """The same values and gradients with and without the decomposition."""
    expected = [t for t in flat(f()) if t.is_floating_point()]
    with Decomposed() as mode:
        got = [t for t in flat(f()) if t.is_floating_point()]
    assert mode.linear > 0
    for pair in (expected, got), (gradients(expected, inputs), gradients(got, inputs)):
        for wanted, have in zip(*pair, strict=True):
            torch.testing.assert_close(have, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_padded_layer_equals_torch(kind: str, options: dict[str, Any]) -> None:
    layer, x = make(kind, **options), torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    assert_as_torch(lambda: layer(x), [x, *layer.parameters()])


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_projection_equals_torch(options: dict[str, Any]) -> None:
    layer = make("LSTM", proj_size=2, **options)
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    assert_as_torch(lambda: layer(x), [x, *layer.parameters()])


@pytest.mark.parametrize("kind", KINDS)
def test_initial_state_and_missing_batch_axis_equal_torch(kind: str) -> None:
    layer = make(kind, num_layers=2)
    x, h = (torch.randn(n, w, dtype=torch.float64, requires_grad=True) for n, w in ((5, 3), (2, 4)))

    def run() -> Any:
        return layer(x, (h, 2 * h) if kind == "LSTM" else h)

    assert_as_torch(run, [x, h, *layer.parameters()])


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_layer_equals_torch(kind: str, options: dict[str, Any]) -> None:
    """Lengths that grow, repeat and fall, in a batch that is sorted by torch."""
    layer, x = make(kind, **options), torch.randn(6, 6, 3, dtype=torch.float64, requires_grad=True)
    lengths, first = torch.tensor([2, 6, 6, 1, 4, 4]), options["batch_first"]

    def run() -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        out, state = layer(packed)
        return pad_packed_sequence(out, batch_first=first, padding_value=0.5), state

    assert_as_torch(run, [x, *layer.parameters()])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cell_equals_torch(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    for options in ({}, {"nonlinearity": "relu"}) if kind == "tanh" else ({},):
        cell = CELLS[kind](3, 4, bias=bias, **options).double()
        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

        def run(cell: nn.Module = cell, x: Tensor = x) -> Any:
            return cell(x, cell(x))

        assert_as_torch(run, [x, *cell.parameters()])


def test_dropout_between_layers_is_torchs_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of F.dropout per layer but the last, on that layer's whole output."""
    calls: list[tuple[torch.Size, float, bool]] = []

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        calls.append((x.shape, p, training))
        return 2 * x

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    layer, x = make("LSTM", num_layers=3, dropout=0.25, bidirectional=True), torch.randn(5, 2, 3)
    with Decomposed():
        layer(x.double())
    assert calls == [(torch.Size([5, 2, 8]), 0.25, True)] * 2
    with Decomposed():
        layer.eval()(x.double())
    assert len(calls) == 2


def test_input_projection_is_one_linear() -> None:
    with Decomposed() as mode:
        make("LSTM", num_layers=2)(torch.randn(7, 1, 3, dtype=torch.float64))
    assert mode.linear == 2 * (1 + 7)


class Reader(nn.Module):
    """Read sequences of given lengths; return everything a model may look at."""

    def __init__(self, kind: str, *, total: bool = True, **options: Any) -> None:
        super().__init__()
        self.layer, self.total = make(kind, batch_first=True, **options), total

    def forward(self, x: Tensor, lengths: Any) -> list[Tensor]:
        if isinstance(lengths, Tensor):
            lengths = lengths.cpu()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, state = self.layer(packed)
        total = x.shape[1] if self.total else None
        padded, same = pad_packed_sequence(out, True, padding_value=0.5, total_length=total)
        return [*flat(state), padded, same]


LENGTHS = torch.tensor([3, 5, 1, 4])


def by_rows(model: nn.Module, x: Tensor, lengths: Any) -> list[list[Tensor]]:
    """What torch gives for each row alone: values, then gradients of a loss per parameter."""
    rows = []
    for n in range(x.shape[0]):
        length = lengths[n][None] if isinstance(lengths, Tensor) else lengths
        out = model(x[n][None], length)
        floats = [t for t in out if t.is_floating_point()]
        rows.append([*out, *gradients(floats, list(model.parameters()))])
    return rows


def by_vmap(model: nn.Module, x: Tensor, lengths: Any) -> list[list[Tensor]]:
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor, length: Any) -> tuple[Tensor, list[Tensor]]:
        length = length[None] if isinstance(length, Tensor) else length
        out = functional_call(model, parameters, (x[None], length))
        floats = [t for t in out if t.is_floating_point()]
        shapes = [torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view_as(t) for t in floats]
        return sum((w * t).sum() for w, t in zip(shapes, floats, strict=True)), out  # type: ignore

    axis = 0 if isinstance(lengths, Tensor) else None
    with Decomposed():
        each, out = vmap(grad(loss, has_aux=True), in_dims=(None, 0, axis))(parameters, x, lengths)
    columns = [*out, *(each[name] for name in parameters)]
    return [[c[n] for c in columns] for n in range(x.shape[0])]


@pytest.mark.parametrize("lengths", [LENGTHS, [4]], ids=["lengths are data", "lengths are numbers"])
@pytest.mark.parametrize("both", [False, True], ids=["forward", "bidirectional"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_under_vmap_equal_a_loop(kind: str, both: bool, lengths: Any) -> None:
    model = Reader(kind, num_layers=2, bidirectional=both)
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    for got, wanted in zip(by_vmap(model, x, lengths), by_rows(model, x, lengths), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_under_vmap_equal_a_loop(kind: str, both: bool) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make(kind, num_layers=2, bidirectional=both, batch_first=True)

        def forward(self, x: Tensor, _: Any) -> list[Tensor]:
            return flat(self.layer(x))

    model, x = Padded(), torch.randn(4, 5, 3, dtype=torch.float64)
    for got, wanted in zip(by_vmap(model, x, None), by_rows(model, x, None), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_and_second_derivative_outside_vmap_equal_a_loop(kind: str) -> None:
    """As the fused engine differentiates: only the losses leave vmap."""
    model, x = Reader(kind), torch.randn(4, 5, 3, dtype=torch.float64)
    parameters = list(model.parameters())

    def loss(x: Tensor, length: Tensor) -> Tensor:
        return sum(t.square().sum() for t in model(x[None], length[None])[:-1])  # type: ignore

    def derivatives(losses: list[Tensor]) -> list[Tensor]:
        total = sum((n + 1) * one for n, one in enumerate(losses))
        first = torch.autograd.grad(total, parameters, create_graph=True)  # type: ignore
        second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)  # type: ignore
        return [*first, *second]

    with Decomposed():
        got = derivatives(list(vmap(loss)(x, LENGTHS)))
    wanted = derivatives([loss(x[n], LENGTHS[n]) for n in range(4)])
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def test_padding_beyond_a_rows_length_has_no_influence() -> None:
    model, x = Reader("GRU"), torch.randn(4, 5, 3, dtype=torch.float64)
    spoiled = torch.where(torch.arange(5)[:, None] < LENGTHS[:, None, None], x, torch.nan)
    for got, wanted in zip(
        by_vmap(model, spoiled, LENGTHS), by_vmap(model, x, LENGTHS), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_packed_rows_of_unknown_length_are_refused() -> None:
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"pass total_length=5, the padded length"):
        by_vmap(Reader("LSTM", total=False), x, LENGTHS)

    def mean_of_steps(x: Tensor, length: Tensor) -> Tensor:
        return torch.mean(pack_padded_sequence(x[None], length[None], batch_first=True).data)

    def method(x: Tensor, length: Tensor) -> Tensor:
        return pack_padded_sequence(x[None], length[None], batch_first=True).data.mean()

    with Decomposed(), pytest.raises(ValueError, match="computes with the packed steps"):
        vmap(mean_of_steps)(x, LENGTHS)
    with Decomposed(), pytest.raises(AttributeError, match="computes with the packed steps"):
        vmap(method)(x, LENGTHS)


class TwoConstantBiases(nn.Module):
    """One weight with two biases that are not trained, at so many positions that G_u is cheaper."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)
        self.shift = nn.Parameter(torch.randn(4))
        self.register_buffer("first", torch.randn(4))
        self.register_buffer("second", 3 + torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(F.linear(x, self.weight, self.first).tanh(), self.weight, self.second)
        x = F.linear(x.tanh(), self.weight, self.shift)
        return F.linear(x.tanh(), self.weight, self.shift).mean(1)


def test_moved_weights_are_kept_for_a_pass_and_constant_biases_are_not() -> None:
    torch.manual_seed(0)
    model, x = TwoConstantBiases().double(), torch.randn(3, 40, 4).double()
    batch = make_batch(x, torch.tensor([0, 1, 2]), 3)
    loss = nn.CrossEntropyLoss(reduction="none")
    found, wanted = (
        made(model, loss).directions(batch, BAM(0.3), 0.3) for made in (FusedEngine, LoopEngine)
    )
    torch.testing.assert_close(found.norms(), wanted.norms(), rtol=1e-9, atol=0)


class Sequences(nn.Module):
    """An LSTM with a loss of every output: all steps, the last state, and the last cell.

    Args:
        given: initial states, none, of the row, or trained.
        constant: which of the layer's weights are detached.
        frozen: which are not trained.
        twice: whether the layer also reads the sequence without its first step.
        options: of the layer.
    """

    def __init__(
        self, given: str = "none", *, constant: tuple[int, ...] = (), frozen: tuple[int, ...] = (),
        twice: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layer = nn.LSTM(3, 4, batch_first=True, **options)
        self.given, self.constant, self.twice = given, constant, twice
        for i in frozen:
            self.layer._flat_weights[i].requires_grad_(False)
        count = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        self.start = nn.Parameter(torch.randn(2, count, 1, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, -3)  # [sequences of a row, T, 3]
        start = self.start.expand(-1, -1, len(x), -1)
        if self.given == "none":
            start = torch.zeros_like(start)
        if self.given == "row":
            start = x.mean() * start.detach()
        parts = [self.run(x, start)]
        if self.twice:
            parts.append(self.run(x[:, 1:], start))
        total = sum(
            out.mean(1).unflatten(1, (-1, 4)).sum(1) + h.sum(0) * c[0] for out, h, c in parts
        )
        return self.head(total).mean(0, keepdim=True)

    def run(self, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer, states = self.layer, tuple(start.contiguous().unbind(0))
        weights = [
            w.detach() if i in self.constant else w for i, w in enumerate(layer._flat_weights)
        ]
        settings = layer.bias, layer.num_layers, 0.0, False, layer.bidirectional, True
        return torch.lstm(x, states, weights, *settings)


BY_THE_RULE: dict[str, dict[str, Any]] = {
    "plain": {},
    "reverse too, two layers": {"bidirectional": True, "num_layers": 2},
    "without bias": {"bias": False},
    "initial state of the row": {"given": "row", "bidirectional": True},
    "trained initial state": {"given": "trained", "num_layers": 2},
    "used twice": {"twice": True},
    "frozen hidden weight": {"frozen": (1,)},
    "frozen input weight and hidden bias": {"frozen": (0, 3), "bidirectional": True},
    "frozen layer": {"frozen": (0, 1, 2, 3), "num_layers": 2},
}
STEP_BY_STEP: dict[str, dict[str, Any]] = {
    "constant hidden weight": {"constant": (1,)},
    "constant input weight and bias": {"constant": (0, 2)},
}
METHODS = {
    "dp-sgd": (DPSGD(), 0.0),
    "bam": (BAM(0.3), 0.3),
    "exact bam": (BAM(0.3, exact=True), 0.3),
}


def assert_as_the_loop_engine(model: nn.Module, x: Tensor, name: str, views: int = 1) -> None:
    loss, (method, lam) = nn.CrossEntropyLoss(reduction="none"), METHODS[name]
    batch = make_batch(x, torch.arange(len(x)) % 3, len(x), views)
    fused, loop = (
        engine(model, loss).directions(batch, method, lam) for engine in (FusedEngine, LoopEngine)
    )
    torch.testing.assert_close(fused.norms(), loop.norms(), rtol=1e-9, atol=0)
    factors = torch.linspace(0.5, 1, batch.units, dtype=x.dtype)[None]
    sums = fused.weighted_sum(factors), loop.weighted_sum(factors)
    for parameter, wanted in sums[1].items():
        torch.testing.assert_close(sums[0][parameter], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("steps", [5, 40], ids=["gram matrices", "materialised"])
@pytest.mark.parametrize("case", BY_THE_RULE)
def test_all_steps_at_once_equal_the_loop_engine(
    case: str, steps: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the layer runs step by step")

    monkeypatch.setattr(rules, "lstm_steps", refuse)
    torch.manual_seed(0)
    model = Sequences(**BY_THE_RULE[case]).double()
    assert_as_the_loop_engine(model, torch.randn(4, steps, 3).double(), name)
    assert_as_the_loop_engine(model, torch.randn(4, 2, steps, 3).double(), name, views=2)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("case", STEP_BY_STEP)
def test_layers_of_constant_weights_equal_the_loop_engine(case: str, name: str) -> None:
    torch.manual_seed(0)
    model = Sequences(**STEP_BY_STEP[case]).double()
    assert_as_the_loop_engine(model, torch.randn(4, 5, 3).double(), name)


@pytest.mark.parametrize("name", METHODS)
def test_direction_of_an_lstm_depends_on_its_own_row_alone(name: str) -> None:
    torch.manual_seed(0)
    model, x = Sequences(bidirectional=True), torch.randn(4, 12, 3)
    loss, (method, lam) = nn.CrossEntropyLoss(reduction="none"), METHODS[name]
    norms = []
    for value in (0.0, 1e3, torch.nan):
        x[2] = value
        batch = make_batch(x, torch.tensor([0, 1, 2, 0]), 4)
        norms.append(FusedEngine(model, loss).directions(batch, method, lam).norms()[0, [0, 1, 3]])
    assert torch.equal(norms[0], norms[1])
    assert torch.equal(norms[0], norms[2])


def load_by_assignment(lstm: nn.LSTM) -> None:
    lstm.load_state_dict(nn.LSTM(4, 4, batch_first=True).state_dict(), assign=True)


def assign_a_parameter(lstm: nn.LSTM) -> None:
    lstm.weight_hh_l0 = nn.Parameter(torch.eye(16, 4))


@pytest.mark.parametrize("replace", [load_by_assignment, assign_a_parameter])
def test_weights_that_were_replaced_before_training_are_no_change_by_a_pass(replace) -> None:
    """torch notes the new weights at the next forward pass, in an attribute of the module."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0].mean(1))

    model, (x, y) = Model(), samples(5)
    sequences = x.float()[:, None].expand(-1, 3, -1).contiguous()
    for _ in range(2):
        replace(model.lstm)
        assert one_step(model, private_plan(), sequences, y)
