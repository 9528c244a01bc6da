"""DiSK, a method that predicts the gradient's change and filters what was released."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.filters import Filter
from dpbam.methods import DPSGD, GradFn, History, Method, computed_as, form_of, overrides

if TYPE_CHECKING:  # torch is imported where it computes
    from dpbam.params import Params


class DiSK(Method):
    """DiSK: predict the gradient's change along the last step, then filter (Zhang et al. 2025).

    With v = theta_t - theta_(t-1), which is public, and a = (1 - kappa) / (kappa gamma),

        d_i = a g_i(theta + gamma v) + (1 - a) g_i(theta),     clipped as one vector,
        m_t = (1 - kappa) m_(t-1) + kappa (released gradient).

    Both gradients of a unit are combined before they are clipped, so a step costs what one of
    DP-SGD costs. With gamma = (1 - kappa) / kappa, a is 1: one gradient, at theta + gamma v.

    Args:
        kappa: the Kalman gain; 1 would be ``inner`` itself.
        gamma: how far to look ahead; None: (1 - kappa) / kappa, at the speed of ``inner``.
        inner: the method whose direction takes the place of g_i; None: DP-SGD.

    Example:
        >>> import torch
        >>> disk = DiSK(kappa=0.5, gamma=0.5).at(
        ...     History(({},), ({"w": torch.tensor(1.0)},), {"w": torch.tensor(3.0)}))
        >>> grad = lambda theta: {"w": theta["w"] ** 2}
        >>> disk.direction(grad, {"w": torch.tensor(3.0)}, 0.0)["w"]  # 2 * (3 + 1)^2 - 3^2
        tensor(23.)
    """

    name = "disk"
    remembers = 1

    def __init__(
        self, kappa: float = 0.7, gamma: float | None = None, inner: Method | None = None
    ) -> None:
        self.kappa = _validate.probability("kappa", kappa)
        self.inner = DPSGD() if inner is None else inner
        # of the method inside, direction and lam_at are used: nothing else of it may matter
        ignored = [
            hook for hook in ("at", "ascent", "filter", "update") if overrides(self.inner, hook)
        ]
        if ignored or not self.inner.private:
            reason = f" (it has its own {' and '.join(ignored)})" if ignored else ""
            raise ArgumentError(
                f"DiSK shifts theta itself, so {self.inner.name} cannot be inside it{reason}: take "
                "DP-SGD or BAM"
            )
        usual_gamma = (1 - kappa) / kappa
        self.gamma = usual_gamma if gamma is None else _validate.positive("gamma", gamma)
        self.share = usual_gamma / self.gamma  # a
        self._velocity: Params | None = None
        super().__init__(self.inner.lam)

    def at(self, history: History) -> Method:
        if not history.parameters:
            return self
        predicting, before = copy.copy(self), history.parameters[-1]
        predicting._velocity = {n: t - before[n] for n, t in history.theta.items()}
        return predicting

    def lam_at(self, step: int, theta: Params) -> float:
        return self.inner.lam_at(step, theta)

    @property
    def _one_gradient(self) -> bool:
        """Whether a = 1, so that the oracle shifts theta and the gradient at theta is not used."""
        return math.isclose(self.share, 1.0)

    def filter(self) -> Filter | None:
        return KalmanStep(self.kappa)

    def ascent(
        self, lam: float, previous: Params | None, batch_gradient: Callable[[], Params]
    ) -> Params | None:
        """Return gamma v where one gradient is enough."""
        if not self._one_gradient or self._velocity is None:
            return None
        return {n: self.gamma * v for n, v in self._velocity.items()}

    @computed_as(lambda method, lam: form_of(method.inner, lam) if method._one_gradient else None)
    def direction(self, grad: GradFn, theta: Params, lam: float) -> Params:
        from dpbam.params import add

        here = self.inner.direction(grad, theta, lam)
        if self._one_gradient:
            return here  # the oracle has shifted theta
        there = theta if self._velocity is None else add(theta, self._velocity, self.gamma)
        ahead = self.inner.direction(grad, there, lam)
        return add({n: self.share * d for n, d in ahead.items()}, here, 1 - self.share)

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}(kappa={self.kappa:g}, gamma={self.gamma:g}, inner={self.inner!r})"


class KalmanStep(Filter):
    """DiSK's update of the estimate: m_t = (1 - kappa) m_(t-1) + kappa g_t, and m_0 = g_0.

    Args:
        kappa: the gain, 0 < kappa < 1.
    """

    name = "kalman"

    def __init__(self, kappa: float) -> None:
        self.kappa = _validate.probability("kappa", kappa)
        self._estimate: Params = {}

    def apply(self, gradient: Params) -> Params:
        from dpbam.params import add

        old, kappa = self._estimate or gradient, self.kappa
        self._estimate = add({n: (1 - kappa) * m for n, m in old.items()}, gradient, kappa)
        return dict(self._estimate)

    def state_dict(self) -> Params:
        return dict(self._estimate)

    def load_state_dict(self, state: Params) -> None:
        self._estimate = dict(state)
