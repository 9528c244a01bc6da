"""Compiled, scripted and complex models: refused when the oracle is made, for the real reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbam.errors import ArgumentError
from support import (
    cross_entropy,
    gradients,
    one_step,
    private_plan,
    samples,
    sized_oracle,
    smooth_net,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


def marked_as_compiled() -> nn.Module:
    model = smooth_net()
    model._compiled_call_impl = model._call_impl  # as model.compile() does
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "model.compile()": (marked_as_compiled, r"the model is compiled.*compile nothing"),
    "script": (
        lambda: torch.jit.script(smooth_net()),
        r"the model is TorchScript.*pass the module",
    ),
    "trace": (lambda: torch.jit.trace(smooth_net(), samples(2)[0]), r"the model is TorchScript"),
    "a scripted layer": (
        lambda: nn.Sequential(torch.jit.script(smooth_net()), nn.Linear(3, 3).double()),
        r"layer '0' of the model is TorchScript",
    ),
    "complex": (Complex, r"parameter weight is complex.*view_as_complex"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_is_named_when_the_oracle_is_made(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ArgumentError, match=words):
        sized_oracle(make(), cross_entropy, private_plan())


def test_a_scripted_loss_is_refused() -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return output.sum(1)

    with pytest.raises(ArgumentError, match="the loss is TorchScript"):
        sized_oracle(smooth_net(), torch.jit.script(loss), private_plan())


def test_frozen_complex_parameters_are_constants() -> None:
    class Mixed(Complex):
        def __init__(self) -> None:
            super().__init__()
            self.weight.requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    x, y = samples(5)
    assert set(one_step(Mixed(), private_plan(), x.float(), y)) == {"scale"}


CONSTANTS = {
    "complex of 16 bytes": lambda: torch.randn(4, 3, dtype=torch.complex128),
    "conjugated": lambda: torch.randn(4, 3, dtype=torch.complex64).conj(),
    "large and conjugated": lambda: torch.randn(200, 100, dtype=torch.complex128).conj(),
    "negated": lambda: torch.randn(4, 3, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse by rows": lambda: torch.eye(3).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("parameter", [False, True], ids=["buffer", "parameter"])
@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_of_any_kind_are_constants(kind: str, parameter: bool) -> None:
    """A pass that writes to one is refused."""

    class Model(nn.Sequential):
        writes = False

        def forward(self, x: Tensor) -> Tensor:
            if self.writes:
                values = self.constant.data
                values = values._values() if values.is_sparse else values
                (values.values() if values.layout is torch.sparse_csr else values).mul_(2)
            return super().forward(x)

    (x, y), model = samples(5), Model(nn.Linear(4, 3).double())
    constant = CONSTANTS[kind]()
    if parameter:
        model.constant = nn.Parameter(constant, requires_grad=False)
    else:
        model.register_buffer("constant", constant)
    assert one_step(model, private_plan(), x, y)
    model.writes = True
    with pytest.raises(ValueError, match=r"written to parameters|changes"):
        one_step(model, private_plan(), x, y)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_model_is_refused_and_its_original_trains(backend: str) -> None:
    """Also after the other one in the same process: nothing was run, so nothing is kept."""
    model, (x, y) = smooth_net(), samples(5)
    compiled: Any = torch.compile(model, backend=backend)
    with pytest.raises(ArgumentError, match=r"the model is compiled.*compiled\._orig_mod"):
        sized_oracle(compiled, cross_entropy, private_plan())
    nested = nn.Sequential(compiled, nn.Linear(3, 3).double())
    with pytest.raises(ArgumentError, match=r"layer '0' of the model is compiled"):
        sized_oracle(nested, cross_entropy, private_plan())
    sized_oracle(compiled._orig_mod, cross_entropy, private_plan()).backward(x, y)
    assert len(gradients(model)) == 4
