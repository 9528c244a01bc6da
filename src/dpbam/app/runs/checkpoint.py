"""Checkpoints: one safetensors file each, written whole or not at all, never a pickle.

A file holds the tensors of a trainer's state by name, and everything else as JSON in its header::

    model.<parameter>          average.<parameter>
    optimizer.<index>.<key>    previous.<parameter>     (DP-SAT's previous private gradient)
    parts.<name>               (the state of clipping, filter and method: all of it released)

Its name ends in a hash of its content, so that damage is detected. The last two are kept. They are
not for publishing: averages and moments are of no use to others.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from dpbam.app.runs.files import write_atomic
from dpbam.app.runs.run import RunError
from dpbam.params import Params

_HEADER = "dpbam"
_NAME = re.compile(r"step-[0-9]{1,18}\..+\.safetensors")
#: what a header that is not ours can do to a reader
_WRONG = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


def save(folder: Path, state: Mapping[str, Any], run: str) -> Path:
    """Write the checkpoint of ``Trainer.state_dict()``, then delete the oldest."""
    step = int(state["oracle"]["step"])
    tensors, rest = _flatten(state)
    header = {_HEADER: json.dumps({**rest, "run": run})}
    content = save_tensors(tensors, header)
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}.{_hash(content)}.safetensors"
    write_atomic(path, content)
    before = [p for p in listed(folder) if _step(p) < step]
    for old in set(listed(folder)) - {path, *before[-1:]}:
        old.unlink()
    return path


def listed(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the latest last."""
    there = [p for p in folder.glob("step-*.safetensors") if _NAME.fullmatch(p.name)]
    return sorted(there, key=lambda p: (_step(p), p.stat().st_mtime))


def load_latest(folder: Path, run: str) -> dict[str, Any] | None:
    """Load the latest checkpoint, None if there is none yet; refuse a damaged or another run's."""
    there = listed(folder)
    if not there:
        return None
    path = there[-1]
    way_out = f"delete it, and resume from step {_step(there[-2]) if len(there) > 1 else 0}"
    content = path.read_bytes()
    if _hash(content) != path.name.split(".")[1]:
        raise RunError(f"the checkpoint {path} is damaged: {way_out}")
    try:
        with safe_open(path, framework="pt") as file:
            rest = json.loads(file.metadata()[_HEADER])
        found = load_tensors(content)
        # safetensors does not keep the order: sums over parameters (DP-SAT's norm) in another
        # order differ in the last bit
        state = _unflatten({name: found[name] for name in rest["names"]}, rest)
        run_of = rest["run"]
    except (SafetensorError, *_WRONG) as error:
        raise RunError(f"the checkpoint {path} cannot be used ({error}): {way_out}") from None
    if run_of != run:
        raise RunError(f"the checkpoint {path} belongs to another run: {way_out}")
    return state


def _step(path: Path) -> int:
    return int(path.name.split(".")[0].removeprefix("step-"))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _flatten(state: Mapping[str, Any]) -> tuple[Params, dict[str, Any]]:
    """Return the tensors by name, and the rest."""
    optimizer, oracle = state["optimizer"], state["oracle"]
    tensors: dict[str, Tensor] = {f"model.{k}": v for k, v in state["model"].items()}
    tensors |= {f"average.{k}": v for k, v in (state["average"] or {}).items()}
    tensors |= {f"parts.{k}": v for k, v in oracle["parts"].items()}
    scalars: dict[str, Any] = {}
    for index, entries in optimizer["state"].items():
        for key, value in entries.items():
            target = tensors if isinstance(value, Tensor) else scalars
            target[f"optimizer.{index}.{key}"] = value
    rest = {
        "step": oracle["step"],
        "names": list(tensors),
        "groups": optimizer["param_groups"],
        "scalars": scalars,
    }
    # cloned: safetensors refuses two names for one memory, as tied weights have
    return {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}, rest


def _unflatten(tensors: Params, rest: Mapping[str, Any]) -> dict[str, Any]:
    def part(prefix: str) -> Params:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    entries: dict[int, dict[str, Any]] = {}
    for name, value in {**part("optimizer."), **_scalars(rest)}.items():
        index, _, key = name.partition(".")
        entries.setdefault(int(index), {})[key] = value
    return {
        "model": part("model."),
        "average": part("average.") or None,
        "oracle": {"step": rest["step"], "parts": part("parts.")},
        "optimizer": {"state": entries, "param_groups": rest["groups"]},
    }


def _scalars(rest: Mapping[str, Any]) -> dict[str, Any]:
    return {k.removeprefix("optimizer."): v for k, v in rest["scalars"].items()}
