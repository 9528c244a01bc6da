"""Recipes: an experiment as a TOML file, and the runs that it asks for.

They are in the folder ``reproduce/recipes/``, which is not installed.
``full/NAME.toml`` has the paper's settings, ``desk/NAME.toml`` what two cores can train in days,
with enough seeds to distinguish methods, and ``pocket/NAME.toml`` what they can train in hours::

    title = "Table 1 on CIFAR-10"
    seeds = 5                    # 0 .. 4, paired
    base = "table1-cifar10"      # take setting and records of that recipe, and ...
    use = ["bam"]                # ... these of its arms

    [setting]                    # fields of RunConfig that all runs share
    model = "resnet9"

    [grid]                       # every combination of these, or ...
    epsilon = [1, 2, 10]

    [seeds_at]                   # another number of seeds in some places of the grid
    epsilon-2 = 8

    [variants.width-12]          # ... each of these: fields of RunConfig
    model_options = { hidden = [12] }

    [arms.bam]                   # what is compared: each arm's own fields of RunConfig
    method = "bam"
    lam = 0.02

A run's name consists of its arm, its place in the grid and its seed: ``bam-epsilon-2-seed-0``. So a
recipe that builds on another shares the records of the runs that both have.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dpbam.app.compare.comparison import noise_seed
from dpbam.app.runs import ConfigError, RunConfig, RunSpec, places, read_file

SCALES = ("pocket", "desk", "full")
OWN = "own"  # in place of a scale: recipes by their paths, with --recipe
WORK = Path("runs/reproduce")
_RECIPES = Path(__file__).resolve().parent / "recipes"


@dataclass(frozen=True)
class Recipe:
    """One experiment.

    Attributes:
        name: of its file.
        scale: "pocket", "desk" or "full".
        title: a few words.
        setting: fields of :class:`~dpbam.app.runs.RunConfig` that all runs share.
        arms: name -> its own fields.
        grid: field -> values.
        variants: name -> fields, in place of a grid.
        seeds: how many paired ones.
        seeds_at: place in the grid -> how many there, where it is another number.
        first_seed: the first of them.
        records: the folder of its records: its name, or the base's.
        flatness: whether to measure the flatness of the trained models.
        lens: of how many seeds to measure the bias of the trained models, each on two batches.
        groups: ``module:function`` of masks of the test records, in each of which the accuracy is
            kept.
        images: in the training set; a public fact, for costs known beforehand.
        shape: of an image, likewise.
        classes: likewise.
        floor: the accuracy that the first arm must exceed for a verdict.
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
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: int = 5
    seeds_at: Mapping[str, int] = field(default_factory=dict)
    first_seed: int = 0
    flatness: bool = False
    lens: int = 0
    groups: str | None = None
    floor: float | None = None
    resolution: float | None = None

    def cells(self) -> list[dict[str, Any]]:
        """Return every combination of the grid's values, or {"at": name} of every variant."""
        if self.variants:
            return [{"at": name} for name in self.variants]
        return [
            dict(zip(self.grid, c, strict=True)) for c in itertools.product(*self.grid.values())
        ]

    def runs(self, seeds: int | None = None, work: Path = WORK) -> list[RunSpec]:
        """Specify all runs, seed by seed, so that an early end leaves whole pairs.

        Another configuration has another run folder under ``work``.
        """
        counts = [self._seeds(cell) if seeds is None else seeds for cell in self.cells()]
        if min(counts) < 1:
            raise ConfigError(f"seeds must be at least 1, got {min(counts)}")
        return [
            self._run(arm, cell, self.first_seed + k, work / self.scale / self.records)
            for k in range(max(counts))
            for cell, count in zip(self.cells(), counts, strict=True)
            if k < count
            for arm in self.arms
        ]

    def _seeds(self, cell: Mapping[str, Any]) -> int:
        return self.seeds_at.get("-".join(places(cell)), self.seeds)

    def _run(self, arm: str, cell: Mapping[str, Any], seed: int, folder: Path) -> RunSpec:
        here = self.variants[cell["at"]] if self.variants else cell
        values = {**self.setting, **here, **self.arms[arm], "seed": seed}
        run = RunSpec(arm, RunConfig.from_mapping(values), folder, cell)
        config = run.config
        if config.private:  # each run has its own noise
            noise = noise_seed(seed, run.name.removesuffix(f"-seed-{seed}"))
            config = config.replace(noise_seed=noise)
        digest = hashlib.sha256(config.to_toml().encode()).hexdigest()[:8]
        return replace(run, config=config, out=folder / f"{run.name}-{digest}")


def recipes_folder() -> Path:
    return _RECIPES


def recipe_names(scale: str) -> list[str]:
    return sorted(path.stem for path in (recipes_folder() / check_scale(scale)).glob("*.toml"))


def load_recipe(name: str, scale: str = "pocket") -> Recipe:
    """Load a recipe by name.

    Example:
        >>> load_recipe("table1-cifar10", "full").setting["batch_size"]
        4096
    """
    path = recipes_folder() / check_scale(scale) / f"{name}.toml"
    if not path.exists():
        hint = did_you_mean(name, recipe_names(scale))
        raise ConfigError(f"there is no {scale} recipe {name!r}: {hint}")
    return read_recipe(path)


def read_recipe(path: Path, scale: str | None = None) -> Recipe:
    """Read a recipe from a file; its scale is the name of the folder if none is given."""
    values = read_file(path)
    base = values.pop("base", None)
    use = values.pop("use", [])
    known = {f.name for f in fields(Recipe)} - {"name", "scale", "records"}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"the recipe {path} has {unknown[0]!r}, which is not known: remove it")
    values.setdefault("setting", {})
    values.setdefault("arms", {})
    if base is not None:
        values = _built_on(read_recipe(path.with_name(f"{base}.toml"), scale), use, values)
    if not values["arms"]:
        raise ConfigError(f"the recipe {path} has no arms: add one as [arms.NAME]")
    lacking = [name for name in ("images", "shape", "classes") if name not in values]
    if lacking:
        raise ConfigError(
            f"the recipe {path} lacks {lacking[0]}, a public fact of its data: add it"
        )
    values.setdefault("title", path.stem)
    place = {"name": path.stem, "scale": scale or path.parent.name}
    values = {"records": path.stem, **values, **place}
    recipe = Recipe(**values)
    if base is None:  # a recipe with a smaller grid inherits places that it does not have
        _check_places(recipe)
    return recipe


def _check_places(recipe: Recipe) -> None:
    known = ["-".join(places(cell)) for cell in recipe.cells()]
    for name in recipe.seeds_at:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"the recipe {recipe.name} has no place {name!r} for seeds: {hint}")


def _built_on(base: Recipe, use: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values over the base's setting, grid and records, and over some of its arms."""
    missing = [arm for arm in use if arm not in base.arms]
    if missing:
        raise ConfigError(f"the recipe {base.name} has no arm {missing[0]!r} to use")
    inherited = (
        "grid",
        "variants",
        "seeds",
        "seeds_at",
        "first_seed",
        "lens",
        "groups",
        "floor",
        "resolution",
        "images",
        "shape",
        "classes",
    )
    return {
        **{name: getattr(base, name) for name in inherited},
        **values,
        "records": base.records,
        "setting": {**base.setting, **values["setting"]},
        "arms": {**{arm: base.arms[arm] for arm in use}, **values["arms"]},
    }


def did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}"


def check_scale(scale: str) -> str:
    if scale not in SCALES:
        raise ConfigError(f"--scale must be pocket, desk or full, got {scale!r}")
    return scale
