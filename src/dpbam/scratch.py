"""Memory that each step uses again: for the sums, and for a copy of theta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpbam.errors import PlanViolationError
from dpbam.params import Params, bits_of, sum_of_none
from dpbam.privacy.noise import GaussianNoise, NoiseMechanism, Query
from dpbam.privacy.secure_noise import SecureGaussianNoise

IntegerArray = NDArray[np.integer[Any]]


def keeps_nothing(noise: NoiseMechanism) -> TypeGuard[GaussianNoise]:
    """Whether a noise is the library's, which keeps neither sums nor results."""
    return type(noise) in (GaussianNoise, SecureGaussianNoise)


class SumMemory:
    """Memory for the sums, on a processor, and for a copy of theta, used again by each step.

    New memory is mapped page by page, which takes as long as the noise of a large model.

    Guarantee: between two steps it holds what was released, or zeros, and parameters, never a sum
    without noise.

    Assumptions: the noise mechanism keeps no reference, nor does what gets the released gradient,
    which is copied before the next step begins; the memory of any noise other than the library's is
    not used again.

    Proof: noise is written over the sums, or :meth:`clear` zeroes them, before the step is charged;
    :meth:`keep` takes the memory after it, and :meth:`take` lets go of it. The copy of parameters
    that a pass has written to is dropped when the step is refused.
    """

    def __init__(self) -> None:
        self._sums: Params | None = None
        self._bits: ParameterBits | None = None  # of theta and small constants

    def __getstate__(self) -> dict[str, object]:
        # a copy needs no memory of the sums, and the bits know parameters by their place
        return {"_sums": None, "_bits": None}

    def take(self, theta: Mapping[str, Tensor]) -> Params:
        """Return float64 zeros in the shapes of ``theta``."""
        sums, self._sums = self._sums or {}, None
        kinds = [{n: (t.shape, t.device) for n, t in tree.items()} for tree in (sums, theta)]
        if kinds[0] != kinds[1]:
            return sum_of_none(theta)
        torch._foreach_zero_(list(sums.values()))
        return sums

    def clear(
        self,
        queries: Mapping[str, Query],
        noised: Mapping[str, Mapping[str, Tensor]],
        noise: NoiseMechanism,
    ) -> None:
        """Zero the sums on a processor that noise was not written over."""
        if not keeps_nothing(noise):
            return
        unnoised = [
            entry
            for name, query in queries.items()
            for n, entry in query.sums.items()
            if entry is not noised[name].get(n) and entry.device.type == "cpu"
        ]
        if unnoised:
            torch._foreach_zero_(unnoised)

    def keep(self, queries: Mapping[str, Query], noise: NoiseMechanism) -> None:
        """Keep the memory of the gradient's sum for the next step, when this one is charged."""
        gradient = dict(queries["gradient"].sums) if "gradient" in queries else {}
        on_cpu = all(s.device.type == "cpu" for s in gradient.values())
        self._sums = gradient if on_cpu and keeps_nothing(noise) else None

    @contextmanager
    def fixed(
        self, theta: Mapping[str, nn.Parameter], constants: Sequence[Tensor]
    ) -> Iterator[Callable[[], Tensor]]:
        """Recognise a block that writes to parameters, in whatever way; restore theta if it fails.

        Yields a function that returns, on the device, a scalar: whether a parameter has changed.

        Guarantee: all passes of a step see the same parameters, and none leaves anything in theta,
        if the block raises where the scalar is not 0. Nor do they see other constants, such as
        frozen parameters and buffers; these are not restored: after such a refusal they hold what a
        pass wrote, and the model is to be made anew.

        Assumptions: nothing is written to and restored within the block; a constant of more than
        ``_COPIED`` entries changes with the sums of its bits (:func:`_sums_of_bits`).

        Proof: theta and small constants are compared bit for bit with a copy made before, and large
        constants by sums of their bits. The former must also be in the same memory, which
        ``p.data = ...`` replaces. torch counts in-place changes, which isolation refuses, but not
        those through ``.data`` or NumPy.
        """
        compared = [*theta.values(), *(t for t in constants if t.numel() <= _COPIED)]
        large = [t for t in constants if t.numel() > _COPIED]
        if self._bits is None or not self._bits.are_of(compared):
            self._bits = ParameterBits(compared)
        bits = self._bits
        bits.save()
        sums = _sums_of_bits(large)

        def changed() -> Tensor:
            if not bits.restore_memory(compared):
                return torch.ones((), dtype=torch.bool, device=bits.device)
            changes = bits.changes()
            changes += [(b != a).any() for b, a in zip(sums, _sums_of_bits(large), strict=True)]
            if len(changes) == 1:
                return changes[0]
            return torch.stack([c.to(bits.device) for c in changes]).any()

        try:
            yield changed
        except GeneratorExit:  # the block has ended long ago: Ctrl-C came right at its end
            raise
        except BaseException:
            bits.restore_memory(compared)
            bits.restore(len(theta))
            raise


class ParameterBits:
    """The bits of parameters, read as whole numbers, and a copy of them to compare with.

    The views are made once, not at every step.

    Guarantee: where :meth:`are_of` holds, the views are the parameters' memory.

    Assumptions: none.

    Proof: the views keep that memory alive, so that no other can be at the same place.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._tensors = [p.detach() for p in parameters]
        self._places = list(map(_place, self._tensors))
        self.device = self._tensors[0].device
        self._views = list(map(bits_of, self._tensors))
        self._views = [v.view(-1) if v.is_contiguous() else v for v in self._views]
        self._copies = [v.new_empty(0) for v in self._views]  # shaped as the views
        self._kinds: list[_BitsOfKind] = []
        indices: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, v in enumerate(self._views):
            indices.setdefault((v.dtype, v.device), []).append(i)
        for members in indices.values():
            views = [self._views[i] for i in members]
            vector = views[0].new_empty(sum(v.numel() for v in views))
            pieces = vector.split_with_sizes([v.numel() for v in views])
            for i, piece in zip(members, pieces, strict=True):
                self._copies[i] = piece.view(self._views[i].shape)
            in_place = vector.device.type == "cpu" and vector.numel() >= _LARGE
            arrays = [
                (self._views[i].numpy(), self._copies[i].numpy()) for i in members if in_place
            ]
            self._kinds.append(_BitsOfKind(views, vector, arrays))

    def are_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters, in the memory that they had."""
        return list(map(_place, parameters)) == self._places

    def save(self) -> None:
        """Copy the bits, in one operation per kind."""
        for kind in self._kinds:
            torch.cat(kind.flat(), out=kind.copy)

    def changes(self) -> list[Tensor]:
        """Return, for each kind, whether a bit differs from the copy: a scalar on the device."""
        flags = []
        for kind in self._kinds:
            if kind.arrays:
                same = all((now == before).all() for now, before in kind.arrays)
                flags.append(torch.tensor(not same))
            else:
                flags.append((torch.cat(kind.flat()) != kind.copy).any())
        return flags

    def restore(self, count: int) -> None:
        """Write the copy into the first ``count`` parameters."""
        for view, copy in zip(self._views[:count], self._copies[:count], strict=True):
            view.copy_(copy)

    def restore_memory(self, parameters: Iterable[Tensor]) -> bool:
        """Give the parameters the memory that they had; return whether all had it still."""
        same = True
        for parameter, tensor, place in zip(parameters, self._tensors, self._places, strict=True):
            if _place(parameter) != place:
                parameter.data, same = tensor, False
        return same


class _BitsOfKind(NamedTuple):
    """The bits of tensors of one dtype on one device."""

    views: list[Tensor]
    copy: Tensor  # of all, one after another
    # views and copies of a large model on the processor, compared where they are: in a sixth of the
    # time of joining them
    arrays: list[tuple[IntegerArray, IntegerArray]]

    def flat(self) -> list[Tensor]:
        return [v if v.ndim == 1 else v.reshape(-1) for v in self.views]


def check_unwritten(changed: bool) -> None:
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


def _place(t: Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


def _sums_of_bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return sums of each tensor's bits, read as numbers of eight bytes; they wrap at 2^64.

    Along both axes of the numbers laid out in rows, so that exchanged entries show too.
    """
    sums = []
    for t in tensors:
        each = bits_of(t.detach()).contiguous().view(-1).view(torch.uint8)
        if each.storage_offset() % 8:  # as a view of a larger tensor may be
            each = each.clone()
        end = each.numel() // (8 * _ROW) * (8 * _ROW)
        rows = each[:end].view(torch.int64).view(-1, _ROW)
        sums.append(torch.cat([rows.sum(0), rows.sum(1), each[end:].long()]))
    return sums


_COPIED = 2**14  # entries of a constant that is compared with a copy
_ROW = 2**10  # numbers
_LARGE = 2**18  # entries of all parameters
