"""Which settings a tuning study chose, to compare with the recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reproduce.outcome import Study, mean_of


def best_rate(study: Study, arm: str) -> float:
    """The learning rate with the best accuracy in a tuning study, the smallest where two tie."""
    tried = [(r.accuracy, -float(r.cell["lr"])) for r in study.records if r.arm == arm]
    return -max(tried)[1]


def best_trial(study: Study, method: str) -> Mapping[str, Any]:
    """Return the fields of the arm of a method with the best mean accuracy, the first of a tie."""
    arms = {
        arm: mean_of(by_seed).mean
        for arm, by_seed in study.arms().items()
        if study.recipe.arms[arm]["method"] == method
    }
    return study.recipe.arms[max(arms, key=arms.__getitem__)]


def best_lambda(study: Study, method: str) -> float:
    """The lambda with the best mean accuracy in a study of lambdas, the smallest where two tie."""
    tried = {
        float(study.recipe.arms[arm]["lam"]): mean_of(by_seed).mean
        for arm, by_seed in study.arms().items()
        if study.recipe.arms[arm]["method"] == method
    }
    return max(sorted(tried), key=tried.__getitem__)
