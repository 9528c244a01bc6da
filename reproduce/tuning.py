"""How the methods were tuned: the settings tried for each, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.accuracy_claims import METHODS
from reproduce.outcome import Outcome, Study, TextTable, mean_of, points

_TUNED = {
    "pocket": "Accuracy in percent on a tenth of the training set, held out; epsilon 2, seeds that "
    "are not used elsewhere. As in the paper, the learning rate comes first: each method gets the "
    "same three, and trains with its best one in Table 1. Then lambda, four values each for DP-SAT "
    "and BAM; Table 1 has the paper's, which was tuned at full size, and the best one here. The "
    "data are public: the search is not part of epsilon.",
    "desk": "Accuracy in percent on a tenth of the training set, held out; epsilon 10, seeds "
    "that are not used elsewhere. The learning rate comes first, four values for DP-SGD. All "
    "methods train with its best one, which favours DP-SGD. Then lambda, four values each for "
    "DP-SAT and BAM; on CIFAR-10 the best of DP-SAT is the largest that was tried. One seed and "
    "5,000 images decide there: the standard error of an accuracy is about 0.7 points, so values "
    "near one another are chosen by chance. Trials are as long as the runs of Table 1. Exact BAM "
    "uses the lambda of approximate BAM. All were tuned only at epsilon 10. The data are public: "
    "the search is not part of epsilon.",
}


def tuning(studies: Sequence[Study]) -> Outcome:
    """Show the settings tried: learning rates, the same for each method, then lambda."""
    trained = [study for study in studies if study.records]
    return Outcome(
        "tuning", "How the methods were tuned",
        tables=[_rates(s) if "lr" in s.recipe.grid else _trials(s) for s in trained],
        notes=[_TUNED[studies[0].recipe.scale]],
        studies=studies,
    )  # fmt: skip


def _rates(study: Study) -> TextTable:
    rates = [cell["lr"] for cell in study.recipe.cells()]
    rows = [
        (study.recipe.name, METHODS[arm], *(_tried(study, arm, lr) for lr in rates))
        for arm in study.recipe.arms
    ]
    return TextTable(("recipe", "method", *(f"lr {lr:g}" for lr in rates)), rows)


def _trials(study: Study) -> TextTable:
    """One row per trial: method, learning rate, lambda (none for DP-SGD) and accuracy."""
    rows = []
    for arm, by_seed in study.arms().items():
        tried = {**study.recipe.setting, **study.recipe.arms[arm]}
        lam = f"{tried['lam']:g}" if "lam" in tried else ""
        rows.append((study.recipe.name, METHODS[tried["method"]], f"{tried['lr']:g}", lam,
                     points(mean_of(by_seed)), str(len(by_seed))))  # fmt: skip
    return TextTable(("recipe", "method", "lr", "lambda", "accuracy", "seeds"), rows)


def _tried(study: Study, arm: str, lr: float) -> str:
    by_seed = study.arms({"lr": lr}).get(arm)
    return "" if not by_seed else points(mean_of(by_seed))
