"""What Lightning and Hugging Face have in common: Poisson batches, the ledger, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from dpbam.errors import ArgumentError, ArgumentTypeError
from dpbam.oracle import PrivateGradientOracle
from dpbam.params import map_rows
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import PrivacyPlan, epoch_steps


class EpochSampler:
    """A ``batch_sampler`` whose epochs are n / l Poisson samples.

    Args:
        plan: has n and l.
        oracle: returns the oracle when an epoch begins. Its sampler draws from its present step
            on, so a resumed run continues. The oracle refuses steps beyond the plan.
    """

    def __init__(self, plan: PrivacyPlan, oracle: Callable[[], PrivateGradientOracle]) -> None:
        self._length = epoch_steps(plan.n, plan.batch_size, 1)
        self._oracle = oracle

    def __iter__(self) -> Iterator[list[int]]:
        sampler = self._oracle().sampler()
        for step in range(sampler.start, sampler.start + self._length):
            yield sampler.indices(step).tolist()

    def __len__(self) -> int:
        return self._length


class EmptyAware:
    """A collate function that returns zero rows of the right shape for an empty sample."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
        self._collate, self._dataset = collate, dataset

    def __call__(self, items: list[Any]) -> Any:
        """Collate ``items``; if there are none, the first record gives the shapes alone."""
        batch = self._collate(items or [self._dataset[0]])
        if isinstance(batch, Mapping):  # such as a tokenizer's BatchEncoding
            batch = dict(batch)
        return batch if items else map_rows(lambda t: t[:0], batch)


def poisson_loader(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    plan: PrivacyPlan,
    sampler: EpochSampler,
    **options: Any,
) -> DataLoader[Any]:
    """Return a DataLoader of Poisson batches; an empty sample is an empty batch, not skipped."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ArgumentTypeError(
            f"a {type(dataset).__name__} returns its records in a fixed order, which Poisson "
            "sampling cannot use: pass a data set with dataset[i] and len(dataset)"
        )
    if plan.unit != "record":
        raise ArgumentError(
            f"the plan's unit is the {plan.unit}, which a trainer's batches do not contain: write "
            "the loop yourself, with oracle.batches(data, units=...)"
        )
    if len(dataset) != plan.n:
        raise ArgumentError(
            f"the plan is for n = {plan.n} records but the data set has {len(dataset)}: the "
            "sampling rate would differ; make the plan with the data set's size"
        )
    collate = EmptyAware(collate, dataset)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, **options)


def open_ledger(plan: PrivacyPlan, ledger: Ledger | Path | str) -> Ledger:
    """Return the ledger, or open the one at a path, whose folder is created."""
    if isinstance(ledger, Ledger):
        return ledger
    path = Path(ledger)
    path.parent.mkdir(parents=True, exist_ok=True)
    return plan.ledger(path)


def check_fresh(ledger: Ledger, given: Ledger | Path | str, how_to_resume: str) -> None:
    """Refuse to start a run on the file of another run, which would count as this one's cost."""
    if len(ledger) and not isinstance(given, Ledger):
        raise ArgumentError(
            f"{given} holds {len(ledger)} steps of an earlier run: resume it with "
            f"{how_to_resume}, or give this run another ledger; to count both together, pass the "
            "ledger itself, plan.ledger(path)"
        )


def saved(oracle: PrivateGradientOracle) -> dict[str, Any]:
    """Return what a checkpoint stores: the oracle's state and all entries of the ledger."""
    return {"oracle": oracle.state_dict(), "ledger": oracle.ledger.entries()}


def restore(oracle: PrivateGradientOracle, state: Mapping[str, Any] | None) -> None:
    """Restore the state of :func:`saved`; later entries in the ledger's file are kept."""
    if state is None:
        raise ArgumentError(
            "the checkpoint has no ledger, so the privacy cost of its weights is unknown: resume "
            "from a checkpoint of a private training; load weights that were trained without "
            "private data into the model first"
        )
    oracle.ledger.merge(state["ledger"])
    oracle.load_state_dict(state["oracle"])
