"""Averages of the weights over the steps: post-processing, so they cost no privacy.

Both are one recursion, a_t = a_{t-1} + w_t (theta_t - a_{t-1}); w_t depends on the step alone:

========================  ==================================================================
average                   w_t (t counts steps from 0)
========================  ==================================================================
exponential, decay beta   1 - min(beta, (1 + t) / (10 + t)): short memory at first (De et al. 2022)
dense (SWAD) from step s  1 / (t - s + 1): the plain mean of theta_s .. theta_t; 1 before s
========================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpbam import _validate
from dpbam.params import Params, accumulation_dtype, restored, trainable

Weight = Callable[[int], float]


def exponential(decay: float) -> Weight:
    """Return w_t of an exponential moving average.

    Example:
        >>> weight = exponential(0.999)
        >>> weight(0), round(weight(10**6), 6)
        (0.9, 0.001)
    """
    _validate.probability("ema", decay)
    return lambda t: 1.0 - min(decay, (1 + t) / (10 + t))


def dense(start: int) -> Weight:
    """Return w_t of the mean over all steps from ``start`` on.

    Example:
        >>> [dense(start=2)(t) for t in range(5)]
        [1.0, 1.0, 1.0, 0.5, 0.3333333333333333]
    """
    return lambda t: 1.0 / max(1, t - start + 1)


class WeightAverage:
    """Averages a model's trainable parameters, in float32 or better.

    Args:
        model: its parameters are read, and changed only by :meth:`applied`.
        weight: w_t, a function of the step.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> average = WeightAverage(model, dense(start=0))
        >>> for step, value in enumerate((1.0, 3.0)):
        ...     _ = model.weight.data.fill_(value)
        ...     average.update(step)
        >>> with average.applied():
        ...     model.weight.item()
        2.0
    """

    def __init__(self, model: nn.Module, weight: Weight) -> None:
        self._parameters = trainable(model)
        self._weight = weight
        self._mean: Params = {
            n: p.detach().to(accumulation_dtype(p.dtype), copy=True)
            for n, p in self._parameters.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the parameters as they are after ``step``."""
        w = self._weight(step)
        for name, mean in self._mean.items():
            mean += w * (self._parameters[name].to(mean.dtype) - mean)  # a + w (theta - a)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Hold the average in the model inside the block, and its own weights again afterwards."""
        with restored(self._parameters):
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(self._mean[name])
            yield

    def state_dict(self) -> Params:
        return dict(self._mean)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, mean in self._mean.items():
            mean.copy_(state[name])
