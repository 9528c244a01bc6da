"""A run's ledger and its data set's budget: what is reserved, noted along the way, and settled.

The ledger on disk is what is settled, after it was checked: it must be there and readable, hold no
less than the run in memory and the latest checkpoint have seen, and no less than the budget knows
of. So neither a lost ledger nor a run folder restored from an old copy gives anything back.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from dpbam.app.runs.budget import Budget
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.documents import BudgetState, OtherRun
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.run import RunError
from dpbam.privacy.accounting import Charge
from dpbam.privacy.calibration import max_steps
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import PrivacyPlan
from dpbam.privacy.rounding import up


def reserve(
    path: Path, folder: RunFolder, run: str, most: list[Charge], unit: str, ledger: Ledger
) -> None:
    """Reserve ``most``, all that the run in ``folder`` may take; its ledger holds ``ledger``.

    Guarantee: no step is taken that the budget has not counted.

    Assumptions: as for ``Budget``.

    Proof: it is called before the first step, and raises what the run may take.

    Raises:
        RunError: if the budget does not hold it or is not the one that the run began with, the
            folder is a copy of a run that is still there, or its ledger holds less than the budget
            knows of.
    """
    budget, label = Budget(path), str(folder.path.absolute())
    if len(ledger) and run not in {entry.run for entry in budget.entries()}:
        raise RunError(
            f"the run in {label} has taken {len(ledger)} steps, and the budget {budget.path} knows "
            "nothing of it: it is not the file that the run began with, or an old copy; resume "
            "from the folder where --budget means that file, or restore it"
        )
    for entry in budget.entries():
        if entry.run == run and entry.label != label and RunFolder(entry.label).started:
            raise RunError(
                f"{label} is a copy of the run in {entry.label}, and the budget would count "
                "the two as one: resume that one, or start a new run"
            )
    budget.reserve(run, most, unit=unit, label=label, spent=ledger.charges())


@dataclass(frozen=True)
class BudgetPreview:
    """How a budget stands, and how it would with one more run."""

    budget: str
    budget_epsilon: float
    budget_epsilon_taken: float
    budget_epsilon_with_this_run: float


def preview(path: Path, run: str, plan: PrivacyPlan) -> BudgetPreview:
    """Return how the budget stands, and how it would with ``run``; refuse a run that exceeds it."""
    budget = Budget(path)
    after = budget.epsilon_with(run, plan.charges(plan.steps), unit=plan.unit)
    return BudgetPreview(str(path), budget.total[0], budget.epsilon(), after)


def note(path: Path | None, run: str, ledger: Ledger) -> None:
    """Record in the budget, if there is one, what the ledger holds by now."""
    if path is not None:
        Budget(path).note(run, ledger.charges())


def settle(path: Path | None, folder: RunFolder, run: str, ledger: Ledger) -> BudgetState | None:
    """Settle the budget, if there is one, by the ledger on disk, and return how it stands.

    Guarantee: the entry becomes what the ledger holds, never less than is known.

    Assumptions: as for ``Ledger``.

    Proof: ledger in memory and on disk must agree; the budget refuses less than it has seen.

    Raises:
        RunError: if the ledger is missing, damaged, or not what the run in memory was charged.
    """
    if path is None:
        return None
    budget, stored = Budget(path), stored_ledger(folder, ledger.delta, ledger.accountant)
    if stored.charges() != ledger.charges():
        raise RunError(
            f"{folder.ledger} holds {len(stored)} steps, but this run was charged {len(ledger)}: "
            "it was changed meanwhile; restore it from a backup, and resume to settle the budget"
        )
    budget.settle(run, stored.charges())
    epsilon, delta = budget.total
    others = [OtherRun(run=e.run, finished=e.settled) for e in budget.entries() if e.run != run]
    return BudgetState(
        file=path.name, epsilon=epsilon, delta=delta, taken=budget.epsilon(), other_runs=others
    )


def release_reservation(out: str | Path) -> None:
    """Settle the budget of a run that will not be resumed by what its ledger holds.

    Raises:
        RunError: if a process is at work on it, it has no budget, or its ledger is missing,
            damaged, or holds less than its checkpoint or the budget knows of.
    """
    from dpbam.app.runs import checkpoint

    folder = RunFolder(out)
    with folder.opened(resume=True):
        facts = folder.read_facts()
        config = facts.config
        if config.budget is None:
            raise RunError(f"the run in {folder.path} has no budget file")
        ledger = stored_ledger(folder, facts.delta, config.accountant)
        latest = checkpoint.load_latest(folder.checkpoints, facts.run)
        check_steps(ledger, int(latest["oracle"]["step"]) if latest else 0)
        Budget(config.budget).settle(facts.run, ledger.charges())


def stored_ledger(folder: RunFolder, delta: float, accountant: str) -> Ledger:
    """Read the ledger of a run that has begun: it is made, empty, before the first step."""
    if not folder.ledger.is_file():
        raise RunError(
            f"{folder.ledger} is missing: restore it from a backup; without it there is no record "
            "of what was spent"
        )
    return Ledger(delta, accountant, folder.ledger)


def check_steps(ledger: Ledger, step: int) -> None:
    """Refuse a ledger with fewer steps than the parameters have seen."""
    if len(ledger) < step:
        raise RunError(
            f"{ledger.path} holds {len(ledger)} steps, but the checkpoint has seen {step}: restore "
            "it from a backup; without it there is no record of what was spent"
        )


def check_ledger(plan: PrivacyPlan, ledger: Ledger, step: int) -> None:
    """Refuse a ledger with fewer steps than the parameters have seen, or of another mechanism.

    Guarantee: a run resumes only on a ledger that covers its parameters, with steps of its own
    mechanism.

    Assumptions: the checkpoint is the run's.

    Proof: every step is charged before it changes the parameters.
    """
    check_steps(ledger, step)
    planned = {charge[:2] for charge in plan.charges(plan.steps)}
    for charge in ledger.charges():
        if charge[:2] not in planned:
            sigmas = " or ".join(f"{sigma:g}" for sigma, _ in sorted(planned))
            raise RunError(
                f"{ledger.path} holds steps at sigma {charge.noise_multiplier:g} and sampling rate "
                f"{charge.sampling_rate:g}, not this run's {sigmas} and "
                f"{plan.sampling_rate:g}: it is not this run's ledger; restore it from a backup"
            )


def replays(config: RunConfig, ledger: Ledger, step: int) -> int:
    """Return the steps on the ledger that ``step`` does not contain: lost in crashes, and paid for.

    Guarantee: every charge beyond ``step`` counts, unless its replay is the same release.

    Assumptions: as for ``Ledger``; ``step`` is that of the checkpoint.

    Proof: a step is charged before it is taken, so the ledger holds the steps of the checkpoint and
    those lost after it. Seeded, a lost step is repeated with the same noise, and is charged once.
    """
    return max(0, len(ledger) - step) if config.seed is None else 0


def is_lost(config: RunConfig, plan: PrivacyPlan, ledger: Ledger, step: int) -> bool:
    """Whether all that was released is lost, and the configured epsilon pays for no other step."""
    if step or not len(ledger) or config.seed is not None:
        return False
    return most_charges(config, plan, ledger, step) <= len(ledger)


def explain_loss(problem: str, ledger: Ledger) -> RunError:
    """Return the error for a run that cannot be resumed, since a release of its is lost."""
    return RunError(
        f"{problem}: what was released is charged and lost, and the run's epsilon pays for no "
        f"other release; start a new run with another --out; epsilon {up(ledger.epsilon())}, spent "
        "here, adds to that of the new run"
    )


def most_charges(config: RunConfig, plan: PrivacyPlan, ledger: Ledger, step: int) -> int:
    """Return the most steps that the ledger may hold: the plan's and, unseeded, those replayed.

    Where replays would carry it beyond the configured epsilon, as many as stay within.

    Guarantee: charged steps, replays included, stay within the configured epsilon.

    Assumptions: as for ``Ledger``.

    Proof: ``max_steps`` of that epsilon.
    """
    lost = replays(config, ledger, step)
    total = max(plan.steps, step) + lost
    if config.epsilon is None or not lost:
        return total
    if plan.epsilon(total - lost, lost) <= config.epsilon:
        return total
    if plan.released_before is not None:

        def spent(steps: int) -> float:
            return plan.epsilon(steps, lost)

        return lost + max(0, bisect_right(range(plan.steps), config.epsilon, key=spent) - 1)
    return max_steps(
        config.epsilon,
        plan.delta,
        plan.charged_noise_multiplier,
        plan.sampling_rate,
        accountant=plan.accountant,
    )
