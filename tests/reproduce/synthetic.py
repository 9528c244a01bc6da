"""Records with numbers of our own choosing, to test what is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpbam.app.runs import RunRecord
from reproduce.outcome import Study, mean_of
from reproduce.recipes import Recipe

MACHINE = {"processor": "Test 1", "cores": 2, "torch": "2.0", "commit": "abc"}


def reading(bias=3.0, cosine=0.8, **more):
    values = {
        "reference_norm": 3.0, "clipped_norm": 0.1, "bias": bias, "relative_bias": bias / 3.1,
        "a": 0.03, "c_norm": 0.02, "magnitude_share": 0.99, "direction_share": 0.01,
        "cosine": cosine, "private_cosine": 0.1, "noise_share": 0.1,
    }  # fmt: skip
    return {**values, **more}


def steps(count=8, alignment=None, **more):
    against = reading(**more)
    return [
        {"step": k, "non_private_against_plain": against, "non_private_against_own": against,
         "non_private_alignment": alignment}
        for k in range(count)
    ]  # fmt: skip


def record(arm, seed, accuracy, *, cell=None, method=None, lam=0.02, batch_size=64, eigenvalue=50.0,
           bias=()):  # fmt: skip
    return RunRecord(
        arm=arm, cell=cell or {}, seed=seed,
        config={"method": method or arm, "lam": lam, "batch_size": batch_size, "seed": seed},
        plan={"n": 1000, "batch_size": batch_size}, epsilon=1.0, accuracy=accuracy,
        accuracy_curve=[[1, accuracy]], seconds=10.0, pairing={}, machine=MACHINE,
        non_private_bias=list(bias),
        non_private_flatness={
            "non_private_top_eigenvalue": eigenvalue, "non_private_mean_norm": 9.0,
            "non_private_gradient_norm": 1.0, "non_private_loss": 1.5,
        },
    )  # fmt: skip


def study(records, *, name="table1-test", grid=None, floor=None):
    arms = {r.arm: {"method": r.config["method"]} for r in records}
    recipe = Recipe(
        name=name, scale="pocket", title="Accuracy on Test at epsilon 1",
        setting={"model": "resnet9"}, arms=arms, records=name, images=1000,
        shape=[1, 8, 8], classes=10, grid=grid or {}, floor=floor,
    )  # fmt: skip
    return Study(recipe, records, len(records))


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
