"""Private linear heads on fixed features: by gradient descent, and in closed form.

Both release through :class:`~dpbam.oracle.PrivateGradientOracle`, on its ledger.
"""

from dpbam.heads.base import LinearHead
from dpbam.heads.closed_form import (
    MomentHead,
    MomentLoss,
    Moments,
    bounded_targets,
    check_closed_form_plan,
    class_means,
    class_shares,
    class_targets,
    classifier,
    closed_form_plan,
    detector,
    finding_targets,
    regressor,
    release_moments,
)
from dpbam.heads.descent import Descent, fit_by_descent

__all__ = [
    "Descent",
    "LinearHead",
    "MomentHead",
    "MomentLoss",
    "Moments",
    "bounded_targets",
    "check_closed_form_plan",
    "class_means",
    "class_shares",
    "class_targets",
    "classifier",
    "closed_form_plan",
    "detector",
    "finding_targets",
    "fit_by_descent",
    "regressor",
    "release_moments",
]
