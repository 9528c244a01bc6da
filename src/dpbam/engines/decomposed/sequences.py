"""Sequences of different lengths, for recurrent layers under vmap.

A recurrent layer reads a sequence in one of three forms, with the same three methods:

* :class:`Padded`: a tensor [T, B, width];
* :class:`Packed`: the data of torch's ``PackedSequence``, [sum of batch sizes, width], if the
  lengths are plain numbers;
* :class:`Masked`: [T, B, width] and lengths that are data of the row. Under vmap the shape of a
  tensor cannot depend on data, so the sequence stays padded, and a state stays constant after the
  end of its sequence. The model gets it as a :class:`PackedRow`, which supports only recurrent
  layers and ``pad_packed_sequence(total_length=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from dpbam.engines.batching import differs_by_row
from dpbam.errors import ArgumentError

State = tuple[Tensor, ...]  # (h,), and (h, c) for an LSTM: each [B, width]
Advance = Callable[[Tensor, State], State]


class Padded:
    """Sequences of one length: [T, B, width]."""

    one_length: ClassVar[bool] = True

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Return one [B, width] per step."""
        return x.unbind(0)

    def scan(
        self, advance: Advance, xs: Sequence[Tensor], start: State, *, reverse: bool
    ) -> tuple[list[Tensor], State]:
        """Return the output of every step in the order of ``xs``, and all final states.

        Where a step has fewer sequences than the one before, the last ones end; in reverse, they
        begin.
        """
        state, ended, outputs = start, [], []
        if reverse:
            state = tuple(s[: xs[-1].shape[0]] for s in start)
        for x in reversed(xs) if reverse else xs:
            now, before = x.shape[0], state[0].shape[0]
            if now < before:
                ended.append(tuple(s[now:] for s in state))
                state = tuple(s[:now] for s in state)
            elif now > before:
                pairs = zip(state, start, strict=True)
                state = tuple(torch.cat([s, first[before:now]]) for s, first in pairs)
            state = advance(x, state)
            outputs.append(state[0])
        if ended:
            state = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
        return (outputs[::-1] if reverse else outputs), state

    def join(self, outputs: list[Tensor]) -> Tensor:
        """Invert :meth:`split`."""
        return torch.stack(outputs)


class Packed(Padded):
    """Sequences of different lengths, step by step, the longest sequence first."""

    one_length = False

    def __init__(self, batch_sizes: Tensor) -> None:
        self._sizes = _numbers(batch_sizes)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Return one [batch size of the step, width] per step."""
        return torch.split_with_sizes(x, self._sizes)

    def join(self, outputs: list[Tensor]) -> Tensor:
        return torch.cat(outputs)


class Masked(Padded):
    """Padded sequences [T, B, width] of which only the first ``lengths`` [B] steps count."""

    one_length = False

    def __init__(self, lengths: Tensor) -> None:
        self._lengths = lengths

    def scan(
        self, advance: Advance, xs: Sequence[Tensor], start: State, *, reverse: bool
    ) -> tuple[list[Tensor], State]:
        """Return the same for padded ones; after its end a sequence's state stays constant."""
        state, outputs = start, []
        counted = _mask(self._lengths, len(xs), xs[0].device)  # [T, B, 1]
        for t in reversed(range(len(xs))) if reverse else range(len(xs)):
            pairs = zip(advance(xs[t], state), state, strict=True)
            state = tuple(torch.where(counted[t], new, old) for new, old in pairs)
            outputs.append(state[0])
        return (outputs[::-1] if reverse else outputs), state


def _numbers(sizes: Tensor) -> list[int]:
    return [int(size) for size in sizes]  # torch 2.8 has no tolist() under grad


def _mask(lengths: Tensor, steps: int, device: torch.device) -> Tensor:
    """Return whether step t of sequence b counts: lengths [B] -> [T, B, 1]."""
    return (torch.arange(steps)[:, None] < lengths.cpu()).to(device).unsqueeze(-1)


class PackedRow:
    """The ``PackedSequence.data`` under vmap if the lengths are data of the row.

    Args:
        padded: [T, B, width], zero beyond the lengths at first.
        lengths: [B].

    It has the attributes that ``nn.LSTM`` reads. Any other function of it is refused: the number of
    steps in torch's packed tensor differs from row to row.
    """

    def __init__(self, padded: Tensor, lengths: Tensor) -> None:
        self.padded, self.lengths = padded, lengths
        self.dtype, self.device = padded.dtype, padded.device

    def dim(self) -> int:
        """Return 2, as for packed data."""
        return 2

    def size(self, dim: int) -> int:
        """Return the width; the number of packed steps is unknown."""
        return self.padded.size(-1) if dim in (-1, 1) else _refuse()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_REFUSAL)

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        _refuse()


_REFUSAL = (
    "the model packs sequences whose lengths are data and then computes with the packed steps, "
    "whose number differs from row to row: pass them only through recurrent layers and "
    "pad_packed_sequence(..., total_length=the padded length), or use engine='loop'"
)


def _refuse() -> NoReturn:
    raise ArgumentError(_REFUSAL)


def pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Any, Tensor]:
    """Return (data, batch sizes) of ``_pack_padded_sequence`` under vmap.

    Lengths that are data of the row give a :class:`PackedRow` with one batch size, B. They are not
    checked: a length above T counts as T.
    """
    steps, batch = input.shape[:2][:: -1 if batch_first else 1]
    if differs_by_row(lengths):
        x = input.transpose(0, 1) if batch_first else input
        counted = _mask(lengths, steps, x.device).view(steps, batch, *[1] * (x.ndim - 2))
        row = PackedRow(torch.where(counted, x, torch.zeros_like(x)), lengths)
        return row, torch.tensor([batch])
    with torch._C.DisableTorchFunction():
        at = torch.arange(steps * batch).view(input.shape[:2])
        order, sizes = torch._VF._pack_padded_sequence(at, lengths, batch_first)
    return input.flatten(0, 1).index_select(0, order.to(input.device)), sizes


def pad(
    data: Any, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return (sequences, lengths) of ``_pad_packed_sequence`` under vmap."""
    if isinstance(data, PackedRow):
        return _pad_row(data, batch_first, padding_value, total_length)
    sizes = _numbers(batch_sizes)
    lengths = [sum(size > b for size in sizes) for b in range(sizes[0])]
    order = torch.zeros(total_length, sizes[0], dtype=torch.int64)  # 0 is the padding
    numbers = torch.arange(1, 1 + sum(sizes))
    for t, count in enumerate(torch.split_with_sizes(numbers, sizes)):
        order[t, : len(count)] = count
    if batch_first:
        order = order.T
    filled = torch.cat([data.new_full((1, *data.shape[1:]), padding_value), data])
    padded = filled.index_select(0, order.flatten().to(data.device))
    return padded.view(*order.shape, *data.shape[1:]), torch.tensor(lengths)


def _pad_row(
    data: PackedRow, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    x, lengths = data.padded, data.lengths
    if total_length < x.shape[0]:  # without total_length torch passes 1, the number of batch sizes
        raise ArgumentError(
            "pad_packed_sequence of sequences whose lengths are data gives each row a shape of its "
            f"own: pass total_length={x.shape[0]}, the padded length, or use engine='loop'"
        )
    if extra := total_length - x.shape[0]:
        x = torch.cat([x, x.new_zeros(extra, *x.shape[1:])])
    counted = _mask(lengths, total_length, x.device)
    x = torch.where(counted, x, torch.full_like(x, padding_value))
    return (x.transpose(0, 1) if batch_first else x), lengths
