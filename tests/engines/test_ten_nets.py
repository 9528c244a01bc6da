"""The fused and the functional engine agree with the loop on the ten nets of the benchmark."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import make_batch
from torch import Tensor

from dpbam.engines import FunctionalEngine, FusedEngine, LoopEngine
from dpbam.methods import BAM, DPSAT, DPSGD, Method
from dpbam.params import trainable

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import nets

METHODS: dict[str, Method] = {
    "dp-sgd": DPSGD(),
    "dp-sat": DPSAT(0.1),
    "bam": BAM(0.1),
    "bam-exact": BAM(0.1, exact=True),
}
SAMPLE = [("lstm", "bam"), ("convnext", "dp-sgd"), ("mlp", "bam-exact")]


def flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([tree[name].flatten() for name in sorted(tree)])


def norms_and_sum(engine: Any, net: str, method: str) -> tuple[Tensor, Tensor]:
    """Two units of two rows, in float64, at moved parameters for DP-SAT."""
    model, x, y = nets.make(net, 4)
    model.double()
    x = x.double() if x.is_floating_point() else x
    batch = make_batch(x, y, 4, 2)
    what = METHODS[method]
    step = what.ascent(0.1, {n: torch.ones_like(p) for n, p in trainable(model).items()}, dict)
    with torch.no_grad():
        for name, shift in (step or {}).items():
            trainable(model)[name].add_(shift)
    found = engine(model, nets.loss).directions(batch, what, 0.1)
    return found.norms(), flat(found.weighted_sum(torch.tensor([[0.3, 0.7]]).double()))


def check(net: str, method: str, engine: Any) -> None:
    (norms, total), (wanted, reference) = (
        norms_and_sum(made, net, method) for made in (engine, LoopEngine)
    )
    assert torch.allclose(norms, wanted, rtol=1e-9)
    assert float((total - reference).norm() / reference.norm()) < 1e-9


@pytest.mark.parametrize(("net", "method"), SAMPLE)
def test_fused_agrees_with_the_loop_on_a_sample(net: str, method: str) -> None:
    check(net, method, FusedEngine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [FusedEngine, FunctionalEngine])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("net", nets.TEN)
def test_engines_agree_with_the_loop(net: str, method: str, engine: Any) -> None:
    check(net, method, engine)
