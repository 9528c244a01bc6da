"""The paper's experiments by name: the recipes of each, and the function that reads its outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpbam.app.runs import ConfigError
from reproduce import (
    accuracy_claims,
    bias_claims,
    encoder_claims,
    groups,
    laptop_page,
    pooled,
    rivals,
    tuning,
    when,
)
from reproduce.depth import Timing, figure3, measure
from reproduce.outcome import Outcome, Study
from reproduce.recipes import SCALES, Recipe, check_scale, did_you_mean, load_recipe
from reproduce.records import finished

Build = Callable[[Sequence[Study]], Outcome]
ALL = "all"


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper, or a question about it, with its recipes at each scale.

    ``build`` makes the outcome from the finished runs; None: the experiment measures times.
    ``page`` writes a page of its own: the experiment is then not one of the paper's.
    """

    build: Build | None
    pocket: tuple[str, ...] = ()
    desk: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    page: Callable[[Outcome], str] | None = None
    page_path: str | None = None  # in the repository; reproduce/pages/NAME.md by default

    @property
    def scales(self) -> list[str]:
        """The scales with recipes; the pocket scale for an experiment without any."""
        return [scale for scale in SCALES if self._names(scale)] or ["pocket"]

    def recipes(self, scale: str) -> list[Recipe]:
        return [load_recipe(name, scale) for name in self._names(scale)]

    def _names(self, scale: str) -> tuple[str, ...]:
        return {"pocket": self.pocket, "desk": self.desk, "full": self.full}[scale]


def _of(recipe: str, build: Build) -> Experiment:
    return Experiment(build, pocket=(recipe,), desk=(recipe,), full=(recipe,))


EXPERIMENTS: dict[str, Experiment] = {
    "tuning": Experiment(
        tuning.tuning,
        pocket=("tune-cifar10", "tune-pneumonia", "tune-lambda-cifar10", "tune-lambda-pneumonia"),
        desk=("tune-cifar10", "tune-lambda-cifar10", "tune-pneumonia", "tune-lambda-pneumonia"),
    ),
    "table1": Experiment(
        accuracy_claims.table1,
        pocket=("table1-cifar10", "table1-pneumonia"),
        desk=("table1-cifar10", "table1-pneumonia"),
        full=("table1-cifar10", "table1-cifar100", "table1-imagenet32"),
    ),
    "fig1": Experiment(bias_claims.figure1),
    "fig2": Experiment(
        bias_claims.figure2,
        pocket=("methods",),
        desk=("methods", "fig2-resnet9"),
        full=("methods",),
    ),
    "fig3": Experiment(None),
    "fig4": _of("methods", bias_claims.figure4),
    "fig5": _of("batch-size", bias_claims.figure5),
    "fig6": _of("batch-size", bias_claims.figure6),
    "fig7": _of("methods", bias_claims.figure7),
    "pooled": Experiment(
        pooled.pooled,
        desk=(
            "table1-cifar10",
            "table1-pneumonia",
            "when-mlp",
            "share-pneumonia",
            "other-digits",
            "other-small-cnn",
            "long-small-cnn",
            "long-small-cnn-more",
            "long-mlp",
            "long-mlp-more",
            "long-mlp-tuned",
        ),
    ),
    "exact": _of("exact", accuracy_claims.exact),
    "lambda": _of("lambda", accuracy_claims.sweep),
    "flatness": Experiment(bias_claims.flatness, pocket=("methods",), full=("methods",)),
    "groups": Experiment(groups.whom, desk=("imbalanced",)),
    "encoders": Experiment(
        encoder_claims.encoders, desk=("encoder-cifar10", "encoder-pneumonia", "encoder-lora")
    ),
    "bias-methods": Experiment(
        rivals.bias_methods, desk=("tune-bias-methods", "bias-methods"), page=rivals.page
    ),
    "laptop": Experiment(
        laptop_page.laptop, desk=("laptop",), page=laptop_page.page, page_path="docs/how-good.md"
    ),
    "when": Experiment(
        when.when,
        desk=(
            "tune-when-mlp",
            "tune-share-pneumonia",
            "when-mlp",
            "share-mlp",
            "share-pneumonia",
            "share-sat",
            "other-digits",
            "other-small-cnn",
            "other-cifar10",
            "other-pneumonia",
        ),
    ),
}
#: Those of the paper: "all" means them, and they are on the page of results.
PAPERS = [name for name, experiment in EXPERIMENTS.items() if experiment.page is None]


def chosen(name: str, scale: str = "pocket") -> list[str]:
    """Return the experiments of a scale that a name means: one, or all.

    Example:
        >>> chosen("fig2"), len(chosen("all")), len(chosen("all", "desk"))
        (['fig2'], 12, 13)
        >>> chosen("fig8")
        Traceback (most recent call last):
        dpbam.app.runs.config.ConfigError: there is no experiment 'fig8': did you mean 'fig7'?
        >>> chosen("fig1", "desk")
        Traceback (most recent call last):
        dpbam.app.runs.config.ConfigError: fig1 has no recipe of scale desk: choose pocket
    """
    check_scale(scale)
    if name == ALL:
        return [known for known in PAPERS if scale in EXPERIMENTS[known].scales]
    if name not in EXPERIMENTS:
        hint = did_you_mean(name, list(EXPERIMENTS))
        raise ConfigError(f"there is no experiment {name!r}: {hint}")
    scales = EXPERIMENTS[name].scales
    if scale not in scales:
        raise ConfigError(f"{name} has no recipe of scale {scale}: choose {' or '.join(scales)}")
    return [name]


def recipes_of(names: Sequence[str], scale: str) -> list[Recipe]:
    """Load every recipe that the experiments need, once, in order."""
    recipes = [recipe for name in names for recipe in EXPERIMENTS[name].recipes(scale)]
    return list({recipe.name: recipe for recipe in recipes}.values())


def outcome(name: str, scale: str, out: Path, seeds: int | None = None) -> Outcome | None:
    """Return the outcome of the finished runs of an experiment; None if there are none yet."""
    experiment = EXPERIMENTS[name]
    if experiment.build is None:
        path = timing_path(out)
        return figure3(measure(Timing(), path)) if path.exists() else None
    recipes = experiment.recipes(scale)
    studies = [Study(r, finished(r, out, seeds), len(r.runs(seeds))) for r in recipes]
    if recipes and not any(study.records for study in studies):
        return None
    return experiment.build(studies)


def outcomes(
    names: Sequence[str], scale: str, out: Path, seeds: int | None = None
) -> dict[str, Outcome | None]:
    """Return the outcomes of the experiments that the scale has; None without a record."""
    of_scale = [name for name in names if scale in EXPERIMENTS[name].scales]
    return {name: outcome(name, scale, out, seeds) for name in of_scale}


def timing_path(out: Path) -> Path:
    return out / "pocket" / "depth" / "times.json"


def take_times(names: Sequence[str], out: Path) -> None:
    """Time the steps, if an experiment needs them and they are not there."""
    if any(EXPERIMENTS[name].build is None for name in names):
        measure(Timing(), timing_path(out))
