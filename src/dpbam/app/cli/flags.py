"""Flags from the fields of a model, and the configuration that flags and a file make together."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel

from dpbam._names import AUTO
from dpbam.app.cli.output import HELP_ALL, option
from dpbam.app.runs.config import ConfigError, RunConfig, read_file
from dpbam.app.runs.folder import stored_config
from dpbam.app.runs.meaning import check_code, switched_off_by
from dpbam.app.runs.settings import Setting, policies, settings
from dpbam.errors import ArgumentError, DPBAMError

ConfigFile = Annotated[
    Path | None,
    option("A .toml file of these settings; flags override it.", "--config"),
]
Command = TypeVar("Command", bound=Callable[..., None])
_FEW = 20  # flags whose help one screen holds


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
        values.pop(HELP_ALL, None)
        texts = {one.name: (one, values.pop(one.name)) for one in taken}
        flags = {k: one.parse(v) for k, (one, v) in texts.items() if v is not None and v != []}
        try:
            command(flags=flags, **values)
        except DPBAMError as error:
            if error.args and isinstance(error.args[0], str):
                typed = as_typed(error.args[0], _flags_of(taken, values.get("config")))
                error.args = (typed, *error.args[1:])
            raise

    taken = [one for one in settings(model) if one.flag and one.name not in leave_out]
    of_command = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [p for p in of_command if p.name != "flags"] + [_parameter(one) for one in taken]
    if len(parameters) > _FEW:
        parameters.append(_help_all(len(parameters)))
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    del wrapped.__wrapped__  # typer would read its signature instead
    return wrapped


def settings_as_flags(
    model: type[BaseModel] = RunConfig, *, leave_out: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Mark a command that takes the fields of ``model`` as flags (:func:`with_flags`).

    The flags are made when the command line is built: their help lists what the catalogue has then.
    """

    def mark(command: Command) -> Command:
        make = functools.partial(with_flags, command, model, leave_out=leave_out)
        command.settings_as_flags = make  # type: ignore[attr-defined]
        return command

    return mark


def _help_all(count: int) -> inspect.Parameter:
    """Return the flag that shows the help of all flags, those that few users need included."""

    def show(context: typer.Context, wanted: bool) -> None:
        if wanted:
            context.meta[HELP_ALL] = True
            print(context.get_help())
            raise typer.Exit

    flag = typer.Option("--help-all", callback=show, is_eager=True, help=f"Show all {count} flags.")
    annotation = Annotated[bool, flag]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(HELP_ALL, keyword, default=False, annotation=annotation)


def merged(file: Path | None, flags: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a configuration file, if there is one, overridden by the flags.

    A flag also replaces its alternative: ``--noise-multiplier`` a file's epsilon.
    """
    values = read_file(file) if file is not None else {}
    check_code(values, flags, file)
    for name, policy in policies(RunConfig).items():
        pair = (name, policy.instead_of)
        if policy.instead_of and any(one in flags for one in pair):
            values = {name: value for name, value in values.items() if name not in pair}
    return {**values, **flags}


def require_data(values: Collection[str]) -> None:
    """Refuse settings that name no data set: the default is for Python alone."""
    if "data" not in values:
        raise ConfigError(
            "there is no data set: give --data, a folder of images, a .npz file, or a name such as "
            "digits (dpbam data list has all kinds)"
        )


def as_typed(message: str, flags: Mapping[str, str]) -> str:
    """Name the settings in a message by their flags, as a user of the command line typed them.

    A name of one word is also a word of English: it is taken for a setting at the beginning of the
    message, and after "either", "leave" and "setting".

    Example:
        >>> flags = {"lr": "--lr", "clip_norm": "--clip-norm"}
        >>> as_typed("lr must be positive: see clip_norm", flags)
        '--lr must be positive: see --clip-norm'
    """
    words, long = "|".join(flags), "|".join(name for name in flags if "_" in name) or "$^"
    start, stop = (
        r"(?:^|(?<=either )|(?<=leave )|(?<=setting ))",
        r"(?= must | needs | was | '| \(|$)",
    )

    def typed(match: re.Match[str]) -> str:
        return re.sub(rf"\b(?:{words})\b", lambda m: flags[m[0]], match[0])

    pair = rf"{start}(?:{words}) (?:and|or) (?:{words})\b"
    one = rf"{start}(?:{words}){stop}|(?<![\w'./-])(?:{long})(?![\w'./=-])"
    return re.sub(f"{pair}|{one}", typed, message)


def _flags_of(taken: Sequence[Setting], file: Path | None) -> dict[str, str]:
    """Return the flag of each setting, by its name; without those that a file sets."""
    written: Collection[str] = ()
    with suppress(ConfigError):
        written = read_file(file) if file is not None else ()
    return {one.name: one.flag for one in taken if one.name not in written}


def _effective(config: RunConfig, flags: Mapping[str, object]) -> RunConfig:
    """Refuse a flag that does nothing together with the other settings."""
    values = config.model_dump()
    if config.model == AUTO and "optimizer" not in config.model_fields_set:
        values["optimizer"] = "sgd"  # the rule's
    for name in flags:
        if other := switched_off_by(name, values):
            flag = f"--{other.replace('_', '-')}"
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with {flag} {values[other]}: leave it "
                f"out, or choose another {flag}"
            )
    return config


def run_config(
    file: Path | None,
    flags: Mapping[str, object],
    *,
    default: Callable[[Mapping[str, object]], Mapping[str, object]] = dict,
) -> RunConfig:
    """Return the configuration of a file and flags; ``default`` may add what both leave out."""
    config = _effective(RunConfig.from_mapping(default(merged(file, flags))), flags)
    require_data(config.model_fields_set)
    return config


def resumed_config(run: Path, flags: Mapping[str, object]) -> RunConfig:
    """Return the configuration of the run in a folder, overridden by the flags."""
    stored = stored_config(run)
    check_code(stored.to_mapping(), flags, run)
    return _effective(stored.replace(**flags), flags)


def _parameter(setting: Setting) -> inspect.Parameter:
    def refuse_flag(value: Any) -> Any:
        # click takes the next word as the value, whatever it is, and then has one too many
        texts = value if isinstance(value, list | tuple) else (value,)
        for text in texts:
            if isinstance(text, str) and text.startswith("--"):
                raise ArgumentError(
                    f"{setting.flag} needs a value, and the flag {text} follows it "
                    f"({setting.help.removesuffix('.')})"
                )
        return value

    option = typer.Option(
        setting.flag,
        callback=refuse_flag,
        help=setting.help.replace("[", "\\["),
        rich_help_panel=setting.panel,
        show_default=False,
    )
    option.common = setting.common
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[setting.type | None, option],
    )
