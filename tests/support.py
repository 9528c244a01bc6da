"""Small models, plans and oracles for tests, and gradients by ordinary autograd, one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbam import BAM, DPSAT, DPSGD, Compute, Method, PrivacyPlan, PrivateGradientOracle, mechanism
from dpbam.batches import LogicalBatch
from dpbam.compute import ENGINES as ALL_ENGINES
from dpbam.engines.memory import MOST_ROWS
from dpbam.guard import Admitted
from dpbam.loading import PoissonBatches
from dpbam.params import WeakTensors, trainable

ENGINES = [name for name in ALL_ENGINES if name != "auto"]
CLIPPINGS = ["flat", "automatic", "per-layer"]
METHODS: dict[str, Callable[[float], Method]] = {
    "dp-sgd": lambda lam: DPSGD(),
    "dp-sat": lambda lam: DPSAT(lam),
    "bam": lambda lam: BAM(lam),
    "bam-exact": lambda lam: BAM(lam, exact=True),
}
#: every method on every engine
SERVED = [(engine, method) for engine in ENGINES for method in METHODS]
#: where either shows it, the cheaper one in the quick suite
ACCOUNTANTS = ["rdp", pytest.param("pld", marks=pytest.mark.slow)]

cross_entropy = nn.CrossEntropyLoss(reduction="none")


def poisson_batches(
    plan: PrivacyPlan,
    dataset: Any,
    *,
    seed: int | None = None,
    start: int = 0,
    secure: bool = False,
    **options: Any,
) -> Iterator[tuple[Any, Any, Any]]:
    """A plan's Poisson batches, as an oracle would draw them."""
    sampler = plan.sampler(seed=seed, start=start, secure=secure)
    return iter(PoissonBatches(plan, dataset, sampler, **options))


def smooth_net(inputs: int = 4, classes: int = 3, *, seed: int = 0) -> nn.Module:
    """Two layers with a smooth activation, float64."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, classes))
    return net.double()


def samples(n: int, inputs: int = 4, classes: int = 3, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    """n random records with labels, float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (n,), generator=generator)


def private_plan(**changes: Any) -> PrivacyPlan:
    """A cheap plan: sigma given, nothing calibrated."""
    fields = {"n": 100, "batch_size": 10, "steps": 20, "noise_multiplier": 1.0, "delta": 1e-3}
    return PrivacyPlan(**{**fields, **changes})


def quiet_plan(clip_norm: float = math.inf, **changes: Any) -> PrivacyPlan:
    """No noise, so that what is summed can be seen."""
    fields = {"n": 100, "batch_size": 10, "steps": 20, "clip_norm": clip_norm}
    return PrivacyPlan.non_private(**{**fields, **changes})


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every ``.grad``."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def flat(tree: dict[str, Tensor]) -> Tensor:
    """One long float64 vector."""
    return torch.cat([t.detach().double().flatten() for t in tree.values()])


def in_turn(first: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """A grid: each of ``first`` once in the quick suite, the others in turn; the rest is slow."""
    cells = []
    for k, one in enumerate(first):
        chosen = tuple(axis[(k + k // 3) % len(axis)] for axis in others)
        for rest in itertools.product(*others):
            values = (*(one if isinstance(one, tuple) else (one,)), *rest)
            cells.append(pytest.param(*values, marks=[] if rest == chosen else pytest.mark.slow))
    return cells


def sized_oracle(
    model: nn.Module, loss: Any, plan: PrivacyPlan, method: Method | None = None, **options: Any
) -> PrivateGradientOracle:
    """An oracle with a fixed number of rows to compute at once: measuring it costs the most."""
    rows = options.pop("physical_batch_size", MOST_ROWS)
    options.setdefault("sampling", "poisson-elsewhere")  # tests hand over batches of their own
    compute = Compute(engine=options.pop("engine", "auto"), physical_batch_size=rows)
    return PrivateGradientOracle(model, loss, plan, method, compute=compute, **options)


def one_step(
    model: nn.Module, plan: PrivacyPlan, x: Any, y: Any, *, units: Any = None, **options: Any
) -> dict[str, Tensor]:
    """The gradient that a new oracle writes for one batch."""
    options.setdefault("loss", cross_entropy)
    oracle = sized_oracle(model, options.pop("loss"), plan, **options)
    oracle.backward(x, y, units)
    return gradients(model)


def clipped_sum(oracle: PrivateGradientOracle, x: Any, y: Any, units: Any = None) -> Tensor:
    """The un-noised sum of one logical batch, as the mechanism computes it."""
    batch = LogicalBatch.of(x, y, units, oracle.plan.max_records)
    clipping = oracle.clipping.at(oracle.step, oracle.plan.clip_factor_at(oracle.step))
    theta = trainable(oracle.model)
    admitted = Admitted(batch, batch.size, theta, [], clipping, False, WeakTensors())
    step = oracle._prepare(admitted, x, y)
    return flat(mechanism.clipped_sums(step)["gradient"].sums)


@contextmanager
def noticed_sums() -> Iterator[list[Tensor]]:
    """Collect the un-noised sum of every step inside the block."""
    sums: list[Tensor] = []
    real = mechanism.clipped_sums

    def noticed(step: mechanism.Step) -> Any:
        queries = real(step)
        sums.append(flat(queries["gradient"].sums).clone())  # its memory is zeroed afterwards
        return queries

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanism, "clipped_sums", noticed)
        yield sums


def released_before(
    oracle: PrivateGradientOracle, gradient: Any = None, ahead: float = 0.0
) -> dict[str, Any]:
    """The ``parts`` of an oracle's state after a step: its gradient, and theta + ahead there."""
    if not oracle.method.remembers:
        return {}
    theta = dict(oracle.model.named_parameters())
    gradient = theta if gradient is None else gradient
    parts = {f"history/0/gradient/{n}": g.detach() for n, g in gradient.items()}
    return parts | {f"history/0/theta/{n}": p.detach() + ahead for n, p in theta.items()}


def each_gradient(
    model: nn.Module, x: Tensor, y: Tensor, loss: Any = cross_entropy
) -> list[dict[str, Tensor]]:
    """g_i for every sample, by ordinary autograd on that sample alone."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = []
    for i in range(len(x)):
        value = loss(model(x[i : i + 1]), y[i : i + 1]).sum()
        found.append(dict(zip(named, torch.autograd.grad(value, named.values()), strict=True)))
    return found


def clip_and_sum(directions: Iterable[dict[str, Tensor]], clip_norm: float) -> Tensor:
    """sum_i d_i / max(1, |d_i| / C), written out."""
    vectors = [flat(d) for d in directions]
    return torch.stack([v / max(1.0, float(v.norm()) / clip_norm) for v in vectors]).sum(0)
