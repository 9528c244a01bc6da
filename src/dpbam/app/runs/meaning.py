"""What settings mean together: which do nothing in a run, and which name code that would be run.

The command line refuses a flag that does nothing (:mod:`dpbam.app.cli.flags`), and a report does
not list such a setting as if the run had used it (:mod:`dpbam.app.report`). The definition of a
setting has the conditions, as its policies.

Code that a file names is run only if the user names it too. A model or a data set may be a
function, ``module:function``, and a method, a clipping or a filter a class. In a file from
elsewhere (a configuration, a run folder, a ``model.json``) it could be ``os:system``, with the
file's options for its arguments. So a file may only repeat what the command line names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dpbam._names import ENCODER, has_fixed_features
from dpbam.app.runs.config import ConfigError, RunConfig
from dpbam.app.runs.settings import Policy, policies, settings
from dpbam.catalogue import METHODS

#: Settings whose value may name code.
NAMES = tuple(one.name for one in settings(RunConfig) if one.may_be_code)
_UNKNOWN = Policy()


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


def switched_off_by(name: str, config: Mapping[str, Any]) -> str:
    """Return the setting whose value in ``config`` makes ``name`` do nothing; empty if none does.

    Example:
        >>> switched_off_by("lam", {"method": "dp-sgd"}), switched_off_by("lam", {"method": "bam"})
        ('method', '')
    """
    policy = policies(RunConfig).get(name, _UNKNOWN)
    method = str(config.get("method"))
    if policy.of_method and method in METHODS and name not in METHODS[method].settings:
        return "method"
    other, values = policy.idle
    return other if other in config and config[other] in values else ""


def used_settings(config: Mapping[str, Any], *, private: bool = True) -> dict[str, object]:
    """Return the settings that had an effect on a run with this configuration.

    Left out are those that another setting switches off, that are switched off themselves, and,
    of a run that is not ``private``, those of privacy.

    Example:
        >>> used_settings({"method": "dp-sgd", "gradient": "approximate", "focal": 0.0, "lr": 0.1})
        {'method': 'dp-sgd', 'lr': 0.1}
    """
    return {
        name: value
        for name, value in config.items()
        if not _is_off(name, value, config, private) and not switched_off_by(name, config)
    }


def _is_off(name: str, value: Any, config: Mapping[str, Any], private: bool) -> bool:
    policy = policies(RunConfig).get(name, _UNKNOWN)
    # lam_share stands for a lambda that was not given
    replaced = name == "lam_share" and config.get("lam") is not None
    plain = tuple(value) if isinstance(value, list) else value
    off = value is None or value is False or plain in ("", (), {}, policy.off)
    return replaced or off or (policy.private_only and not private)
