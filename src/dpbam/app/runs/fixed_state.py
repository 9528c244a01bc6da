"""What a run publishes besides trained parameters, which is what the model had before training.

Buffers and frozen parameters are in the model file, too. A forward pass that wrote into them would
publish facts about the training data without noise. So a run records the SHA-256 of every tensor
before its model has seen data, refuses to save or publish if one of those differs, and
``dpbam audit`` compares the published file with the record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dpbam.app.runs.run import RunError

if TYPE_CHECKING:
    from hashlib import _Hash

    from torch import Tensor, nn


def initial_tensors(model: nn.Module) -> dict[str, dict[str, str]]:
    """SHA-256 of every tensor of the model by name: ``trained`` parameters, and ``fixed`` others.

    A tied parameter is listed under each of its names.
    """
    trained = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    digests = {name: tensor_digest(value) for name, value in model.state_dict().items()}
    return {
        "trained": {name: value for name, value in digests.items() if name in trained},
        "fixed": {name: value for name, value in digests.items() if name not in trained},
    }


def tensor_digest(values: Tensor) -> str:
    """SHA-256 over shape, type and bits of a tensor.

    Example:
        >>> import torch
        >>> tensor_digest(torch.tensor(0.0)) == tensor_digest(torch.tensor(-0.0))
        False
    """
    digest = hashlib.sha256()
    update_digest(digest, values)
    return digest.hexdigest()


def update_digest(digest: _Hash, values: Tensor) -> None:
    """Add shape, type and bits of a tensor to a digest."""
    import torch

    digest.update(f"{tuple(values.shape)} {values.dtype} ".encode())
    digest.update(values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def difference(tensors: Mapping[str, Tensor], recorded: Mapping[str, Mapping[str, str]]) -> str:
    """What besides trained parameters is not as recorded, in words; empty if everything is.

    Args:
        tensors: a model's state dict, or what its file holds.
        recorded: what :func:`initial_tensors` returned before training.
    """
    fixed, trained = recorded["fixed"], recorded["trained"]
    for name in sorted({*tensors, *fixed, *trained}):
        if name not in tensors:
            return f"{name} is missing"
        if name not in fixed and name not in trained:
            return f"{name} was not there before training"
        if name in fixed and tensor_digest(tensors[name]) != fixed[name]:
            return f"{name} differs from what it was before training"
    return ""


def check_unchanged(model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Refuse to save or publish a model whose buffers or frozen parameters were written to.

    Raises:
        RunError: naming the tensor.
    """
    recorded = facts.get("initial_tensors")
    if not isinstance(recorded, dict):
        raise RunError("the run has no record of its model before training: start a new run")
    if wrong := difference(model.state_dict(), recorded):
        raise RunError(
            f"{wrong}, though it is not trained: what a forward pass writes there comes from the "
            "data without noise, so nothing is saved or published; keep no state in the model"
        )
