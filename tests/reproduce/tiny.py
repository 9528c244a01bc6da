"""A recipe that trains in a second: digits, a small net, two methods, two seeds."""

from __future__ import annotations

from pathlib import Path

from reproduce.recipes import Recipe, read_recipe
from reproduce.records import carry_out, missing
from tests.end_to_end.kill_driver import plant

TEXT = """
title = "Tiny"
seeds = 2
images = 1438
shape = [1, 8, 8]
classes = 10
flatness = {flatness}
floor = 0.05

[setting]
data = "digits"
model = "mlp"
noise_multiplier = 1.0
delta = 1e-4
accountant = "rdp"
batch_size = 64
epochs = {epochs}
device = "cpu"
num_workers = 0
checkpoint_every = 0
measure_bias = 2

[grid]
clip_norm = {clip_norms}

[arms.dp-sgd]
method = "dp-sgd"

[arms.dp-sat]
method = "dp-sat"
lam = 0.05

[arms.bam]
method = "bam"
lam = 0.05
"""


def tiny(folder: Path, *, epochs=0.2, clip_norms=(1.0,), flatness=False) -> Recipe:
    path = folder / "pocket" / "tiny.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"epochs": epochs, "clip_norms": list(clip_norms), "flatness": str(flatness).lower()}
    path.write_text(TEXT.format(**values))
    return read_recipe(path)


def machine(folder: Path, seeds: int | None = None) -> None:
    """Do what is missing of the recipe in ``folder``."""
    recipe = read_recipe(folder / "pocket" / "tiny.toml")
    results = folder / "results"
    carry_out(missing([recipe], results, seeds, work=folder / "runs"), results)


def dies(folder: Path, step: int) -> None:
    """Do the recipe for one seed, and die by SIGKILL at its ``step``-th step."""
    plant("after the optimiser's step", step)
    machine(folder, 1)
