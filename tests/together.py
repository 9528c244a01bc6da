"""Several ranks in a test: real processes over gloo on the loopback, this process being rank 0.

The others are forked from it, so that they cost no import of torch, and share what a test has
patched: a planted mistake is planted on every rank.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dpbam.distributed import Ranks, joined

LIMIT = 900.0  # seconds; a loaded machine is slow, and no test waits for it to pass
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store is there: connect to it


def together(world: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """``work(ranks)`` on each of ``world`` ranks: the results, by rank; arrays, not tensors."""
    gc.collect()  # a store of an earlier test must end here: its destructor joins its thread
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(1, world)]
    others = [
        fork.Process(target=_other, args=(rank, world, work, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes, 1)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of every fork
        for process, (_, end) in zip(others, pipes, strict=True):
            process.start()
            end.close()  # the end of a rank that dies is then seen
    threads, store = torch.get_num_threads(), open_store()  # which starts a thread: after forks
    try:
        torch.set_num_threads(1)
        for pipe, _ in pipes:
            pipe.send(store.port)
        found = [as_rank(0, world, store.port, work, **AGENT)]
        for pipe, _ in pipes:
            assert pipe.poll(LIMIT), "a rank gave no answer"
            found.append(pipe.recv())  # EOFError: the rank died
    finally:
        torch.set_num_threads(threads)
        for process in others:
            process.join(10)
            process.kill()
    return found


def as_rank(rank: int, world: int, port: int, work: Callable[[Ranks], Any], **more: str) -> Any:
    """``work`` as torchrun would start it."""
    environment = {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more,
    }  # fmt: skip
    try:
        with mock.patch.dict(os.environ, environment), joined() as ranks:
            return work(ranks)
    finally:
        if dist.is_initialized():  # after an error: the next test makes a group of its own
            dist.destroy_process_group()


def _other(rank: int, world: int, work: Callable[[Ranks], Any], pipe: Any) -> None:
    gc.freeze()  # what was there before the fork may own a thread, which is not here
    torch.set_num_threads(1)
    pipe.send(as_rank(rank, world, pipe.recv(), work, **AGENT))


def open_store() -> dist.TCPStore:
    """Open a store on a port of the system's choice; no other process can take it in between."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
