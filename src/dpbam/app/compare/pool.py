"""Runs in processes of their own, a few at a time, each telling how far it is."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from dpbam.app.compare.pairing import fingerprints
from dpbam.app.runs.config import ConfigError, RunConfig
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.result import RunError
from dpbam.data import DataError
from dpbam.training.events import Reporter, StepReport

_EVERY = 0.5  # seconds between two words of one run
_told: Any = None  # in a worker: the queue to its parent process
_stop: Any = None  # in a worker: set when the comparison is to stop
_busy = threading.Lock()  # in a worker: held while a run is at work


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison; ``name`` says which contender's."""

    name: str
    seed: int
    config: RunConfig
    out: Path

    @property
    def started(self) -> bool:
        """Whether its folder holds the run already, finished or not."""
        return RunFolder(self.out).facts.exists()


@dataclass(frozen=True)
class FinishedRun:
    """What a run of a comparison gave; epsilon is infinite for the reference.

    Attributes:
        pairing: digests of what runs of one seed must share: see :mod:`dpbam.app.compare.pairing`.
    """

    name: str
    seed: int
    accuracy: float
    epsilon: float
    delta: float
    noise_multiplier: float
    sampling_rate: float
    accountant: str
    charged: int
    seconds: float
    out: str
    pairing: dict[str, str]


class StoppedError(Exception):
    """A comparison was stopped by Ctrl-C; what was running has saved."""


class Watcher(Protocol):
    """Hears how a comparison gets on."""

    def progress(self, index: int, step: int, steps: int) -> None:
        """Run ``index`` has done ``step`` of ``steps``."""

    def finished(self, index: int, run: FinishedRun) -> None:
        """Run ``index`` is done."""


def run_all(
    runs: Sequence[PlannedRun],
    jobs: int,
    watcher: Watcher | None = None,
) -> list[FinishedRun]:
    """All runs, in the order given.

    One job works in this process. With more, each has a process of its own with one thread, since
    runs side by side use the cores better than threads within a run do.

    Raises:
        StoppedError: after Ctrl-C, when what was running has saved.
        RunError: if a run cannot be done; finished ones are kept.
    """
    if jobs == 1:
        return _one_by_one(runs, watcher)
    context = multiprocessing.get_context("spawn")
    told, stop = context.Queue(), context.Event()
    with ProcessPoolExecutor(
        max_workers=min(jobs, len(runs)),
        mp_context=context,
        initializer=_begin,
        initargs=(told, stop),
    ) as pool:
        begun = ((pool.submit(_in_worker, k, run), k) for k, run in enumerate(runs))
        try:
            with _terminated_like_ctrl_c():
                return _collect(begun, jobs, told, watcher)
        except KeyboardInterrupt:
            raise StoppedError from None
        except BrokenProcessPool:
            raise RunError(
                "a worker process was killed, perhaps for want of memory: take fewer --jobs, or a "
                "smaller --physical-batch-size; finished runs are kept"
            ) from None
        finally:
            stop.set()  # whatever still runs saves, and ends
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt inside, so that workers are not left behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _one_by_one(runs: Sequence[PlannedRun], watcher: Watcher | None) -> list[FinishedRun]:
    from dpbam.app.runs import RunInterruptedError

    results = []
    for index, run in enumerate(runs):
        try:
            results.append(_work(run, _Telling(index, watcher.progress if watcher else None)))
        except (RunInterruptedError, KeyboardInterrupt):
            raise StoppedError from None
        if watcher:
            watcher.finished(index, results[-1])
    return results


def _collect(
    begun: Iterator[tuple[Future[FinishedRun | str | None], int]],
    jobs: int,
    told: Any,
    watcher: Watcher | None,
) -> list[FinishedRun]:
    results: dict[int, FinishedRun] = {}
    futures = dict(islice(begun, jobs))
    while futures:
        done, _ = wait(futures, timeout=_EVERY / 2, return_when=FIRST_COMPLETED)
        for message in _drain(told):
            if watcher:
                watcher.progress(*message)
        for future in done:
            result = future.result()
            if result is None:  # the worker heard Ctrl-C before this process did
                raise KeyboardInterrupt
            if isinstance(result, str):  # what is for the user to mend, in a sentence
                raise RunError(result)
            index = futures.pop(future)
            results[index] = result
            futures.update(islice(begun, 1))  # first, so that no core waits for the record
            if watcher:
                watcher.finished(index, result)
    return [results[k] for k in sorted(results)]


def _drain(told: Any) -> list[tuple[int, int, int]]:
    messages = []
    while True:
        try:
            messages.append(told.get_nowait())
        except queue.Empty:
            return messages


def _begin(told: Any, stop: Any) -> None:
    """In a worker, once."""
    global _told, _stop
    import torch

    _told, _stop = told, stop
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a run in training has a handler of its own
    threading.Thread(target=_outlive_nobody, daemon=True).start()


def _outlive_nobody() -> None:
    """When the parent process is killed, let a run save, then end: nobody waits for more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        _stop.set()
        with _busy:
            os._exit(1)


def _in_worker(index: int, run: PlannedRun) -> FinishedRun | str | None:
    """One run; None if it was interrupted; a sentence if the user has to mend something.

    (An exception would lose where it was raised on its way to the parent process.)
    """
    from dpbam.app.runs import RunInterruptedError

    def tell(*message: int) -> None:
        _told.put(message)
        if _stop.is_set():  # Ctrl-C came before this run began to listen for it
            signal.raise_signal(signal.SIGTERM)

    if _stop.is_set():
        return None
    try:
        with _busy:
            return _work(run, _Telling(index, tell))
    except RunInterruptedError:
        _stop.set()
        return None
    except (RunError, ConfigError, DataError, OSError) as error:
        return f"{run.name}, seed {run.seed}: {error}"


def _work(run: PlannedRun, reporter: Reporter) -> FinishedRun:
    """One run, begun or gone on with."""
    from dpbam.app.runs import execute

    result = execute(run.config, run.out, resume=run.started, reporter=reporter)
    return FinishedRun(
        name=run.name,
        seed=run.seed,
        accuracy=result.accuracy,
        epsilon=result.epsilon,
        delta=result.delta,
        noise_multiplier=result.plan.noise_multiplier,
        sampling_rate=result.plan.sampling_rate,
        accountant=result.plan.accountant,
        charged=result.charged,
        seconds=result.seconds,
        out=str(run.out),
        pairing=fingerprints(run.out),
    )


class _Telling(Reporter):
    """Tells how far a run is, at most twice a second."""

    def __init__(self, index: int, tell: Callable[[int, int, int], None] | None) -> None:
        self._index, self._tell = index, tell
        self._last = 0.0

    def on_step(self, report: StepReport) -> None:
        """Now and then."""
        now = time.monotonic()
        if self._tell and now - self._last > _EVERY:
            self._last = now
            self._tell(self._index, report.step, report.steps)
