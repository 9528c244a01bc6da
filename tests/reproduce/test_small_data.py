"""The pocket data: halved rightly, held out without overlap, missing files named."""

from __future__ import annotations

import numpy as np
import pytest

from dpbam.data import DataError, load
from reproduce import small_data
from tests.app.cli.helpers import images


@pytest.fixture
def scans(tmp_path, monkeypatch):
    path = tmp_path / "scans.npz"
    labels = np.arange(40) % 2
    np.savez(path, train_images=images(40, 28), train_labels=labels, val_images=images(10, 28),
             val_labels=labels[:10], test_images=images(20, 28),
             test_labels=labels[:20])  # fmt: skip
    monkeypatch.setenv(small_data.PNEUMONIA, str(path))
    return path


def test_a_halved_pixel_is_the_mean_of_four():
    whole = np.random.default_rng(0).integers(0, 256, (3, 3, 8, 6), dtype=np.uint8)
    small = small_data.halved(whole)
    assert small.shape == (3, 3, 4, 3)
    assert small[2, 1, 3, 0] == round(float(whole[2, 1, 6:8, 0:2].mean()))


def test_pneumonia_is_train_and_val_against_test(scans):
    assert len(small_data.pneumonia("train")) == 50
    assert len(small_data.pneumonia("test")) == 20


def test_tuning_never_sees_the_test_set_nor_what_it_trains_on(scans):
    train, held = small_data.pneumonia_tuning("train"), small_data.pneumonia_tuning("test")
    whole = small_data.pneumonia("train")
    assert (len(train), len(held), len(whole)) == (45, 5, 50)

    def content(dataset):
        return sorted(
            pixels.tobytes() for pixels in dataset.batch(np.arange(len(dataset)))[0].numpy()
        )

    assert sorted(content(train) + content(held)) == content(whole)


def test_pneumonia_is_halved_after_it_is_split(scans):
    for split in ("train", "test"):
        for small, whole in (
            (small_data.pneumonia_14x14, small_data.pneumonia),
            (small_data.pneumonia_14x14_tuning, small_data.pneumonia_tuning),
        ):
            every = np.arange(len(whole(split)))
            (pixels, labels), (wide, same) = (d(split).batch(every) for d in (small, whole))
            assert (pixels.numpy() == small_data.halved(wide.numpy())).all()
            assert (labels == same).all()


def test_cifar_is_split_the_same_way():
    held, kept = small_data._kept(50_000, "test"), small_data._kept(50_000, "train")
    assert (len(held), len(kept)) == (5_000, 45_000)
    assert not set(held) & set(kept)


def test_a_missing_file_is_named_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv(small_data.PNEUMONIA, str(tmp_path / "nowhere.npz"))
    with pytest.raises(DataError, match=r"nowhere\.npz: get pneumoniamnist\.npz"):
        load("reproduce.small_data:pneumonia")
