"""Memory that a step uses and the next one uses again: zeros to sum into, a copy of theta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpbam.errors import PlanViolationError
from dpbam.params import Params, sum_of_none
from dpbam.privacy.noise import GaussianNoise, NoiseMechanism, Query
from dpbam.privacy.secure_noise import SecureGaussianNoise

Kind = tuple[torch.dtype, torch.device]


def keeps_nothing(noise: NoiseMechanism) -> bool:
    """Whether a noise is the library's, which keeps neither sums nor results."""
    return type(noise) in (GaussianNoise, SecureGaussianNoise)


class SumMemory:
    """Zeros to sum into, and a copy of theta, in memory that is used again, on a processor.

    New memory is mapped page by page, which takes as long as the noise of a large model.

    Guarantee: between two steps it holds zeros and parameters, never a sum without noise.

    Assumptions: the noise mechanism keeps no reference; the memory of any other than the library's
    is not used again.

    Proof: :meth:`keep` zeroes it before the step is charged, and :meth:`take` lets go of it; the
    copy of parameters that a pass has written to is dropped when the step is refused.
    """

    def __init__(self) -> None:
        self._zeros: Params | None = None
        # the bits of theta before and after the passes of a step
        self._before: dict[Kind, Tensor] = {}
        self._after: dict[Kind, Tensor] = {}

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
    ) -> Iterator[Callable[[], Tensor]]:
        """Recognise a block that writes to parameters, in whatever way; restore theta if it fails.

        Yields a function that returns, on the device, a scalar: whether a parameter has changed.

        Guarantee: all passes of a step see the same parameters, and none leaves anything in theta,
        if the block raises where the scalar is not 0. Frozen parameters are not restored: after
        such a refusal they hold what a pass wrote, and the model is to be made anew.

        Assumptions: parameters are not written to and restored within the block; the sum of a
        frozen parameter's bits changes with the parameter.

        Proof: theta is compared bit for bit with a copy made before, and frozen parameters, which
        may be large, by the sums of their bits. Theta must also be in the same memory, which
        ``p.data = ...`` replaces. torch counts in-place changes, which isolation refuses, but not
        those through ``.data`` or NumPy.
        """
        parameters = [p.detach() for p in theta.values()]
        self._before = before = _flat_bits(parameters, self._before)
        sums = _sums_of_bits(frozen)

        def changed() -> Tensor:
            if not _restore_memory(theta.values(), parameters):
                return torch.ones((), dtype=torch.bool, device=parameters[0].device)
            self._after = after = _flat_bits(parameters, self._after)
            changes = [(after[kind] != before[kind]).any() for kind in before]
            changes += [now != then for now, then in zip(_sums_of_bits(frozen), sums, strict=True)]
            return torch.stack([c.to(parameters[0].device) for c in changes]).any()

        try:
            yield changed
        except BaseException:
            self._after = {}  # may hold what a pass wrote
            _restore_memory(theta.values(), parameters)
            for kind, bits in before.items():
                members = [p for p in parameters if _kind(p) == kind]
                pieces = torch.split(bits, [p.numel() for p in members])
                for p, piece in zip(members, pieces, strict=True):
                    p.copy_(piece.view(p.dtype).view(p.shape))
            raise


def check_unwritten(changed: float) -> None:
    """Refuse a step whose passes have changed parameters.

    Guarantee: no step is released in which a pass has changed parameters for the next one.

    Assumptions: those of :meth:`SumMemory.fixed`, whose scalar it gets.

    Proof: it is called inside the block, before the sums are returned, and raises.
    """
    if changed:
        raise PlanViolationError(
            "a pass has written to parameters, through .data or NumPy, so that a unit could "
            "change what the others compute: the forward pass must only read them (those that "
            "are trained are as they were before the step)"
        )


def _restore_memory(theta: Iterable[nn.Parameter], before: Sequence[Tensor]) -> bool:
    """Give parameters the memory that they had; return whether all had it still."""
    same = True
    for parameter, tensor in zip(theta, before, strict=True):
        if _place(parameter) != _place(tensor):
            parameter.data, same = tensor, False
    return same


def _place(t: Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def _kind(t: Tensor) -> Kind:
    return t.dtype, t.device


def _flat_bits(tensors: Sequence[Tensor], memory: dict[Kind, Tensor]) -> dict[Kind, Tensor]:
    """Join the bits of all tensors of a kind, in one operation, into the memory if that fits."""
    joined = {}
    for kind in dict.fromkeys(map(_kind, tensors)):
        bits = [_bits(t).reshape(-1) for t in tensors if _kind(t) == kind]
        out = memory.get(kind)
        fits = out is not None and out.numel() == sum(b.numel() for b in bits)
        joined[kind] = torch.cat(bits, out=out) if fits else torch.cat(bits)
    return joined


def _sums_of_bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of each tensor's entries, read as whole numbers; it wraps at 2^64."""
    return [_bits(t.detach()).sum(dtype=torch.int64) for t in tensors]


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(_INTEGERS[t.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
