"""Flags from the fields of a model, and the configuration that flags and a file make together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from dpbam.app.cli.output import option
from dpbam.app.runs.config import RunConfig, read_file
from dpbam.app.runs.folder import stored_config
from dpbam.app.runs.own_code import check_code
from dpbam.app.runs.settings import Setting, settings

ConfigFile = Annotated[
    Path | None,
    option("A .toml file of these settings; flags override it.", "--config"),
]
_ALTERNATIVES = (("epsilon", "noise_multiplier"), ("ema", "swa"), ("freeze", "train"))


def with_flags(
    command: Callable[..., None],
    model: type[BaseModel] = RunConfig,
    *,
    leave_out: Collection[str] = (),
) -> Callable[..., None]:
    """Give ``command`` a flag per field of ``model``; it gets those given as the dict ``flags``.

    Every flag's default is None, so that only those really given override a file's values.
    """

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        found = {one.name: (one, values.pop(one.name)) for one in taken}
        given = {k: one.parse(v) for k, (one, v) in found.items() if v is not None and v != []}
        command(flags=given, **values)

    taken = [one for one in settings(model) if one.flag and one.name not in leave_out]
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [p for p in own if p.name != "flags"] + [_parameter(one) for one in taken]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    del wrapped.__wrapped__  # typer would read its signature instead
    return wrapped


def merged(file: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration file, if there is one, overridden by the flags.

    A flag also replaces its alternative: ``--noise-multiplier`` a file's epsilon.
    """
    values = read_file(file) if file is not None else {}
    check_code(values, flags, file)
    for pair in _ALTERNATIVES:
        if any(name in flags for name in pair):
            values = {name: value for name, value in values.items() if name not in pair}
    return {**values, **flags}


def run_config(file: Path | None, flags: Mapping[str, Any]) -> RunConfig:
    return RunConfig.from_mapping(merged(file, flags))


def resumed_config(run: Path, flags: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of the run in a folder, overridden by the flags."""
    stored = stored_config(run)
    check_code(stored.to_mapping(), flags, run)
    return stored.replace(**flags)


def _parameter(setting: Setting) -> inspect.Parameter:
    option = typer.Option(
        setting.flag,
        help=setting.help.replace("[", "\\["),
        rich_help_panel=setting.panel,
        show_default=False,
    )
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[setting.type | None, option],
    )
