"""The tree of commands. A command's module is imported when the command is used.

The catalogue names the function of each command. Its docstring is the help, and the lines under
``Examples:`` in it that begin with ``$`` are the examples below the flags.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dpbam._version import __version__
from dpbam.app.cli.output import HELP_ALL
from dpbam.catalogue import COMMANDS

_HELP = (
    "Train on sensitive images with differential privacy, and measure the bias that clipping puts "
    "into gradients."
)
_EPILOG = """\b
Examples:
  $ dpbam demo
  $ dpbam train --data digits --epsilon 3 --out runs/digits
  $ dpbam train --help
  $ dpbam train --help-all
"""
_SETTINGS = {"help_option_names": ["-h", "--help"]}


class _Commands(Mapping[str, Any]):
    """Commands by name; looking one up imports its module."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        return _built(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Root(TyperGroup):
    """``dpbam`` itself: lists the commands without importing them.

    Its help is formatted by click and not by rich, whose modules take longer to import than
    everything else that ``dpbam --help`` needs.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": _Commands()})

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.summary) for name, one in COMMANDS.items()])


def command() -> Any:
    """Return the whole command line as a click command."""
    app = typer.Typer(
        cls=_Root, help=_HELP, epilog=_EPILOG, rich_markup_mode=None, context_settings=_SETTINGS,
        invoke_without_command=True,
    )  # fmt: skip
    app.callback()(_root)
    return typer.main.get_command(app)


def _built(name: str) -> Any:
    """Import a command's module and build its click command, or the group of its commands."""
    target = COMMANDS.load(name)
    if not isinstance(target, Mapping):
        return single(name, target)
    firsts = [_parts(function)[1][0] for function in target.values()]
    app = typer.Typer(
        help=COMMANDS[name].summary, epilog=_shown(firsts), no_args_is_help=True,
        rich_markup_mode="rich", add_completion=False, context_settings=_SETTINGS,
    )  # fmt: skip
    for inner, function in target.items():
        _add(app, inner, function)
    return typer.main.get_command(app)


def single(name: str, function: Callable[..., None]) -> Any:
    """Return the click command of a function, whose docstring is the help."""
    app = typer.Typer(rich_markup_mode="rich", add_completion=False, context_settings=_SETTINGS)
    _add(app, name, function)
    return typer.main.get_command(app)


def _add(app: typer.Typer, name: str, function: Callable[..., None]) -> None:
    text, examples = _parts(function)
    if marked := getattr(function, "settings_as_flags", None):  # made anew: names may be added
        function = marked()
    app.command(name, cls=_tiered(function), help=text, epilog=_shown(examples))(function)


def _tiered(function: Callable[..., None]) -> type[TyperCommand]:
    """Return the class of a command: if it has ``--help-all``, ``--help`` shows common flags."""
    parameters = inspect.signature(function, eval_str=True).parameters
    if HELP_ALL not in parameters:
        return TyperCommand
    # the definition of a flag marks it as common or rare
    marks = {name: getattr(p.annotation, "__metadata__", ()) for name, p in parameters.items()}
    rare = {
        name for name, flags in marks.items() if not all(getattr(f, "common", True) for f in flags)
    }
    return type("TieredCommand", (_Tiered,), {"rare": frozenset(rare)})


class _Tiered(TyperCommand):
    """A command whose ``--help`` leaves out the flags in ``rare``; ``--help-all`` has them all.

    They are hidden while the help is written, and not for good: a shell completes all flags.
    """

    rare: frozenset[str] = frozenset()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        rare: list[Any] = [p for p in self.params if p.name in self.rare]
        rare = [] if ctx.meta.get(HELP_ALL) else rare
        for parameter in rare:
            parameter.hidden = True
        try:
            super().format_help(ctx, formatter)
        finally:
            for parameter in rare:
                parameter.hidden = False


def _parts(function: Callable[..., None]) -> tuple[str, list[str]]:
    """Return help and examples, each paragraph one line, so that it wraps where the screen ends."""
    text, _, shown = (inspect.getdoc(function) or "").partition("\n\nExamples:\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    examples = [" ".join(example.split()) for example in f"\n{shown}".split("\n    $ ")[1:]]
    return "\n\n".join(paragraphs), examples


def _shown(examples: list[str]) -> str:
    return "\n\n".join(["[bold]Examples[/bold]", *(f"$ {example}" for example in examples)])


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"dpbam {__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
