"""Recipes: an experiment as a TOML file, and the runs that it asks for.

They live in the folder ``recipes/`` of the project; neither it nor this package is installed.
``full/NAME.toml`` has the paper's settings, ``desk/NAME.toml`` what two cores can train in days,
with enough seeds to tell methods apart, and ``pocket/NAME.toml`` what they can train in hours::

    title = "Table 1 on CIFAR-10"
    seeds = 5                    # 0 .. 4, paired
    base = "table1-cifar10"      # take setting and records of that recipe, and ...
    use = ["bam"]                # ... these of its arms

    [setting]                    # fields of RunConfig that all runs share
    model = "resnet9"

    [grid]                       # every combination of these
    epsilon = [1, 2, 10]

    [arms.bam]                   # what is compared: fields of RunConfig of its own
    method = "bam"
    lam = 0.02

A run is called after its arm, its place in the grid and its seed: ``bam-epsilon-2-seed-0``. So a
recipe that builds on another shares that one's records where the runs are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dpbam import _validate
from dpbam._names import did_you_mean
from dpbam.app.compare.comparison import noise_seed
from dpbam.app.runs.config import ConfigError, RunConfig, read_file
from dpbam.methods import is_private

SCALES = ("pocket", "desk", "full")
_HERE = Path(__file__).resolve()


@dataclass(frozen=True)
class RecipeRun:
    """One run that a recipe asks for.

    Attributes:
        arm: what is compared.
        cell: its place in the grid, such as {"epsilon": 2}.
        seed: runs of one seed are paired.
        config: what to do.
    """

    arm: str
    cell: Mapping[str, Any]
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        """Arm, place and seed: the name of its record."""
        return f"{label(self.arm, self.cell)}-seed-{self.seed}"


@dataclass(frozen=True)
class Recipe:
    """One experiment.

    Attributes:
        name: its file's.
        scale: "pocket", "desk" or "full".
        title: a few words.
        setting: fields of :class:`~dpbam.app.runs.RunConfig` that all runs share.
        arms: name -> fields of its own.
        grid: field -> values.
        seeds: how many paired ones.
        first_seed: the first of them.
        records: the folder of its records: its name, or the base's.
        flatness: measure the flatness of the trained models too.
        images: how many there are to train on; a public fact, for what is known beforehand.
        shape: of an image, likewise.
        classes: likewise.
        floor: the accuracy that the first arm must be well above, for the rest to mean anything.
        resolution: the largest half-width of the interval of a difference in accuracy that allows a
            verdict; None: any.
    """

    name: str
    scale: str
    title: str
    setting: Mapping[str, Any]
    arms: Mapping[str, Mapping[str, Any]]
    records: str
    images: int
    shape: Sequence[int]
    classes: int
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    seeds: int = 5
    first_seed: int = 0
    flatness: bool = False
    floor: float | None = None
    resolution: float | None = None

    def cells(self) -> list[dict[str, Any]]:
        """Every combination of the grid's values; one empty one without a grid."""
        return [
            dict(zip(self.grid, c, strict=True)) for c in itertools.product(*self.grid.values())
        ]

    def runs(self, seeds: int | None = None) -> list[RecipeRun]:
        """All runs, seed by seed, so that an early end leaves whole pairs."""
        count = _validate.count("seeds", self.seeds if seeds is None else seeds)
        return [
            RecipeRun(arm, cell, seed, self.config(arm, cell, seed))
            for seed in range(self.first_seed, self.first_seed + count)
            for cell in self.cells()
            for arm in self.arms
        ]

    def config(self, arm: str, cell: Mapping[str, Any], seed: int) -> RunConfig:
        """The configuration of one run; its noise is its own."""
        values = {**self.setting, **cell, **self.arms[arm], "seed": seed}
        if is_private(values.get("method")):
            values["noise_seed"] = noise_seed(seed, label(arm, cell))
        return RunConfig.from_mapping(values)


def label(arm: str, cell: Mapping[str, Any]) -> str:
    """Arm and place in the grid.

    Example:
        >>> label("bam", {"epsilon": 2.0})
        'bam-epsilon-2'
    """
    return "-".join([arm, *(f"{key}-{value:g}" for key, value in cell.items())])


def recipes_folder() -> Path:
    """Where the recipes are: beside this package, in the project's folder."""
    return _HERE.parents[1] / "recipes"


def recipe_names(scale: str) -> list[str]:
    """Those of a scale, sorted."""
    return sorted(path.stem for path in (recipes_folder() / check_scale(scale)).glob("*.toml"))


def load_recipe(name: str, scale: str = "pocket") -> Recipe:
    """The recipe of that name.

    Raises:
        ConfigError: if there is none, or it is not right.

    Example:
        >>> load_recipe("table1-cifar10", "full").setting["batch_size"]
        4096
    """
    path = recipes_folder() / check_scale(scale) / f"{name}.toml"
    if not path.exists():
        hint = did_you_mean(name, recipe_names(scale))
        raise ConfigError(f"there is no {scale} recipe {name!r}: {hint}")
    return read_recipe(path)


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file; its scale is its folder's name."""
    values = read_file(path)
    base = values.pop("base", None)
    use = values.pop("use", [])
    known = {f.name for f in fields(Recipe)} - {"name", "scale", "records"}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"the recipe {path} has {unknown[0]!r}, which is not known")
    values.setdefault("setting", {})
    values.setdefault("arms", {})
    if base is not None:
        values = _built_on(read_recipe(path.with_name(f"{base}.toml")), use, values)
    if not values["arms"]:
        raise ConfigError(f"the recipe {path} has no arms: give one as [arms.NAME]")
    lacking = [name for name in ("images", "shape", "classes") if name not in values]
    if lacking:
        raise ConfigError(f"the recipe {path} lacks {lacking[0]}, a public fact of its data")
    values.setdefault("title", path.stem)
    return Recipe(**{"records": path.stem, **values, "name": path.stem, "scale": path.parent.name})


def _built_on(base: Recipe, use: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values over the base's setting, grid and records, and over some of its arms."""
    missing = [arm for arm in use if arm not in base.arms]
    if missing:
        raise ConfigError(f"the recipe {base.name} has no arm {missing[0]!r} to use")
    inherited = ("grid", "seeds", "first_seed", "floor", "resolution", "images", "shape", "classes")
    taken = {name: getattr(base, name) for name in inherited}
    return {
        **taken,
        **values,
        "records": base.records,
        "setting": {**base.setting, **values["setting"]},
        "arms": {**{arm: base.arms[arm] for arm in use}, **values["arms"]},
    }


def check_scale(scale: str) -> str:
    """Return the scale.

    Raises:
        ConfigError: if there is none of that name.
    """
    if scale not in SCALES:
        raise ConfigError(f"--scale must be pocket, desk or full, got {scale!r}")
    return scale
