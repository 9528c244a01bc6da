"""The page about a run's configuration, made from the definitions of its fields."""

from __future__ import annotations

from dpbam.app.runs import RunConfig
from dpbam.app.runs.settings import Setting, settings

_HEAD = """# Configuration

A run is configured by the flags of `dpbam train`, by a `.toml` or `.json` file (`--config
run.toml`), or by both: flags override the file. `dpbam compare`, `dpbam search` and `dpbam bias`
take the same settings. In Python they are the fields of [`RunConfig`](app.md#runs).

```toml
data = "digits"
epsilon = 3
lr = 0.01

[model_options]
width = 0.5
```
"""


def page() -> str:
    """Return the page: a table per panel of the help, a row per field."""
    found = settings(RunConfig)
    panels = dict.fromkeys(one.panel for one in found)
    tables = [_table(panel, [one for one in found if one.panel == panel]) for panel in panels]
    return "\n".join([_HEAD, *tables])


def _table(panel: str, rows: list[Setting]) -> str:
    header = ["| key | flag | default | |", "|---|---|---|---|"]
    return "\n".join([f"## {panel}\n", *header, *map(_row, rows), ""])


def _row(one: Setting) -> str:
    flag = f"`{one.flag}`" if one.flag else "none"
    choices = f" One of {one.choices}." if one.choices else ""
    return f"| `{one.name}` | {flag} | {one.default} | {one.description}{choices} |"
