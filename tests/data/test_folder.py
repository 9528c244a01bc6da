from __future__ import annotations

import os
import re

import numpy as np
import pytest

from dpbam.data import DataError, check, load, load_pair
from dpbam.data.registry import inspect
from dpbam.data.sources import Options

from .helpers import write_image


def tree(root, layout: dict[str, int], **options) -> str:
    """Write ``count`` images into each folder; no two are alike."""
    for k, (folder, count) in enumerate(layout.items()):
        for i in range(count):
            write_image(root / folder / f"{i}.png", seed=100 * k + i, **options)
    return str(root)


def test_splits_as_they_are(tmp_path):
    layout = {"train/cat": 3, "train/dog": 4, "test/cat": 2, "test/dog": 1, "val/dog": 1}
    spec = tree(tmp_path / "pets", layout)
    train, test = load_pair(spec)
    assert (train.name, test.name) == ("pets/train", "pets/test")
    assert train.class_names == test.class_names == ("cat", "dog")
    assert train.labels.tolist() == [0] * 3 + [1] * 4
    assert test.labels.tolist() == [0, 0, 1]
    assert load(spec, split="val").labels.tolist() == [1]
    assert train.shape == (1, 8, 8)
    assert train.columns == {}


def test_val_stands_in_for_test(tmp_path):
    spec = tree(tmp_path, {"train/a": 2, "train/b": 2, "val/a": 1, "val/b": 2})
    assert len(load_pair(spec).test) == 3
    assert len(load(spec, split="test")) == 3


@pytest.mark.parametrize("top", ["", "train/"])
def test_without_a_test_folder_a_part_is_held_out(tmp_path, top):
    spec = tree(tmp_path, {f"{top}a": 10, f"{top}b": 5})
    train, test = load_pair(spec)
    assert (np.bincount(train.labels).tolist(), np.bincount(test.labels).tolist()) == (
        [8, 4],
        [2, 1],
    )
    assert load(spec).fingerprint() == train.fingerprint()
    assert load(spec, split="test").fingerprint() == test.fingerprint()
    assert len(load(spec, split="all")) == 15


def test_deeper_folders_become_columns_and_units(tmp_path):
    layout = {f"{c}/patient{p}/visit{v}": 2 for c in "ab" for p in range(5) for v in range(2)}
    spec = tree(tmp_path, layout)
    train, test = load_pair(spec, unit="folder1")
    assert set(train.columns) == {"folder1", "folder2"}
    assert not set(train.columns["folder1"]) & set(test.columns["folder1"])
    assert set(train.columns["folder2"]) == {"visit0", "visit1"}
    write_image(tmp_path / "a" / "loose.png", seed=9999)
    levels = dict(
        zip(*np.unique(load(spec, split="all").columns["folder1"], return_counts=True), strict=True)
    )
    assert levels[""] == 1


def test_a_missing_person_column_leads_to_the_folders_that_name_persons(tmp_path):
    layout = {f"{c}/patient_{p}": 2 for c in "ab" for p in range(5)}
    with pytest.raises(DataError, match="'patient': did you mean the folder level 'folder1'"):
        load_pair(tree(tmp_path / "folders", layout), unit="patient")
    with pytest.raises(DataError, match="'sex': its columns are folder1"):
        load_pair(str(tmp_path / "folders"), unit="sex")
    classes = tree(tmp_path / "classes", {f"patient_{p}": 2 for p in range(5)})
    with pytest.raises(DataError, match="'patient': name the owners in a column patient of labels"):
        load_pair(classes, unit="patient")


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    spec = tree(tmp_path, {str(k): 2 for k in range(12)})
    assert load(spec).class_names == tuple(str(k) for k in range(12))


def test_what_is_ignored_is_counted(tmp_path):
    root = tmp_path / "set"
    spec = tree(root, {"a": 5, "b": 5, ".hidden": 3})
    (root / "a" / ".DS_Store").write_bytes(b"x")
    (root / "a" / "notes.txt").write_text("x")
    (root / "Thumbs.db").write_text("x")
    write_image(root / "loose.png")
    data = load(spec, split="all")
    assert len(data) == 10
    assert data.class_names == ("a", "b")
    assert data.notes == (
        "ignored 1 hidden file",
        "ignored 2 files that are not images",
        "ignored 1 image outside a class folder",
    )


def test_a_record_is_named_by_the_path_that_the_user_gave(tmp_path, monkeypatch):
    tree(tmp_path / "set", {"a": 5, "b": 5})
    monkeypatch.chdir(tmp_path)
    data = load("set", split="all")
    assert data.images.describe(0).startswith("set/a/")
    monkeypatch.chdir("/")  # which does not change what is read
    assert data.subset(np.array([0])).images.describe(0) == data.images.describe(0)
    assert data.batch(np.array([0]))[0].shape[0] == 1


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    write_image(tmp_path / "secret" / "x.png", seed=999)
    root = tmp_path / "set"
    spec = tree(root, {"a": 5, "b": 5})
    (root / "a" / "link.png").symlink_to(tmp_path / "secret" / "x.png")
    (root / "c").symlink_to(tmp_path / "secret")
    (root / "a" / "loop").symlink_to(root)
    data = load(spec, split="all")
    assert data.class_names == ("a", "b")
    assert len(data) == 10
    assert data.notes == ("ignored 3 links to folders or out of the folder",)


def test_an_empty_class_is_a_class_and_a_problem(tmp_path):
    spec = tree(tmp_path, {"a": 5, "b": 5})
    (tmp_path / "never").mkdir()
    train, test = load_pair(spec)
    assert train.class_names == ("a", "b", "never")
    assert check(train, test) == [f"{train.name} has no images of 1 class: 'never'"]


def test_no_images(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=r"there are no images in .*: looked for .*\.png"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("layout", "options", "lack", "way_out"),
    [
        ({"flat": 3}, {}, "no class folders", "move each into a folder of its class (CLASS/x.png)"),
        ({"flat": 2, "flat/.a": 1, "flat/.b": 1}, {}, "no class folders", "file and label"),
        ({"flat/train": 2}, {}, "no class folders", "(train/CLASS/x.png)"),
        ({"flat/train": 2, "flat/other/a": 1}, {}, "no class folders", "(train/CLASS/x.png)"),
        ({"flat": 3}, {"task": "segmentation"}, "no folders images and masks", "file and mask"),
    ],
)
def test_images_without_labels_are_counted_and_a_way_out_is_named(
    tmp_path, monkeypatch, layout, options, lack, way_out
):
    tree(tmp_path, layout)
    monkeypatch.chdir(tmp_path)
    seen = sum(count for folder, count in layout.items() if "/." not in folder)
    with pytest.raises(DataError) as error:
        load("flat", **options)
    sentence = str(error.value)
    assert sentence.startswith(f"flat has {seen} images, but {lack} and no labels.csv: move ")
    assert way_out in sentence
    assert inspect("flat", Options(**options))[0].problems == [sentence]


def test_class_folders_without_images_are_not_called_missing(tmp_path):
    spec = tree(tmp_path, {"": 3})
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match=r"has 3 images, but none in its class folders and no lab"):
        load(spec)


def test_one_class(tmp_path):
    with pytest.raises(DataError, match=r"one class only, 'a'"):
        load(tree(tmp_path, {"a": 5}))


def test_nothing_to_train_on(tmp_path):
    spec = tree(tmp_path, {"test/a": 2, "test/b": 2})
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"has test images but none to train on"):
        load(spec)


def test_one_format_for_all_splits(tmp_path):
    spec = tree(tmp_path, {"train/a": 3, "train/b": 3, "test/a": 1})
    write_image(tmp_path / "test" / "b" / "0.png", mode="RGB")
    train, test = load_pair(spec)
    assert train.shape == test.shape == (3, 8, 8)
    assert load(spec, channels=1).shape == (1, 8, 8)


def test_sizes_that_differ(tmp_path):
    spec = tree(tmp_path, {"a": 5, "b": 5})
    write_image(tmp_path / "b" / "wide.png", size=(16, 8), seed=999)
    with pytest.raises(DataError, match=r"differ in size .*--image-size"):
        load(spec)
    assert load(spec, image_size=6).shape == (1, 6, 6)
    assert load(spec, image_size=(4, 6)).shape == (1, 4, 6)


def test_a_broken_image_is_named_when_read_and_when_checked(tmp_path):
    spec = tree(tmp_path, {"a": 40, "b": 40})
    (tmp_path / "b" / "7.png").write_bytes((tmp_path / "b" / "7.png").read_bytes()[:60])
    (tmp_path / "b" / "9.png").write_bytes((tmp_path / "b" / "9.png").read_bytes()[:60])
    data = load(spec, split="all")
    with pytest.raises(DataError, match=rf"{tmp_path}/b/[79]\.png cannot be read"):
        data.batch(np.arange(80))
    problems = check(data)
    assert len(problems) == 2
    assert f"{tmp_path}/b/7.png cannot be read" in problems[0]
    assert f"{tmp_path}/b/9.png cannot be read" in problems[1]


def test_the_fingerprint_notices_a_replaced_file(tmp_path):
    spec = tree(tmp_path, {"a": 200, "b": 200})
    before = load(spec, split="all").fingerprint()
    assert load(spec, split="all").fingerprint() == before
    write_image(tmp_path / "a" / "3.png", mode="RGB", seed=77)
    assert load(spec, split="all", channels=1).fingerprint() != before


def csv_set(root, table: str) -> str:
    for k in range(12):
        write_image(root / "img" / f"{k}.png", seed=k)
    (root / "labels.csv").write_text(table)
    return str(root)


def rows(**extra) -> str:
    """Twelve rows of six patients, two classes."""
    lines = ["file,label,patient,sex"]
    lines += [
        f"img/{k}.png,{'ill' if k < 6 else 'well'},p{k // 2},{'mf'[k % 2]}" for k in range(12)
    ]
    return "\n".join(lines) + "\n"


def test_labels_csv(tmp_path):
    spec = csv_set(tmp_path, "\ufeff" + rows())  # as spreadsheets write it
    train, test = load_pair(spec, unit="patient")
    assert train.class_names == ("ill", "well")
    assert set(train.columns) == {"patient", "sex", "folder1"}
    assert len(train) == 8
    assert not set(train.columns["patient"]) & set(test.columns["patient"])
    everything = load(spec, split="all")
    assert everything.columns["patient"].tolist() == [f"p{k // 2}" for k in range(12)]
    assert everything.notes == ()


def test_space_in_labels_csv_makes_no_other_patient(tmp_path):
    found = load(csv_set(tmp_path, rows().replace("p1,", "p1 ,", 1)), split="all")
    assert found.columns["patient"].tolist() == [f"p{k // 2}" for k in range(12)]


@pytest.mark.parametrize(
    "header",
    ["path,class,subject,sex", "Image,Target,Patient ID,sex", "filename,finding,patient-id,sex",
     "Image Index,Finding Labels,Subject_ID,sex"],
)  # fmt: skip
def test_labels_csv_with_other_names(tmp_path, header):
    spec = csv_set(tmp_path, rows().replace("file,label,patient,sex", header))
    data = load(spec, split="all")
    assert data.class_names == ("ill", "well")
    assert data.columns["patient"].tolist() == [f"p{k // 2}" for k in range(12)]
    given = header.split(",")
    assert data.notes == (
        f"labels.csv: reading the column {given[0]!r} as file, {given[1]!r} as label, "
        f"{given[2]!r} as patient",
    )


def test_the_name_itself_wins_over_a_synonym(tmp_path):
    lines = [f"{line},{'x' if k else 'class'}" for k, line in enumerate(rows().splitlines())]
    data = load(csv_set(tmp_path, "\n".join(lines)), split="all")
    assert data.class_names == ("ill", "well")
    assert set(data.columns["class"]) == {"x"}


def test_labels_csv_with_splits(tmp_path):
    lines = rows().splitlines()
    table = "\n".join(
        [lines[0] + ",split"]
        + [f"{line},{'test' if k % 3 == 0 else 'train'}" for k, line in enumerate(lines[1:])]
    )
    train, test = load_pair(csv_set(tmp_path, table))
    assert (len(train), len(test)) == (8, 4)
    assert "split" not in train.columns


def test_labels_csv_over_split_folders(tmp_path):
    tree(tmp_path, {"train/x": 4, "test/x": 2})
    table = ["file,label"]
    table += [
        f"{s}/x/{k}.png,{'ab'[k % 2]}" for s, n in (("train", 4), ("test", 2)) for k in range(n)
    ]
    (tmp_path / "labels.csv").write_text("\n".join(table))
    train, test = load_pair(str(tmp_path))
    assert (len(train), len(test)) == (4, 2)
    assert train.columns["folder1"].tolist() == ["x"] * 4


def test_images_that_labels_csv_does_not_list_are_counted(tmp_path):
    table = "\n".join(rows().splitlines()[:-2])
    data = load(csv_set(tmp_path, table), split="all")
    assert data.notes == ("ignored 2 images that labels.csv does not list",)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("img/99.png,ill,p,m", r"line 14 of .*labels.csv names img/99.png, which does not exist"),
        ("../x.png,ill,p,m", "names ../x.png, which is outside the folder"),
        ("/etc/hostname,ill,p,m", "outside the folder"),
        ("img/0.png,ill,p,m", r"as img/0.png \(line 2\) and as img/0.png \(line 14\): it would"),
        ("img/1.png,,p,m", "line 14 of .* has no label"),
        (",ill,p,m", "line 14 of .* has no file"),
        ("img/1.png,ill", "line 14 of .* more or fewer values"),
        ("img/1.png,ill,p,m,x", "line 14 of .* more or fewer values"),
        ('img/1.png,"ill', "not a readable CSV"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, sentence):
    with pytest.raises(DataError, match=sentence):
        load(csv_set(tmp_path, rows() + line))


@pytest.mark.parametrize(
    "spelling",
    ["./img/0.png", "img//0.png", "img/./0.png", "img/../img/0.png", "other/../img/0.png",
     "linked.png", "img/chain.png", "hard.png", "folder/0.png"],
)  # fmt: skip
@pytest.mark.parametrize("patient", ["p0", "another"])
def test_one_file_under_two_spellings_is_not_two_records(tmp_path, spelling, patient):
    """Before, all but the first three were two records, of two patients if the table said so."""
    table = rows()
    spec = csv_set(tmp_path, table)
    (tmp_path / "other").mkdir()
    (tmp_path / "linked.png").symlink_to(tmp_path / "img" / "0.png")
    (tmp_path / "img" / "chain.png").symlink_to(tmp_path / "linked.png")
    (tmp_path / "folder").symlink_to(tmp_path / "img")
    os.link(tmp_path / "img" / "0.png", tmp_path / "hard.png")
    assert len(load(spec, split="all")) == 12  # links that are not listed do no harm
    (tmp_path / "labels.csv").write_text(f"{table}{spelling},ill,{patient},m\n")
    second = rf"{re.escape(spelling)} \(line 14\)"
    with pytest.raises(DataError, match=rf"twice, as img/0.png \(line 2\) and as {second}: it"):
        load(spec, split="all")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_to_another_image_of_a_class_folder_is_not_a_second_record(tmp_path, link):
    for k in range(4):
        write_image(tmp_path / "ab"[k % 2] / f"{k}.png", seed=k)
    assert len(load(str(tmp_path), split="all")) == 4
    link(tmp_path / "b" / "1.png", tmp_path / "a" / "again.png")
    with pytest.raises(DataError, match=r"as a/again.png and as b/1.png: it would"):
        load(str(tmp_path), split="all")


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("", "has no column 'file'.* it has nothing"),
        ("file,grade\n", "has no column 'label'.* it has file,grade"),
        ("file,label\n", r"labels\.csv lists no images: write a line for each"),
        ("path,image,label\n", "'path' and 'image', each of which could be 'file': rename"),
        ("file,class,target\n", "'class' and 'target', each of which could be 'label'"),
        ("file,label,subject,patient_id\n", "'subject' and 'patient_id'"),
        ("file,label,Split,subset\n", "'Split' and 'subset', each of which could be 'split'"),
        ("file,label,split\nimg/0.png,a,dev\n", "has split 'dev'"),
    ],
)
def test_bad_tables(tmp_path, table, sentence):
    with pytest.raises(DataError, match=sentence):
        load(csv_set(tmp_path, table))


def test_a_table_that_is_not_text(tmp_path):
    csv_set(tmp_path, "")
    (tmp_path / "labels.csv").write_bytes(b"file,label\n\xff\xfe,a\n")
    with pytest.raises(DataError, match=r"not a readable CSV file in UTF-8"):
        load(str(tmp_path))


def test_an_unlisted_split_folder(tmp_path):
    tree(tmp_path, {"train/x": 2, "other": 1})
    (tmp_path / "labels.csv").write_text("file,label\ntrain/x/0.png,a\nother/0.png,b\n")
    with pytest.raises(DataError, match=r"line 3 .* must be train, val or test"):
        load(str(tmp_path))


def test_one_pass_finds_all_problems_of_a_table_and_opens_no_image(tmp_path, monkeypatch):
    for k in range(4):
        write_image(tmp_path / f"{k}.png", seed=k)
    rows = ["0.png,a", "1.png,", "gone.png,b", "3.png,b", "../x.png,a"]
    (tmp_path / "labels.csv").write_text("file,label\n" + "\n".join(rows) + "\n")
    opened = []
    monkeypatch.setattr("dpbam.data.folder.open_image", lambda *a, **k: opened.append(a))
    with pytest.raises(DataError) as caught:
        load_pair(str(tmp_path))
    assert len(caught.value.problems) == 3
    assert "line 3 of" in caught.value.problems[0]
    assert str(caught.value).endswith(f"; 2 more problems: dpbam data check {tmp_path} lists all")
    assert not opened


@pytest.mark.parametrize("spelling", [r"img\7.png", "img/7", "7.png"])
def test_a_file_that_does_not_exist_is_named_with_the_one_that_was_meant(tmp_path, spelling):
    """The separator of Windows, no suffix, no folder."""
    spec = csv_set(tmp_path, rows().replace("img/7.png", spelling))
    sentence = f"line 9 of {tmp_path}/labels.csv names {spelling}, which does not exist: "
    with pytest.raises(DataError, match=re.escape(sentence + "did you mean img/7.png?")):
        load(spec)


def test_two_files_that_could_be_meant_are_no_hint(tmp_path):
    spec = csv_set(tmp_path, rows().replace("img/7.png", "7.png"))
    write_image(tmp_path / "other" / "7.png", seed=99)
    with pytest.raises(DataError, match=r"names 7\.png, which does not exist$"):
        load(spec)


def test_a_column_of_labels_under_another_name(tmp_path):
    spec = csv_set(tmp_path, rows().replace("file,label", "Filename,Disease"))
    sentence = r"has no column 'label': .* it has Filename,Disease,patient,sex; or name .*--label"
    with pytest.raises(DataError, match=sentence):
        load(spec)
    with pytest.raises(DataError, match=r"has no column 'disease': did you mean 'Disease'\?"):
        load(spec, label_columns=["disease"])
    assert load(spec, label_columns=["Disease"], unit="patient").class_names == ("ill", "well")


def test_classes_are_no_numbers_to_predict(tmp_path):
    spec = tree(tmp_path / "pets", {"cat": 3, "dog": 3})
    with pytest.raises(
        DataError, match=r"one folder per class \(cat, dog\), but a regression need"
    ):
        load(spec, task="regression")
    data = load(tree(tmp_path / "ages", {"30": 3, "41.5": 3}), split="all", task="regression")
    assert data.labels.tolist() == [30] * 3 + [41.5] * 3
