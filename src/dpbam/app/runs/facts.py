"""A run's facts: what it settles when it begins, and what must be the same when it is resumed.

The definition of a setting says whether it may change on resume
(:class:`dpbam.app.runs.settings.Policy`): by default it may not, since the accountant counts on it.
Device, engine and physical batch size, and the number of processes, may in an unseeded run: they
change the last bits, and a seeded run is the same to the bit. The epochs may with constant
schedules and without swa or a warm-up of lambda, whose shape depends on them, within the configured
epsilon. The data may be at another path, if training and test records are the same.

Buffers and frozen parameters are published with the trained ones. A forward pass that wrote into
them would publish facts about the training data without noise. So a run records the SHA-256 of
every tensor before its model has seen data, refuses to save or publish if a tensor that is not
trained differs, and ``dpbam audit`` compares the published file with the record.
"""

from __future__ import annotations

import hashlib
import platform
import secrets
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from dpbam._version import __version__
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.documents import InitialTensors, RunFacts, TestFacts
from dpbam.app.runs.files import FORMAT
from dpbam.app.runs.run import RunError
from dpbam.app.runs.settings import policies
from dpbam.catalogue import SOURCES
from dpbam.data.registry import is_function
from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from hashlib import _Hash

    from torch import Tensor, nn

    from dpbam.app.runs.preparation import Prepared


def new_facts(prepared: Prepared, world: int = 1) -> RunFacts:
    """Return what a new run settles. Not for publishing: it holds a fingerprint of the data."""
    import torch

    plan = prepared.plan
    return RunFacts(
        format=FORMAT,
        run=secrets.token_hex(8),
        config=prepared.config,
        n=plan.n,
        unit=plan.unit,
        test=test_facts(prepared),
        noise_multiplier=plan.noise_multiplier,
        delta=plan.delta,
        sampling_rate=plan.sampling_rate,
        clip_norm=plan.clip_norm if plan.private else None,
        device=prepared.device,
        threads=torch.get_num_threads(),
        ranks=world,
        versions=versions(),
        public_weights=prepared.public_weights,
        initial_weights=weights_digest(prepared.model),
        initial_tensors=initial_tensors(prepared.model),
        non_private_fingerprint=prepared.train.fingerprint(),
        non_private_test_fingerprint=prepared.test.fingerprint(),
        non_private_test_records=replace(prepared.test, columns={}).fingerprint(),
    )


def test_facts(prepared: Prepared) -> TestFacts:
    """Return what a statement has about the test data."""
    test, unit = prepared.test, prepared.plan.unit
    return TestFacts(set=test.name, records=len(test), names_units=unit in test.columns)


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    names = ("torch", "numpy", "dp-accounting", "safetensors")
    return {"dpbam": __version__, "python": platform.python_version()} | {
        name: version(name) for name in names
    }


def check_config(facts: RunFacts, config: RunConfig) -> None:
    """Refuse a configuration that the run was not begun with, naming the field that differs."""
    stored, new = facts.config, config
    lengthless = "warmup" not in stored.method_options and stored.swa is None
    constant = stored.schedule == "constant" and lengthless
    moved = _kind_of_path(stored.data) == _kind_of_path(new.data) != ""
    allowed = {
        "always": True,
        "unseeded": stored.seed is None,
        "constant": constant,
        "moved": moved,
    }
    for name, policy in policies(RunConfig).items():
        old, now = getattr(stored, name), getattr(new, name)
        if old == now or allowed.get(policy.resume, False):
            continue
        raise RunError(
            f"{name} was {_show(old)} when the run began and cannot become {_show(now)}: resume "
            f"without it, or start a new run with another --out"
        )
    if _kind_of_path(new.data) and not Path(new.data).expanduser().exists():
        raise RunError(
            f"the run's data is not at {new.data}: if it was moved, name where it is now, "
            "--resume --data PATH"
        )


def check_prepared(facts: RunFacts, prepared: Prepared, world: int = 1) -> None:
    """Refuse changed data, more epochs than the budget allows, and a seeded run's other machine.

    Of several ranks each checks the data that it has, against the leader's.
    """
    config, plan = prepared.config, prepared.plan
    if prepared.train.fingerprint() != facts.non_private_fingerprint or plan.n != facts.n:
        raise RunError(
            f"{prepared.train.name} is not the data that the run began with: restore it, or start "
            "a new run with another --out"
        )
    if replace(prepared.test, columns={}).fingerprint() != facts.non_private_test_records:
        raise RunError(
            f"{prepared.test.name} is not the test data that the run began with: restore it, or "
            "start a new run with another --out"
        )
    if prepared.public_weights != facts.public_weights:
        raise RunError(
            "the public weights are not those that the run began with: restore them, or start a "
            "new run with another --out"
        )
    if config.epsilon is not None and plan.epsilon() > config.epsilon:
        raise RunError(
            f"{config.epochs:g} epochs would spend epsilon {up(plan.epsilon())} of the run's "
            f"{up(config.epsilon)}: resume with fewer"
        )
    if config.seed is not None:
        _check_machine(facts, world)


def _check_machine(facts: RunFacts, world: int) -> None:
    """A seeded run is the same to the bit: the same torch, the same number of threads and ranks."""
    import torch

    if torch.__version__.partition("+")[0] != facts.versions["torch"].partition("+")[0]:
        raise RunError(
            f"the seeded run began with torch {facts.versions['torch']}, here is "
            f"{torch.__version__}: its steps would come out differently; install that one"
        )
    if torch.get_num_threads() != facts.threads:
        raise RunError(
            f"the seeded run began with {facts.threads} threads, here are "
            f"{torch.get_num_threads()}: its steps would come out differently; set "
            f"OMP_NUM_THREADS={facts.threads}"
        )
    if world != facts.ranks:
        raise RunError(
            f"the seeded run began on {facts.ranks} processes, here are {world}: sums of "
            "other parts differ in the last bits; resume it on as many"
        )


def _kind_of_path(data: str) -> str:
    """Return what is at a path, as far as its name says; empty of what is no path.

    Example:
        >>> [_kind_of_path(data) for data in ("/old/scans", "scans.npz", "digits", "hf:org/set")]
        ['folder', 'npz', '', '']
    """
    source = SOURCES.get(data.partition(":")[0])
    if (source is not None and source.named) or is_function(data):
        return ""
    return "npz" if Path(data).suffix == ".npz" else "folder"


def _show(value: object) -> str:
    return "unset" if value is None else str(value)


def initial_tensors(model: nn.Module) -> InitialTensors:
    """Return SHA-256 of every tensor by name: ``trained`` parameters, and ``fixed`` others.

    A tied parameter is listed under each of its names.
    """
    trained = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    digests = {name: tensor_digest(value) for name, value in model.state_dict().items()}
    return InitialTensors(
        trained={name: value for name, value in digests.items() if name in trained},
        fixed={name: value for name, value in digests.items() if name not in trained},
    )


def weights_digest(model: nn.Module) -> str:
    """Return SHA-256 over names and values of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        digest.update(f"{name} ".encode())
        _update(digest, values)
    return digest.hexdigest()


def tensor_digest(values: Tensor) -> str:
    """Return SHA-256 over shape, type and bits of a tensor.

    Example:
        >>> import torch
        >>> tensor_digest(torch.tensor(0.0)) == tensor_digest(torch.tensor(-0.0))
        False
    """
    digest = hashlib.sha256()
    _update(digest, values)
    return digest.hexdigest()


def _update(digest: _Hash, values: Tensor) -> None:
    import torch

    digest.update(f"{tuple(values.shape)} {values.dtype} ".encode())
    digest.update(values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def difference(tensors: Mapping[str, Tensor], recorded: InitialTensors) -> str:
    """Describe what besides trained parameters is not as recorded; empty if everything is.

    Args:
        tensors: a model's state dict, or what its file holds.
        recorded: what :func:`initial_tensors` returned before training.
    """
    fixed, trained = recorded.fixed, recorded.trained
    for name in sorted({*tensors, *fixed, *trained}):
        if name not in tensors:
            return f"{name} is missing"
        if name not in fixed and name not in trained:
            return f"{name} was not there before training"
        if name in fixed and tensor_digest(tensors[name]) != fixed[name]:
            return f"{name} differs from what it was before training"
    return ""


def check_unchanged(model: nn.Module, facts: RunFacts) -> None:
    """Refuse to save or publish a model whose buffers or frozen parameters were written to."""
    if wrong := difference(model.state_dict(), facts.initial_tensors):
        raise RunError(
            f"{wrong}, though it is not trained: what a forward pass writes there comes from the "
            "data without noise, so nothing is saved or published; keep no state in the model"
        )
