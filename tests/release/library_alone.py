"""Imports the library and takes private steps; runs where the app's packages are not installed.

``tools/check_release.sh`` runs it in an environment of its own, ``test_small_install.py`` in one
whose packages are blocked.
"""

from __future__ import annotations

import importlib
import pkgutil

import torch
from torch.utils.data import TensorDataset

import dpbam
from dpbam import BAM, PrivacyPlan, PrivateGradientOracle

#: What needs the app, or an extra of its own.
OUTSIDE = ("dpbam.app", "dpbam.interop.")


def import_library() -> list[str]:
    """Import every module of the library; return their names."""
    names = [found.name for found in pkgutil.walk_packages(dpbam.__path__, "dpbam.")
             if not found.name.startswith(OUTSIDE)]  # fmt: skip
    for name in names:
        importlib.import_module(name)
    return names


def take_steps() -> float:
    """Train two steps privately; return epsilon."""
    model = torch.nn.Linear(4, 3)
    data = TensorDataset(torch.randn(200, 4), torch.randint(3, (200,)))
    plan = PrivacyPlan.calibrate(epsilon=3, delta=1e-4, n=200, batch_size=100, epochs=1)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    oracle = PrivateGradientOracle(model, loss, plan, method=BAM(lam=0.02))
    for batch in oracle.batches(data):
        oracle.backward(*batch)
        assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    return float(oracle.ledger.epsilon())


if __name__ == "__main__":
    assert len(import_library()) > 50
    assert 2.9 < take_steps() <= 3
