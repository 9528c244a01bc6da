"""Runs a small training in a process of its own, which kills itself at a chosen point.

The product has no hooks for this: the child replaces the function at the point by one that does
the real work, or half of it, and then dies by SIGKILL. Children are forked from a server process
that has imported everything, so that each costs a training and not the start of torch.
"""

import contextlib
import json
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

from dpbam.app.runs import RunConfig, execute, stored_config
from dpbam.app.runs.folder import RunFolder
from tests.forked import unstarted

STEPS = 8
SEEDED = {
    "data": "digits", "model": "mlp", "model_options": {"hidden": [8]}, "method": "dp-sat",
    "noise_multiplier": 4.0, "accountant": "rdp", "delta": 1e-4, "batch_size": 180, "epochs": 1,
    "checkpoint_every": 0, "lr": 0.02, "ema": 0.8, "augment_multiplicity": 2,
    "shift": 1, "num_workers": 1, "seed": 5, "schedule": "cosine",
    "physical_batch_size": 512,
}  # fmt: skip


def die(by: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), by)


def at_call(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """Acts at the ``number``-th call."""
    calls = 0

    def called() -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            act()

    return called


def plant(point: str, number: int, by: int = signal.SIGKILL) -> None:
    """Replace the function at ``point``: its ``number``-th call sends the process signal ``by``."""
    import torch

    import dpbam._jsonl
    import dpbam.app.runs.execution
    import dpbam.app.runs.files
    import dpbam.privacy.noise
    import dpbam.training.trainer

    kill = at_call(number, lambda: die(by))

    def before(owner: object, name: str) -> None:
        real = getattr(owner, name)
        setattr(owner, name, lambda *a, **k: (kill(), real(*a, **k))[1])

    def after(owner: object, name: str) -> None:
        real = getattr(owner, name)
        setattr(owner, name, lambda *a, **k: (real(*a, **k), kill())[0])

    def half_line(path: Path, entry: dict[str, object]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        with path.open("ab", buffering=0) as file:
            file.write(line[: len(line) // 2])
            kill()
            file.write(line[len(line) // 2 :])

    os_module = dpbam.app.runs.files.os
    points: dict[str, Callable[[], None]] = {
        "before the ledger write": lambda: before(dpbam._jsonl, "append_durably"),
        "in the middle of the ledger write": lambda: setattr(
            dpbam._jsonl, "append_durably", half_line
        ),
        "after the ledger write": lambda: after(dpbam._jsonl, "append_durably"),
        "in the middle of a step": lambda: before(dpbam.privacy.noise.GaussianNoise, "add"),
        "before the optimiser's step": lambda: before(torch.optim.NAdam, "step"),
        "after the optimiser's step": lambda: after(torch.optim.NAdam, "step"),
        "in the middle of a checkpoint write": lambda: _half_written(kill),
        "before the rename": lambda: before(os_module, "replace"),
        "after the rename": lambda: after(os_module, "replace"),
        "in evaluation": lambda: before(dpbam.training.trainer, "summarise"),
        "before the model is handed out": lambda: before(
            dpbam.app.runs.execution, "save_run_model"
        ),
        "before the statement": lambda: before(dpbam.app.runs.execution, "write_statement"),
    }
    points[point]()


def _half_written(kill: Callable[[], None]) -> None:
    """The temporary file of a checkpoint gets half its bytes, then the process dies."""
    real = pathlib.Path.open

    class Half:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            kill()
            self.file.write(data[len(data) // 2 :])

        def __getattr__(self, name):
            return getattr(self.file, name)

    def opened(path, *args, **kwargs):
        file = real(path, *args, **kwargs)
        return Half(file) if path.name.endswith(".safetensors.tmp") else file

    pathlib.Path.open = opened


def count_applied(log: Path) -> None:
    """Note every step that reaches the parameters, in a file that outlives the process."""
    import torch

    real = torch.optim.NAdam.step

    def step(self, *args):
        result = real(self, *args)
        with log.open("ab", buffering=0) as file:
            file.write(b"x")
        return result

    torch.optim.NAdam.step = step


def child(
    config: dict[str, object],
    out: str,
    point: str | None,
    number: int,
    mistake: str | None,
    by: int = signal.SIGKILL,
) -> None:
    """Start the run in ``out``, or resume it if it has begun."""
    folder = RunFolder(out)
    count_applied(folder.path.with_suffix(".applied"))
    if mistake:
        plant_mistake(mistake)
    if point:
        plant(point, number, by)
    resume = folder.facts.exists()
    execute(stored_config(out) if resume else RunConfig(**config), out, resume=resume)


def plant_mistake(name: str) -> None:
    """What tests must find, a ledger that lags or a resume that forgets; or bear: a clock."""
    import torch

    import dpbam._jsonl
    import dpbam.oracle

    if name == "the ledger is written a step late":
        real, waiting = dpbam._jsonl.append_durably, []

        def late(path, entry):
            waiting.append(entry)
            if len(waiting) > 1:
                real(path, waiting.pop(0))

        dpbam._jsonl.append_durably = late
    elif name == "the clock runs backwards":
        _set_back()
    elif name == "the optimiser's state is forgotten":
        torch.optim.NAdam.load_state_dict = lambda self, state: None
    else:
        raise KeyError(name)


def _set_back() -> None:
    """Every look at the clock is a minute earlier; the one that only runs forward is left alone."""
    import time

    now = [time.time()]

    def earlier() -> float:
        now[0] -= 60
        return now[0]

    time.time, time.time_ns = earlier, lambda: int(earlier() * 1e9)


@contextlib.contextmanager
def halting(config: dict[str, object], out: Path, step: int) -> Iterator[BaseProcess]:
    """A process at work that stops itself at a step; killed at the end, if it has not ended."""
    point = "before the optimiser's step"
    process = unstarted(child, config, str(out), point, step, None, signal.SIGSTOP)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def run(
    config: dict[str, object],
    out: Path,
    *,
    point: str | None = None,
    number: int = 1,
    after: float | None = None,
    mistake: str | None = None,
) -> int:
    """One process's work on the run; its exit code, -9 if it was killed."""
    process = unstarted(child, config, str(out), point, number, mistake)
    process.start()
    if after is not None:
        process.join(timeout=after)
        process.kill()  # SIGKILL, unless it has ended
    process.join()
    assert process.exitcode is not None
    return process.exitcode
