"""How far an engine's directions are from the reference's, as relative errors."""

from __future__ import annotations

from typing import Any

import torch
from reference import one_at_a_time
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpbam.engines.base import Engine, PhysicalBatch
from dpbam.methods import BAM, DPSGD

PENALTY = 0.3
METHODS = {"dp-sgd": DPSGD(), "bam-exact": BAM(PENALTY, exact=True)}


def cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def _flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([tree[k].flatten() for k in sorted(tree)])


def errors(engine: Engine, model: nn.Module, loss: Any, batch: PhysicalBatch, method: str) -> dict:
    """Relative errors of norms, of a weighted sum, of inner products, and of the plain handle."""
    lam = 0.0 if method == "dp-sgd" else PENALTY
    handle = engine.directions(batch, METHODS[method], lam, plain=True)
    assert handle.plain is not None
    wanted = [_flat(d).double() for d in one_at_a_time(model, loss, batch, lam)]
    plain = [_flat(d).double() for d in one_at_a_time(model, loss, batch, 0.0)]
    d, g = torch.stack(wanted), torch.stack(plain)  # [U, parameters]
    generator = torch.Generator().manual_seed(3)
    factors = torch.rand(1, batch.units, generator=generator, dtype=torch.float64)
    vector = torch.randn(d.shape[1], generator=generator, dtype=torch.float64)
    theta = {n: p for n, p in model.named_parameters() if p.requires_grad}
    parts = vector.split([theta[n].numel() for n in sorted(theta)])
    tree = {
        n: v.view(theta[n].shape).to(theta[n].dtype)
        for n, v in zip(sorted(theta), parts, strict=True)
    }
    total = _flat(handle.weighted_sum(factors.float() if d.dtype != wanted[0].dtype else factors))
    return {
        "norms": _relative(handle.norms()[0], d.norm(dim=1)),
        "sum": _relative(total, factors[0] @ d),
        "inner": _relative(handle.inner(tree), d @ vector),
        "plain": _relative(handle.plain.norms()[0], g.norm(dim=1)),
    }


def _relative(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found.double() - wanted).norm() / wanted.norm())
