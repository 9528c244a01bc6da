"""What the two calculators share: how steps and the sampling rate are said."""

from __future__ import annotations

from typing import Annotated

import typer

from dpbam import _validate
from dpbam.errors import ArgumentError

N = Annotated[int | None, typer.Option("--n", help="Units of privacy in the training set.")]
BatchSize = Annotated[int | None, typer.Option(help="Expected batch size; q = batch size / n.")]
SamplingRate = Annotated[float | None, typer.Option(help="q itself, in place of the two.")]
Epochs = Annotated[float | None, typer.Option(help="Expected passes over the data: T q.")]
Steps = Annotated[int | None, typer.Option(help="T itself, in place of epochs.")]
Delta = Annotated[float | None, typer.Option(help="Delta; by default a power of ten below 1/n.")]
Accountant = Annotated[str, typer.Option(help="pld (tight) or rdp.")]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON, for scripts.")]


def sampling_rate(n: int | None, batch_size: int | None, rate: float | None) -> float:
    """Q as given, or batch_size / n."""
    if rate is not None and n is None and batch_size is None:
        return _validate.positive("--sampling-rate", rate)
    if rate is not None or n is None or batch_size is None:
        raise ArgumentError("give either --sampling-rate, or both --n and --batch-size")
    _validate.count("--n", n)
    _validate.count("--batch-size", batch_size)
    if batch_size > n:
        raise ArgumentError(f"--batch-size {batch_size} exceeds --n {n}: it is at most everything")
    return batch_size / n


def steps(epochs: float | None, count: int | None, q: float) -> int:
    """T as given, or epochs / q, rounded."""
    if (epochs is None) == (count is None):
        raise ArgumentError("give either --epochs or --steps, and not both")
    if count is not None:
        return _validate.count("--steps", count)
    return max(1, round(_validate.positive("--epochs", epochs) / q))


def delta(given: float | None, n: int | None) -> float:
    """Delta as given, else the default of a run: a power of ten, at most 1/(2n)."""
    if given is not None:
        return _validate.probability("--delta", given)
    if n is None:
        raise ArgumentError("give --delta: without --n there is no default for it")
    from dpbam.app.runs.config import default_delta

    return default_delta(n)
