"""What a run settles when it begins, and what may differ when it is resumed.

============================================  ==================================================
field                                         may change on resume
============================================  ==================================================
num_workers, eval_every, checkpoint_every,    yes
data_root, tensorboard, measure_bias
epochs                                        with a constant schedule and without swa, whose
                                              shape hangs on it; within the configured epsilon
device, engine, physical_batch_size, and      unseeded only: they change the last bits, and a
the number of processes                       seeded run is the same to the bit
everything else                               no: it is what the accountant was told
============================================  ==================================================
"""

from __future__ import annotations

import hashlib
import platform
import secrets
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from dpbam._version import __version__
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.fixed_state import initial_tensors, update_digest
from dpbam.app.runs.formats import FORMAT
from dpbam.app.runs.run import RunError
from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from torch import nn

    from dpbam.app.runs.preparation import Prepared

_FREE = {
    "num_workers", "eval_every", "checkpoint_every", "data_root", "tensorboard", "measure_bias",
}  # fmt: skip
_FREE_UNSEEDED = {"device", "engine", "physical_batch_size"}


def new_facts(prepared: Prepared, world: int = 1) -> dict[str, Any]:
    """What a new run settles. Not for publishing: it holds a fingerprint of the data."""
    import torch

    plan = prepared.plan
    return {
        "format": FORMAT,
        "run": secrets.token_hex(8),
        "config": prepared.config.to_mapping(),
        "n": plan.n,
        "noise_multiplier": plan.noise_multiplier,
        "delta": plan.delta,
        "sampling_rate": plan.sampling_rate,
        "clip_norm": plan.clip_norm if plan.private else None,
        "physical_batch_size": prepared.physical_batch_size,
        "device": prepared.device,
        "threads": torch.get_num_threads(),
        "ranks": world,
        "versions": versions(),
        "initial_weights": weights_digest(prepared.model),
        "initial_tensors": initial_tensors(prepared.model),
        "non_private_fingerprint": prepared.train.fingerprint(),
        "non_private_test_fingerprint": prepared.test.fingerprint(),
    }


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over names and values of all parameters and buffers: runs that begin alike agree."""
    digest = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        digest.update(f"{name} ".encode())
        update_digest(digest, values)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Of what computes."""
    names = ("torch", "numpy", "dp-accounting", "safetensors")
    return {"dpbam": __version__, "python": platform.python_version()} | {
        name: version(name) for name in names
    }


def check_config(facts: dict[str, Any], config: RunConfig) -> None:
    """Refuse a configuration that the run was not begun with.

    Raises:
        RunError: naming the first field that may not change.
    """
    stored, new = RunConfig.from_mapping(facts["config"]), config
    free = _FREE | (_FREE_UNSEEDED if stored.seed is None else set())
    if stored.schedule == "constant" and stored.swa is None:
        free = free | {"epochs"}
    for name in RunConfig.model_fields:
        old, now = getattr(stored, name), getattr(new, name)
        if name in free or old == now:
            continue
        raise RunError(
            f"{name} was {_show(old)} when the run began and cannot become {_show(now)}: resume "
            f"without it, or start a new run with another --out"
        )


def check_prepared(facts: dict[str, Any], prepared: Prepared, world: int = 1) -> None:
    """Refuse changed data, more epochs than the budget holds, and a seeded run's other machine.

    Of several ranks each checks the data that it has, against the leader's.

    Raises:
        RunError: one sentence.
    """
    config, plan = prepared.config, prepared.plan
    if prepared.train.fingerprint() != facts["non_private_fingerprint"] or plan.n != facts["n"]:
        raise RunError(
            f"{prepared.train.name} is not the data that the run began with: restore it, or start "
            "a new run with another --out"
        )
    if config.epsilon is not None and plan.epsilon() > config.epsilon:
        raise RunError(
            f"{config.epochs:g} epochs would spend epsilon {up(plan.epsilon())} of the run's "
            f"{up(config.epsilon)}: resume with fewer"
        )
    if config.seed is not None:
        _check_machine(facts, world)


def _check_machine(facts: dict[str, Any], world: int) -> None:
    """A seeded run goes on bit by bit: the same torch, the same number of threads and ranks."""
    import torch

    if torch.__version__.partition("+")[0] != facts["versions"]["torch"].partition("+")[0]:
        raise RunError(
            f"the seeded run began with torch {facts['versions']['torch']}, here is "
            f"{torch.__version__}: its steps would come out differently; install that one"
        )
    if torch.get_num_threads() != facts["threads"]:
        raise RunError(
            f"the seeded run began with {facts['threads']} threads, here are "
            f"{torch.get_num_threads()}: its steps would come out differently; set "
            f"OMP_NUM_THREADS={facts['threads']}"
        )
    if world != facts.get("ranks", 1):
        raise RunError(
            f"the seeded run began on {facts.get('ranks', 1)} processes, here are {world}: sums of "
            "other parts differ in the last bits; resume it on as many"
        )


def _show(value: object) -> str:
    return "unset" if value is None else str(value)
