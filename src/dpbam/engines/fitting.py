"""How many rows to compute at once: measured, so that a step stays within its memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

from dpbam.engines import Engine, PhysicalBatch
from dpbam.engines.memory import estimated_bytes, physical_batch_size
from dpbam.methods import Method

MOST_ROWS = 512  # more at once gains no speed
LOOP_ROWS = 16  # nor does the loop engine gain by more: it holds every unit's gradient
LIMIT_BYTES = 2**31  # fixed, so that the same model gets the same split on every machine


class Fit(NamedTuple):
    """Rows at once, the engine that serves, and the bytes that a step then takes."""

    rows: int
    engine: str
    bytes: int


def fit_rows(
    make: Callable[[], Engine],
    sample: PhysicalBatch,
    method: Method,
    lam: float,
    *,
    rows: int | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> Fit:
    """The most rows whose step stays within ``limit_bytes``; or, given ``rows``, what they take.

    Args:
        make: makes an engine for the trial alone: it must not settle what the engine proper learns
            from real rows.
        sample: one unit; it is repeated, so its values do not matter.
        method: whose directions.
        lam: its lambda.
        rows: a number that the user gave.
        limit_bytes: for everything that a step allocates.
    """
    each = sample.unit.shape[0]
    with warnings.catch_warnings():  # the engine proper will say what stands in its way
        warnings.simplefilter("ignore")
        engine = make()
        engine.directions(sample, method, lam)  # settles which engine serves
        if rows is None:
            most = max(1, (LOOP_ROWS if engine.name == "loop" else MOST_ROWS) // each)
            rows = each * physical_batch_size(engine, sample, method, lam, limit_bytes, most=most)
        taken = estimated_bytes(engine, sample, method, lam, max(1, rows // each))
    return Fit(rows, engine.name, taken)
