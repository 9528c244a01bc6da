from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from dpbam.data import DataError, check, from_arrays, load, load_pair
from dpbam.data.checking import Units, defects, summarise
from dpbam.data.registry import inspect
from dpbam.data.sources import Options

from .helpers import random_pixels, write_image


def scans(n: int, seed: int, name: str, **options):
    return from_arrays(random_pixels(n, seed, (8, 8)), np.arange(n) % 2, name=name, **options)


def test_a_good_set_has_no_problems():
    assert check(scans(20, 0, "train"), scans(8, 1, "test")) == []


def test_one_class_only():
    data = from_arrays(random_pixels(3, 0, (8, 8)), [1, 1, 1], class_names=["a", "b"])
    assert check(data) == ["arrays has one class only, 'b': a classifier needs at least two"]


def test_empty_classes():
    data = scans(6, 0, "train", class_names=list("abcdefg"))
    assert check(data) == ["train has no images of 5 classes: 'c', 'd', 'e', ..."]


def test_images_in_both_sets():
    train = scans(20, 0, "train")
    test = from_arrays(
        np.concatenate([random_pixels(4, 1, (8, 8)), random_pixels(20, 0, (8, 8))[[7]]]),
        [0, 1, 0, 1, 0],
        name="test",
    )
    assert check(train, test) == ["1 image of test is in train too (record 7 = record 4)"]


def test_images_more_than_once():
    pixels = random_pixels(6, 0, (8, 8))
    pixels[5] = pixels[3] = pixels[1]
    data = from_arrays(pixels, np.arange(6) % 2, name="train")
    expected = "train has 1 image more than once (record 1 = record 3, record 1 = record 5)"
    assert check(data) == [expected]


def test_copies_count_where_several_units_have_them():
    pixels = random_pixels(6, 0, (8, 8))
    test = from_arrays(random_pixels(4, 1, (8, 8)), [0, 1, 0, 1])
    owners = {"who": list("abacdb")}
    assert defects(from_arrays(pixels, np.arange(6) % 2, columns=owners), test, "record") == []
    pixels[5] = pixels[1]  # both of b
    pixels[3] = pixels[2]  # of c and of a
    train = from_arrays(pixels, np.arange(6) % 2, columns=owners)
    (twice,) = defects(train, test, "record")
    assert twice.startswith("2 images occur more than once in arrays: a person")
    (twice,) = defects(train, test, "who")
    assert twice.startswith("1 image occurs more than once in arrays, under more than one who: ")
    assert defects(train, test, "who", private=False) == []
    both = defects(train, from_arrays(pixels[[0, 4]], [0, 1], name="test"), "record")
    assert both[1].startswith("2 images of test are in arrays too, so the score is too good")


def test_a_run_warns_of_what_spoils_it():
    """Images that are nearly black, and a class of which the training set has none."""
    test = from_arrays(random_pixels(4, 1, (8, 8)), [0, 1, 0, 1])
    dark = from_arrays(random_pixels(6, 0, (8, 8)) // 16, np.arange(6) % 2, name="dark",
                       class_names=["a", "b", "c"])  # fmt: skip
    black, missing = defects(dark, test, "record")
    assert black.startswith("dark has 6 images without a pixel above 31 of 255, nearly black")
    assert missing == "dark has no images of 1 class: 'c'"


def test_units_in_both_sets():
    train = scans(4, 0, "train", columns={"who": list("aabb")})
    test = scans(2, 1, "test", columns={"who": list("bc")})
    assert check(train, test, unit="who") == ["train and test share 1 value of 'who' (b)"]
    assert check(train, test) == check(train, test, unit="record") == []
    others = scans(2, 1, "test", columns={"who": list("cd")})
    assert check(train, others, unit="who") == []


def test_broken_test_images_are_found_too(tmp_path):
    for k, split in enumerate(("train", "test")):
        for i in range(4):
            write_image(tmp_path / split / "ab"[i % 2] / f"{i}.png", seed=10 * k + i)
    bad = tmp_path / "test" / "b" / "3.png"
    bad.write_bytes(bad.read_bytes()[:70])
    problems = check(*load_pair(str(tmp_path)))
    assert len(problems) == 1
    assert str(bad) in problems[0]


def test_patients_in_both_sets_are_found_whatever_the_unit_is():
    train = scans(4, 0, "train", columns={"patient": ["a", "a", "b", ""]})
    test = scans(2, 1, "test", columns={"patient": ["b", ""]})
    assert check(train, test) == ["train and test share 1 value of 'patient' (b)"]


def test_records_without_a_unit_of_privacy():
    train = scans(4, 0, "train", columns={"who": ["a", "", "b", ""]})
    (problem,) = check(train, unit="who")
    assert problem.startswith("2 of 4 records have no who, record 1 first")


def test_nearly_black_images_are_named():
    dark = from_arrays(random_pixels(6, 0, (8, 8)) // 16, np.arange(6) % 2, name="dark")
    (problem,) = check(dark)
    assert problem.startswith("dark has 6 images without a pixel above 31 of 255, nearly black")


def test_each_image_is_looked_at_not_the_brightest_of_all():
    pixels = random_pixels(6, 0, (8, 8))
    pixels[4] //= 16
    pixels[1] = 0
    (problem,) = check(from_arrays(pixels, np.arange(6) % 2, name="dark"))
    assert problem.startswith("dark has 2 images without a pixel above 31 of 255")
    assert problem.endswith("(record 1, record 4)")


def deep_folder(folder, largest, bright=0):
    """Six images of 16 bits up to ``largest``, and ``bright`` ones of the full range."""
    for k in range(6 + bright):
        high = largest if k < 6 else 2**16 - 1
        values = np.random.default_rng(k).integers(0, high + 1, (8, 8), dtype=np.uint16)
        values[0, 0] = high
        place = folder / "ab"[k % 2]
        place.mkdir(exist_ok=True)
        Image.fromarray(values).save(place / f"{k}.png")
    return load(str(folder), split="all")


@pytest.mark.parametrize(("bits", "bright"), [(12, 0), (12, 4), (10, 4), (14, 0)])
def test_files_of_16_bits_that_use_fewer(tmp_path, bits, bright):
    (problem,) = check(deep_folder(tmp_path, 2**bits - 1, bright))
    assert f"has 6 images of 16 bits with only {bits} in use" in problem
    assert f"too dark by a factor of {2 ** (16 - bits)}: multiply the values by it" in problem
    assert "a/0.png" in problem
    assert "6.png" not in problem


@pytest.mark.parametrize(("bits", "bright"), [(16, 0), (14, 4)])
def test_files_of_16_bits_that_use_them(tmp_path, bits, bright):
    assert check(deep_folder(tmp_path, 2**bits - 1, bright)) == []


def test_multiplied_as_advised_they_are_no_problem(tmp_path):
    problem = check(deep_folder(tmp_path, 4095))[0]
    factor = int(re.findall(r"a factor of (\d+)", problem)[0])
    for path in tmp_path.rglob("*.png"):
        Image.fromarray(np.asarray(Image.open(path)) * np.uint16(factor)).save(path)
    assert check(load(str(tmp_path), split="all")) == []


def test_a_record_without_an_owner_is_named_by_its_line(tmp_path):
    """As an editor counts: the header, an empty line and a value of two lines included."""
    for k in range(6):
        write_image(tmp_path / f"{k}.png", seed=k)
    rows = ["file,label,who,note", "0.png,a,ann,x", "", '1.png,b,ann,"two', 'lines"',
            "2.png,a,bob,",
            '3.png,b,,"two', 'lines"', "4.png,a,,", "5.png,b,cid,"]  # fmt: skip
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    data = load(str(tmp_path), split="all", unit="who")
    (problem,) = check(data, unit="who")
    assert problem.startswith("2 of 6 records have no who, line 7 of labels.csv first")
    assert rows[7 - 1].startswith("3.png")
    assert [data.place(k) for k in (0, 5)] == ["line 2 of labels.csv", "line 10 of labels.csv"]


def test_many_broken_images_are_summed_up(tmp_path):
    for k in range(50):
        write_image(tmp_path / "train" / "ab"[k % 2] / f"{k}.png", seed=k)
    write_image(tmp_path / "test" / "a" / "0.png", seed=99)
    for k in range(2, 32):
        path = tmp_path / "train" / "ab"[k % 2] / f"{k}.png"
        path.write_bytes(path.read_bytes()[:70])
    findings, parts = inspect(str(tmp_path), Options())
    assert findings.problems == []
    problems = check(parts["train"])
    assert sum("may be damaged" in problem for problem in problems) == 20
    assert problems[20].endswith("has 10 more images that cannot be read")


def broken_set(tmp_path):
    """A folder with a problem of every kind that does not keep it from being read."""
    for k in range(12):
        write_image(tmp_path / f"{k}.png", seed=k, size=(8, 8) if k != 5 else (9, 9))
    (tmp_path / "3.png").write_bytes(b"\x89PNG")
    lines = [f"{k}.png,{'ab'[k % 2]},p{k // 4},{'test' if k > 8 else 'train'}" for k in range(11)]
    lines += ["12.png,a,p9,train", "0.png,a,p0,train", "1.png,,p0,train", "2.png,a,p0,dev", "x"]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label,patient,split", *lines]))
    return str(tmp_path)


def test_every_problem_is_listed_at_once(tmp_path):
    findings, parts = inspect(broken_set(tmp_path), Options(unit="patient"))
    problems = findings.problems + check(parts["train"], parts["test"], unit="patient")
    for words in (
        "line 13 of", "line 15 of", "has split 'dev'", "line 17 of", "lists one file twice",
        "differ in size (8x8: 0.png, 9x9: 5.png)", "3.png", "share 1 value of 'patient' (p2)",
    ):  # fmt: skip
        assert sum(words in problem for problem in problems) == 1, (words, problems)
    with pytest.raises(DataError, match="line 13 of"):
        load_pair(broken_set(tmp_path))


def test_a_summary_of_a_set(tmp_path):
    findings, parts = inspect(broken_set(tmp_path), Options(unit="patient"))
    contents = summarise(parts, findings, "patient")
    assert contents.images == {"train": 10, "test": 2}
    assert contents.sizes == {"8x8": 10, "9x9": 1}
    assert contents.classes == {"a": {"train": 6, "test": 1}, "b": {"train": 4, "test": 1}}
    assert contents.columns == {"patient": 3}
    assert contents.units == Units("patient", {"train": 3, "test": 1}, 3, 5)
    assert contents.notes == ["ignored 1 image that labels.csv does not list"]


def test_labels_that_cannot_be_read_do_not_hide_the_images(tmp_path):
    for k in range(4):
        write_image(tmp_path / f"{k}.png", seed=k)
    (tmp_path / "3.png").write_bytes(b"\x89PNG")
    (tmp_path / "labels.csv").write_text("file,label\n0.png,1\n1.png,x\n2.png,2\n3.png,0.5\n")
    findings, parts = inspect(str(tmp_path), Options(task="regression"))
    problems = findings.problems + check(parts["train"], parts.get("test"))
    assert sum("which is not a number" in p for p in problems) == 1
    assert sum("3.png" in p for p in problems) == 1


def listed(spec, **options):
    """What ``dpbam data check`` lists, and the splits that could be read."""
    findings, parts = inspect(str(spec), Options(**options))
    first, *other = parts.values()
    return findings.problems + check(first, *other, unit=options.get("unit")), parts


def every(words, problems):
    """Each of the words is in exactly one problem, and there are no others."""
    for one in words:
        assert sum(one in problem for problem in problems) == 1, (one, problems)
    assert len(problems) == len(words), problems


def test_every_problem_of_an_npz_file_is_listed(tmp_path):
    images, labels = random_pixels(8, 0, (8, 8)), np.array([0, 1, 2, 3, 0, 0, 1, 1]).reshape(4, 2)
    images[3] = images[1]
    path = tmp_path / "x.npz"
    np.savez(
        path, train_images=images[:4], train_labels=labels, test_images=images[4:],
        test_labels=labels - 1, val_images=images, train_age=np.zeros((4, 2)),
        train_patient=list("abcd"), test_patient=list("dxyz"), stray=images,
    )  # fmt: skip
    problems, parts = listed(path, task="multi-label")
    every(
        ["has 'val_images' but not val_labels", "x.npz/train: record 1 has 2 for finding 0",
         "x.npz/train: record 1 has 3 for finding 1", "x.npz/test: record 0 has -1",
         "x.npz/test: record 2 has -1 for finding 0", "x.npz/test: record 2 has -1 for finding 1",
         "x.npz/test: record 1 has 2 for finding 1", "column train_age of",
         "has 1 image more than once", "share 1 value of 'patient' (d)",
         "has the column 'patient', which says whose each record is"], problems,
    )  # fmt: skip
    assert {name: len(part) for name, part in parts.items()} == {"train": 4, "test": 4}
    assert parts["train"].notes == ("ignored the arrays stray",)
    with pytest.raises(DataError, match="val_images"):  # a run is told the first
        load_pair(str(path))


def test_arrays_of_the_wrong_kind_hide_neither_each_other_nor_the_other_split(tmp_path):
    images = random_pixels(6, 0, (8, 8))
    np.savez(tmp_path / "x.npz", train_images=images / 255, train_labels=np.arange(6) % 2,
             test_images=images, test_labels=np.zeros(5, int), test_age=np.arange(3))  # fmt: skip
    findings, parts = inspect(str(tmp_path / "x.npz"), Options())
    every(["train are float64", "6 images but 5 labels", "column 'age' must have 6 values"],
          findings.problems)  # fmt: skip
    assert not parts


def test_every_mask_that_cannot_be_used_is_listed(tmp_path):
    for k in range(6):
        write_image(tmp_path / "images" / f"{k}.png", seed=k)
        write_image(tmp_path / "masks" / f"{k}.png", seed=k, size=(8, 8) if k else (4, 4))
    (tmp_path / "masks" / "1.png").write_bytes(b"no")
    (tmp_path / "masks" / "2.png").unlink()
    (tmp_path / "images" / "3.png").write_bytes(b"no")
    problems, parts = listed(tmp_path)
    every(["masks/0.png is 4x4", "masks/1.png is not an image", "2.png has no mask",
           "images/3.png is not an image"], problems)  # fmt: skip
    assert sum(map(len, parts.values())) == 5


def test_a_table_without_its_columns_does_not_hide_the_images(tmp_path):
    for k in range(4):
        write_image(tmp_path / f"{k}.png", seed=k)
    (tmp_path / "3.png").write_bytes(b"no")
    (tmp_path / "labels.csv").write_text("name,age\n0.png,3\n")
    problems, parts = listed(tmp_path)
    every(["has no column 'file' and no column 'label'", "3.png is not an image"], problems)
    assert sum(map(len, parts.values())) == 4
    assert summarise(parts, inspect(str(tmp_path), Options())[0], None).task is None


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", "labels.csv lists no images: write a line"),
        ("9.png,a\n", "9.png, which does not exist"),
    ],
)
def test_a_table_of_no_image_is_a_problem_and_all_images_are_checked(tmp_path, rows, words):
    for k in range(4):
        write_image(tmp_path / f"{k}.png", seed=k)
    (tmp_path / "labels.csv").write_text(f"file,label\n{rows}")
    findings, parts = inspect(str(tmp_path), Options())
    every([words], findings.problems)
    assert summarise(parts, findings, None).images == {"train": 4}
    assert findings.notes == []  # no image is ignored


def test_a_row_that_ends_the_table_does_not_hide_those_before_it(tmp_path):
    for k in range(4):
        write_image(tmp_path / f"{k}.png", seed=k)
    rows = "0.png,a\n9.png,b\n1.png,b\n2.png,a\n3.png,b\n"
    (tmp_path / "labels.csv").write_text(f'file,label\n{rows}"4.png')
    problems, parts = listed(tmp_path)
    every(["names 9.png, which does not exist", "is not a readable CSV file"], problems)
    assert sum(map(len, parts.values())) == 4


def test_every_problem_of_a_function_is_listed(tmp_path, monkeypatch):
    code = (
        "import numpy as np\n"
        "def data(split):\n"
        "    return np.zeros((4, 8, 8)), np.array([0.5, np.nan, 1, 2]), {'who': np.zeros((4, 2))}\n"
    )
    (tmp_path / "checked_set.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    findings, _ = inspect("checked_set:data", Options())
    every(["data/train: record 1", "data/test: record 1", "data/train are float64",
           "data/test are float64"], findings.problems)  # fmt: skip


def test_values_that_are_all_alike():
    data = from_arrays(random_pixels(3, 0, (8, 8)), [0.5, 0.5, 0.5], task="regression")
    assert check(data) == ["all labels of arrays are 0.5: nothing to learn"]


def test_a_unit_that_is_no_column_does_not_hide_the_rest(tmp_path):
    for k in range(6):
        write_image(tmp_path / "ab"[k % 2] / f"{k}.png", seed=k)
    findings, parts = inspect(str(tmp_path), Options(unit="patient"))
    assert len(findings.problems) == 1
    assert "no column 'patient'" in findings.problems[0]
    assert len(parts["train"]) == 6


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
@pytest.mark.parametrize("long", [0, 20_000])  # so that lines before the first error are read
def test_a_table_in_another_encoding_is_one_sentence_without_counts(tmp_path, encoding, long):
    for k in range(4):
        write_image(tmp_path / f"{k}.png", seed=k)
    remark = "x" * long
    table = f"file,label,remark\n0.png,a,{remark}\n2.png,a,{remark}\n1.png,größer,\n"
    (tmp_path / "labels.csv").write_bytes(table.encode(encoding))
    findings, parts = inspect(str(tmp_path), Options())
    every(["is not a readable CSV file in UTF-8"], findings.problems)
    assert findings.problems[0].endswith("save it as UTF-8")
    assert sum(map(len, parts.values())) == 4
    assert findings.notes == []
    assert summarise(parts, findings, None) is None


def test_a_table_that_cannot_be_read_is_not_blamed_for_the_columns_it_has(tmp_path):
    for k in range(4):
        write_image(tmp_path / f"{k}.png", seed=k)
    (tmp_path / "labels.csv").write_text("file,age,patient\n0.png,3,p\n")
    problems, _ = listed(tmp_path, unit="patient", label_columns=("ages",))
    every(["has no column 'ages': did you mean 'age'?"], problems)


def test_a_class_that_is_a_misspelt_other_one(tmp_path):
    for k in range(50):
        write_image(tmp_path / f"{k}.png", seed=k)
    lines = [f"{k}.png,{'wel' if k == 7 else ['ill', 'well'][k % 2]}" for k in range(50)]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *lines]))
    data = load(str(tmp_path), split="all")
    assert check(data) == [
        f"{data.name} has 1 image of the class 'wel' (line 9 of labels.csv) and 24 of 'well': "
        "correct the name if it is misspelt"
    ]
    others = from_arrays(data.images.read(np.arange(50)), [11] * 25 + [12] + [13] * 24,
                         class_names=[str(k) for k in range(14)], name="n")  # fmt: skip
    assert check(others) == [
        "n has no images of 11 classes: '0', '1', '2', ..."
    ]  # numbers are alike


def test_a_run_reports_as_many_problems_of_a_table_as_the_check(tmp_path):
    for k in range(6):
        write_image(tmp_path / f"{k}.png", seed=k)
    (tmp_path / "labels.csv").write_text(
        "file,age\n0.png,1\n1.png,\n2.png,nan\n3.png,unknown\n4.png,2.5\n5.png,3\n"
    )
    options = {"label_columns": ("age",), "task": "regression"}
    with pytest.raises(DataError) as error:
        load_pair(str(tmp_path), **options)
    every(["line 3 of", "line 4 of labels.csv has 'nan'", "line 5 of labels.csv has 'unknown'"],
          error.value.problems)  # fmt: skip
    assert "has no age: fill it in, or leave the line out; 2 more problems" in str(error.value)
    assert inspect(str(tmp_path), Options(**options))[0].problems == list(error.value.problems)


def test_every_path_is_printed_as_the_user_gave_it(tmp_path, monkeypatch):
    broken_set(tmp_path / "scans")
    monkeypatch.chdir(tmp_path)
    problems, _ = listed("scans", unit="patient")
    assert not [problem for problem in problems if str(tmp_path) in problem]
    for words in (
        "line 13 of scans/labels.csv", "scans/labels.csv lists one file twice",
        "images of scans differ in size", "scans/3.png is not an image",
    ):  # fmt: skip
        assert sum(words in problem for problem in problems) == 1, (words, problems)
    with pytest.raises(DataError, match=r"^line 13 of scans/labels\.csv"):
        load("scans")


def test_a_folder_of_masks_and_the_current_folder_keep_their_spelling(tmp_path, monkeypatch):
    for k in range(3):
        write_image(tmp_path / "images" / f"{k}.png", seed=k)
        write_image(tmp_path / "masks" / f"{k}.png", seed=k, size=(8, 8) if k else (4, 4))
    (tmp_path / "masks" / "1.png").write_bytes(b"no")
    (tmp_path / "masks" / "2.png").unlink()
    monkeypatch.chdir(tmp_path)
    problems, parts = listed(".")
    every(["the mask masks/0.png is 4x4", "masks/1.png is not an image",
           "images/2.png has no mask masks/2.png"], problems)  # fmt: skip
    assert parts["train"].name == f"{tmp_path.name}/train"
