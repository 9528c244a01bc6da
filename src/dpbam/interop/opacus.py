"""From Opacus: its model unwrapped, its accountant's history on our ledger, and on with BAM.

Both libraries count alike: Poisson sampling at rate q, the Gaussian mechanism with noise
multiplier sigma, neighbours that differ by one record added or removed. So a history of
(sigma, q, steps) means the same here, and is composed with what follows as if all steps had been
ours. Opacus's own accountant may be any of its three; the history is counted by our ledger's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from dpbam.errors import ArgumentError, ArgumentTypeError
from dpbam.privacy.accounting import Charge
from dpbam.privacy.ledger import Ledger

try:
    from opacus.data_loader import DPDataLoader
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
    from opacus.optimizers import DPOptimizer
except ImportError as error:
    raise ImportError(
        "dpbam.interop.opacus needs the package opacus: pip install 'dpbam[opacus]'"
    ) from error

__all__ = ["OpacusTraining", "charges", "from_opacus", "record", "unwrap", "unwrap_optimizer"]


class OpacusTraining(NamedTuple):
    """What a training with Opacus leaves behind.

    Attributes:
        model: the plain module, the same parameter objects, without hooks.
        optimizer: the plain optimiser with its state.
        dataset: what the loader drew from.
        charges: what was spent.
    """

    model: nn.Module
    optimizer: Optimizer
    dataset: Any
    charges: list[Charge]


def from_opacus(model: Any, optimizer: Any, data_loader: Any, accountant: Any) -> OpacusTraining:
    """Take over a training from what ``PrivacyEngine.make_private`` returned.

    Give ``charges`` to :meth:`PrivacyPlan.calibrate <dpbam.privacy.plan.PrivacyPlan.calibrate>` as
    ``spent``, and to :func:`record`.

    Args:
        model: Opacus's private model.
        optimizer: Opacus's private optimiser.
        data_loader: Opacus's private loader, which tells whether samples were Poisson.
        accountant: the ``PrivacyEngine``, or its accountant.

    Raises:
        ValueError: for a loader that did not sample as the accountant assumed.
        TypeError: for what Opacus has not made private.

    Example:
        >>> import torch
        >>> from opacus import PrivacyEngine
        >>> data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.zeros(40).long())
        >>> net = nn.Linear(3, 2)
        >>> engine = PrivacyEngine()
        >>> private = engine.make_private(
        ...     module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        ...     data_loader=torch.utils.data.DataLoader(data, batch_size=4), noise_multiplier=1.0,
        ...     max_grad_norm=1.0)
        >>> engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
        >>> taken = from_opacus(*private, engine)
        >>> taken.model is net, taken.charges
        (True, [Charge(noise_multiplier=1.0, sampling_rate=0.1, steps=1)])
    """
    if not isinstance(data_loader, DPDataLoader):
        raise ArgumentError(
            f"a {type(data_loader).__name__} does not draw Poisson samples, which Opacus's "
            "accountant takes for granted (make_private with poisson_sampling=False?): its "
            "history is not what was spent, so it cannot be taken over"
        )
    spent = charges(accountant)
    return OpacusTraining(unwrap(model), unwrap_optimizer(optimizer), data_loader.dataset, spent)


def unwrap(model: Any) -> nn.Module:
    """The module inside Opacus's wrapper; hooks and ``grad_sample`` are removed from it.

    Its parameters stay the same objects, so an optimiser goes on with them.

    Example:
        >>> from opacus import GradSampleModule
        >>> net = nn.Linear(3, 2)
        >>> unwrap(GradSampleModule(net)) is net, hasattr(net.weight, "grad_sample")
        (True, False)
    """
    inner = getattr(model, "_module", None)
    if not isinstance(inner, nn.Module) or not hasattr(model, "remove_hooks"):
        raise ArgumentTypeError(
            f"{type(model).__name__} is no model that Opacus made private (a GradSampleModule): "
            "a plain module needs no unwrapping, give it to the oracle as it is"
        )
    strip = "to_standard_module" if isinstance(model, nn.Module) else "cleanup"  # hooks alone
    getattr(model, strip)()
    return inner.module if isinstance(inner, DPDDP) else inner


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The optimiser inside Opacus's, with its state (momenta) as it is.

    Example:
        >>> import torch
        >>> plain = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        >>> private = DPOptimizer(
        ...     plain, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)
        >>> unwrap_optimizer(private) is plain
        True
    """
    if not isinstance(optimizer, DPOptimizer):
        raise ArgumentTypeError(
            f"{type(optimizer).__name__} is no optimiser that Opacus made private (a DPOptimizer): "
            "a plain one needs no unwrapping"
        )
    inner: Optimizer = optimizer.original_optimizer
    return inner


def charges(accountant: Any) -> list[Charge]:
    """An accountant's history: RDP, PRV and Gaussian (GDP) alike.

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
        return [Charge(float(sigma), float(q), int(steps)) for sigma, q, steps in history]
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{type(accountant).__name__} has no history of (noise_multiplier, sample_rate, "
            "steps): pass the PrivacyEngine, its accountant, or the accountant's state_dict()"
        ) from None


def record(ledger: Ledger, charges: Sequence[Charge], *, run: str) -> Ledger:
    """Write what another library spent on our ledger; on return it is on disk.

    Args:
        ledger: where; it is also returned.
        charges: :func:`charges`, in the order they were spent.
        run: a name of its own for that training. The same steps under the same name are charged
            once, so a script may be run again; two trainings need two names.

    Raises:
        ValueError: if the name is on the ledger with another history.

    Example:
        >>> ledger = Ledger(delta=1e-5, accountant="rdp")
        >>> round(record(ledger, [Charge(1.0, 0.01, 500)], run="first").epsilon(), 3)
        1.653
    """
    if not run:
        raise ArgumentError("run must name the training that is taken over, for example 'opacus-1'")
    each = (charge for charge in charges for _ in range(charge.steps))
    ledger.merge(
        {
            "stream": f"taken-over/{run}",
            "step": step,
            "noise_multiplier": charge.noise_multiplier,
            "sampling_rate": charge.sampling_rate,
            "release": None,
        }
        for step, charge in enumerate(each)
    )
    return ledger
