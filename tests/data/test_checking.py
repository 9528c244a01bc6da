from __future__ import annotations

import numpy as np

from dpbam.data import check, from_arrays, load_pair

from .helpers import random_pixels, write_image


def scans(n: int, seed: int, name: str, **options):
    return from_arrays(random_pixels(n, seed, (8, 8)), np.arange(n) % 2, name=name, **options)


def test_a_good_set_has_no_problems():
    assert check(scans(20, 0, "train"), scans(8, 1, "test")) == []


def test_one_class_only():
    data = from_arrays(random_pixels(3, 0, (8, 8)), [1, 1, 1], class_names=["a", "b"])
    assert check(data) == ["arrays has one class only, 'b'"]


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
