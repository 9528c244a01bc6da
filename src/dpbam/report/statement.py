"""The privacy statement of a run as the report shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpbam.report.records import Run
from dpbam.report.tables import shown


@dataclass(frozen=True)
class StatementView:
    """What one card of the report says."""

    title: str
    colour: int
    epsilon: str
    promise: str
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    publishable: tuple[str, ...]
    withheld: tuple[str, ...]
    meter: float | None
    meter_text: str


def view(run: Run, label: str, colour: int) -> StatementView:
    """A run's statement, its main number first."""
    s: dict[str, Any] = run.statement
    eps = s.get("epsilon")
    private = isinstance(eps, int | float)
    budget = run.config.get("epsilon")
    return StatementView(
        title=label,
        colour=colour,
        epsilon=f"{eps:.2f}" if private else "∞",
        promise=f"at δ = {shown(s.get('delta'))}, for each {s.get('unit', 'record')}",
        facts=tuple((k.replace("_", " "), shown(v)) for k, v in s.items() if not isinstance(v, dict | list)),
        notes=tuple(s.get("notes", ())),
        publishable=tuple(s.get("publishable", ())),
        withheld=tuple(s.get("withheld", ())),
        meter=min(100.0, 100 * eps / budget) if private and budget else None,
        meter_text=f"{eps:.3f} of a budget of {budget:g} is spent." if private and budget else "",
    )
