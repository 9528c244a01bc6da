"""The laptop recipe on small data: features that are fixed, private training as any other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dpbam.app.runs import RunConfig, execute
from dpbam.data import DataSet, from_arrays
from dpbam.features.leaves import dead_leaves
from dpbam.features.scattering import Axes, maps_of, mirror_matrix
from reproduce import laptop
from reproduce.laptop import rounded
from reproduce.recipes import load_recipe


@pytest.fixture(scope="module")
def maps() -> Tensor:
    return maps_of(dead_leaves(24))


@pytest.fixture(scope="module")
def axes(maps: Tensor) -> Axes:
    return Axes.measured(maps, channels=20)


def test_synthetic_images_are_the_same_every_time() -> None:
    assert torch.equal(dead_leaves(2), dead_leaves(3)[:2])
    assert not torch.equal(dead_leaves(2), dead_leaves(2, seed=1))
    assert dead_leaves(4).abs().max() <= 1


def test_an_image_and_its_mirror_image_have_the_same_features(axes: Axes) -> None:
    images = dead_leaves(4, seed=5)
    plain = rounded(axes, maps_of(images)).astype(int)
    mirrored = rounded(axes, maps_of(images.flip(-1))).astype(int)
    assert np.abs(plain - mirrored).max() <= 1  # where a value falls between two steps
    assert np.abs(plain - rounded(axes, maps_of(images.flip(-2))).astype(int)).max() > 10


def test_axes_are_kept_or_turned_round_by_mirroring(axes: Axes) -> None:
    swapped = mirror_matrix(243).float() @ axes.project
    torch.testing.assert_close(swapped, axes.sign * axes.project, rtol=1e-4, atol=1e-4)
    assert set(axes.sign.tolist()) == {1.0, -1.0}


def test_full_whitening_makes_all_axes_alike_on_the_synthetic_images(maps: Tensor) -> None:
    axes = Axes.measured(maps, channels=20, whitening=1.0)
    projected = torch.einsum("ncyx,ck->nkyx", maps - axes.mean[:, None, None], axes.project)
    torch.testing.assert_close(
        projected.var((0, 2, 3)) + projected.mean((0, 2, 3)) ** 2,
        torch.ones(20), rtol=0.25, atol=0.0,
    )  # fmt: skip


def test_features_of_an_image_do_not_depend_on_others(axes: Axes) -> None:
    maps = maps_of(dead_leaves(3, seed=9))
    np.testing.assert_array_equal(rounded(axes, maps)[1:2], rounded(axes, maps[1:2]))


def test_all_images_have_nearly_one_norm(axes: Axes) -> None:
    features = rounded(axes, maps_of(dead_leaves(6, seed=2)))
    assert features.shape == (6, 20, 8, 4)
    norms = np.linalg.norm((features.astype(float) - 127.5).reshape(6, -1), axis=1)
    assert norms.std() / norms.mean() < 0.05  # but for values cut off at 8 bits


def test_the_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)

    def small(spec: str, *, split: str) -> DataSet:
        count = 60 if split == "train" else 30
        labels = np.arange(count) % 2
        pixels = generator.integers(0, 90, (count, 3, 32, 32)) + 160 * labels[:, None, None, None]
        return from_arrays(pixels.astype(np.uint8), labels, name=split)

    monkeypatch.setattr(laptop, "load", small)
    monkeypatch.setattr(laptop, "data_root", lambda: tmp_path)
    monkeypatch.setattr(laptop, "_SYNTHETIC", 12)
    monkeypatch.setattr(laptop, "CHANNELS", 8)
    out = tmp_path / "run"
    small_run = {"batch_size": 60, "epochs": 6.0, "accountant": "rdp", "seed": 0}
    recipe = load_recipe("laptop", "desk")
    config = {**recipe.setting, **recipe.variants["epsilon-8"], **small_run}
    result = execute(RunConfig.from_mapping(config), out)
    assert result.score > 0.6
    assert result.epsilon <= 8
    statement = json.loads((out / "privacy-statement.json").read_text())
    assert statement["epsilon"] == result.epsilon
    assert statement["steps"] == result.steps == 6
    assert len(list((tmp_path / "laptop").glob("*.npy"))) == 2
