"""Which settings do nothing in a run, because another setting switches them off.

The command line refuses such a flag (:mod:`dpbam.app.cli.flags`), and a report does not list such a
setting as if the run had used it (:mod:`dpbam.app.report`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: A setting -> the other setting, and those of its values with which the first does nothing.
NO_EFFECT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "lam": ("method", ("dp-sgd", "sgd")),
    "lam_share": ("method", ("dp-sgd", "dp-sat", "sgd", "sam")),
    "lam_warmup": ("method", ("dp-sgd", "sgd")),
    "gradient": ("method", ("dp-sgd", "dp-sat", "sgd", "sam")),
    "momentum": ("optimizer", ("nadam", "adam", "adamw")),
    "shift": ("augment_multiplicity", (0,)),
    "flip": ("augment_multiplicity", (0,)),
    "augment_probability": ("augment_multiplicity", (0,)),
}
# A file of settings holds these of every run; without privacy nothing is clipped or noised.
_OF_PRIVACY = (
    "epsilon", "noise_multiplier", "delta", "clip_norm", "clipping", "clipping_options",
    "accountant", "noise", "noise_schedule", "clip_schedule", "max_records",
)  # fmt: skip
_OFF: dict[str, tuple[Any, ...]] = {
    "lam_warmup": (0,), "weight_decay": (0,), "focal": (0,), "augment_multiplicity": (0,),
    "filter": ("none",), "schedule": ("constant",),
    "noise_schedule": ([1.0], (1.0,)), "clip_schedule": ([1.0], (1.0,)),
}  # fmt: skip


def used_settings(config: Mapping[str, Any], *, private: bool = True) -> dict[str, Any]:
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
        if not _switched_off(name, value, config) and (private or name not in _OF_PRIVACY)
    }


def _switched_off(name: str, value: Any, config: Mapping[str, Any]) -> bool:
    other, useless = NO_EFFECT.get(name, ("", ()))
    if other in config and config[other] in useless:
        return True
    # lam_share stands for a lambda that was not given
    replaced = name == "lam_share" and config.get("lam") is not None
    off = value is None or value is False or value in ("", [], (), {})
    return replaced or off or value in _OFF.get(name, ())
