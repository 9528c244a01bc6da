"""Runs one training on several ranks, kills one of them, and ends the others as torchrun does.

The ranks are forked from the server process of the other crash tests. The store lives here, as it
lives in torchrun's agent: a new one for every attempt, or the old one, as torchrun keeps it when it
restarts the ranks by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpbam import mechanism
from dpbam.app.cli.boundary import INTERRUPTED, guarded
from dpbam.app.runs import RunConfig, RunInterruptedError, execute, stored_config
from dpbam.app.runs.folder import RunFolder
from dpbam.distributed import Ranks, process, watch
from end_to_end.kill_driver import at_call, count_applied, die, plant_mistake
from tests.forked import unstarted
from together import AGENT, LIMIT, as_rank, open_store

POINTS: dict[str, Callable[[Callable[[], None]], None]] = {
    "before the sums are reduced": lambda kill: _before(process.dist, "reduce_scatter", kill),
    "between noise and ledger": lambda kill: _before(mechanism, "identify", kill),
    "before the slices are gathered": lambda kill: _before(process.dist, "all_gather", kill),
    "after the slices are gathered": lambda kill: _after(process.dist, "all_gather", kill),
    "while the others wait": lambda kill: _before(process.dist, "all_reduce", kill),
}


@dataclass
class Attempt:
    """How the processes of one attempt ended: exit codes and what each said, by rank; its store."""

    codes: list[int]
    said: list[str]
    store: Any
    restarts: int


def applied(out: Path) -> int:
    """Steps that reached some rank's parameters, in all attempts: of each attempt the most."""
    return sum(
        max(path.stat().st_size for path in out.parent.glob(f"{out.name}.{attempt}.*.applied"))
        for attempt in {p.name.split(".")[1] for p in out.parent.glob(f"{out.name}.*.applied")}
    )


def attempt(
    config: dict[str, Any], out: Path, world: int, *, victim: int = 0, after: float | None = None,
    point: str | None = None, number: int = 1, mistake: str | None = None, act: str = "die",
    restarts: Attempt | None = None,
) -> Attempt:  # fmt: skip
    """One start of the run, or its resumption, on ``world`` ranks."""
    store, count = open_store(), 0
    if restarts is not None:
        store, count = restarts.store, restarts.restarts + 1
    logs = [out.with_name(f"{out.name}.{store.port}.{rank}.stderr") for rank in range(world)]
    plant = (victim, point, number, mistake, act, count)
    processes = [
        unstarted(rank_process, rank, world, store.port, config, str(out), plant)
        for rank in range(world)
    ]
    for started in processes:
        started.start()
    if after is not None:
        processes[victim].join(after)
        processes[victim].kill()
    _as_the_agent_does(processes, at_once=after is not None)
    return Attempt(
        [p.exitcode or 0 for p in processes],
        [log.read_text() if log.exists() else "" for log in logs],
        store,
        count,
    )


def _as_the_agent_does(processes: list[Any], *, at_once: bool) -> None:
    """Wait for all; when one has died, ask the others to end (later, to see them end by self)."""
    began = None
    while any(p.is_alive() for p in processes):
        if began is None and any(p.exitcode for p in processes):
            began = time.monotonic()
            if at_once:
                for other in processes:
                    other.terminate()
        assert began is None or time.monotonic() - began < LIMIT, "a rank does not end"
        time.sleep(0.05)


def rank_process(
    rank: int, world: int, port: int, config: dict[str, Any], out: str, plant: tuple[Any, ...]
) -> None:
    """One rank: start the run in ``out``, or resume it if it has begun."""
    watch.BEAT, watch._PATIENCE = 0.2, 600  # soon told, and a store that answers late is waited for
    victim, point, number, mistake, act, restarts = plant
    count_applied(Path(f"{out}.{port}.{rank}.applied"))
    if mistake:
        plant_mistake(mistake)
    if point and rank == victim:
        POINTS[point](at_call(number, {"die": die, "fail": fail, "ask": ask}[act]))
    sys.stderr = open(f"{out}.{port}.{rank}.stderr", "w")  # noqa: SIM115
    agent = {**AGENT, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    code = guarded(lambda: as_rank(rank, world, port, lambda r: train(r, config, out), **agent))
    sys.stderr.close()
    os._exit(code)


def fail() -> None:
    """An error of one rank alone."""
    raise OSError(28, "No space left on device")


def ask() -> None:
    """What a scheduler does before it takes the machine away."""
    os.kill(os.getpid(), signal.SIGTERM)


def train(ranks: Ranks, config: dict[str, Any], out: str) -> int:
    """Train or resume; 0, or 130 if it was stopped."""
    resume = ranks.from_leader(RunFolder(out).facts.exists)
    settings = ranks.from_leader(lambda: stored_config(out) if resume else RunConfig(**config))
    try:
        execute(settings, out, resume=resume, ranks=ranks)
    except RunInterruptedError:
        return INTERRUPTED
    return 0


def _before(owner: object, name: str, kill: Callable[[], None]) -> None:
    real = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: (kill(), real(*a, **k))[1])


def _after(owner: object, name: str, kill: Callable[[], None]) -> None:
    real = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: (real(*a, **k), kill())[0])


KILLED, ASKED = -signal.SIGKILL, -signal.SIGTERM
