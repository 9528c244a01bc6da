"""Models that the engines must agree on: what an example is, and the directions to compare."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from reference import make_batch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpbam.compute import Compute, Runner
from dpbam.engines import Engine, LoopEngine
from dpbam.engines.base import PhysicalBatch
from dpbam.methods import BAM, DPSGD, Method
from dpbam.params import Params, shifted, unit_vector

ROWS, STEPS, LAM, TOLERANCE = 4, 4, 0.1, 1e-8
ENGINES = ("fused", "functional")
METHODS: dict[str, Method] = {
    "DP-SGD": DPSGD(),
    "DP-SAT": DPSGD(),  # at parameters that are shifted along the last step's sum
    "BAM": BAM(LAM),
    "exact BAM": BAM(LAM, exact=True),
}
PARTS = ("vision", "sequence", "code", "training", "huggingface")
CATALOGUE: dict[str, Callable[[], Example]] = {}
KINDS: dict[str, str] = {}


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy per row, the mean over a row's positions."""
    if output.ndim == 3:  # [n, positions, classes]
        output = output.transpose(1, 2)
    value = F.cross_entropy(output, target, reduction="none")
    return value if value.ndim == 1 else value.flatten(1).mean(1)


@dataclass
class Example:
    """A model with its data.

    Attributes:
        model: in train mode.
        inputs: a tree of tensors, or a function from the step to one.
        targets: likewise; class labels 0, 1, 2, 0 unless given.
        loss: one value per row.
        dtype: what the model and floating inputs are cast to; None leaves them.
        tolerance: the relative difference that is allowed, on the worst parameter.
        per_unit: the rows of each unit.
    """

    model: nn.Module
    inputs: Any
    targets: Any = None
    loss: Any = loss
    dtype: torch.dtype | None = torch.float64
    tolerance: float = TOLERANCE
    per_unit: int = 1

    def __post_init__(self) -> None:
        if self.targets is None:
            self.targets = labels()
        if self.dtype is not None:
            self.model.to(self.dtype)

    def batch(self, step: int) -> PhysicalBatch:
        inputs, targets = (t(step) if callable(t) else t for t in (self.inputs, self.targets))
        if self.dtype is not None:
            inputs = tree_map(self._cast, inputs)
        return make_batch(inputs, targets, ROWS, self.per_unit)

    def _cast(self, t: Any) -> Any:
        return t.to(self.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t


class Net(nn.Module):
    """A model by its parts and its forward function (model, *inputs) -> output."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


def example(make: Callable[[], Example]) -> Callable[[], Example]:
    """Register a model under its function's name."""
    return register(make.__name__, make)


def register(name: str, make: Callable[[], Example]) -> Callable[[], Example]:
    name = name.replace("__", ", ").replace("_", " ")
    assert name not in CATALOGUE, name
    CATALOGUE[name] = make
    KINDS[name] = make.__module__.removeprefix("catalogue_")
    return make


def load() -> dict[str, Callable[[], Example]]:
    """All examples by name."""
    for part in PARTS:
        importlib.import_module(f"catalogue_{part}")
    return CATALOGUE


def make(name: str) -> Example:
    torch.manual_seed(0)
    return load()[name]()


def labels(classes: int = 3) -> Tensor:
    return torch.arange(ROWS) % classes


def images(channels: int = 3, side: int = 6) -> Tensor:
    return torch.randn(ROWS, channels, side, side)


def parameter(*shape: int, scale: float = 0.5) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * scale)


# --- what is compared


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


@dataclass
class Step:
    """What an engine found at one step: [1, U] norms, and a weighted sum per parameter."""

    norms: Tensor
    total: Params


def steps(engine: Engine, made: Example, method: str) -> Iterator[Step]:
    """Four steps; the parameters move in between, the same way whatever the engine found."""
    theta = trainable(made.model)
    generator = torch.Generator().manual_seed(1)
    factors = torch.rand(1, ROWS // made.per_unit, generator=generator, dtype=torch.float64) + 0.5
    previous = None
    for step in range(STEPS):
        with shifted(theta, previous if method == "DP-SAT" else None):
            handle = engine.directions(made.batch(step), METHODS[method], LAM)
            norms = handle.norms()
            yield Step(norms, handle.weighted_sum(factors.to(norms.dtype)))
        noise = {n: torch.randn(p.shape, generator=generator, dtype=torch.float64)
                 for n, p in theta.items()}  # fmt: skip
        previous = {n: (LAM * u).to(theta[n].dtype) for n, u in unit_vector(noise).items()}
        with torch.no_grad():
            for n, p in theta.items():
                p.add_((0.1 * noise[n]).to(p.dtype))


def reference(name: str, method: str) -> list[Step]:
    made = make(name)
    return list(steps(LoopEngine(made.model, made.loss), made, method))


def differences(found: Step, wanted: Step, *, half: bool = False) -> dict[str, float]:
    """The norms' relative difference, and each parameter's, relative to it or to the whole sum.

    A parameter whose sum is 1e-4 of the largest or less (zero in exact arithmetic, for example a
    bias before a norm) is measured against that; in half precision, where sums of both signs round
    to something else, every parameter against the largest.
    """
    whole = max(float(t.double().norm()) for t in wanted.total.values())
    known = {"norms": _relative(found.norms, wanted.norms, 0.0)}
    for n, t in wanted.total.items():
        known[n] = _relative(found.total[n], t, (1 if half else 1e-4) * whole)
    return known


def _relative(found: Tensor, wanted: Tensor, least: float) -> float:
    assert found.shape == wanted.shape
    found, wanted = found.detach().double(), wanted.detach().double()
    size = max(float(wanted.norm()), least)
    difference = float((found - wanted).norm())
    return difference / size if size else difference


def first_step(name: str, engine: str, method: str) -> str:
    """What stands in the way of this engine's first step; empty if it serves."""
    made = make(name)
    groups = dict.fromkeys(trainable(made.model), 0)
    try:
        next(steps(Runner(Compute(engine=engine), made.model, made.loss, groups), made, method))
    except Exception as reason:  # whatever it is: this engine does not serve
        return f"{type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''}"
    return ""
