"""Ranks over ``torch.distributed``: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dpbam.distributed.ranks import EndedElsewhereError, RankLostError, Ranks
from dpbam.distributed.watch import Watch
from dpbam.errors import ArgumentError
from dpbam.params import Params

T = TypeVar("T")
_TIMEOUT = "DPBAM_RANK_TIMEOUT"


class ProcessRanks(Ranks):
    """The ranks of the default process group.

    A logical batch takes two large messages, each one flat tensor in the dtype of the sums: a
    reduce-scatter and an all-gather. Together they carry as many bytes as an all-reduce.

    Args:
        watch: reports which rank is missing when a message fails.
    """

    def __init__(self, watch: Watch) -> None:
        self.rank, self.world = watch.rank, watch.world
        self._watch = watch

    def scatter(self, sums: Params) -> tuple[Params, int]:
        length = self._length(sums)
        start, message = self.rank * length, flatten(sums, shapes=sums, length=self.world * length)
        with self._together():
            slice_sum = _reduce_scatter(message, start, length)  # sum_r (clipped sum of rank r)
        return cut(slice_sum, sums, start), start

    def gather(self, rank_slice: Params, shapes: Params) -> Params:
        length = self._length(shapes)
        message = flatten(rank_slice, shapes=shapes, length=length)
        vector = message.new_empty(self.world * length)
        with self._together():
            dist.all_gather(list(torch.split(vector, length)), message)
        return unflatten(vector[: size(shapes)], shapes)

    def _length(self, shapes: Params) -> int:
        """Return how many coordinates each rank has, the padding of the last ones included."""
        return max(1, -(-size(shapes) // self.world))

    def total(self, sums: Params) -> Params:
        message = flatten(sums, shapes=sums, length=size(sums))
        with self._together():
            dist.all_reduce(message)
        return unflatten(message, sums)

    def sums(self, *values: float) -> list[float]:
        message = torch.tensor([float(v) for v in values], dtype=torch.float64)
        with self._together():
            dist.all_reduce(message)
        totals: list[float] = message.tolist()
        return totals

    def collect(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world
        with self._together():
            dist.all_gather_object(values, value)  # pickled: the processes trust one another
        return values

    def from_leader(self, make: Callable[[], T]) -> T:
        result = [make() if self.leads else None]  # pickled: the processes trust one another
        with self._together():
            dist.broadcast_object_list(result, src=0, device=torch.device("cpu"))
        return result[0]  # type: ignore[return-value]

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Turn a failed message into an error that names the rank that is lost or late."""
        try:
            yield
        except RuntimeError as error:
            sentence = self._watch.inquire(error)
            if sentence is None:
                raise EndedElsewhereError from None
            raise RankLostError(sentence) from None


def _reduce_scatter(message: Tensor, start: int, length: int) -> Tensor:
    """Return ``length`` coordinates, from ``start`` on, of the sum of all ranks' messages."""
    slice_sum = message.new_empty(length)
    try:
        dist.reduce_scatter(slice_sum, list(torch.split(message, length)))
    except RuntimeError as error:
        if "not support" not in str(error):  # by gloo of some versions; then on every rank alike
            raise
        dist.all_reduce(message)
        slice_sum = message[start : start + length]
    return slice_sum


def size(params: Params) -> int:
    """Return how many coordinates there are."""
    return sum(p.numel() for p in params.values())


def cut(vector_slice: Tensor, shapes: Params, start: int) -> Params:
    """Name the coordinates of a slice that begins at ``start`` of the vector: flat pieces."""
    pieces, at = Params(), 0
    for name, p in shapes.items():
        first, last = max(at, start), min(at + p.numel(), start + len(vector_slice))
        if first < last:
            pieces[name] = vector_slice[first - start : last - start]
        at += p.numel()
    return pieces


def flatten(params: Params, *, shapes: Params, length: int) -> Tensor:
    """Copy all entries into one vector in the widest dtype of ``shapes``, padded with zeros."""
    dtype = reduce(torch.promote_types, {p.dtype for p in shapes.values()})
    flat = next(iter(shapes.values())).new_zeros(length, dtype=dtype)
    parts = torch.split(flat, [*(p.numel() for p in params.values()), length - size(params)])
    for p, piece in zip(params.values(), parts, strict=False):
        piece.copy_(p.detach().flatten())
    return flat


def unflatten(flat: Tensor, shapes: Params) -> Params:
    """The inverse of :func:`flatten`, as views where the dtype allows."""
    parts = torch.split(flat, [p.numel() for p in shapes.values()])
    return {n: s.view(p.shape).to(p.dtype) for (n, p), s in zip(shapes.items(), parts, strict=True)}


@contextmanager
def opened() -> Iterator[Ranks]:
    """Join the process group of the environment; an error in the body ends the other ranks too."""
    with _met(timeout()) as watch:
        try:
            yield ProcessRanks(watch)
        except (RankLostError, EndedElsewhereError):
            raise
        except Exception as error:
            if not watch.claim(str(error)):
                raise EndedElsewhereError from error  # another rank reports it
            raise
    dist.destroy_process_group()


def _met(limit: timedelta) -> Watch:
    """Create the process group, and a watch over it."""
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a late rank is an error, not an abort
    # torchrun may keep its store when it restarts the ranks: old names must not be read
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store, rank, world = next(iter(rendezvous("env://", timeout=limit)))
        dist.init_process_group(
            _backend(), store=PrefixStore(f"{attempt}/group", store), rank=rank, world_size=world,
            timeout=limit,
        )  # fmt: skip
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankLostError(
            f"rank {os.environ['RANK']} did not find all {os.environ['WORLD_SIZE']} processes at "
            f"{where} within {limit.total_seconds():g} s ({_first_line(error)}): check that all "
            "are started and can reach one another, then start again"
        ) from None
    stores = [PrefixStore(f"{attempt}/watch", store.clone()) for _ in range(2)]
    return Watch(stores, rank, world, limit)


def timeout() -> timedelta:
    """Return how long ranks wait for one another."""
    text = os.environ.get(_TIMEOUT, "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ArgumentError(f"{_TIMEOUT} must be a number of seconds, got {text!r}")
    return timedelta(seconds=seconds)


def _backend() -> str:
    """Gloo on CPUs; with GPUs, one per rank, also NCCL: small messages stay on the CPU."""
    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
