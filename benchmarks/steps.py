"""One training step's gradient, as every engine does it: a function of no arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from nets import NETS, loss, make
from torch import Tensor, nn

from dpbam import Compute, PrivacyPlan, PrivateGradientOracle
from dpbam.batches import LogicalBatch, Views
from dpbam.engines import FunctionalEngine, FusedEngine, LoopEngine
from dpbam.methods import BAM, DPSAT, DPSGD, Method

Step = Callable[[], object]
METHODS: dict[str, tuple[Method, float]] = {
    "dp-sgd": (DPSGD(), 0.0),
    "dp-sat": (DPSAT(0.02), 0.02),
    "bam": (BAM(0.02), 0.02),
    "bam-exact": (BAM(0.02, exact=True), 0.02),
}
__all__ = ["METHODS", "NETS", "opacus_step", "placed", "private_step", "step"]
ENGINES = {"fused": FusedEngine, "functional": FunctionalEngine, "loop": LoopEngine}


def placed(
    given: tuple[nn.Module, Tensor, Tensor], device: Any
) -> tuple[nn.Module, Tensor, Tensor]:
    """Return model, inputs and targets on a device."""
    model, x, y = given
    return model.to(device), x.to(device), y.to(device)


def step(
    engine: str, method: str, net: str, rows: int, *, noise: bool = False, device: Any = "cpu"
) -> Step:
    """Return a step: the sum of clipped directions of ``rows`` samples; ``noise``: released."""
    if noise and not engine.startswith(("plain", "opacus")):
        return private_step(engine, method, net, rows, device=device)
    model, x, y = placed(make(net, rows), device)
    if engine.startswith("plain"):
        return _plain(model, x, y)
    if engine.startswith("opacus"):
        return opacus_step(engine.split("-")[1], model, x, y, noise=float(noise))
    return _ours(engine, method, model, x, y)


def _plain(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    def run() -> None:
        model.zero_grad()
        loss(model(x), y).sum().backward()

    return run


def _ours(engine: str, method: str, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    made, (what, lam) = ENGINES[engine](model, loss), METHODS[method]
    (batch,) = LogicalBatch.of(x, y, None, 1).split(len(y), Views(), x.device)
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


def private_step(
    engine: str, method: str, net: str, rows: int, *, parts: int = 1, seed: int | None = None,
    device: Any = "cpu",
) -> Step:  # fmt: skip
    """Return a whole ``backward`` of an oracle, noise included, of ``parts`` physical batches."""
    model, x, y = placed(make(net, rows), device)
    plan = PrivacyPlan(n=100 * rows, batch_size=rows, steps=9999, noise_multiplier=1.0, delta=1e-7)
    compute = Compute(engine=engine, physical_batch_size=-(-rows // parts))
    oracle = PrivateGradientOracle(
        model, loss, plan, METHODS[method][0], seed=seed, sampling="unchecked", compute=compute
    )
    trained = tuple(p for p in model.parameters() if p.requires_grad)

    def run() -> None:
        # as if an optimiser had moved the parameters since the last step: else the oracle compares
        # them, to warn of those that did not move
        versions = tuple(p._version + 1 for p in trained)
        torch._C._autograd._unsafe_set_version_counter(trained, versions)
        oracle.backward(x, y)

    run()
    torch.optim.SGD(trained, 1e-3).step()
    return run


def opacus_step(mode: str, model: nn.Module, x: Tensor, y: Tensor, noise: float = 0.0) -> Step:
    """Per-sample clipping by Opacus, on the model as its validator fixes it."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.validators import ModuleValidator

    model = ModuleValidator.fix(copy.deepcopy(model)).train()
    options = {"noise_multiplier": noise, "max_grad_norm": 1.0, "expected_batch_size": len(y)}
    if mode == "ghost":
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=1.0, use_ghost_clipping=True
        )
        optimiser = DPOptimizerFastGradientClipping(
            torch.optim.SGD(wrapped.parameters(), 0.0), **options
        )
        criterion = DPLossFastGradientClipping(wrapped, optimiser, _PerSample())

        def ghost() -> None:
            optimiser.zero_grad()
            criterion(wrapped(x), y).backward()
            if noise:
                optimiser.pre_step()

        return ghost
    wrapped = GradSampleModule(model, force_functorch=mode == "functorch")
    optimiser = DPOptimizer(torch.optim.SGD(wrapped.parameters(), 0.0), **options)

    def hooks() -> None:
        optimiser.zero_grad()
        loss(wrapped(x), y).mean().backward()
        if noise:
            optimiser.pre_step()
        else:
            optimiser.clip_and_accumulate()

    return hooks


class _PerSample(nn.Module):
    """The loss as Opacus's ghost clipping wants it: with an attribute ``reduction``."""

    reduction = "mean"

    def forward(self, output: Any, targets: Tensor) -> Tensor:
        return loss(output, targets)
