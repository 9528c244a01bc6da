"""Masks of a segmentation, from folders, tables and arrays."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dpbam.data import DataError, check, from_arrays, load, load_pair
from tests.data.helpers import random_pixels, write_image

IMAGES = random_pixels(10, 0, (8, 6))
MASKS = random_pixels(10, 1, (8, 6)) % 3


def write_masks(folder, count=10, suffix=".png", **image):
    """``images/K.png`` and ``masks/K.png``; returns the masks."""
    (folder / "masks").mkdir(parents=True)
    for k in range(count):
        write_image(folder / "images" / f"{k}.png", size=(6, 8), seed=k)
        Image.fromarray(MASKS[k], **image).save(folder / "masks" / f"{k}{suffix}")
    return folder


def test_arrays_of_masks_are_a_segmentation():
    data = from_arrays(IMAGES, MASKS)
    assert (data.task, data.num_classes, data.shape) == ("segmentation", 3, (1, 8, 6))
    _, masks = data.batch(np.array([3, 1]))
    assert masks.shape == (2, 8, 6)
    assert np.array_equal(masks.numpy(), MASKS[[3, 1]])
    shares = data.class_shares()
    assert np.allclose(shares.sum(1), 1)
    assert np.isclose(shares[4, 2], (MASKS[4] == 2).mean())


def test_a_subset_keeps_its_masks_and_another_mask_another_fingerprint():
    data, changed = from_arrays(IMAGES, MASKS), MASKS.copy()
    part = data.subset(np.array([7, 2]))
    assert np.array_equal(part.batch(np.array([0]))[1][0].numpy(), MASKS[7])
    changed[0, 0, 0] = (changed[0, 0, 0] + 1) % 3
    assert data.fingerprint() != from_arrays(IMAGES, changed).fingerprint()


def test_masks_of_0_and_255_have_two_classes():
    data = from_arrays(IMAGES, np.where(MASKS > 0, 255, 0).astype(np.uint8))
    assert data.class_names == ("background", "foreground")
    assert np.array_equal(data.batch(np.array([0]))[1][0].numpy(), MASKS[0] > 0)


def test_npz_masks_with_names(tmp_path):
    np.savez(tmp_path / "x.npz", train_images=IMAGES, train_masks=MASKS, test_images=IMAGES[:4],
             test_masks=MASKS[:4], class_names=["back", "disc", "cup"], train_patient=range(10),
             train_labels=np.arange(10) % 2)  # fmt: skip
    train, test = load_pair(str(tmp_path / "x.npz"))
    assert (train.task, train.class_names, len(test)) == (
        "segmentation",
        ("back", "disc", "cup"),
        4,
    )
    assert set(train.columns) == {"patient"}


@pytest.mark.parametrize("layout", [".", "train"])
def test_folders_of_images_and_masks(tmp_path, layout):
    write_masks(tmp_path / layout)
    (tmp_path / "classes.txt").write_text("back\ndisc\ncup\n")
    if layout == "train":
        write_masks(tmp_path / "test", 3)
    train, test = load_pair(str(tmp_path))
    assert (train.task, train.class_names) == ("segmentation", ("back", "disc", "cup"))
    assert (len(train), len(test)) == ((10, 3) if layout == "train" else (8, 2))
    assert check(train, None) == []


def test_palette_masks_are_read_by_index_and_resized_to_the_nearest(tmp_path):
    write_masks(tmp_path)
    for k in range(10):
        image = Image.fromarray(MASKS[k], mode="P")
        image.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0])
        image.save(tmp_path / "masks" / f"{k}.png")
    data = load(str(tmp_path), split="all", image_size=(16, 12))
    mask = data.batch(np.array([0]))[1][0].numpy()
    assert np.array_equal(mask[::2, ::2], MASKS[0])


def test_a_table_names_masks_and_patients(tmp_path):
    write_masks(tmp_path)
    lines = "".join(f"images/{k}.png,masks/{k}.png,p{k // 2}\n" for k in range(10))
    (tmp_path / "labels.csv").write_text("file,mask,patient\n" + lines)
    data = load(str(tmp_path), split="all")
    assert data.task == "segmentation"
    assert data.columns["patient"].tolist() == [f"p{k // 2}" for k in range(10)]
    assert data.notes == ()


def test_a_missing_mask_is_named(tmp_path):
    write_masks(tmp_path)
    (tmp_path / "masks" / "3.png").unlink()
    with pytest.raises(DataError, match=r"images/3.png has no mask .*masks/3.png"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (Image.new("RGB", (6, 8)), "mode RGB: save class numbers as a grey or palette PNG"),
        (Image.new("L", (4, 8)), "is 8x4, its image 8x6"),
        (Image.new("L", (6, 8), 9), "go up to 9 but never hold 3"),
    ],
)
def test_masks_that_are_refused(tmp_path, image, sentence):
    write_masks(tmp_path)
    image.save(tmp_path / "masks" / "5.png")
    with pytest.raises(DataError, match=sentence):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("masks", "names", "sentence"),
    [
        (MASKS.astype(np.float32), None, "float32 .* must be uint8"),
        (MASKS[:, :4], None, "each image needs one mask of its own size"),
        (MASKS, ["a", "b"], "hold the value 2, but there are 2 classes"),
    ],
)
def test_arrays_of_masks_that_are_refused(masks, names, sentence):
    with pytest.raises(DataError, match=sentence):
        from_arrays(IMAGES, masks, class_names=names)


def test_masks_of_one_class_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", images=IMAGES, masks=MASKS * 0)
    with pytest.raises(DataError, match="one class only: mark another class"):
        load_pair(str(tmp_path / "x.npz"))
