"""Continue a training that began with Opacus: its model, its optimiser, what it spent.

Both libraries account for the same mechanism: Poisson sampling at rate q, Gaussian noise with
multiplier sigma, neighbours that differ by one record added or removed. So the history of an Opacus
accountant, (sigma, q, steps), is composed with later steps as if all had been ours. It may come
from any of Opacus's three accountants; epsilon is computed by the ledger's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from dpbam.errors import ArgumentError, ArgumentTypeError
from dpbam.loading import refuse_repeated
from dpbam.privacy.accounting import Charge, checked
from dpbam.privacy.ledger import Ledger

try:
    from opacus.data_loader import DPDataLoader
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
    from opacus.optimizers import DPOptimizer
except ImportError as error:
    raise ImportError(
        "dpbam.interop.opacus needs the package opacus: pip install 'dpbam[opacus]'"
    ) from error

__all__ = ["OpacusTraining", "charges", "from_opacus", "record"]


class OpacusTraining(NamedTuple):
    """The result of a training with Opacus.

    Attributes:
        model: the plain module with the same parameter objects, without hooks.
        optimizer: the plain optimiser with its state.
        dataset: of the loader, all of which Opacus has drawn from, whatever sampler it was given.
        charges: what was spent.
    """

    model: nn.Module
    optimizer: Optimizer
    dataset: Any
    charges: list[Charge]


def from_opacus(model: Any, optimizer: Any, data_loader: Any, accountant: Any) -> OpacusTraining:
    """Convert what ``PrivacyEngine.make_private`` returned, after training.

    Pass ``charges`` to :meth:`PrivacyPlan.calibrate <dpbam.privacy.plan.PrivacyPlan.calibrate>` as
    ``spent``, and to :func:`record`.

    Args:
        model: Opacus's private model.
        optimizer: Opacus's private optimiser.
        data_loader: Opacus's private loader, whose class shows whether samples were Poisson.
        accountant: the ``PrivacyEngine``, or its accountant.

    Raises:
        ValueError: for a loader that did not sample as the accountant assumes, or whose data set
            has a record twice.
        TypeError: for a model or optimiser that Opacus has not made private.
    """
    if not isinstance(data_loader, DPDataLoader):
        raise ArgumentError(
            f"a {type(data_loader).__name__} does not draw Poisson samples, which Opacus's "
            "accountant assumes (make_private with poisson_sampling=False?): its history is not "
            "what was spent, so this training cannot be continued"
        )
    refuse_repeated(data_loader.dataset)
    spent = charges(accountant)
    return OpacusTraining(_unwrap(model), _unwrap_optimizer(optimizer), data_loader.dataset, spent)


def _unwrap(model: Any) -> nn.Module:
    """The module inside Opacus's wrapper, without hooks and ``grad_sample``."""
    inner = getattr(model, "_module", None)
    if not isinstance(inner, nn.Module) or not hasattr(model, "remove_hooks"):
        raise ArgumentTypeError(
            f"{type(model).__name__} is no model that Opacus made private (a GradSampleModule): "
            "give a plain module to the oracle as it is"
        )
    strip = "to_standard_module" if isinstance(model, nn.Module) else "cleanup"  # hooks alone
    getattr(model, strip)()
    return inner.module if isinstance(inner, DPDDP) else inner


def _unwrap_optimizer(optimizer: Any) -> Optimizer:
    if not isinstance(optimizer, DPOptimizer):
        raise ArgumentTypeError(
            f"{type(optimizer).__name__} is no optimiser that Opacus made private (a DPOptimizer): "
            "use a plain one as it is"
        )
    inner: Optimizer = optimizer.original_optimizer
    return inner


def charges(accountant: Any) -> list[Charge]:
    """Return the history of an Opacus accountant: RDP, PRV or Gaussian (GDP).

    Args:
        accountant: a ``PrivacyEngine``, an accountant, or the ``state_dict()`` of one.

    Example:
        >>> charges({"history": [(1.1, 0.01, 300)], "mechanism": "rdp"})
        [Charge(noise_multiplier=1.1, sampling_rate=0.01, steps=300)]
    """
    accountant = getattr(accountant, "accountant", accountant)
    inside = accountant.get("history") if isinstance(accountant, dict) else None
    history: Any = getattr(accountant, "history", inside)
    try:
        rows = [(float(sigma), float(q), float(steps)) for sigma, q, steps in history]
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{type(accountant).__name__} has no history of (noise_multiplier, sample_rate, "
            "steps): pass the PrivacyEngine, its accountant, or the accountant's state_dict()"
        ) from None
    for _, _, steps in rows:
        if not steps.is_integer():
            raise ArgumentError(f"a history has {steps:g} steps: their number must be whole")
    return [checked(Charge(sigma, q, int(steps))) for sigma, q, steps in rows]


def record(ledger: Ledger, charges: Sequence[Charge], *, run: str) -> Ledger:
    """Record on the ledger what another library spent; on return it is on disk.

    Args:
        ledger: to add to; it is also returned.
        charges: in the order in which they were spent.
        run: a name for that training. The same steps under the same name are charged once, so a
            script may be run again; two trainings need two names.

    Raises:
        ValueError: if the ledger has another history under this name.

    Example:
        >>> ledger = Ledger(delta=1e-5, accountant="rdp")
        >>> round(record(ledger, [Charge(1.0, 0.01, 500)], run="first").epsilon(), 3)
        1.653
    """
    if not run:
        raise ArgumentError("run must name the training that is recorded, for example 'opacus-1'")
    each = [charge for charge in map(checked, charges) for _ in range(charge.steps)]
    ledger.merge(
        {
            "stream": f"taken-over/{run}",
            "step": step,
            "noise_multiplier": charge.noise_multiplier,
            "sampling_rate": charge.sampling_rate,
            "unit": "record",
            "release": None,
        }
        for step, charge in enumerate(each)
    )
    return ledger
