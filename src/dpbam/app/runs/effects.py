"""Which settings do nothing in a run, because another setting switches them off.

The command line refuses such a flag (:mod:`dpbam.app.cli.flags`), and a report does not list such a
setting as if the run had used it (:mod:`dpbam.app.report`). The definition of a setting has the
conditions, as its policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.settings import Policy, policies
from dpbam.catalogue import METHODS

_UNKNOWN = Policy()


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
