"""The model that is handed out: ``model.safetensors`` and ``model.json``, no pickle.

They hold the released weights and what a loader has to know, nothing about the training data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dpbam._names import public_name
from dpbam._version import __version__
from dpbam.app.runs.documents import ModelFacts
from dpbam.app.runs.files import FORMAT, plain, write_atomic
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.meaning import check_code, names_code
from dpbam.app.runs.run import RunError
from dpbam.catalogue import Arguments
from dpbam.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpbam.app.runs.config import RunConfig
    from dpbam.data import DataSet
    from dpbam.tasks.base import Task


@dataclass(frozen=True)
class RunModel:
    """A run's model, ready to predict.

    Attributes:
        module: in eval mode; takes float images as :func:`dpbam.data.to_float` makes them.
        class_names: one per output.
        task: what it predicts.
        image_shape: (C, H, W) that it was trained on.
        facts: everything in ``model.json``.
        dicom_window: (centre, width) by which it was shown DICOM files; None: each by its own.
    """

    module: nn.Module
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    facts: ModelFacts
    task: Task
    dicom_window: tuple[float, float] | None = None


def save_run_model(folder: RunFolder, model: nn.Module, config: RunConfig, train: DataSet) -> None:
    from safetensors.torch import save

    from dpbam.app.runs import build
    from dpbam.app.runs.feature_model import FeatureModel
    from dpbam.nn.encoders import PublicEncoder

    weights = {k: v.detach().cpu().clone().contiguous() for k, v in model.state_dict().items()}
    described: dict[str, Arguments] = {}
    if isinstance(model, PublicEncoder):  # so that loading needs neither the hub nor the folder
        described = {"encoder": model.description()}
    if isinstance(model, FeatureModel):
        described = {"features": model.description()}
    window, edges = config.dicom_window, config.target_range
    facts = ModelFacts(
        format=FORMAT,
        dpbam=__version__,
        model=public_name(config.model),
        model_options=plain(build.model_options(config)),
        image_shape=list(train.shape),
        dicom_window=None if window is None else list(window),
        task=config.task or train.task,
        class_names=list(train.class_names),
        target_range=None if edges is None else list(edges),
        input="uint8 images to float32: x / 127.5 - 1",
        method=config.method,
        public_weights=build.public_weights(config, model) if described else None,
        **plain(described),
    )
    write_atomic(folder.weights, save(weights))
    facts.write(folder.model)


def load_run_model(
    run: str | Path, *, device: str = "cpu", own_model: str | None = None
) -> RunModel:
    """Load the model of a finished run folder (or of a folder that holds just the two files).

    Args:
        run: the folder.
        device: where to put the model.
        own_model: the "module:function" that makes the model, if it is the user's own. It is
            imported and called; a ``model.json`` that names any other code is refused, so nothing
            in a folder from elsewhere is executed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from dpbam.data.sources import Options
    from dpbam.tasks.base import make_task

    folder = RunFolder(run)
    if not folder.model.exists() or not folder.weights.exists():
        going = folder.started
        hint = "its training has not ended: resume it first" if going else "give a run folder"
        raise RunError(f"there is no model in {folder.path}: {hint}")
    folder.check_links()
    facts = ModelFacts.read(folder.model)
    named = {"model": facts.model}  # the method and its parts are not run any more
    check_code(named, named if own_model == facts.model else (), folder.model)
    try:
        channels, height, width = facts.image_shape
        names = tuple(facts.class_names)
        weights = load_file(folder.weights)
        build = partial(_build, facts, weights, (channels, height, width), len(names))
        # the user's own may need real tensors, and fixed features are made of the weights' own
        if not names_code("model", facts.model) and facts.features is None:
            _check_sizes(build, weights)
        module = build()
        module.load_state_dict(weights)
        edges, centre = facts.target_range, facts.dicom_window
        task = make_task(
            facts.task, names, target_range=None if edges is None else (edges[0], edges[1])
        )
        window = None if centre is None else (centre[0], centre[1])
        Options(dicom_window=window)  # refuses a wrong one
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
            ValueError, SafetensorError) as error:  # fmt: skip
        raise RunError(
            f"the model in {folder.path} cannot be loaded ({_first_line(error)}): restore "
            f"{folder.model.name} and {folder.weights.name}, or resume the run to write them again"
        ) from None
    module = module.eval().to(device)
    return RunModel(module, names, (channels, height, width), facts, task, window)


def _build(
    facts: ModelFacts, weights: dict[str, Tensor], shape: tuple[int, int, int], outputs: int
) -> nn.Module:
    """Build the model that ``model.json`` describes, with weights still to load."""
    from dpbam.app.runs.feature_model import described_model
    from dpbam.nn import build_model
    from dpbam.nn.encoders import described_encoder

    options: Arguments = dict(facts.model_options)
    if facts.features is not None:
        return described_model(facts.features, weights, image_shape=shape, num_outputs=outputs)
    if facts.encoder is not None:
        model = described_encoder(facts.encoder, image_shape=shape, num_outputs=outputs)
        if options:
            model.add_lora(**options)
        return model
    return build_model(
        facts.model, in_channels=shape[0], image_size=shape[1:], num_classes=outputs, **options
    )


def _check_sizes(build: Callable[[], nn.Module], weights: dict[str, Tensor]) -> None:
    """Refuse a model larger than its weights before it is built: build it without memory first."""
    import torch

    with torch.device("meta"):
        shapes = {name: value.shape for name, value in build().state_dict().items()}
    odd = [n for n in {*shapes, *weights} if n not in weights or weights[n].shape != shapes.get(n)]
    if odd:
        raise ArgumentError(f"{min(odd)} is not of the shape that the model has")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0].rstrip(":")
