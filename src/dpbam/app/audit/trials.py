"""Trials of an audit: in several processes, kept on disk, resumed after a stop."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dpbam.app.runs.files import append_json_line, read_json, read_json_lines, write_json
from dpbam.app.runs.run import RunError

_CHUNK = 50  # trials per task of a process


class Trial(NamedTuple):
    """Which canaries were present, and the attacker's score of each."""

    number: int
    present: list[bool]
    scores: list[float]


Play = Callable[[Any, int], Trial]


def collect(
    play: Play,
    target: Any,
    trials: int,
    *,
    jobs: int,
    out: Path | None,
    progress: Callable[[int, int], None],
) -> list[Trial]:
    """Trials 0 .. ``trials`` - 1, in order; those that ``out`` holds are not played again.

    Raises:
        RunError: if ``out`` holds the trials of another audit.
    """
    found = {t.number: t for t in _kept(target, out)}
    waiting = [k for k in range(trials) if k not in found]
    chunks = [waiting[k : k + _CHUNK] for k in range(0, len(waiting), _CHUNK)]
    for chunk in _played(play, target, chunks, jobs):
        for trial in chunk:
            found[trial.number] = trial
            if out is not None:
                append_json_line(out / "trials.jsonl", trial._asdict())
        progress(len(found), trials)
    return [found[k] for k in range(trials)]


def _played(
    play: Play, target: Any, chunks: Sequence[list[int]], jobs: int
) -> Iterator[list[Trial]]:
    if jobs <= 1 or len(chunks) <= 1:
        yield from (_chunk(play, target, c) for c in chunks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread) as pool:
        yield from pool.map(partial(_chunk, play, target), chunks)


def _one_thread() -> None:
    """One thread per process; torch reads this when it is loaded."""
    os.environ["OMP_NUM_THREADS"] = "1"


def _chunk(play: Play, target: Any, indices: Sequence[int]) -> list[Trial]:
    return [play(target, k) for k in indices]


def _kept(target: Any, out: Path | None) -> list[Trial]:
    """The trials of an earlier run of the same audit."""
    if out is None:
        return []
    out.mkdir(parents=True, exist_ok=True)
    name = _name(target)
    facts = out / "target.json"
    if not facts.exists():
        write_json(facts, {"audit": name, "target": asdict(target)})
    if read_json(facts).get("audit") != name:
        raise RunError(f"{out} holds the trials of another audit: choose another --out")
    try:
        return [_trial(t) for t in read_json_lines(out / "trials.jsonl")]
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{out / 'trials.jsonl'} is damaged ({error}): delete the folder") from None


def _trial(t: dict[str, Any]) -> Trial:
    return Trial(int(t["number"]), [bool(p) for p in t["present"]], [float(s) for s in t["scores"]])


def _name(target: Any) -> str:
    text = json.dumps(asdict(target), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
