"""Predictions of files, arrays and data sets, with a model whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from dpbam.app.runs import RunModel
from dpbam.app.runs.predict import evaluate_dataset, files_in, predict_files
from dpbam.data import DataError, from_arrays
from dpbam.tasks.single_label import SingleLabel


class Brightness(torch.nn.Module):
    """Logits (0, 10 * mean brightness): class "light" if the image's mean is above the middle."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(10.0))

    def forward(self, x):
        mean = x.flatten(1).mean(1)
        return torch.stack([torch.zeros_like(mean), self.scale * mean], dim=1)


@pytest.fixture
def model():
    names = ("dark", "light")
    return RunModel(Brightness().eval(), names, (1, 8, 8), {}, SingleLabel(names))


def grey(level, n=1, shape=(8, 8)):
    return np.full((n, *shape), level, np.uint8)


def save(path, level, size=(8, 8), mode="L"):
    Image.new(mode, size, level if mode == "L" else (level,) * 3).save(path)
    return path


def test_image_files_in_the_order_given(model, tmp_path):
    files = [save(tmp_path / "b.png", 250), save(tmp_path / "a.png", 5)]
    light, dark = predict_files(model, files)
    assert (light.file, light.row.label) == (str(files[0]), "light")
    assert (dark.file, dark.row.label) == (str(files[1]), "dark")
    x = 250 / 127.5 - 1
    assert light.row.values["light"] == pytest.approx(1 / (1 + np.exp(-10 * x)), abs=1e-6)
    assert sum(light.row.values.values()) == pytest.approx(1)


def test_other_sizes_and_colours_are_converted(model, tmp_path):
    (one,) = predict_files(model, [save(tmp_path / "big.jpg", 240, (31, 17), "RGB")])
    assert one.row.label == "light"


def test_files_and_arrays_together_keep_their_order(model, tmp_path):
    array = tmp_path / "scans.npz"
    np.savez(array, images=np.concatenate([grey(250, 300), grey(5, 1)]))
    png = save(tmp_path / "x.png", 5)
    got = list(predict_files(model, [png, array, png]))
    assert len(got) == 303
    assert [p.file for p in (got[0], got[1], got[-2], got[-1])] == [
        str(png), f"{array}[0]", f"{array}[300]", str(png),
    ]  # fmt: skip
    assert [p.row.label for p in (got[0], got[1], got[-2])] == ["dark", "light", "dark"]


def test_a_single_array_may_have_any_name(model, tmp_path):
    np.savez(tmp_path / "a.npz", whatever=grey(250, 2))
    assert [p.row.label for p in predict_files(model, [tmp_path / "a.npz"])] == ["light"] * 2


def bad_file(kind, tmp_path):
    path = tmp_path / {"text": "notes.png", "npz": "bad.npz"}.get(kind, "a.npz")
    if kind == "text":
        path.write_text("not an image")
    elif kind == "npz":
        path.write_bytes(b"PK\x03\x04 broken")
    elif kind == "shape":
        np.savez(path, images=grey(1, 2, (9, 9)))
    elif kind == "names":
        np.savez(path, a=grey(1), b=grey(1))
    elif kind == "pickled":
        np.savez(path, images=np.array([{}], dtype=object))
    elif kind == "float":
        np.savez(path, images=np.zeros((1, 8, 8)))
    elif kind == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("text", "notes.png is not an image"),
        ("npz", "bad.npz cannot be read"),
        ("shape", r"\[1, 9, 9\]"),
        ("names", "a, b"),
        ("pickled", "a.npz cannot be read"),
        ("float", "uint8"),
        ("folder", "a folder"),
        ("missing", "not there"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(kind, says, model, tmp_path):
    good = save(tmp_path / "good.png", 5)
    with pytest.raises(DataError, match=says):
        list(predict_files(model, [good, bad_file(kind, tmp_path)]))


@pytest.mark.parametrize("kind", ["text", "npz", "shape", "names", "pickled", "float"])
def test_a_file_that_cannot_be_read_is_left_out_and_reported(kind, model, tmp_path):
    goods = [save(tmp_path / f"{k}.png", 5) for k in range(5)]
    errors = []
    files = [*goods[:3], bad_file(kind, tmp_path), *goods[3:]]
    got = list(predict_files(model, files, on_unreadable=errors.append))
    assert [p.file for p in got] == [str(path) for path in goods]
    assert len(errors) == 1


def test_a_data_set(model):
    images = np.concatenate([grey(250, 3), grey(5, 2)])
    data = from_arrays(images, [1, 1, 1, 0, 1], class_names=["dark", "light"])
    assert evaluate_dataset(model, data).scores["accuracy"] == 4 / 5


def test_classes_are_matched_by_name(model):
    data = from_arrays(grey(250, 2), ["light", "light"], columns={"sex": ["f", "m"]})
    result = evaluate_dataset(model, data, ["sex"])
    assert result.scores["accuracy"] * result.count == 2
    assert set(result.groups["sex"]) == {"f", "m"}


def test_what_does_not_fit_the_model_is_refused(model):
    with pytest.raises(DataError, match="'grey', which the model does not know"):
        evaluate_dataset(model, from_arrays(grey(9, 2), ["grey", "dark"]))
    with pytest.raises(DataError, match=r"takes \[1, 8, 8\]"):
        evaluate_dataset(model, from_arrays(grey(9, 2, (9, 8)), ["light", "dark"]))
    with pytest.raises(DataError, match="no column 'age'"):
        evaluate_dataset(model, from_arrays(grey(9, 2), ["light", "dark"]), ["age"])


def test_a_folder_stands_for_its_images(model, tmp_path):
    (tmp_path / "inner").mkdir()
    save(tmp_path / "inner" / "a.png", 250)
    save(tmp_path / "b.png", 5)
    (tmp_path / "notes.txt").write_text("none")
    (tmp_path / ".hidden.png").write_text("none")
    files = files_in([tmp_path, tmp_path / "b.png"])
    assert [path.relative_to(tmp_path).as_posix() for path in files] == [
        "b.png", "inner/a.png", "b.png",
    ]  # fmt: skip
    assert [one.row.label for one in predict_files(model, files)] == ["dark", "light", "dark"]


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(DataError, match="there are no images in"):
        files_in([tmp_path])
