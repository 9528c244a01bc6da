"""What the trainers of other libraries need of us: Poisson batches, a ledger, a state to keep."""

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
    """A ``batch_sampler`` whose epochs are n / l Poisson samples, from the present step on.

    Args:
        plan: says n and l.
        oracle: returns the oracle when an epoch begins. Its sampler draws, from its present step
            on, so a resumed run continues; a step beyond the plan is left to the oracle to refuse.

    Example:
        >>> import torch
        >>> plan = PrivacyPlan(n=100, batch_size=20, steps=50, noise_multiplier=1.0, delta=1e-3)
        >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
        >>> oracle = PrivateGradientOracle(torch.nn.Linear(2, 2), loss, plan, seed=0)
        >>> oracle.load_state_dict({"step": 7, "previous": None})
        >>> batches = EpochSampler(plan, lambda: oracle)
        >>> len(batches), next(iter(batches)) == oracle.sampler().indices(7).tolist()
        (5, True)
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
    """A collate function that gives zero rows of the right shape for an empty sample."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
        self._collate, self._dataset = collate, dataset

    def __call__(self, items: list[Any]) -> Any:
        """The batch; of the first record, without its values, where there is none."""
        batch = _plain(self._collate(items or [self._dataset[0]]))
        return batch if items else map_rows(lambda t: t[:0], batch)


def poisson_loader(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    plan: PrivacyPlan,
    sampler: EpochSampler,
    **options: Any,
) -> DataLoader[Any]:
    """A DataLoader of Poisson batches; an empty sample is an empty batch, never a skipped one."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ArgumentTypeError(
            f"a {type(dataset).__name__} gives its records in an order of its own, which Poisson "
            "sampling cannot use: pass a data set that answers dataset[i] and len(dataset)"
        )
    if plan.unit != "record":
        raise ArgumentError(
            f"the plan's unit is the {plan.unit}, which a trainer's batches do not tell: write "
            "the loop yourself, with oracle.batches(data, units=...)"
        )
    if len(dataset) != plan.n:
        raise ArgumentError(
            f"the plan is for n = {plan.n} records but the data set has {len(dataset)}: the "
            "sampling rate would be another; make the plan with the data set's size"
        )
    collate = EmptyAware(collate, dataset)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, **options)


def open_ledger(plan: PrivacyPlan, ledger: Ledger | Path | str) -> Ledger:
    """The ledger itself, or the one at a path, whose folder is made."""
    if isinstance(ledger, Ledger):
        return ledger
    path = Path(ledger)
    path.parent.mkdir(parents=True, exist_ok=True)
    return plan.ledger(path)


def check_fresh(ledger: Ledger, given: Ledger | Path | str, how_to_resume: str) -> None:
    """Refuse to begin anew on the file of another run: it would be taken for this one's cost."""
    if len(ledger) and not isinstance(given, Ledger):
        raise ArgumentError(
            f"{given} holds {len(ledger)} steps of an earlier run: resume it with "
            f"{how_to_resume}, or give this run a ledger of its own; to count both together, pass "
            "the ledger itself, plan.ledger(path)"
        )


def saved(oracle: PrivateGradientOracle) -> dict[str, Any]:
    """What a checkpoint keeps: the oracle's state and the whole ledger, as plain values."""
    return {"oracle": oracle.state_dict(), "ledger": oracle.ledger.entries()}


def restore(oracle: PrivateGradientOracle, state: Mapping[str, Any] | None) -> None:
    """Continue from :func:`saved`; the ledger's file keeps its entries beyond the checkpoint."""
    if state is None:
        raise ArgumentError(
            "the checkpoint has no ledger, so nobody knows what its weights have cost: resume from "
            "one that a private training wrote; weights trained without private data are loaded "
            "into the model before"
        )
    oracle.ledger.merge(state["ledger"])
    oracle.load_state_dict(state["oracle"])


def _plain(batch: Any) -> Any:
    """A dict for what only behaves as one (a tokenizer's ``BatchEncoding``)."""
    return dict(batch) if isinstance(batch, Mapping) else batch
