"""DP-AdamBC: Adam whose second moment is corrected by the known variance of the noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.oracle import PrivateGradientOracle


class AdamBC(Optimizer):
    """Adam, AdamW or NAdam on private gradients, corrected for their noise (Tang et al. 2023).

    The noise adds its variance Phi_t = (sigma_t C_t / l)^2 to every squared gradient. Where noise
    dominates, Adam's denominator is that constant, and Adam is SGD with momentum. With

        v_t = beta2 v_(t-1) + (1 - beta2) g_t^2,   w_t = beta2 w_(t-1) + (1 - beta2) Phi_t

    the denominator is sqrt(max(v_t - w_t, floor * w_t) / (1 - beta2^t)) + eps. All of it is
    computed from public facts and released gradients, so it costs nothing.

    Compared with the authors' code (ubc-systopia/DP-AdamBC): there the floor gamma' is a number,
    not a share of the noise, the variance is constant, and nothing is added to the denominator.

    Args:
        params: as of ``torch.optim.Adam``.
        oracle: whose gradients these are; it must have no filter, which would change Phi_t.
        kind: ``"adam"``, ``"adamw"`` or ``"nadam"``, each as in ``torch.optim``.
        lr: the learning rate.
        betas: of the first and the second moment.
        eps: added to the denominator.
        weight_decay: decoupled with ``"adamw"``.
        floor: the paper's gamma', relative to the variance of the noise: what is not visible above
            the noise counts as this share of it.

    Example:
        >>> from dpbam import PrivacyPlan
        >>> model = nn.Linear(2, 2)
        >>> plan = PrivacyPlan(n=100, batch_size=10, steps=1, noise_multiplier=1.0, delta=1e-3)
        >>> oracle = PrivateGradientOracle(model, nn.CrossEntropyLoss(reduction="none"), plan)
        >>> optimizer = AdamBC(model.parameters(), oracle, kind="nadam")
        >>> data = (torch.randn(100, 2), torch.arange(100) % 2)
        >>> for inputs, targets, units in oracle.batches(data):
        ...     oracle.backward(inputs, targets, units)
        ...     optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        oracle: PrivateGradientOracle,
        *,
        kind: str = "adam",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        floor: float = 0.1,
    ) -> None:
        if oracle.filter is not None:
            raise ArgumentError(
                "AdamBC needs the variance of the noise in each gradient, which the oracle's "
                "filter changes: leave one of the two out"
            )
        self.oracle, self.kind = oracle, _validate.one_of("kind", kind, ("adam", "adamw", "nadam"))
        self.floor = _validate.positive("floor", floor)
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step with the gradients of the oracle's latest ``backward``."""
        variance = self.oracle.noise_std**2
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group, variance)

    def _move(self, p: nn.Parameter, g: Tensor, group: dict[str, Any], variance: float) -> None:
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        state = self.state[p]
        if not state:
            state |= _begun(p)
        state["step"] += 1
        t = float(state["step"])
        if self.kind == "adamw":
            p.mul_(1 - lr * decay)
        elif decay:
            g = g + decay * p
        state["exp_avg"].lerp_(g, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        state["noise_sq"].mul_(beta2).add_((1 - beta2) * variance)
        noise = state["noise_sq"]
        seen = (state["exp_avg_sq"] - noise).clamp(min=float(self.floor * noise))
        denominator = (seen / (1 - beta2**t)).sqrt() + group["eps"]
        if self.kind != "nadam":
            p.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - beta1**t))
            return
        mu, ahead = (beta1 * (1 - 0.5 * 0.96 ** (0.004 * s)) for s in (t, t + 1))
        state["mu_product"] *= mu
        product = float(state["mu_product"])
        p.addcdiv_(g, denominator, value=-lr * (1 - mu) / (1 - product))
        p.addcdiv_(state["exp_avg"], denominator, value=-lr * ahead / (1 - product * ahead))


def _begun(p: nn.Parameter) -> dict[str, Tensor]:
    return {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(p),
        "exp_avg_sq": torch.zeros_like(p),
        "noise_sq": torch.zeros((), dtype=p.dtype, device=p.device),
        "mu_product": torch.tensor(1.0),
    }
