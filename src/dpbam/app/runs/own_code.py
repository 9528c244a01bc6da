"""Code that a file names is run only if the user names it too.

A model or a data set may be a function, ``module:function``, and a method, a clipping or a filter a
class. In a file from elsewhere (a configuration, a run folder, a ``model.json``) it could be
``os:system``, with the file's options for its arguments. So a file may only repeat what the command
line names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dpbam._names import ENCODER, has_fixed_features
from dpbam.app.runs.config import ConfigError, RunConfig
from dpbam.app.runs.settings import settings

#: Settings whose value may name code.
NAMES = tuple(one.name for one in settings(RunConfig) if one.may_be_code)


def check_code(values: Mapping[str, object], said: Collection[str], where: object) -> None:
    """Refuse settings of a file that name code, unless the user set them on the command line.

    Args:
        values: settings from a file, by name.
        said: the names of the settings that the user gave, which override the file's.
        where: the file or folder, for the message.

    Example:
        >>> check_code({"model": "hf:google/vit-base", "data": "hf:cifar10"}, {}, "run.toml")
        >>> check_code({"model": "my_nets:small"}, {"model"}, "run.toml")
        >>> check_code({"model": "os:system"}, {}, "run.toml")
        Traceback (most recent call last):
        dpbam.app.runs.config.ConfigError: run.toml names code to run, os:system, as its model: if \
you trust it, name it on the command line too, --model os:system
    """
    for name in NAMES:
        spec = str(values.get(name) or "")
        if name not in said and names_code(name, spec):
            raise ConfigError(
                f"{where} names code to run, {spec}, as its {name}: if you trust it, name it on "
                f"the command line too, --{name} {spec}"
            )


def names_code(name: str, spec: str) -> bool:
    """Whether ``spec``, a value of the setting ``name``, would be imported and called.

    Example:
        >>> names_code("data", "hf:cifar10"), names_code("data", "my_scans:load")
        (False, True)
    """
    if name == "model" and has_fixed_features(spec):  # an encoder runs no code
        return False
    if name != "data":
        return ":" in spec and not spec.startswith(ENCODER)
    from dpbam.data.registry import is_function

    return is_function(spec)
