"""Flatness of the loss around theta: the paper's Appendix C, and the Hessian itself.

    L_Z = L + lambda |mean_i g_i|   <=   L_BAO = L + lambda mean_i |g_i|      (triangle inequality)

The slack lambda (mean_i |g_i| - |mean_i g_i|) is the gap between the two objectives. The largest
eigenvalue of the Hessian of L, by Lanczos' method with products H v, tests what the paper infers
from the bound: that BAM finds flatter minima. Not protected by privacy: do not share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpbam import _validate
from dpbam.batches import LogicalBatch, Views
from dpbam.bias.decomposition import flat, norm
from dpbam.compute import Compute, Runner
from dpbam.engines import Loss, PhysicalBatch
from dpbam.engines.base import call_model, per_row_loss
from dpbam.engines.synthetic import use_first
from dpbam.methods import DPSGD
from dpbam.params import Params, device_of, evaluating, rows, trainable
from dpbam.privacy.clipping import unclipped

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Flatness:
    """Flatness at theta over some samples.

    Attributes:
        lam: lambda of the two objectives.
        non_private_loss: L, the mean loss.
        non_private_gradient_norm: |mean_i g_i|.
        non_private_mean_norm: mean_i |g_i|.
        non_private_top_eigenvalue: the Hessian's largest; None if it was not asked for.
    """

    lam: float
    samples: int
    non_private_loss: float
    non_private_gradient_norm: float
    non_private_mean_norm: float
    non_private_top_eigenvalue: float | None

    @property
    def non_private_l_z(self) -> float:
        """L + lambda |mean_i g_i|."""
        return self.non_private_loss + self.lam * self.non_private_gradient_norm

    @property
    def non_private_l_bao(self) -> float:
        """L + lambda mean_i |g_i|."""
        return self.non_private_loss + self.lam * self.non_private_mean_norm

    @property
    def non_private_slack(self) -> float:
        """L_BAO - L_Z >= 0, up to rounding; 0 where all gradients point the same way."""
        return self.lam * (self.non_private_mean_norm - self.non_private_gradient_norm)


def measure_flatness(
    model: nn.Module,
    loss: Loss,
    inputs: Any,
    targets: Any,
    *,
    lam: float,
    eigenvalue: bool = True,
    engine: str = "auto",
    physical_batch_size: int = 256,
) -> Flatness:
    """Measure L_Z, L_BAO and the largest eigenvalue of the Hessian at theta, in eval mode.

    Args:
        model: as for the oracle.
        loss: (output, targets) -> one value per sample.
        inputs: [N, ...].
        targets: [N, ...].
        lam: lambda of the objectives.
        eigenvalue: compute it, at about 20 Hessian-vector products over all samples.
        engine: the engine of the per-sample norms.
        physical_batch_size: samples at once.

    Example: L = mean_i (x_i w - y_i)^2 / 2 has the Hessian mean_i x_i^2. At w = 0 the gradients
    -x_i y_i are -4 and 6: L_BAO - L_Z = 0.1 (5 - 1).
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> half_square = lambda output, target: (output[:, 0] - target) ** 2 / 2
        >>> x, y = torch.tensor([[1.0], [3.0]]), torch.tensor([4.0, -2.0])
        >>> found = measure_flatness(model, half_square, x, y, lam=0.1)
        >>> round(found.non_private_top_eigenvalue, 4), round(found.non_private_slack, 4)
        (5.0, 0.4)
    """
    n = _validate.count("samples", rows(inputs))
    theta = trainable(model)
    batch = LogicalBatch.of(inputs, targets, None, 1)
    chunks = list(batch.split(physical_batch_size, Views(), device_of(model)))
    with evaluating(model):
        chosen_engine = Runner(Compute(engine=engine), model, loss, dict.fromkeys(theta, 0))
        total: Params = {}
        norms: list[Tensor] = []
        losses = 0.0
        # what a model fixes at its first use is not taken from a record
        use_first(chosen_engine, chunks[0], DPSGD())
        for chunk in chunks:
            losses += float(_losses(model, loss, chunk).detach().sum())
            directions = chosen_engine.directions(chunk, DPSGD(), 0.0)
            norms.append(directions.norms()[0])
            batch_sum = directions.weighted_sum(unclipped(directions.norms()))
            total = {k: total[k] + g for k, g in batch_sum.items()} if total else batch_sum
        top = _top_eigenvalue(model, loss, chunks) if eigenvalue else None
    return Flatness(
        lam=_validate.non_negative("lam", lam),
        samples=n,
        non_private_loss=losses / n,
        non_private_gradient_norm=norm(flat(total, 1 / n)),
        non_private_mean_norm=float(torch.cat(norms).double().mean()),
        non_private_top_eigenvalue=top,
    )


def _top_eigenvalue(model: nn.Module, loss: Loss, chunks: Sequence[PhysicalBatch]) -> float:
    """Return the largest (algebraic) eigenvalue of the Hessian of the mean loss over all chunks."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    theta = [p for p in model.parameters() if p.requires_grad]
    d, n = sum(p.numel() for p in theta), sum(chunk.units for chunk in chunks)

    def product(v: Vector) -> Vector:
        vector = _unflatten(torch.from_numpy(np.array(v, dtype=np.float64)), theta)
        total = torch.zeros(d, dtype=torch.float64)
        for chunk in chunks:
            value = _losses(model, loss, chunk).sum() / n
            total += _hessian_vector(value, theta, vector)
        return total.numpy()

    if d == 1:  # Lanczos' method starts at dimension 2
        return float(product(np.ones(1))[0])
    start = np.random.default_rng(0).standard_normal(d)  # any start serves; the same one each time
    operator = LinearOperator((d, d), matvec=product, dtype=np.float64)
    eigenvalues = eigsh(
        operator, k=1, which="LA", tol=1e-2, v0=start, ncv=min(d, 12),
        return_eigenvectors=False,
    )  # fmt: skip
    return float(eigenvalues[0])


def _hessian_vector(value: Tensor, theta: list[nn.Parameter], vector: list[Tensor]) -> Tensor:
    """Return H v = d <grad L, v> / d theta, as one float64 vector on the CPU."""
    gradient = torch.autograd.grad(value, theta, create_graph=True, materialize_grads=True)
    slope = torch.stack([(g * v).sum() for g, v in zip(gradient, vector, strict=True)]).sum()
    if not slope.requires_grad:  # a loss that is linear in theta
        return torch.zeros(sum(p.numel() for p in theta), dtype=torch.float64)
    products = torch.autograd.grad(slope, theta, materialize_grads=True)
    return torch.cat([h.detach().cpu().double().flatten() for h in products])


def _losses(model: nn.Module, loss: Loss, batch: PhysicalBatch) -> Tensor:
    output = call_model(model, batch.inputs)
    return per_row_loss(loss, output, batch.targets, batch.units)


def _unflatten(vector: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    parts = torch.split(vector, [p.numel() for p in parameters])
    return [piece.to(p).view_as(p) for piece, p in zip(parts, parameters, strict=True)]
