"""The model that is handed out: ``model.safetensors`` and ``model.json``, no pickle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class RunModel:
    """A run's model, ready to predict.

    Attributes:
        module: in eval mode; takes float images as :func:`dpbam.data.to_float` makes them.
        class_names: one an output.
        image_shape: (C, H, W) that it was trained on.
        facts: everything in ``model.json``.
    """

    module: nn.Module
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    facts: dict[str, Any]


def load_run_model(run: str | Path, *, device: str = "cpu") -> RunModel:
    """The model of a finished run folder (or of a folder that holds just the two files).

    Raises:
        RunError: if there is no model, or it is damaged.
    """
    raise NotImplementedError
