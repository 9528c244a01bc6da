"""How long a run will take on this machine, from a few steps on blank images.

No record is used, nothing is charged to a ledger on disk, and the model's parameters do not move.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dpbam.app.runs.preparation import Prepared, blank
from dpbam.privacy.plan import replace_quietly

if TYPE_CHECKING:
    from torch import Tensor

_FEW_ROWS = 16
_PATIENCE = 3.0  # seconds that one measured step may take
_ROWS = 256  # of an evaluation, computed at once


def estimated_seconds(prepared: Prepared, rows: int) -> float:
    """Estimate the seconds of all steps and evaluations, without reading and decoding files.

    The time of a step is taken as linear in its units, from one with few and one with more.

    Args:
        prepared: the run.
        rows: of a physical batch.
    """
    from dpbam.training.trainer import evaluation_steps

    plan, views = prepared.plan, max(1, prepared.config.augment_multiplicity)
    few = min(plan.batch_size, max(1, _FEW_ROWS // views))
    fast = _step_seconds(prepared, few, rows)
    more = min(plan.batch_size, max(few, rows // views), max(few, int(few * _PATIENCE / fast)))
    slow = _step_seconds(prepared, more, rows) if more > few else fast
    # where the units cannot be told from the rest (one step takes all the patience, or the machine
    # was busy during the first), the whole step counts as theirs: too long rather than too short
    each = (slow - fast) / (more - few) if more > few and slow > fast else slow / more
    step = slow + each * (plan.batch_size - more)
    evaluations = math.ceil(plan.steps / evaluation_steps(plan, prepared.config.eval_every))
    return plan.steps * step + evaluations * _evaluation_seconds(prepared) + _features(prepared)


def _step_seconds(prepared: Prepared, units: int, rows: int) -> float:
    """Return the time of a step with ``units`` blank units, the second of two."""
    import torch

    # a step of these many units, of a plan that expects them; what is released before the first
    # step belongs to the run
    plan = replace_quietly(
        prepared.plan, batch_size=units, steps=max(2, prepared.plan.steps), released_before=None
    )
    config = prepared.config.replace(
        release_counts=None,
        release_centre=None,
        balance=0.0,
        physical_batch_size=rows,
        batch_size=units,
        budget=None,
    )
    # blank images are no sample of the data
    oracle = replace(prepared, plan=plan, config=config).oracle(sampling="unchecked")
    train = prepared.seen.train
    each = 1 if prepared.units is None else math.ceil(min(plan.max_records, len(train) / plan.n))

    def step() -> None:
        images = blank(train, units * each)  # new ones: a batch serves one step
        targets = prepared.task.blank_targets(len(images), *train.shape[1:])
        grouped = prepared.units is not None
        owners = torch.arange(units).repeat_interleave(each) if grouped else None
        oracle.backward(images, targets, owners)

    with warnings.catch_warnings():  # the run itself will report what there is to report
        warnings.simplefilter("ignore")
        first, second = (_timed(step) for _ in range(2))
    prepared.model.zero_grad(set_to_none=True)
    return min(first, second)


def _evaluation_seconds(prepared: Prepared) -> float:
    """Return the time of one evaluation of the test set, from blank records."""
    test = prepared.seen.test
    rows = min(_ROWS, len(test))
    return _forward_seconds(prepared, blank(test, rows)) * len(test) / rows


def _features(prepared: Prepared) -> float:
    """Return the time in which a frozen encoder computes the features of all records."""
    if prepared.seen.train is prepared.train:
        return 0.0
    records = len(prepared.train) + len(prepared.test)
    rows = min(_FEW_ROWS, records)
    return _forward_seconds(prepared, blank(prepared.train, rows)) * records / rows


def _forward_seconds(prepared: Prepared, images: Tensor) -> float:
    import torch

    from dpbam.data.dataset import model_input
    from dpbam.params import device_of, evaluating
    from dpbam.training.evaluation import spare

    model = spare(prepared.model) or prepared.model
    inputs = model_input(images.to(device_of(model)))
    with torch.no_grad(), evaluating(model):
        return min(_timed(lambda: model(inputs)) for _ in range(2))


def _timed(call: Callable[[], object]) -> float:
    import torch

    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def duration(seconds: float) -> str:
    """Format a rough duration: two digits would promise too much.

    Example:
        >>> duration(0.4), duration(47), duration(400), duration(9000), duration(400_000)
        ('5 s', '50 s', '7 min', '2.5 h', '4.6 days')
        >>> duration(2e7)
        '230 days'
    """
    if seconds < 5:
        return "5 s"
    if seconds < 90:
        return f"{math.ceil(seconds / 10) * 10} s"
    if seconds < 90 * 60:
        return f"{math.ceil(seconds / 60)} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.2g} h"
    days = float(f"{seconds / 86_400:.2g}")
    return f"{days:g} days"
