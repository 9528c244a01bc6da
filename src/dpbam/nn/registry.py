"""Models by name, or by the user's own function."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dpbam import _validate
from dpbam._names import ENCODER, did_you_mean, load_function
from dpbam.catalogue import MODELS
from dpbam.errors import ArgumentError, ArgumentTypeError
from dpbam.nn.encoders import load_encoder
from dpbam.nn.models import check_sides
from dpbam.nn.repair import has_batch_norm, replace_batch_norm

Facts = Mapping[str, Any]  # arguments by name


def build_model(
    name: str,
    *,
    in_channels: int,
    image_size: int | tuple[int, int],
    num_classes: int,
    seed: int | None = None,
    **options: Any,
) -> nn.Module:
    """Build a model with new weights.

    Args:
        name: one of :data:`dpbam.catalogue.MODELS`, such as "resnet9", "wrn-16-4" (depth 16, factor
            4) or "unet" (scores per pixel, for segmentation); "hf:NAME" or "hf:FOLDER", a public
            encoder of Hugging Face with a new head; or "module:function", which is imported and
            called with those of in_channels, image_size and num_classes that it accepts, and with
            all options. It must return an ``nn.Module``. Batch norms in it are replaced, with a
            warning.
        in_channels: of the images.
        image_size: the side, or (height, width), in pixels.
        num_classes: of outputs.
        seed: of the initial weights, drawn from torch's CPU generator, whose state is restored.
            ``None`` uses the generator's present state. Initial weights are public, so a seed costs
            no privacy.
        **options: of the model, such as width=0.25 for resnet9.

    Example:
        >>> net = build_model("resnet9", in_channels=1, image_size=28, num_classes=2, width=0.25)
        >>> net(torch.zeros(4, 1, 28, 28)).shape
        torch.Size([4, 2])
    """
    height, width = image_size if isinstance(image_size, tuple) else (image_size, image_size)
    size = _validate.count("image_size", height), _validate.count("image_size", width)
    _validate.count("in_channels", in_channels)
    _validate.count("num_classes", num_classes)
    facts = {"in_channels": in_channels, "image_size": size, "num_classes": num_classes}
    with _seed_weights(seed):
        if name.startswith(ENCODER):
            _check_options(name, options, ["lora_rank"])
            encoder = load_encoder(name, image_shape=(in_channels, *size), num_outputs=num_classes)
            if options:
                encoder.add_lora(**options)
            return encoder
        build = _build_own if ":" in name else _build_named
        return _check_built(name, build(name, facts, options))


@contextlib.contextmanager
def _seed_weights(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed, which would seed the other devices' generators too
        torch.default_generator.manual_seed(_validate.count("seed", seed, least=0))
        yield


def _build_named(name: str, facts: Facts, options: Facts) -> object:
    cls, fixed = _lookup(name)
    height, width = facts["image_size"]
    parameters = inspect.signature(cls).parameters
    if least := getattr(cls, "least_side", None):
        check_sides(height, width, name, least)
    known = {**facts, "in_features": facts["in_channels"] * height * width}
    arguments = {**fixed, **{key: value for key, value in known.items() if key in parameters}}
    _check_options(name, options, [key for key in parameters if key not in arguments])
    return cls(**arguments, **options)


def _lookup(name: str) -> tuple[Callable[..., object], Facts]:
    """Return the class of a name, and the arguments that the name determines."""
    for entry in MODELS.values():
        arguments = entry.arguments(name)
        if arguments is not None:
            return entry.load(), arguments
    known = (
        f"There are {', '.join(MODELS)} (any wrn-D-K), hf:NAME for public encoders, and your own "
        "as 'module:function'; runs also take auto, scattering, onnx:FILE and features:hf:NAME"
    )
    guess = did_you_mean(name, MODELS, "", cutoff=0.4)
    raise ArgumentError(f"model {name!r} is unknown: {f'{guess} {known}'.strip()}")


def _check_options(name: str, options: Facts, allowed: list[str]) -> None:
    for option in options:
        if option not in allowed:
            known = ", ".join(allowed) or "none"
            hint = did_you_mean(option, allowed, f"its options are {known}")
            raise ArgumentError(f"model {name!r} has no option {option!r}: {hint}")


def _build_own(name: str, facts: Facts, options: Facts) -> object:
    function = load_function(name)
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_all:
        _check_options(name, options, [key for key in parameters if key not in facts])
    accepted = {key: value for key, value in facts.items() if takes_all or key in parameters}
    return function(**accepted, **options)


def _check_built(name: str, model: object) -> nn.Module:
    """Refuse what is no model, and replace batch norms."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"{name} returned {type(model).__name__}, not a torch.nn.Module: return the model"
        )
    if has_batch_norm(model):
        warnings.warn(
            f"{name} has batch norms, which mix samples: replaced by group norms", stacklevel=3
        )
        model = replace_batch_norm(model)
    return model
