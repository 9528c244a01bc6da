"""Names that users give: the known name that is nearest, and the function behind one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpbam.errors import ArgumentError

ENCODER = "hf:"  # a model's name begins so if it is a public encoder's
AUTO = "auto"  # the model and the settings that follow from public facts
SCATTERING = "scattering"  # models that are a head on fixed features: this one, and those with
ONNX = "onnx:"  # this prefix, and with
FEATURES = "features:"  # this one before an encoder's name


def did_you_mean(
    value: object, choices: Iterable[str], otherwise: str | None = None, *, cutoff: float = 0.6
) -> str:
    """Return "did you mean ...?" with the nearest choice, or ``otherwise`` if none is near.

    Without ``otherwise`` the choices are listed; ``cutoff`` is the least similarity, up to 1.

    Example:
        >>> did_you_mean("flatt", ["flat", "automatic"])
        "did you mean 'flat'?"
        >>> did_you_mean("x", ["flat", "automatic"])
        'choose from flat, automatic'
    """
    from difflib import get_close_matches

    known = list(choices)
    near = get_close_matches(str(value), known, n=1, cutoff=cutoff)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"choose from {', '.join(known)}" if otherwise is None else otherwise


def is_path(name: str) -> bool:
    """Whether the name of an encoder is a folder's, not one of the Hugging Face hub's."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir()


def has_fixed_features(model: str) -> bool:
    """Whether a model is a linear head on fixed features.

    Example:
        >>> [has_fixed_features(name) for name in ("scattering", "onnx:net.onnx", "hf:vit", "mlp")]
        [True, True, False, False]
    """
    return model == SCATTERING or model.startswith((ONNX, FEATURES + ENCODER))


def public_name(model: str) -> str:
    """Return a model's name for publishing: of an encoder's file or folder, not the path to it.

    Example:
        >>> public_name("hf:/home/ann/encoders/tiny-vit"), public_name("hf:google/vit-base")
        ('hf:tiny-vit', 'hf:google/vit-base')
        >>> public_name("onnx:encoders/mobilenet.onnx")
        'onnx:mobilenet.onnx'
    """
    if model.startswith(FEATURES):
        return FEATURES + public_name(model.removeprefix(FEATURES))
    if model.startswith(ONNX):
        return ONNX + Path(model.removeprefix(ONNX)).name
    name = model.removeprefix(ENCODER)
    return f"{ENCODER}{Path(name).name}" if name != model and is_path(name) else model


def load_function(name: str) -> Callable[..., Any]:
    """Import the function that a user names as ``module:function``.

    The current folder comes last on the module path, so that no file there takes the place of an
    installed package. What the module itself raises when it is imported is not caught.

    Raises:
        ArgumentError: if there is no such module or function.
    """
    from importlib import import_module

    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ArgumentError(f"{name!r} must read 'module:function'")
    try:
        with _last_on_path(os.getcwd()):
            module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, but something that it imports is not
        raise ArgumentError(
            f"there is no module {module_name!r} to import for {name!r}, in {os.getcwd()} or "
            "installed: put its folder on PYTHONPATH, or install it"
        ) from error
    if not hasattr(module, function_name):
        public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        hint = did_you_mean(function_name, public, "name one that it has")
        raise ArgumentError(f"module {module_name!r} has no function {function_name!r}: {hint}")
    function: Callable[..., Any] = getattr(module, function_name)
    if not callable(function):
        raise ArgumentError(f"{name} is a {type(function).__name__}, not a function")
    return function


@contextmanager
def _last_on_path(folder: str) -> Iterator[None]:
    before = list(sys.path)
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path[:] = before
