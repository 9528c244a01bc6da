"""Processes of a test's own that cost no import of torch.

They are forked from a server process that has imported everything and trained once
(:mod:`tests.warm`), so that each costs its work alone. Where the start of a process is the point, a
test starts a real one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

WARM = "DPBAM_TESTS_WARM"  # set where importing tests.warm shall train
_FOREVER = 900  # seconds; a loaded machine is slow, and no test waits for it to pass
context: ForkServerContext = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch._dynamo",  # torch's optimisers import it
        "torch.func",
        "dp_accounting",
        "dpbam.app.cli.train",
        "dpbam.app.compare.comparison",
        "dpbam.app.search.study",
        "dpbam.loading",
        "dpbam.app.runs.build",
        "dpbam.app.runs.checkpoint",
        "sklearn.datasets",
        "tests.warm",
    ]
)
_ROOT = Path(__file__).resolve().parent.parent


def started(work: Callable[..., None], *args: object) -> BaseProcess:
    """Start ``work(*args)``, a function of a module, with one thread."""
    process = unstarted(work, *args)
    process.start()
    return process


def unstarted(work: Callable[..., None], *args: object) -> BaseProcess:
    """Make the process of ``work(*args)``, a function of a module, with one thread."""
    _ensure_server()
    return context.Process(target=_alone, args=(work, *args))


def command(
    *args: object,
    cwd: Path,
    stdout: Path,
    stderr: Path,
    first: Callable[[], None] | None = None,
) -> BaseProcess:
    """Start ``dpbam ARGS`` in ``cwd``, in a session of its own, as a terminal would.

    ``first``, which can be pickled, is called in the new process before the command: it may plant
    a signal at a chosen point, so that no test has to hit that moment from outside.
    """
    return started(_command, [str(a) for a in args], cwd, stdout, stderr, first)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Inside, the worker processes of comparisons and searches are forked from the server."""
    _ensure_server()
    with mock.patch.object(multiprocessing, "get_context", return_value=context):
        yield


def wait_until(condition: Callable[[], object], *, alive: Callable[[], object]) -> None:
    """Wait for ``condition()``, however slow the machine, while ``alive()``; never for ever."""
    limit = time.monotonic() + _FOREVER
    while not condition():
        assert alive() or condition(), "it ended before that"
        assert time.monotonic() < limit, f"that did not happen in {_FOREVER} s"
        time.sleep(0.02)


def _ensure_server() -> None:
    """Start the server, if there is none, where it finds ``tests.warm``."""
    with contextlib.chdir(_ROOT), mock.patch.dict(os.environ, {WARM: "1"}):
        ensure_running()


def _alone(work: Callable[..., None], *args: object) -> None:
    import torch

    torch.set_num_threads(1)
    work(*args)


def _command(
    args: list[str], cwd: Path, stdout: Path, stderr: Path, first: Callable[[], None] | None
) -> None:
    from dpbam.app.cli import main

    os.setsid()
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()
    for path, number in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if first is not None:
        first()
    sys.exit(main(args))
