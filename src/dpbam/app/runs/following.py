"""A run's work on a rank that does not lead: train, and write nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dpbam.app.runs.interrupt import graceful
from dpbam.app.runs.result import RunInterruptedError, RunResult
from dpbam.training.events import Reporter

if TYPE_CHECKING:
    from dpbam.app.runs.preparation import Prepared
    from dpbam.distributed import Ranks


def follow(prepared: Prepared, out: Path, ranks: Ranks) -> RunResult:
    """Train beside the leader, from its weights and its step; its result is everybody's.

    The ledger here stays empty: what is released is charged where it is released.

    Raises:
        RunInterruptedError: as on the leader, after its checkpoint is saved.
    """
    trainer = prepared.trainer(prepared.oracle(ranks=ranks), Reporter())
    trainer.load_state_dict(ranks.from_leader(trainer.state_dict))
    with graceful(lambda message: None) as stop:
        trainer.run(stop=stop)
        result = ranks.from_leader(_leaders_result)
    if result is None:
        raise RunInterruptedError(out, trainer.oracle.step, prepared.plan.steps)
    return result


def _leaders_result() -> RunResult | None:
    raise AssertionError("the leader has a result of its own")
