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
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from dpbam.app.runs.documents import Count, Part
from dpbam.app.runs.files import plain, write_atomic
from dpbam.app.runs.run import RunError
from dpbam.params import Params

if TYPE_CHECKING:
    from dpbam.training.trainer import TrainerState

_HEADER = "dpbam"
_NAME = re.compile(r"step-[0-9]{1,18}\..+\.safetensors")
#: what a header that is not ours can do to a reader
_WRONG = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


class Header(Part):
    """What a checkpoint holds besides tensors.

    Attributes:
        run: the run's identifier.
        step: steps done.
        names: of the tensors, in the order of the state.
        groups: the optimiser's groups of parameters.
        scalars: the optimiser's numbers per parameter that are no tensors, named as tensors are.
    """

    run: str
    step: Count
    names: list[str]
    groups: list[dict[str, JsonValue]]
    scalars: dict[str, JsonValue]


def save(folder: Path, state: TrainerState, run: str) -> Path:
    """Write the checkpoint of ``Trainer.state_dict()``, then delete the oldest."""
    step = int(state["oracle"]["step"])
    tensors, header = _flatten(state, run)
    content = save_tensors(tensors, {_HEADER: json.dumps(header.model_dump())})
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


def load_latest(folder: Path, run: str) -> TrainerState | None:
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
            header = Header.model_validate_json(file.metadata()[_HEADER])
        tensors = load_tensors(content)
        # safetensors does not keep the order: sums over parameters (DP-SAT's norm) in another
        # order differ in the last bit
        state = _unflatten({name: tensors[name] for name in header.names}, header)
    except (SafetensorError, *_WRONG) as error:
        raise RunError(f"the checkpoint {path} cannot be used ({error}): {way_out}") from None
    if header.run != run:
        raise RunError(f"the checkpoint {path} belongs to another run: {way_out}")
    return state


def _step(path: Path) -> int:
    return int(path.name.split(".")[0].removeprefix("step-"))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _flatten(state: TrainerState, run: str) -> tuple[Params, Header]:
    """Return the tensors by name, and the rest."""
    optimizer, oracle = state["optimizer"], state["oracle"]
    tensors: dict[str, Tensor] = {f"model.{k}": v for k, v in state["model"].items()}
    tensors |= {f"average.{k}": v for k, v in (state["average"] or {}).items()}
    tensors |= {f"parts.{k}": v for k, v in oracle["parts"].items()}
    scalars: dict[str, JsonValue] = {}
    for index, entries in optimizer["state"].items():
        for key, value in entries.items():
            name = f"optimizer.{index}.{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                scalars[name] = value
    header = Header(
        run=run,
        step=oracle["step"],
        names=list(tensors),
        groups=plain(optimizer["param_groups"]),
        scalars=scalars,
    )
    # cloned: safetensors refuses two names for one memory, as tied weights have
    return {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}, header


def _unflatten(tensors: Params, header: Header) -> TrainerState:
    def under(prefix: str) -> Params:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    scalars = {k.removeprefix("optimizer."): v for k, v in header.scalars.items()}
    entries: dict[int, dict[str, Tensor | JsonValue]] = {}
    for name, value in {**under("optimizer."), **scalars}.items():
        index, _, key = name.partition(".")
        entries.setdefault(int(index), {})[key] = value
    return {
        "model": under("model."),
        "average": under("average.") or None,
        "oracle": {"step": header.step, "parts": under("parts.")},
        "optimizer": {"state": entries, "param_groups": header.groups},
    }
