"""``dpbam methods``: what is built in against clipping bias and noise, and what it costs."""

from __future__ import annotations

from dpbam.app.cli.output import Json, print_json, say, table
from dpbam.catalogue import CLIPPINGS, CORRECTION, FILTERS, METHODS, Part

_KINDS = (("--method", METHODS), ("--clipping", CLIPPINGS), ("--filter", FILTERS))


def methods(json: Json = False) -> None:
    """List methods, clippings, filters and corrections, with formula, privacy cost and use.

    Each of the first three also takes module:Name, code of your own.

    Examples:
        $ dpbam methods
        $ dpbam methods --json
    """
    listed: list[tuple[str, Part]] = [(flag, one) for flag, kind in _KINDS for one in kind.values()]
    listed += [("--correct-noise", CORRECTION)]
    if json:
        print_json([
            {"flag": flag, "name": one.name, "formula": one.formula, "reference": one.reference,
             "cost": one.cost, "use": one.summary}
            for flag, one in listed
        ])  # fmt: skip
        return
    header = ("flag", "name", "what it does", "privacy cost", "use it if")
    rows = [
        (flag, one.name, f"{one.formula} ({one.reference})" if one.reference else one.formula,
         one.cost, one.summary)
        for flag, one in listed
    ]  # fmt: skip
    say(table(header, rows, left=5))
    say("--method, --clipping and --filter also take module:Name, code of your own.")
