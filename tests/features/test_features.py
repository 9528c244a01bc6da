"""Features of a record depend on that record alone, and have one scale for every extractor."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpbam.data import from_arrays
from dpbam.errors import ArgumentError
from dpbam.features import (
    EncoderFeatures,
    Features,
    OnnxFeatures,
    ScatteringFeatures,
    cached_features,
    feature_key,
    make_features,
    scattering,
    standardise_rows,
)
from dpbam.features.scattering import working_size
from planting import Mistake, catches
from tests.tiny_encoders import save_encoder

SHAPE = (3, 8, 8)
PREPROCESSING = {
    "size": {"height": 6, "width": 6},
    "image_mean": [0.5] * 3,
    "image_std": [0.25] * 3,
}


class Net(nn.Module):
    """A tiny encoder; with ``mixing`` its rows depend on each other."""

    def __init__(self, *, mixing: bool = False, noisy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.mixing, self.noisy = nn.Conv2d(3, 5, 3), mixing, noisy

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x).relu().mean((2, 3))
        if self.mixing:
            out = out - out.mean(0, keepdim=True) + out.sum()
        return out + torch.rand_like(out) if self.noisy else out


def onnx_file(folder: Path, **options: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "net.onnx"
    # the exporter that needs no tracing of Python code writes one file, with its weights inside
    torch.onnx.export(
        Net(**options).eval(), (torch.zeros(1, 3, 6, 6),), str(path), dynamo=True, verbose=False,
        input_names=["pixels"], external_data=False,
        dynamic_shapes=({0: torch.export.Dim("rows")},) if not options.get("noisy") else None,
    )  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING))
    return path


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx_file(tmp_path_factory.mktemp("onnx"), mixing=True)


@pytest.fixture(scope="module")
def extractors(onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Features]:
    folder = save_encoder(tmp_path_factory.mktemp("hf"), "resnet")
    return {
        "scattering": ScatteringFeatures(SHAPE, channels=6),
        "onnx": OnnxFeatures(onnx, SHAPE),
        "hf": EncoderFeatures(f"hf:{folder}", SHAPE),
    }


def images(rows: int, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Tensor:
    return torch.rand(rows, *shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def check_rows_stand_alone(features: Features, *, exact: bool = True) -> None:
    """Row 1 is the same alone, among others, and when every other record is another one."""
    x = images(11)
    others = images(11, seed=1)
    others[1] = x[1]
    alone = features.extract(x[1:2])[0]
    limit = 0.0 if exact else 1e-5
    for rows in (x, others, x[:3]):
        torch.testing.assert_close(features.extract(rows)[1], alone, rtol=limit, atol=limit)


@pytest.mark.parametrize("name", ["scattering", "onnx", "hf"])
def test_features_of_a_record_do_not_depend_on_other_records(extractors: Any, name: str) -> None:
    check_rows_stand_alone(extractors[name], exact=name != "hf")  # vmap may round differently


@pytest.mark.parametrize("name", ["scattering", "onnx", "hf"])
def test_no_rows_give_no_features(extractors: Any, name: str) -> None:
    features = extractors[name]
    assert features.extract(images(0)).shape == (0, features.width)
    assert features.extract(images(2)).shape == (2, features.width)


def _centre_over_rows(right: Any) -> Any:
    def wrong(network: Any, rows: Tensor) -> Tensor:
        maps = right(network, rows)
        return maps - maps.mean(0, keepdim=True)  # type: ignore[no-any-return]

    return wrong


MISTAKES = {
    "maps centred over the batch": Mistake(
        lambda: check_rows_stand_alone(ScatteringFeatures(SHAPE, channels=3)),
        scattering, "_companded", _centre_over_rows,
    ),
}  # fmt: skip


@catches(MISTAKES)
def test_mixing_rows_is_noticed(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 25, 17), (4, 1, 1), (1, 70, 30), (3, 28, 28)])
def test_scattering_takes_any_size_and_any_number_of_channels(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scattering, "SYNTHETIC", 12)
    for mirror in (True, False):
        features = ScatteringFeatures(shape, channels=4, mirror=mirror)
        values = features.extract(images(2, shape))
        assert values.shape == (2, features.width)
        assert values.isfinite().all()


def test_scattering_is_the_same_for_a_mirror_image_only_if_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scattering, "SYNTHETIC", 12)
    x = images(2, (1, 20, 20))
    for mirror in (True, False):
        features = ScatteringFeatures((1, 20, 20), channels=5, mirror=mirror)
        plain, mirrored = features.extract(x), features.extract(x.flip(-1))
        assert torch.allclose(plain, mirrored, atol=1e-3) == mirror


def test_scattering_averages_over_the_mirror_image_where_there_is_colour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scattering, "SYNTHETIC", 12)
    for channels, mirror in ((1, False), (3, True)):
        assert ScatteringFeatures((channels, 20, 20), channels=5).mirror == mirror


def test_working_size_is_a_multiple_of_the_cell_and_bounded() -> None:
    for height in (1, 2, 7, 15, 16, 31, 47, 48, 64, 65, 500):
        for width in (1, 3, 28, 64, 2000):
            rows, columns, scales = working_size(height, width)
            cell = 2**scales
            assert rows % cell == columns % cell == 0
            assert 2 * cell <= min(rows, columns)
            assert max(rows, columns) <= scattering.LARGEST


def test_standardised_rows_are_centred_with_norm_one_at_any_scale() -> None:
    rows = torch.randn(5, 40) * torch.tensor([1e-6, 1.0, 1e3, 1e6, 1.0])[:, None] + 3.0
    rows[4] = 7.0
    values = standardise_rows(rows)
    torch.testing.assert_close(values[1:4].norm(dim=1), torch.ones(3))
    assert values.mean(1).abs().max() < 1e-6
    assert torch.equal(values[4], torch.zeros(40))
    torch.testing.assert_close(standardise_rows(100 * rows[1:4]), values[1:4], rtol=1e-4, atol=1e-5)


def test_a_row_that_is_not_finite_becomes_zero_and_leaves_others_alone() -> None:
    rows = torch.randn(3, 6)
    whole = standardise_rows(rows)
    rows[1, 2] = torch.inf
    values = standardise_rows(rows)
    assert torch.equal(values[1], torch.zeros(6))
    assert torch.equal(values[[0, 2]], whole[[0, 2]])


def test_a_random_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="without random operators"):
        OnnxFeatures(onnx_file(tmp_path, noisy=True), SHAPE)


def test_an_onnx_encoder_normalises_as_its_file_says(onnx: Path) -> None:
    x = images(1, (3, 6, 6))  # no resizing
    features = OnnxFeatures(onnx, (3, 6, 6))
    u = (x + 1) / 2
    expected = Net(mixing=True)((u - 0.5) / 0.25)
    torch.testing.assert_close(features.extract(x), expected, rtol=1e-4, atol=1e-5)


def test_a_grey_image_is_repeated_to_the_encoders_channels(onnx: Path) -> None:
    grey = images(2, (1, 8, 8))
    expected = OnnxFeatures(onnx, SHAPE).extract(grey.expand(2, 3, 8, 8))
    torch.testing.assert_close(OnnxFeatures(onnx, (1, 8, 8)).extract(grey), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "preprocessor_config.json").unlink(), "needs a preprocessor_config.json"),
        (lambda f: (f / "preprocessor_config.json").write_text("[]"), "JSON object"),
        (lambda f: (f / "preprocessor_config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "net.onnx").write_bytes(b"nothing"), "cannot be loaded"),
        (lambda f: (f / "net.onnx").unlink(), "there is no file"),
    ],
)
def test_what_is_no_onnx_encoder_is_refused_in_one_sentence(
    onnx: Path, tmp_path: Path, change: Any, words: str
) -> None:
    for file in onnx.parent.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change(tmp_path)
    with pytest.raises(ArgumentError, match=words):
        OnnxFeatures(tmp_path / "net.onnx", SHAPE)


def test_channels_that_do_not_fit_are_refused(onnx: Path) -> None:
    with pytest.raises(ArgumentError, match="3 channels, and the data has 2"):
        OnnxFeatures(onnx, (2, 8, 8))


def test_unknown_features_are_refused() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'scattering'"):
        make_features("scatering", SHAPE)


# --- the cache


def data_set(rows: int = 5, seed: int = 0) -> Any:
    pixels = np.random.default_rng(seed).integers(0, 256, (rows, 8, 8, 3)).astype(np.uint8)
    return from_arrays(pixels, np.arange(rows) % 2)


def test_cached_features_are_computed_once_and_readable_by_the_owner_alone(
    extractors: Any, tmp_path: Path
) -> None:
    counts: list[int] = []
    features, folder = extractors["onnx"], tmp_path / "features"
    first = cached_features(data_set(), features, folder, progress=lambda k, n: counts.append(k))
    repeated = cached_features(data_set(), features, folder, progress=lambda k, n: counts.append(k))
    np.testing.assert_array_equal(first, repeated)
    assert counts == [5]
    files = list(folder.iterdir())
    assert len(files) == 1
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
    np.testing.assert_array_equal(first, cached_features(data_set(), features))


def test_a_damaged_cache_is_computed_again(extractors: Any, tmp_path: Path) -> None:
    features = extractors["onnx"]
    first = np.array(cached_features(data_set(), features, tmp_path))
    path = next(tmp_path.glob("*.npy"))
    path.write_bytes(path.read_bytes()[:90])
    np.testing.assert_array_equal(cached_features(data_set(), features, tmp_path), first)


def test_the_key_changes_with_any_pixel_and_with_the_extractor(
    extractors: Any, onnx: Path, tmp_path: Path
) -> None:
    keys = {feature_key(data_set(), e) for e in extractors.values()}
    pixels = data_set().batch(np.arange(5))[0].numpy().transpose(0, 2, 3, 1).copy()
    pixels[4, 7, 7, 0] ^= 1
    keys.add(feature_key(from_arrays(pixels, np.arange(5) % 2), extractors["onnx"]))
    (tmp_path / "net.onnx").write_bytes(onnx.read_bytes())
    other = {**PREPROCESSING, "image_mean": [0.4] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(other))
    keys.add(feature_key(data_set(), OnnxFeatures(tmp_path / "net.onnx", SHAPE)))
    assert len(keys) == 5
