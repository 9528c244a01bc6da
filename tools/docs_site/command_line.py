"""The page about the command line, made from the command line's own help."""

from __future__ import annotations

import re
from typing import Any

from dpbam.app.cli.app import command

_HEAD = """# Command line

Made from `dpbam --help`. `dpbam COMMAND --help` prints the same; of commands with many flags it
prints those that most users need, and `--help-all` all of them. A value in brackets is the default.
`dpbam --install-completion` teaches the shell to complete commands and flags.

Exit codes: 0 done, 1 an audit refuted the claim or a bug of ours, 2 something you can fix (one
sentence says what), 130 stopped by Ctrl-C.
"""


def page() -> str:
    """Every command with its arguments, flags and examples."""
    return "\n".join([_HEAD, *_commands(command(), "dpbam")])


def _commands(group: Any, path: str) -> list[str]:
    parts = []
    for name, found in group.commands.items():
        if getattr(found, "commands", None):
            parts += [f"## {path} {name}\n", f"{found.help}\n", *_commands(found, f"{path} {name}")]
        else:
            parts.append(_command(found, f"{path} {name}"))
    return parts


def _command(found: Any, path: str) -> str:
    level = "#" * len(path.split())
    lines = [f"{level} {path}", "", _plain(found.help), ""]
    panels: dict[str, list[Any]] = {}
    for parameter in found.params:
        panel = getattr(parameter, "rich_help_panel", None)
        panels.setdefault(panel or _kind(parameter), []).append(parameter)
    for title, parameters in panels.items():
        lines += [f"| {title} | |", "|---|---|", *map(_row, parameters), ""]
    return "\n".join([*lines, _examples(found.epilog or "")])


def _kind(parameter: Any) -> str:
    return "Arguments" if parameter.param_type_name == "argument" else "Options"


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}`"
    text = _plain(parameter.help or "")
    default = parameter.default
    if getattr(parameter, "show_default", False) and default not in (None, False, (), []):
        text += f" [{default}]" if not callable(default) else ""
    return f"| {names} | {text} |".replace("<", "&lt;")


def _plain(text: str) -> str:
    return re.sub(r"\[/?(?:bold|dim|italic)[^\]]*\]", "", text).replace("\\[", "[")


def _examples(epilog: str) -> str:
    lines = [line.strip() for line in _plain(epilog).splitlines()]
    found = [line for line in lines if line.startswith("$ ")]
    return "\n".join(["```console", *found, "```", ""]) if found else ""
