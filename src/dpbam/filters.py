"""Filters: post-processing of the released gradient. They cost no privacy.

A filter sees what was released, one gradient after the other, and nothing of the data. Its state is
in the checkpoint. Noise is independent between steps and the signal is not, so that an average over
steps keeps the signal and removes noise, at the price of a delay.

=================  ==============================================  ===========================
filter             output m_t of gradients g_t                     when to use it
=================  ==============================================  ===========================
``exponential``    beta m_(t-1) + (1 - beta) g_t                   SGD without momentum
``doppler``        sum_k b_k g_(t-k) - sum_k a_k m_(t-k)           noise well above the signal
=================  ==============================================  ===========================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from dpbam import _validate
from dpbam.errors import ArgumentError

if TYPE_CHECKING:  # torch is imported where it computes: reading a configuration stays fast
    from dpbam.params import Params


class Filter(ABC):
    """Maps the released gradient to what the optimiser gets. Subclass it to make your own.

    Example: the sign of each entry.
        >>> import torch
        >>> class Sign(Filter):
        ...     def apply(self, gradient):
        ...         return {name: g.sign() for name, g in gradient.items()}
        >>> Sign().apply({"w": torch.tensor([-0.5, 2.0])})
        {'w': tensor([-1.,  1.])}
    """

    name: ClassVar[str] = "filter"

    @abstractmethod
    def apply(self, gradient: Params) -> Params:
        """Return what is written into ``.grad``, by parameter; called once per step."""

    def state_dict(self) -> Params:
        """Return what later calls depend on, as tensors by name."""
        return {}

    def load_state_dict(self, state: Params) -> None:  # noqa: B027
        """Resume from :meth:`state_dict`."""


class LowPass(Filter):
    """DOPPLER's linear low-pass filter (Zhang et al. 2024), with a response of 1 to a constant.

        m_t = sum_(k >= 0) b_k g_(t-k) - sum_(k >= 1) a_k m_(t-k),   output m_t / c_t,

    c_t the same filter's output for g = 1, so that the first outputs are not too small. Compared
    with a third party's summary of the algorithm (arXiv:2408.13460), not with the authors' text:
    there c_t has all b_k from the first step on, so that with several b_k the first outputs are
    smaller; the difference decays as the filter's memory does. The default coefficients are those
    of a first-order filter; the paper's were not found.

    Args:
        b: b_0, b_1, ..., the weights of gradients.
        a: a_1, a_2, ..., the weights of earlier outputs.

    Example:
        >>> import torch
        >>> average = LowPass(b=(0.5, 0.5), a=())
        >>> [float(average.apply({"w": torch.tensor(x)})["w"]) for x in (1.0, 3.0, 5.0)]
        [1.0, 2.0, 4.0]
    """

    name = "doppler"

    def __init__(self, b: Sequence[float] = (0.05, 0.05), a: Sequence[float] = (-0.9,)) -> None:
        self.b, self.a = tuple(float(x) for x in b), tuple(float(x) for x in a)
        if not self.b or abs(sum(self.b) - 1 - sum(self.a)) > 1e-6 or sum(self.b) <= 0:
            raise ArgumentError(
                f"a low-pass filter passes a constant: sum(b) must be 1 + sum(a) and above 0, got "
                f"b = {self.b}, a = {self.a}"
            )
        self._inputs: list[Params] = []  # g_t, g_(t-1), ...
        self._outputs: list[Params] = []  # m_(t-1), m_(t-2), ...

    def apply(self, gradient: Params) -> Params:
        import torch

        from dpbam.params import add

        one = next(iter(gradient.values()))
        self._inputs = [{**gradient, _ONE: torch.ones((), device=one.device)}, *self._inputs]
        self._inputs = self._inputs[: len(self.b)]
        now = {n: self.b[0] * g for n, g in self._inputs[0].items()}
        for x, g in zip(self.b[1:], self._inputs[1:], strict=False):
            now = add(now, g, x)
        for x, m in zip(self.a, self._outputs, strict=False):
            now = add(now, m, -x)
        self._outputs = [now, *self._outputs][: len(self.a)]
        return {n: m / now[_ONE] for n, m in now.items() if n != _ONE}

    def state_dict(self) -> Params:
        histories = {"g": self._inputs, "m": self._outputs}
        return {f"{k}/{i}/{n}": t for k, h in histories.items() for i, p in enumerate(h)
                for n, t in p.items()}  # fmt: skip

    def load_state_dict(self, state: Params) -> None:
        self._inputs, self._outputs = _read_numbered(state, "g"), _read_numbered(state, "m")


class Exponential(LowPass):
    """The exponential average m_t = beta m_(t-1) + (1 - beta) g_t, divided by 1 - beta^t.

    Example:
        >>> import torch
        >>> average = Exponential(beta=0.5)
        >>> [float(average.apply({"w": torch.tensor(x)})["w"]) for x in (2.0, 5.0)]
        [2.0, 4.0]
    """

    name = "exponential"

    def __init__(self, beta: float = 0.9) -> None:
        super().__init__(b=(1 - _validate.probability("beta", beta),), a=(-beta,))


_ONE = "/one"  # not a parameter: the response to a constant


def _read_numbered(state: Mapping[str, object], kind: str) -> list[Params]:
    """Return the dicts that were saved as ``kind/0/name``, ``kind/1/name``, ..."""
    gradients: dict[int, Params] = {}
    for key, value in state.items():
        first, number, name = key.split("/", 2)
        if first == kind:
            gradients.setdefault(int(number), {})[name] = value  # type: ignore[assignment]
    return [gradients[k] for k in sorted(gradients)]
