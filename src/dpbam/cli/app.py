"""The tree of commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpbam._version import __version__
from dpbam.cli import calibrate, data, epsilon
from dpbam.cli.output import examples

if TYPE_CHECKING:
    from collections.abc import Callable

_HELP = (
    "Train on sensitive images with differential privacy: DP-SGD, DP-SAT and BAM, which measures "
    "and removes the bias that clipping puts into gradients."
)
_EPILOG = examples(
    "dpbam demo",
    "dpbam train --data digits --epsilon 3 --out runs/digits",
    "dpbam train --help",
)


def command() -> Any:
    """The whole command line as one click command."""
    app = typer.Typer(
        help=_HELP, epilog=_EPILOG, no_args_is_help=True, rich_markup_mode="rich",
        add_completion=False, context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip
    app.callback()(_root)
    for module in (epsilon, calibrate):
        _add(app, module.run, module.NAME, module.EXAMPLES)
    group = typer.Typer(help=data.HELP, epilog=data.EXAMPLES, no_args_is_help=True)
    for name, (function, text) in data.COMMANDS.items():
        _add(group, function, name, text)
    app.add_typer(group, name="data")
    return typer.main.get_command(app)


def _add(app: typer.Typer, function: Callable[..., None], name: str, epilog: str) -> None:
    app.command(name, epilog=epilog)(function)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"dpbam {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    pass
