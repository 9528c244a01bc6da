"""The tree of commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from dpbam._version import __version__
from dpbam.cli import (
    audit,
    bias,
    calibrate,
    compare,
    data,
    demo,
    epsilon,
    evaluate,
    plot,
    predict,
    report,
    reproduce,
    search,
    train,
)
from dpbam.cli.output import examples

_HELP = (
    "Train on sensitive images with differential privacy: DP-SGD, DP-SAT and BAM, which measures "
    "and removes the bias that clipping puts into gradients."
)
_EPILOG = examples(
    "dpbam demo",
    "dpbam train --data digits --epsilon 3 --out runs/digits",
    "dpbam train --help",
)


_COMMANDS: tuple[tuple[Callable[..., None], str, str], ...] = (
    (train.run, train.NAME, train.EXAMPLES),
    (compare.run, compare.NAME, compare.EXAMPLES),
    (search.run, search.NAME, search.EXAMPLES),
    (evaluate.run, evaluate.NAME, evaluate.EXAMPLES),
    (predict.run, predict.NAME, predict.EXAMPLES),
    (reproduce.run, reproduce.NAME, reproduce.EXAMPLES),
    (report.run, report.NAME, report.EXAMPLES),
    (plot.run, plot.NAME, plot.EXAMPLES),
    (audit.run, audit.NAME, audit.EXAMPLES),
    (bias.run, bias.NAME, bias.EXAMPLES),
    (demo.run, demo.NAME, demo.EXAMPLES),
    (epsilon.run, epsilon.NAME, epsilon.EXAMPLES),
    (calibrate.run, calibrate.NAME, calibrate.EXAMPLES),
)


def command() -> Any:
    """The whole command line as one click command."""
    app = typer.Typer(
        help=_HELP, epilog=_EPILOG, no_args_is_help=True, rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip
    app.callback()(_root)
    for function, name, text in _COMMANDS:
        app.command(name, help=_help(function), epilog=text)(function)
    group = typer.Typer(help=data.HELP, epilog=data.EXAMPLES, no_args_is_help=True)
    for name, (function, text) in data.COMMANDS.items():
        group.command(name, help=_help(function), epilog=text)(function)
    app.add_typer(group, name="data")
    return typer.main.get_command(app)


def _help(function: Callable[..., None]) -> str:
    """The docstring, each paragraph one line, so that it wraps where the screen ends."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


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
