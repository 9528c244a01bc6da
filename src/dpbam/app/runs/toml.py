"""Writes the little TOML that a configuration needs; Python's own library only reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(values: Mapping[str, Any]) -> str:
    """Names and plain values as TOML; a mapping within becomes a table of its own, at the end.

    Example:
        >>> print(to_toml({"lr": 0.1, "freeze": ["conv1.*"], "model_options": {"width": 0.25}}))
        lr = 0.1
        freeze = ["conv1.*"]
        <BLANKLINE>
        [model_options]
        width = 0.25
        <BLANKLINE>
    """
    flat = [f"{_key(k)} = {_value(v)}" for k, v in values.items() if not isinstance(v, Mapping)]
    for name, table in values.items():
        if isinstance(table, Mapping) and table:
            flat += ["", f"[{_key(name)}]"]
            flat += [f"{_key(k)} = {_value(v)}" for k, v in table.items()]
    return "\n".join(flat) + "\n"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _value(value: Any) -> str:
    """One value: TOML's strings, numbers, booleans and arrays read as JSON's do."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items())
        return "{" + inner + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return json.dumps(value).replace("\x7f", "\\u007f")
