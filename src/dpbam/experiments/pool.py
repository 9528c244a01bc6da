"""Runs in processes of their own, a few at a time, each telling how far it is."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dpbam.data import DataError
from dpbam.reporter import Reporter, StartReport, StepReport
from dpbam.runs.config import ConfigError, RunConfig
from dpbam.runs.folder import RunFolder
from dpbam.runs.result import RunError

_EVERY = 0.5  # seconds between two words of one run
_told: Any = None  # in a worker: the queue to its parent


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison."""

    method: str
    seed: int
    config: RunConfig
    out: Path

    @property
    def started(self) -> bool:
        """Whether its folder holds the run already, finished or not."""
        return RunFolder(self.out).facts.exists()


@dataclass(frozen=True)
class FinishedRun:
    """What a run of a comparison gave; epsilon is infinite for the reference."""

    method: str
    seed: int
    accuracy: float
    epsilon: float
    delta: float
    noise_multiplier: float
    sampling_rate: float
    charged: int
    seconds: float
    out: str


class Stopped(Exception):
    """A comparison was stopped by Ctrl-C; what was running has saved."""


class Watcher(Protocol):
    """Hears how a comparison gets on."""

    def progress(self, index: int, step: int, steps: int) -> None:
        """Run ``index`` has done ``step`` of ``steps``."""

    def finished(self, index: int, run: FinishedRun) -> None:
        """Run ``index`` is done."""


def run_all(
    runs: Sequence[PlannedRun], jobs: int, watcher: Watcher | None = None
) -> list[FinishedRun]:
    """All runs, in the order given.

    With more than one job each worker has one thread, since runs side by side use the cores better
    than threads within a run do.

    Raises:
        Stopped: after Ctrl-C.
    """
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    threads = 1 if jobs > 1 else None
    with ProcessPoolExecutor(
        max_workers=min(jobs, len(runs)),
        mp_context=context,
        initializer=_begin,
        initargs=(told, threads),
    ) as pool:
        futures = {pool.submit(_work, k, run): k for k, run in enumerate(runs)}
        try:
            return _collect(futures, told, watcher)
        except KeyboardInterrupt:
            pool.shutdown(wait=True, cancel_futures=True)  # the running ones save first
            raise Stopped from None
        except BrokenProcessPool:
            raise RunError(
                "a worker process was killed, perhaps for want of memory: take fewer --jobs, or a "
                "smaller --physical-batch-size; finished runs are kept"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _collect(
    futures: dict[Future[FinishedRun | str | None], int], told: Any, watcher: Watcher | None
) -> list[FinishedRun]:
    results: dict[int, FinishedRun] = {}
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=_EVERY / 2, return_when=FIRST_COMPLETED)
        for message in _drain(told):
            if watcher:
                watcher.progress(*message)
        for future in done:
            result = future.result()
            if result is None:  # the worker heard Ctrl-C before this process did
                raise KeyboardInterrupt
            if isinstance(result, str):  # what is for the user to mend, in a sentence
                raise RunError(result)
            results[futures[future]] = result
            if watcher:
                watcher.finished(futures[future], result)
    return [results[k] for k in sorted(results)]


def _drain(told: Any) -> list[tuple[int, int, int]]:
    messages = []
    while True:
        try:
            messages.append(told.get_nowait())
        except queue.Empty:
            return messages


def _begin(told: Any, threads: int | None) -> None:
    """In a worker, once."""
    global _told
    import torch

    _told = told
    if threads:
        torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # between runs; a run sets its own handler


def _work(index: int, run: PlannedRun) -> FinishedRun | str | None:
    """In a worker: one run, begun or gone on with.

    Returns:
        The result; None if it was interrupted; a sentence if the user has to mend something. (An
        exception would lose where it was raised on its way to the parent process.)
    """
    from dpbam.runs import Interrupted, execute

    try:
        result = execute(run.config, run.out, resume=run.started, reporter=_Telling(index))
    except Interrupted:
        return None
    except (RunError, ConfigError, DataError, OSError) as error:
        return f"{run.method}, seed {run.seed}: {error}"
    return FinishedRun(
        method=run.method,
        seed=run.seed,
        accuracy=result.accuracy,
        epsilon=result.epsilon,
        delta=result.delta,
        noise_multiplier=result.plan.noise_multiplier,
        sampling_rate=result.plan.sampling_rate,
        charged=result.charged,
        seconds=result.seconds,
        out=str(run.out),
    )


class _Telling(Reporter):
    """Tells the parent process how far a run is, now and then."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._last = 0.0

    def on_start(self, report: StartReport) -> None:
        """At once."""
        _told.put((self._index, report.step, report.plan.steps))

    def on_step(self, report: StepReport) -> None:
        """At most twice a second."""
        now = time.monotonic()
        if now - self._last > _EVERY:
            self._last = now
            _told.put((self._index, report.step, report.steps))
