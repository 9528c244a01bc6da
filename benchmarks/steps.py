"""One training step's gradient, as every engine does it: a function of no arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from nets import LOSS, make
from torch import Tensor, nn

from dpbam.engines import FunctionalEngine, FusedEngine, PhysicalBatch
from dpbam.methods import BAM, DPSAT, DPSGD, Method

Step = Callable[[], object]
METHODS: dict[str, tuple[Method, float]] = {
    "dp-sgd": (DPSGD(), 0.0),
    "dp-sat": (DPSAT(0.02), 0.02),
    "bam": (BAM(0.02), 0.02),
    "bam-exact": (BAM(0.02, exact=True), 0.02),
}


def step(engine: str, method: str, net: str, batch: int) -> Step:
    model, x, y = make(net, batch)
    if engine == "non-private":
        return _plain(model, x, y)
    if engine.startswith("opacus"):
        return _opacus(engine.split("-")[1], model, x, y)
    return _ours(engine, method, model, x, y)


def _plain(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    def run() -> None:
        model.zero_grad()
        LOSS(model(x), y).sum().backward()

    return run


def _ours(engine: str, method: str, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    make_engine = FusedEngine if engine == "fused" else FunctionalEngine
    made, (what, lam) = make_engine(model, LOSS), METHODS[method]
    n = torch.arange(len(y))
    batch = PhysicalBatch(x, y, n, len(y), torch.ones(len(y)), n)
    theta = dict(model.named_parameters())
    previous = {name: torch.randn_like(p) for name, p in theta.items()}

    def run() -> None:
        shift = what.ascent(lam, previous, dict)
        with torch.no_grad():
            for name, t in (shift or {}).items():
                theta[name].add_(t)
        handle = made.directions(batch, what, lam)
        handle.weighted_sum(handle.norms().reciprocal().clamp(max=1.0))
        with torch.no_grad():
            for name, t in (shift or {}).items():
                theta[name].sub_(t)

    return run


def _opacus(mode: str, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Per-sample clipping by Opacus, without noise."""
    from opacus.grad_sample import (
        GradSampleModule,
        GradSampleModuleExpandedWeights,
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = copy.deepcopy(model)
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": len(y)}
    if mode == "ghost":
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=1.0, use_ghost_clipping=True
        )
        optimiser = DPOptimizerFastGradientClipping(
            torch.optim.SGD(wrapped.parameters(), 0.0), **options
        )
        criterion = DPLossFastGradientClipping(wrapped, optimiser, nn.CrossEntropyLoss())

        def ghost() -> None:
            optimiser.zero_grad()
            criterion(wrapped(x), y).backward()

        return ghost
    kinds = {
        "hooks": lambda: GradSampleModule(model),
        "functorch": lambda: GradSampleModule(model, force_functorch=True),
        "ew": lambda: GradSampleModuleExpandedWeights(model),
    }
    wrapped = kinds[mode]()
    optimiser = DPOptimizer(torch.optim.SGD(wrapped.parameters(), 0.0), **options)

    def hooks() -> None:
        optimiser.zero_grad()
        LOSS(wrapped(x), y).mean().backward()
        optimiser.clip_and_accumulate()

    return hooks
