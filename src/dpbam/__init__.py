"""dpbam: differentially private training for PyTorch that measures and removes clipping bias.

The names below are loaded when first used: ``import dpbam`` does not import torch.

Example:
    >>> import dpbam
    >>> plan = dpbam.PrivacyPlan(n=1000, batch_size=100, steps=50, noise_multiplier=1.0, delta=1e-4)
    >>> plan.sampling_rate
    0.1
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpbam._version import __version__

if TYPE_CHECKING:
    from dpbam.compute import Compute
    from dpbam.methods import BAM, DPSAT, DPSGD, Method
    from dpbam.oracle import PrivateGradientOracle
    from dpbam.privacy.clipping import AutomaticClipping, Clipping, FlatClipping, PerLayerClipping
    from dpbam.privacy.ledger import Ledger
    from dpbam.privacy.plan import PrivacyPlan
    from dpbam.privacy.sampling import PoissonSampler

_HOME = {
    "AutomaticClipping": "dpbam.privacy.clipping",
    "BAM": "dpbam.methods",
    "Clipping": "dpbam.privacy.clipping",
    "Compute": "dpbam.compute",
    "DPSAT": "dpbam.methods",
    "DPSGD": "dpbam.methods",
    "FlatClipping": "dpbam.privacy.clipping",
    "Ledger": "dpbam.privacy.ledger",
    "Method": "dpbam.methods",
    "PerLayerClipping": "dpbam.privacy.clipping",
    "PoissonSampler": "dpbam.privacy.sampling",
    "PrivacyPlan": "dpbam.privacy.plan",
    "PrivateGradientOracle": "dpbam.oracle",
}

__all__ = [
    "BAM",
    "DPSAT",
    "DPSGD",
    "AutomaticClipping",
    "Clipping",
    "Compute",
    "FlatClipping",
    "Ledger",
    "Method",
    "PerLayerClipping",
    "PoissonSampler",
    "PrivacyPlan",
    "PrivateGradientOracle",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpbam' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
