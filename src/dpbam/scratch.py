"""Memory that a step uses and the next one uses again: zeros to sum into, a copy of theta."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpbam.errors import PlanViolationError
from dpbam.params import Params, sum_of_none
from dpbam.privacy.noise import GaussianNoise, NoiseMechanism, Query
from dpbam.privacy.secure_noise import SecureGaussianNoise


def keeps_nothing(noise: NoiseMechanism) -> bool:
    """Whether a noise is the library's, which keeps neither sums nor results."""
    return type(noise) in (GaussianNoise, SecureGaussianNoise)


class SumMemory:
    """Zeros to sum into, and a copy of theta, in memory that is used again, on a processor.

    New memory is mapped page by page, which takes as long as the noise of a large model.

    Guarantee: between two steps it holds zeros and parameters, never a sum without noise.

    Assumptions: the noise mechanism keeps no reference; the memory of any other than the library's
    is not used again.

    Proof: :meth:`keep` zeroes it before the step is charged, and :meth:`take` lets go of it.
    """

    def __init__(self) -> None:
        self._zeros: Params | None = None
        self._theta: list[Tensor] = []  # as it was before the passes of a step

    def take(self, theta: Mapping[str, Tensor]) -> Params:
        """Return float64 zeros in the shapes of ``theta``."""
        zeros, self._zeros = self._zeros or {}, None
        kinds = [{n: (t.shape, t.device) for n, t in tree.items()} for tree in (zeros, theta)]
        return zeros if kinds[0] == kinds[1] else sum_of_none(theta)

    def keep(self, queries: Mapping[str, Query], noise: NoiseMechanism) -> None:
        """Zero sums that have got their noise, and keep the memory of the gradient's."""
        sums = [s for query in queries.values() for s in query.sums.values()]
        if not keeps_nothing(noise) or any(s.device.type != "cpu" for s in sums):
            return
        # now, not when it is used: a copy of the oracle, or a file that it is pickled into, would
        # hold the sum without its noise
        torch._foreach_zero_(sums)
        self._zeros = dict(queries["gradient"].sums) if "gradient" in queries else None

    @contextmanager
    def fixed(
        self, theta: Mapping[str, nn.Parameter], frozen: Sequence[nn.Parameter]
    ) -> Iterator[None]:
        """Refuse a block that writes to parameters, in whatever way, and restore theta.

        Guarantee: all passes of a step see the same parameters, and none leaves anything in them.

        Assumptions: parameters are not written to and restored within the block; the sum of a
        frozen parameter's bits changes with the parameter.

        Proof: theta is compared bit for bit with a copy made before, and frozen parameters, which
        may be large, by the sums of their bits. torch counts in-place changes, which isolation
        refuses, but not those through ``.data`` or NumPy.
        """
        parameters = [p.detach() for p in theta.values()]
        if [_kind(c) for c in self._theta] != [_kind(p) for p in parameters]:
            self._theta = [torch.empty_like(p) for p in parameters]
        torch._foreach_copy_(self._theta, parameters)
        sums = _sums_of_bits(frozen)
        try:
            yield
        finally:
            unwritten = _same_bits(parameters, self._theta)
            if not unwritten:
                torch._foreach_copy_(parameters, self._theta)
        if not unwritten or _sums_of_bits(frozen) != sums:
            raise PlanViolationError(
                "a pass has written to parameters, through .data or NumPy, so that a unit could "
                "change what the others compute: the forward pass must only read them (those that "
                "are trained are as they were before the step)"
            )


def _kind(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.dtype, t.device


def _same_bits(tensors: list[Tensor], copies: list[Tensor]) -> bool:
    """Whether all entries are the same bit for bit; NaN equals itself."""
    pairs = [[_bits(t) for t in pair] for pair in zip(tensors, copies, strict=True)]
    if all(t.device.type == "cpu" for t in tensors):
        return all(torch.equal(now, before) for now, before in pairs)
    return not torch.stack([(now != before).any() for now, before in pairs]).any()  # one wait


def _sums_of_bits(tensors: Sequence[Tensor]) -> list[int]:
    """Return the sum of each tensor's entries, read as whole numbers; it wraps at 2^64."""
    sums = [_bits(t.detach()).sum(dtype=torch.int64) for t in tensors]
    by_device: dict[torch.device, list[Tensor]] = {}
    for total in sums:
        by_device.setdefault(total.device, []).append(total)
    return [number for totals in by_device.values() for number in torch.stack(totals).tolist()]


def _bits(t: Tensor) -> Tensor:
    return t.view(_INTEGERS[t.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
