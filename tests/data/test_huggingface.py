from __future__ import annotations

import builtins
import io

import numpy as np
import pytest
from PIL import Image

from dpbam.data import DataError, check, load, load_pair
from dpbam.data.registry import inspect
from dpbam.data.sources import Options

from .helpers import random_pixels


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    genuine = builtins.__import__

    def without(name, *rest):
        if name == "datasets":
            raise ModuleNotFoundError("No module named 'datasets'", name="datasets")
        return genuine(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'dpbam\[hf\]'"):
        load("hf:anything")


def encoded(seed: int, size: tuple[int, int] = (8, 8), form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(random_pixels(size[0], seed, size[1:])).save(buffer, format=form)
    return buffer.getvalue()


@pytest.fixture
def datasets(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when it is first imported, or before this test
    library = pytest.importorskip("datasets", reason="no datasets: pip install 'dpbam[hf]'")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    library.disable_progress_bars()
    return library


def parquet(datasets, path, n=20, *, typed=True, seed=0, **changes) -> str:
    """n rows of an image, a label, a patient and an age."""
    rows = {
        "image": [{"bytes": encoded(seed + k), "path": None} for k in range(n)],
        "label": [k % 2 for k in range(n)],
        "patient": [f"p{k // 2}" for k in range(n)],
        "age": list(range(n)),
    } | changes
    made = datasets.Dataset.from_dict(rows)
    if typed:
        made = made.cast_column("image", datasets.Image())
        made = made.cast_column("label", datasets.ClassLabel(names=["ill", "well"]))
    made.to_parquet(str(path))
    return f"hf:{path}"


@pytest.mark.parametrize("typed", [True, False])
def test_one_parquet_file(datasets, tmp_path, typed):
    spec = parquet(datasets, tmp_path / "x.parquet", typed=typed)
    everything = load(spec, split="all")
    assert (len(everything), everything.shape) == (20, (1, 8, 8))
    assert everything.class_names == (("ill", "well") if typed else ("0", "1"))
    assert everything.labels.tolist() == [0, 1] * 10
    expected = np.stack([random_pixels(8, k, (8,)) for k in range(20)])
    assert np.array_equal(everything.images.read(np.arange(20))[:, 0], expected)
    assert everything.columns["age"].tolist() == list(range(20))
    train, test = load_pair(spec, unit="patient")
    assert len(train) + len(test) == 20
    assert not set(train.columns["patient"]) & set(test.columns["patient"])
    assert check(train, test, unit="patient") == []


def test_a_folder_of_parquet_files(datasets, tmp_path):
    for k, split in enumerate(("train-00000", "train-00001", "test", "validation")):
        parquet(datasets, tmp_path / f"{split}.parquet", 6, seed=100 * k)
    train, test = load_pair(f"hf:{tmp_path}")
    assert (len(train), len(test), len(load(f"hf:{tmp_path}", split="val"))) == (12, 6, 6)
    assert train.fingerprint() == load(f"hf:{tmp_path}").fingerprint()
    assert np.array_equal(test.images.read(np.array([2]))[0, 0], random_pixels(8, 202, (8,)))


def test_a_broken_row_is_named(datasets, tmp_path):
    images = [{"bytes": encoded(k), "path": None} for k in range(50)]
    images[33]["bytes"] = images[33]["bytes"][:60]
    spec = parquet(datasets, tmp_path / "x.parquet", 50, image=images)
    data = load(spec, split="all")
    with pytest.raises(DataError, match=r"row 33 of hf:.*x\.parquet/train cannot be read"):
        data.batch(np.arange(50))
    assert len(check(data)) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"label": ["a", "b"] * 3}, None),
        ({"label": [0, 5] * 3}, "skip 1, 2, 3, 4"),
        ({"label": [0.0, 1.0] * 3}, "could be classes or measurements"),
        ({"image": [{"bytes": b"x", "path": None}] * 6}, "row 0 of .* is not an image"),
        ({"image": [3] * 6}, "row 0 of .* has no image bytes"),
        ({"label": [0] * 6}, "one class only"),
    ],
)
def test_rows_of_another_form(datasets, tmp_path, changes, sentence):
    spec = parquet(datasets, tmp_path / "x.parquet", 6, typed=False, **changes)
    if sentence is None:
        assert load(spec).class_names == ("a", "b")
    else:
        with pytest.raises(DataError, match=sentence):
            load(spec)


def test_columns_of_another_name(datasets, tmp_path):
    datasets.Dataset.from_dict({"picture": [1], "kind": [0]}).to_parquet(
        str(tmp_path / "x.parquet")
    )
    with pytest.raises(DataError, match=r"has the columns picture, kind, but needs an image"):
        load(f"hf:{tmp_path / 'x.parquet'}")


def test_what_is_not_there(datasets, tmp_path):
    with pytest.raises(DataError, match=r"there is no file .*none\.parquet"):
        load(f"hf:{tmp_path / 'none.parquet'}")
    with pytest.raises(DataError, match=r"has no file train\*\.parquet"):
        load(f"hf:{tmp_path}")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"cannot load hf:.*x\.parquet"):
        load(f"hf:{tmp_path / 'x.parquet'}")


def test_a_name_that_cannot_be_had(datasets):
    with pytest.raises(DataError, match=r"cannot load hf:no-such/set .* give their folder"):
        load("hf:no-such/set")
    with pytest.raises(DataError, match=r"not a local file or folder, and downloads are"):
        load("hf:no-such/set", download=False)


def test_every_problem_of_a_set_is_listed(datasets, tmp_path):
    images = [{"bytes": encoded(k, (8, 8) if k != 2 else (9, 9)), "path": None} for k in range(6)]
    images[4] = {"bytes": b"no", "path": None}
    spec = parquet(
        datasets, tmp_path / "x.parquet", 6, typed=False, image=images,
        label=[0.5, 1.5, float("nan"), 2.0, 3.0, float("nan")],
    )  # fmt: skip
    findings, parts = inspect(spec, Options(root=tmp_path, download=False, unit="patient"))
    problems = findings.problems + check(parts["train"], parts.get("test"), unit="patient")
    assert findings.sizes == {(8, 8): 4, (9, 9): 1}
    for words in ("record 2 has nan", "record 5 has nan", "differ in size (8x8: row 0 of",
                  "row 4 of"):  # fmt: skip
        assert sum(words in problem for problem in problems) == 1, problems
    assert len(problems) == 4, problems
