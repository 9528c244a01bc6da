"""Labels of every task: what they become, and which task they can mean."""

from __future__ import annotations

import numpy as np
import pytest

from dpbam.data import DataError, from_arrays, held_out, load, load_pair
from dpbam.data.labels import number_labels
from tests.data.helpers import random_pixels, write_image

IMAGES = random_pixels(4, 0, (8, 8))


@pytest.mark.parametrize(
    ("labels", "task", "expected", "names"),
    [
        ([[1, 0], [1, 1], [0, 0], [0, 1]], None, [[1, 0], [1, 1], [0, 0], [0, 1]], ("0", "1")),
        (["a|b", "b", "No Finding", ""], None, [[1, 1], [0, 1], [0, 0], [0, 0]], ("a", "b")),
        ([[0, 1], [1, 0], [1, 0], [0, 1]], "single-label", [1, 0, 0, 1], ("0", "1")),
        ([[0, 1], [1, 0], [1, 0], [0, 1]], "multi-label", [[0, 1], [1, 0], [1, 0], [0, 1]],
         ("0", "1")),
        ([0, 1, 1, 0], "multi-label", [[0], [1], [1], [0]], ("0",)),
        ([0.5, 2.0, 3.0, -1.0], None, [0.5, 2.0, 3.0, -1.0], ("value",)),
        ([3, 1, 2, 0], "regression", [3.0, 1.0, 2.0, 0.0], ("value",)),
        (["0.5", "2", "1e1", "3"], None, [0.5, 2.0, 10.0, 3.0], ("value",)),
        ([0.0, 1.0, 1.0, 0.0], "single-label", [0, 1, 1, 0], ("0", "1")),
        (["a|b", "b", "b", "b"], "single-label", [0, 1, 1, 1], ("a|b", "b")),
    ],
)  # fmt: skip
def test_labels_become_what_their_task_needs(labels, task, expected, names):
    data = from_arrays(IMAGES, labels, task=task)
    assert data.labels.tolist() == expected
    assert data.class_names == names
    assert task in (None, data.task)
    assert data.batch(np.array([1]))[1].tolist() == [expected[1]]


@pytest.mark.parametrize(
    ("labels", "task", "sentence"),
    [
        ([[1, 1], [0, 1], [0, 0], [0, 0]], "single-label", "not a single 1 among zeros"),
        ([[1, 1], [0, 1], [0, 0], [0, 0]], "regression", "2 values per record, but a regression"),
        (["a", "b", "a", "b"], "regression", "record 0 has 'a', which is not a number"),
        ([0, 1, 2, 0], "multi-label", "record 2 has 2 for finding 0"),
        ([0, 1, 1, 0], "segmentation", "segmentation needs masks"),
        ([0.5, 1.0, 2.0, 0.0], "single-label", "must be whole numbers"),
    ],
)
def test_labels_that_another_task_needs_are_refused(labels, task, sentence):
    with pytest.raises(DataError, match=sentence):
        from_arrays(IMAGES, labels, task=task)


def test_findings_of_two_splits_must_agree():
    with pytest.raises(DataError, match="2, 3 findings per record: they must agree"):
        number_labels({"a": np.ones((2, 2), int), "b": np.zeros((2, 3), int)})


def test_an_unknown_task_is_refused():
    with pytest.raises(DataError, match=r"'multilabel' is unknown: did you mean 'multi-label'"):
        load("digits", task="multilabel")


def test_held_out_findings_are_spread_over_both_parts():
    labels = np.array([[k % 4 == 0, k % 2 == 0] for k in range(80)])
    train, test = held_out(from_arrays(random_pixels(80, 1, (4, 4)), labels))
    assert train.labels.sum(0).tolist() == [16, 32]
    assert test.labels.sum(0).tolist() == [4, 8]


@pytest.fixture
def table(tmp_path):
    """Write a folder of images with a labels.csv of the given text."""

    def write(text: str):
        for k in range(6):
            write_image(tmp_path / f"{k}.png", seed=k)
        (tmp_path / "labels.csv").write_text(text)
        return str(tmp_path)

    return write


def test_columns_of_findings(table):
    lines = "".join(f"{k}.png,p{k},{k % 2},{int(k > 2)}\n" for k in range(6))
    folder = table("file,patient,oedema,effusion\n" + lines)
    data = load(folder, split="all", label_columns=["oedema", "effusion"])
    assert data.class_names == ("oedema", "effusion")
    assert data.labels.tolist() == [[k % 2, int(k > 2)] for k in range(6)]
    assert set(data.columns) == {"patient"}
    with pytest.raises(DataError, match="has no column 'edema'"):
        load(folder, label_columns=["edema"])


def test_one_column_of_numbers_names_the_value(table):
    folder = table("file,age\n" + "".join(f"{k}.png,{20 + k}\n" for k in range(6)))
    data = load(folder, split="all", label_columns=["age"], task="regression")
    assert (data.task, data.class_names) == ("regression", ("age",))
    assert data.labels.tolist() == [20, 21, 22, 23, 24, 25]


def test_listed_findings_may_be_empty_if_the_task_is_given(table):
    folder = table("file,label\n0.png,a|b\n1.png,\n2.png,b\n3.png,a\n4.png,No Finding\n5.png,b\n")
    with pytest.raises(DataError, match=r"line 3 of .* has no label"):
        load(folder)
    data = load(folder, split="all", task="multi-label")
    assert data.labels.tolist() == [[1, 1], [0, 0], [0, 1], [1, 0], [0, 0], [0, 1]]


def test_class_folders_stay_single_label_whatever_they_are_called(tmp_path):
    for k in range(8):
        write_image(tmp_path / ("0.5" if k % 2 else "a|b") / f"{k}.png", seed=k)
    assert load(str(tmp_path)).task == "single-label"


@pytest.mark.parametrize("labels", [np.zeros((20, 3), int), np.full(20, 0.5)])
def test_labels_that_are_all_alike_are_refused(tmp_path, labels):
    np.savez(tmp_path / "x.npz", images=random_pixels(20, 0, (8, 8)), labels=labels)
    with pytest.raises(DataError, match="nothing to learn"):
        load_pair(str(tmp_path / "x.npz"))
