"""Models that mix the records of a batch, and how far one record moves the clipped sum.

A *world* is a data set that takes part in four steps with parameters that move in between, the
same way in every world. Two worlds that differ by one record must have clipped sums within C of one
another at each step, unless the model is refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from catalogue import METHODS, Net, trainable
from reference import make_batch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpbam.compute import Compute, Runner
from dpbam.engines import Engine
from dpbam.params import Params, shifted, unit_vector
from dpbam.privacy.clipping import FlatClipping

C, STEPS, LAM, RECORDS, WIDTH = 0.05, 4, 0.1, 6, 4
SLACK = 1e-6
MIXING: dict[str, Callable[[], Mixing]] = {}
#: what the loop engine must refuse, rather than show one record at a time
STATEFUL: set[str] = set()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


@dataclass
class Mixing:
    """A model with its loss; records are rows of [RECORDS, *shape], one of them loud."""

    model: nn.Module
    loss: Any = loss
    shape: tuple[int, ...] = (WIDTH,)

    def records(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(RECORDS, *self.shape, generator=generator, dtype=torch.float64)
        x[2] *= 20
        return x, torch.arange(RECORDS) % 3


def mixes(make: Callable[[], Mixing]) -> Callable[[], Mixing]:
    """Register a model under its function's name."""
    name = make.__name__.replace("_", " ")
    assert name not in MIXING, name
    MIXING[name] = make
    if make.__module__ == "mixing_state":
        STATEFUL.add(name)
    return make


def load() -> dict[str, Callable[[], Mixing]]:
    for part in ("batch", "state"):
        importlib.import_module(f"mixing_{part}")
    return MIXING


def linear(call: Callable[..., Tensor], **parts: Any) -> Net:
    """First layer, something that mixes, head."""
    return Net(call, first=nn.Linear(WIDTH, 5), head=nn.Linear(5, 3), **parts)


class RefusedError(Exception):
    """The engine raised instead of computing: nothing would be charged."""


def world(
    name: str, engine: str | Callable[..., Engine], method: str, keep: list[int]
) -> list[Params]:
    """The clipped sums of four steps on the records ``keep``.

    Raises:
        RefusedError: with the engine's reason.
    """
    torch.manual_seed(0)
    made = load()[name]()
    model = made.model.double()
    theta = trainable(model)
    groups = dict.fromkeys(theta, 0)
    build = engine if callable(engine) else lambda *parts: Runner(Compute(engine=engine), *parts)
    serving = build(model, made.loss, groups)
    generator = torch.Generator().manual_seed(1)
    sums, previous = [], None
    for _ in range(STEPS):
        with shifted(theta, previous if method == "DP-SAT" else None):
            sums.append(_clipped_sum(serving, made, method, keep))
        noise = {n: torch.randn(p.shape, generator=generator).double() for n, p in theta.items()}
        previous = {n: LAM * u for n, u in unit_vector(noise).items()}
        with torch.no_grad():
            for n, p in theta.items():
                p.add_(0.5 * noise[n])
    return sums


def _clipped_sum(engine: Engine, made: Mixing, method: str, keep: list[int]) -> Params:
    index = torch.tensor(keep)
    x, y = tree_map(lambda t: t[index], made.records())
    batch = make_batch(x, y, len(keep))
    batch = replace(batch, keys=index + 7)  # a record keeps its key in every world
    try:
        handle = engine.directions(batch, METHODS[method], LAM)
        return handle.weighted_sum(FlatClipping(C).factors(handle.norms()))
    except Exception as reason:
        raise RefusedError(f"{type(reason).__name__}: {reason}") from reason


def moves(name: str, engine: str | Callable[..., Engine], method: str) -> list[float]:
    """How far leaving out the first, the loud or the last record moves the sum: k, in units of C.

    The largest of the three at each step.
    """
    everyone = list(range(RECORDS))
    whole = world(name, engine, method, everyone)
    worst = [0.0] * STEPS
    for gone in (0, 2, RECORDS - 1):
        without = world(name, engine, method, [i for i in everyone if i != gone])
        for step, (a, b) in enumerate(zip(whole, without, strict=True)):
            moved = torch.stack([(a[n] - b[n]).square().sum() for n in a]).sum().sqrt()
            worst[step] = max(worst[step], float(moved) / C)
    return worst
