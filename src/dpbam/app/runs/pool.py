"""Worker processes for runs: results in order, messages on the way, and a stop that saves.

:func:`run_tasks` runs any tasks, :func:`train_all` the runs of a comparison. With one job, they run
in the calling process. With more, each job is a process with one thread, because runs in parallel
use the cores better than threads within one run do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.run import RunError, RunInterruptedError, RunResult, RunSpec
from dpbam.errors import DPBAMError
from dpbam.training.events import Reporter, StepReport

T = TypeVar("T")
Send = Callable[[Any], None]
#: Work for a worker: called with a function that sends a message to the parent process. A task and
#: what it returns must be picklable.
Task = Callable[[Send], T]

_PERIOD = 0.25  # seconds between two looks at the messages, and at the parent process
_GRACE = 10.0  # seconds that a run has to begin its training, or to save after another signal
_messages: Any = None  # in a worker: the queue to the parent process
_stop: Any = None  # in a worker: set when all tasks are to save and end
_busy = threading.Lock()  # in a worker: held while a task runs


class StoppedError(Exception):
    """Ctrl-C or SIGTERM ended the tasks; the runs in progress have saved a checkpoint."""


class Watcher(Protocol):
    """Displays or records the progress of several runs."""

    def progress(self, index: int, step: int, steps: int) -> None:
        """Run ``index`` has done ``step`` of ``steps``."""

    def finished(self, index: int, result: RunResult) -> None:
        """Run ``index`` is finished."""


def train_all(
    specs: Sequence[RunSpec], jobs: int = 1, watcher: Watcher | None = None
) -> list[RunResult]:
    """Start or resume all runs, at most ``jobs`` at a time, and return their results in order.

    Raises:
        StoppedError: after Ctrl-C or SIGTERM, when the runs in progress have saved.
        RunError: if a run fails; finished ones are kept.
    """
    tasks = [partial(_train, spec) for spec in specs]
    if watcher is None:
        return run_tasks(tasks, jobs)

    def report(index: int, report: tuple[int, int]) -> None:
        watcher.progress(index, *report)

    return run_tasks(tasks, jobs, on_message=report, on_result=watcher.finished)


def _train(spec: RunSpec, send: Send) -> RunResult:
    from dpbam.app.runs.execution import execute

    resume = RunFolder(spec.out).started
    try:
        result = execute(spec.config, spec.out, resume=resume, reporter=_Progress(send))
    except DPBAMError as error:
        raise RunError(f"{spec.name}: {error}") from error
    return replace(result, spec=spec)


class _Progress(Reporter):
    """Sends the number of steps done, at most twice per second."""

    def __init__(self, send: Send) -> None:
        self._send, self._next = send, 0.0

    def on_step(self, report: StepReport) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 2 * _PERIOD
            self._send((report.step, report.steps))


def _ignore(index: int, value: Any) -> None:
    pass


def run_tasks(
    tasks: Sequence[Task[T]],
    jobs: int,
    *,
    on_message: Callable[[int, Any], None] = _ignore,
    on_result: Callable[[int, T], None] = _ignore,
) -> list[T]:
    """Run all tasks, at most ``jobs`` at a time, and return their results in order.

    Args:
        tasks: the work.
        jobs: how many tasks run at a time.
        on_message: called with a task's index and a message that it sent.
        on_result: called with a task's index and its result, as soon as it is finished.

    Raises:
        StoppedError: after Ctrl-C or SIGTERM, when the runs in progress have saved.
        RunError: if a task fails or its process is killed; finished ones are kept.
    """
    if jobs == 1:
        return _run_here(tasks, on_message, on_result)
    context = multiprocessing.get_context("spawn")
    messages, stop = context.SimpleQueue(), context.Event()
    workers = min(jobs, len(tasks))
    with ProcessPoolExecutor(workers, context, _start_worker, (messages, stop)) as pool:
        futures = ((pool.submit(_run_in_worker, k, task), k) for k, task in enumerate(tasks))
        try:
            with _sigterm_as_ctrl_c():
                return _collect(futures, jobs, messages, on_message, on_result)
        except KeyboardInterrupt:
            raise StoppedError from None
        except BrokenProcessPool:
            raise RunError(
                "a worker process was killed, perhaps for lack of memory: run fewer at a time "
                "(--jobs, --workers), or take a smaller --physical-batch-size; finished runs are "
                "kept"
            ) from None
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _run_here(
    tasks: Sequence[Task[T]],
    on_message: Callable[[int, Any], None],
    on_result: Callable[[int, T], None],
) -> list[T]:
    results = []
    for index, task in enumerate(tasks):
        try:
            results.append(task(partial(on_message, index)))
        except (RunInterruptedError, KeyboardInterrupt):
            raise StoppedError from None
        on_result(index, results[-1])
    return results


def _collect(
    submitted: Iterator[tuple[Future[T], int]],
    jobs: int,
    messages: Any,
    on_message: Callable[[int, Any], None],
    on_result: Callable[[int, T], None],
) -> list[T]:
    """Submit a task whenever one ends, so that few wait in the pool when it is stopped."""
    results: dict[int, T] = {}
    futures = dict(islice(submitted, jobs))
    while futures:
        done, _ = wait(futures, timeout=_PERIOD, return_when=FIRST_COMPLETED)
        while not messages.empty():
            on_message(*messages.get())
        for future in done:
            index = futures.pop(future)
            results[index] = future.result()
            futures.update(islice(submitted, 1))  # first, so that no core waits for the callback
            on_result(index, results[index])
    return [results[index] for index in sorted(results)]


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, so that no worker is left behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start_worker(messages: Any, stop: Any) -> None:
    global _messages, _stop
    import torch

    _messages, _stop = messages, stop
    torch.set_num_threads(1)
    os.setpgrp()  # Ctrl-C reaches the parent process alone, which then stops its workers once
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """When the parent stops the tasks or dies, let the run in progress save and end."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a worker
    while parent.is_alive() and not _stop.is_set():  # no wait(): its set() hangs if a waiter dies
        time.sleep(_PERIOD)
    until = time.monotonic() + _GRACE
    while _busy.locked() and not _saves_on_sigterm() and time.monotonic() < until:
        time.sleep(_PERIOD)
    if _busy.locked():
        os.kill(os.getpid(), signal.SIGTERM)
    with _busy:
        if not parent.is_alive():
            os._exit(1)


def _saves_on_sigterm() -> bool:
    """Whether a run is training and has not been signalled yet: it installs its own handler."""
    return signal.getsignal(signal.SIGTERM) is not signal.default_int_handler


def _run_in_worker(index: int, task: Task[T]) -> T:
    def send(message: Any) -> None:
        _messages.put((index, message))

    with _busy, _sigterm_as_ctrl_c():
        if _stop.is_set():
            raise KeyboardInterrupt
        try:
            return task(send)
        except RunInterruptedError:
            raise KeyboardInterrupt from None
        except (DPBAMError, OSError) as error:  # RunError survives the way to the parent process
            raise RunError(str(error)) from error
