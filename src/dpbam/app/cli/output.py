"""How commands print: tables for people, JSON for scripts; results on stdout, notes on stderr."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod
    from rich.table import Table
    from rich.text import Text


HELP_ALL = "help_all"  # the parameter of commands whose ``--help`` leaves rare flags out


def option(help: str, *names: str, common: bool = True) -> Any:
    """Describe a flag within ``Annotated``; its name is the parameter's, unless it is given.

    One that is not ``common`` is left to ``--help-all`` where a command has many flags.
    """
    flag = typer.Option(*names, help=help)
    flag.common = common
    return flag


Json = Annotated[bool, option("One line of JSON, for scripts.", "--json")]


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def say(*things: str | Table, screen: Console | None = None) -> None:
    """Print tables, and lines, wrapped by the terminal alone; no text controls the terminal."""
    for thing in things:
        shown = printable(thing) if isinstance(thing, str) else thing
        (screen or console()).print(shown, markup=False, soft_wrap=isinstance(thing, str))


def note(text: str) -> None:
    """Print a line on stderr."""
    say(text, screen=console(stderr=True))


def warn(text: str) -> None:
    """Print on stderr what is wrong with the data: for the operator's terminal only."""
    note(f"warning: {text}")


def print_json(value: Any) -> None:
    print(to_json(value))


def print_facts(values: Mapping[str, object], *, json: bool) -> None:
    """Print names and values, as JSON or as a table."""
    if json:
        print_json(values)
    else:
        say(facts(values))


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Format as standard JSON: NaN becomes null, infinity "infinite" or "-infinite".

    Example:
        >>> to_json({"epsilon": float("inf")})
        '{"epsilon": "infinite"}'
    """
    from dpbam.app.runs.escaping import json_text
    from dpbam.app.runs.files import plain

    return json_text(plain(value), indent=indent)


def printable(text: str) -> str:
    r"""Replace what would control the terminal in text from a file; lines stay lines.

    Example:
        >>> printable("cat\x1b[2J") == "cat\ufffd[2J"
        True
    """
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def facts(rows: Mapping[str, object], *, title: str | None = None) -> Table:
    """Return a table of names and values, each in one paragraph, without lines."""
    from rich.table import Table

    from dpbam.app.runs.escaping import visible

    grid = Table(
        title=_title(title), show_header=False, box=None, pad_edge=False, title_justify="left"
    )
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(_text(name), _text(visible(str(_shown(name, value)))))
    return grid


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "", left: int = 1
) -> Table:
    """Return a table with a header; the first ``left`` columns hold text, the others numbers."""
    from rich.table import Table

    grid = Table(title=_title(title), title_justify="left", header_style="bold")
    for k, name in enumerate(header):
        justify: JustifyMethod = "left" if k < left else "right"
        grid.add_column(_text(name), justify=justify, overflow="fold")  # nothing is cut off
    for row in rows:
        grid.add_row(*map(_text, row))
    return grid


def _text(value: object) -> Text:
    """Return text as it is: a class may be called "[/red]", which rich would take for markup."""
    from rich.text import Text

    return Text(printable(str(value)))


def _title(title: str | None) -> Text | None:
    from rich.text import Text

    return Text(printable(title), style="table.title") if title else None


def _shown(name: str, value: object) -> object:
    """Return a float in four digits, an epsilon rounded up."""
    if not isinstance(value, float):
        return value
    return up(value) if "epsilon" in name else number(value)


def number(value: float) -> str:
    """Format with four significant digits.

    Example:
        >>> number(7.99912), number(float("inf")), number(float("-inf")), number(5e4)
        ('7.999', 'infinite', '-infinite', '5e+04')
    """
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    return f"{value:.4g}"


def percent(value: float, digits: int = 1) -> str:
    """Format a share as a percentage.

    Example:
        >>> percent(0.9234)
        '92.3%'
    """
    return f"{100 * value:.{digits}f}%"
