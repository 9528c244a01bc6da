"""What Lightning and Hugging Face have in common: Poisson batches, the ledger, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from dpbam.errors import ArgumentError, ArgumentTypeError, PlanViolationError
from dpbam.loading import refuse_repeated
from dpbam.oracle import PrivateGradientOracle
from dpbam.params import trainable
from dpbam.privacy.ledger import Entry, Ledger
from dpbam.privacy.plan import PrivacyPlan, epoch_steps
from dpbam.reading import Drawn, Join, isolated, keyed

_WARM = 5  # steps after which a learning rate is not 0 any more


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

    def __iter__(self) -> Iterator[list[Drawn]]:
        sampler = self._oracle().sampler()
        for step in range(sampler.start, sampler.start + self._length):
            yield keyed(torch.as_tensor(sampler.indices(step)), sampler.randomness, step)

    def __len__(self) -> int:
        return self._length


def poisson_loader(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    plan: PrivacyPlan,
    sampler: EpochSampler,
    wrap: Callable[[Join], Callable[[list[Any]], Any]] = lambda join: join,
    **options: Any,
) -> DataLoader[Any]:
    """Return a DataLoader of Poisson batches; an empty sample is an empty batch, not skipped.

    Data set and collate function see one record at a time (:class:`~dpbam.reading.OneByOne`);
    ``wrap`` may enclose the joined batches. The shapes of some records are
    compared before the training begins.
    """
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
    refuse_repeated(dataset)
    if len(dataset) != plan.n:
        raise ArgumentError(
            f"the plan is for n = {plan.n} records but the data set has {len(dataset)}: the "
            "sampling rate would differ; make the plan with the data set's size"
        )
    alone, join = isolated(dataset, collate)
    return DataLoader(alone, batch_sampler=sampler, collate_fn=wrap(join), **options)


def warn_unmoved(oracle: PrivateGradientOracle) -> None:
    """Warn if the trainer's optimiser moves none of the trained parameters, warm-up apart."""
    if oracle.step >= _WARM and len(oracle.unmoved()) == len(trainable(oracle.model)):
        warnings.warn(
            "no trained parameter has moved since the last step: the optimiser holds other "
            "parameters; make it after the last change of the model (LoRA, freezing)",
            stacklevel=3,
        )


def open_ledger(plan: PrivacyPlan, ledger: Ledger | Path | str) -> Ledger:
    """Return the ledger, or open the one at a path, whose folder is created."""
    if isinstance(ledger, Ledger):
        return ledger
    path = Path(ledger)
    path.parent.mkdir(parents=True, exist_ok=True)
    return plan.ledger(path)


def check_fresh(ledger: Ledger, ledger_place: Ledger | Path | str, how_to_resume: str) -> None:
    """Refuse to start a run on the file of another run, which would count as this one's cost."""
    if len(ledger) and not isinstance(ledger_place, Ledger):
        raise ArgumentError(
            f"{ledger_place} holds {len(ledger)} steps of an earlier run: resume it with "
            f"{how_to_resume}, or give this run another ledger; to count both together, pass the "
            "ledger itself, plan.ledger(path)"
        )


def overrides(user: object, private: type) -> Iterator[tuple[str, str]]:
    """Yield what a user's classes, or the object itself, replace of the trainer: name and class.

    Args:
        user: an object of ``private``, or of a class that derives from it.
        private: our class, which derives from the other library's.
    """
    for cls in type(user).__mro__:
        if cls not in private.__mro__:
            names = (name for name in vars(cls) if not name.startswith("__"))
            yield from ((name, cls.__name__) for name in names if hasattr(private, name))
    for name in vars(user):
        if callable(getattr(private, name, None)):
            yield name, f"this {type(user).__name__}"


class PrivateSteps:
    """Refuses a step of the optimiser for which the oracle has not written a gradient."""

    def __init__(self, oracle: PrivateGradientOracle) -> None:
        self._oracle = oracle
        self.begin()

    def begin(self) -> None:
        """Start from the oracle's present step, which a checkpoint may have set."""
        self._taken = self._oracle.step

    def check(self) -> None:
        """Refuse, unless the oracle has taken one step since the optimiser's last one."""
        new, self._taken = self._oracle.step - self._taken, self._oracle.step
        if new == 0:
            raise PlanViolationError(
                "the optimiser is about to step on a gradient that is not the oracle's, which "
                "has no privacy: leave the training step to the private trainer"
            )
        if new != 1:
            raise PlanViolationError(
                f"the oracle has taken {new} steps for one of the optimiser, which sees the last "
                "gradient alone: leave gradient accumulation out"
            )


def saved(oracle: PrivateGradientOracle) -> dict[str, Any]:
    """Return what a checkpoint stores: the oracle's state, the ledger's entries and its file."""
    path = oracle.ledger.path
    return {
        "oracle": oracle.state_dict(),
        "ledger": oracle.ledger.entries(),
        "ledger_file": None if path is None else str(path),
    }


def restore(oracle: PrivateGradientOracle, state: Mapping[str, Any] | None) -> None:
    """Restore the state of :func:`saved`, with all that was charged after it.

    What was released after the checkpoint is in the ledger's file alone. It is looked for where it
    was, whichever ledger the resumed training has, and in that ledger itself, to which it may have
    been moved; one of them must hold what the checkpoint does.
    """
    if state is None:
        raise ArgumentError(
            "the checkpoint has no ledger, so the privacy cost of its weights is unknown: resume "
            "from a checkpoint of a private training; load weights that were trained without "
            "private data into the model first"
        )
    ledgers = [oracle.ledger]
    if (file := state["ledger_file"]) is not None and Path(file).is_file():
        ledgers.append(Ledger(oracle.ledger.delta, oracle.ledger.accountant, file))
    complete = [ledger for ledger in ledgers if _holds(ledger, state["ledger"])]
    if not complete:
        where = "was in memory" if file is None else f"was {file}, which is not there or not whole"
        raise ArgumentError(
            f"the ledger of this checkpoint {where}: what was released after the checkpoint is not "
            "known; restore the file, or resume with ledger= the file that has it now"
        )
    for ledger in complete:
        oracle.ledger.merge(ledger.entries())
    oracle.load_state_dict(state["oracle"])


def _holds(ledger: Ledger, entries: Iterable[Entry]) -> bool:
    return all(ledger.entry(entry["stream"], entry["step"]) == entry for entry in entries)
