"""The memory of a step before the run: an estimate from two small batches, for a dry run."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from dpbam.batches import LogicalBatch
from dpbam.engines.memory import LIMIT_BYTES, MOST_ROWS, Fit, peak_bytes

if TYPE_CHECKING:
    from dpbam.data import DataSet
    from dpbam.oracle import PrivateGradientOracle

_FEW_ROWS = 16  # with fewer, parts of a step that do not grow still dominate


def estimated_fit(oracle: PrivateGradientOracle, train: DataSet) -> Fit:
    """Estimate the rows that fit and their memory from the line through two small batches.

    A run itself measures ever larger batches (:func:`~dpbam.engines.memory.fit_rows`), which takes
    several times as long, and its choice may differ by some rows. Blank images are measured: the
    memory does not depend on values.
    """
    each = oracle.views.multiplicity  # rows per unit
    units = max(2, _FEW_ROWS // each)
    few, more = peak(oracle, train, units), peak(oracle, train, 2 * units)
    share = max(1.0, (more - few) / (each * units))  # bytes per row
    rows = oracle.physical_batch_size
    if rows is None:
        most = each * max(1, MOST_ROWS // each)
        rows = int(min(most, max(each, each * units + (0.9 * LIMIT_BYTES - few) / share)))
    return Fit(rows, oracle.engine.name, int(few + share * max(0, rows - each * units)))


def peak(oracle: PrivateGradientOracle, train: DataSet, units: int) -> int:
    """The most bytes alive at once in one step on ``units`` blank images."""
    blank = torch.zeros(units, *train.shape, dtype=torch.uint8)
    batch = LogicalBatch.of(blank, torch.zeros(units, dtype=torch.int64), None, 1)
    device = next(oracle.model.parameters()).device
    rows = units * oracle.views.multiplicity
    physical = next(batch.split(rows, oracle.views, device))
    with warnings.catch_warnings():  # the run's own engine will report what stands in its way
        warnings.simplefilter("ignore")
        return peak_bytes(oracle.engine, physical, oracle.method, oracle.method.lam_at(0))
