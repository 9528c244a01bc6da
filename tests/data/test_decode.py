from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from dpbam.data import DataError, read_images
from dpbam.data import decode as decode_module
from dpbam.data.decode import FileImages, common_format, open_image
from dpbam.data.sources import Options

from .helpers import write_image


def files(root, names, *, size=(8, 8), channels=1, resize=False) -> FileImages:
    return FileImages(root, names, size, channels, resize)


@pytest.mark.parametrize("resize", [False, True], ids=["one by one", "in a pool of threads"])
def test_images_are_read_in_the_order_asked_for(tmp_path, monkeypatch, resize):
    monkeypatch.setattr(FileImages, "threads", 4)
    pixels = [write_image(tmp_path / f"{k}.png", seed=k) for k in range(40)]
    images = files(tmp_path, [f"{k}.png" for k in range(40)], resize=resize)
    order = np.random.default_rng(0).integers(0, 40, 60)
    assert np.array_equal(images.read(order)[:, 0], np.stack(pixels)[order])
    some = images.select(np.array([7, 3]))
    assert np.array_equal(some.read(np.array([1]))[0, 0], pixels[3])
    assert some.describe(0) == str(tmp_path / "7.png")


def test_a_small_set_is_decoded_once_and_a_large_one_each_time(tmp_path, monkeypatch):
    write_image(tmp_path / "a.png")
    images = files(tmp_path, ["a.png"])
    before = images.read(np.array([0, 0]))
    (tmp_path / "a.png").unlink()
    assert np.array_equal(images.read(np.array([0, 0])), before)
    monkeypatch.setattr(decode_module, "KEPT_BYTES", 10)
    with pytest.raises(DataError, match=r"a.png"):
        images.read(np.array([0]))


def test_a_failed_read_is_not_kept(tmp_path):
    write_image(tmp_path / "a.png", seed=1)
    (tmp_path / "b.png").write_bytes(b"broken")
    images = files(tmp_path, ["a.png", "b.png"])
    with pytest.raises(DataError, match=r"b.png"):
        images.read(np.array([0, 1]))
    expected = write_image(tmp_path / "b.png", seed=2)
    assert np.array_equal(images.read(np.array([1]))[0, 0], expected)


def test_colours_are_unified(tmp_path):
    grey = write_image(tmp_path / "grey.png", seed=1)
    rgb = write_image(tmp_path / "rgb.png", mode="RGB", seed=2)
    rgba = write_image(tmp_path / "rgba.png", mode="RGBA", seed=3)
    names = ["grey.png", "rgb.png", "rgba.png"]
    colour = files(tmp_path, names, channels=3).read(np.arange(3))
    assert np.array_equal(colour[0], np.stack([grey] * 3))
    assert np.array_equal(colour[1], rgb.transpose(2, 0, 1))
    assert np.array_equal(colour[2], rgba[..., :3].transpose(2, 0, 1))
    luma = rgb @ np.array([0.299, 0.587, 0.114])
    assert abs(files(tmp_path, names).read(np.array([1]))[0, 0] - luma).max() <= 1


def test_sizes_are_refused_or_resized(tmp_path):
    Image.fromarray(np.full((6, 10), 77, np.uint8)).save(tmp_path / "wide.png")
    with pytest.raises(DataError, match=r"wide.png is 6x10 where others are 8x8: .*--image-size"):
        files(tmp_path, ["wide.png"]).read(np.array([0]))
    got = files(tmp_path, ["wide.png"], size=(4, 5), resize=True).read(np.array([0]))
    assert got.shape == (1, 1, 4, 5)
    assert (got == 77).all()


def test_resizing_averages_rather_than_skips(tmp_path):
    stripes = np.tile(np.array([0, 255], np.uint8), (64, 32))
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    got = files(tmp_path, ["stripes.png"], resize=True).read(np.array([0]))
    assert abs(got.astype(int) - 127).max() < 10


def broken(kind: str) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format="JPEG" if kind == "half a jpeg" else "PNG")
    whole = bytearray(buffer.getvalue())
    if kind == "bad checksum":
        whole[200] ^= 255
    return {
        "empty": b"",
        "text": b"this is not an image",
        "half a png": bytes(whole[: len(whole) // 2]),
        "half a jpeg": bytes(whole[: len(whole) // 2]),
        "bad checksum": bytes(whole),
    }[kind]


@pytest.mark.parametrize("kind", ["empty", "text", "half a png", "half a jpeg", "bad checksum"])
@pytest.mark.parametrize("others", [0, 40], ids=["alone", "in a pool of threads"])
def test_a_broken_image_is_named(tmp_path, monkeypatch, kind, others):
    monkeypatch.setattr(FileImages, "threads", 4)
    write_image(tmp_path / "good.png", size=(64, 64))
    (tmp_path / "bad.png").write_bytes(broken(kind))
    names = ["good.png"] * others + ["bad.png"]
    with pytest.raises(DataError, match=rf"{tmp_path}/bad\.png .* may be damaged"):
        files(tmp_path, names, size=(64, 64), resize=True).read(np.arange(len(names)))


@pytest.mark.parametrize("factor", [1.5, 3], ids=["Pillow warns", "Pillow refuses"])
def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch, factor):
    write_image(tmp_path / "big.png", size=(64, 64))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", int(64 * 64 / factor))
    with pytest.raises(DataError, match=r"big\.png is too large .* shrink it first"):
        files(tmp_path, ["big.png"], size=(64, 64)).read(np.array([0]))


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_sixteen_bits_are_scaled_by_their_full_range(tmp_path, suffix):
    deep = np.array([[0, 128, 129, 256], [4000, 32768, 65406, 65535]], np.uint16)
    Image.fromarray(deep).save(tmp_path / f"ct.{suffix}")
    found = files(tmp_path, [f"ct.{suffix}"], size=(2, 4)).read(np.array([0]))
    assert found[0, 0].tolist() == [[0, 0, 1, 1], [16, 128, 254, 255]]  # round(255 v / 65535)
    colour = files(tmp_path, [f"ct.{suffix}"], size=(2, 4), channels=3).read(np.array([0]))
    assert np.array_equal(colour[0], np.stack([found[0, 0]] * 3))


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_thirty_two_bits_are_refused(tmp_path, kind):
    Image.fromarray(np.full((8, 8), 4000, kind)).save(tmp_path / "ct.tiff")
    with pytest.raises(DataError, match=r"ct\.tiff has 32 bits per pixel .* convert it"):
        files(tmp_path, ["ct.tiff"]).read(np.array([0]))


class Watched(decode_module.FileImages):
    """Counts the rows that are decoded at once, and all of them."""

    largest = total = 0

    def _decode(self, indices):
        Watched.largest = max(Watched.largest, len(indices))
        Watched.total += len(indices)
        return super()._decode(indices)


def test_a_set_above_the_bound_streams_and_one_below_is_decoded_once(tmp_path, monkeypatch):
    """A training of 5 steps holds the batches in use, never the set: 40 images of 64 bytes."""
    from dpbam.app.runs import RunConfig, execute

    for k in range(40):
        write_image(tmp_path / "s" / "ab"[k % 2] / f"{k}.png", seed=k)
    monkeypatch.setattr("dpbam.data.folder.FileImages", Watched)
    config = RunConfig(
        data=str(tmp_path / "s"), model="mlp", method="dp-sgd", noise_multiplier=1.0, seed=0,
        accountant="rdp", batch_size=4, epochs=1, eval_every=1,
    )  # fmt: skip
    for bound, streams in ((1000, True), (40 * 64, False)):
        monkeypatch.setattr(decode_module, "KEPT_BYTES", bound)
        monkeypatch.setattr("dpbam.data.base._CHUNK", 8 * 64)
        Watched.largest = Watched.total = 0
        execute(config, tmp_path / f"out{bound}")
        if streams:
            assert Watched.largest <= 16  # a Poisson batch of 4, a chunk of 8, the 8 test images
            assert Watched.total > 80
        else:
            assert Watched.total == 40  # each image once


def test_formats_that_run_other_programs_are_not_tried(tmp_path):
    (tmp_path / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")
    with pytest.raises(DataError, match=r"x\.png is not an image that can be read"):
        files(tmp_path, ["x.png"]).read(np.array([0]))


def test_the_common_format_of_a_set(tmp_path):
    for k in range(5):
        write_image(tmp_path / f"{k}.png", size=(10, 6))
    write_image(tmp_path / "5.png", mode="RGB", size=(10, 6))
    write_image(tmp_path / "6.png", size=(7, 6))

    def of(*names, **options):
        choices = Options(**options)
        paths = [f"{name}.png" for name in names]
        common = common_format(
            lambda k: open_image(tmp_path / paths[k]), paths.__getitem__, len(names), choices, "set"
        )
        choices.findings.stop()
        return common

    assert of(0, 1, 2) == ((6, 10), 1)
    assert of(0, 1, 5) == ((6, 10), 3)
    assert of(0, 6, image_size=(4, 4)) == ((4, 4), 1)
    assert of(0, 5, channels=1) == ((6, 10), 1)
    with pytest.raises(DataError, match=r"differ in size \(6x7: 6.png, 6x10: 0.png\): pass"):
        of(0, 6)


def test_the_manifest_has_names_and_sizes(tmp_path):
    write_image(tmp_path / "a.png")
    images = files(tmp_path, ["a.png"])
    before = images.manifest()
    assert before == f"a.png {(tmp_path / 'a.png').stat().st_size}".encode()
    write_image(tmp_path / "a.png", size=(9, 9))
    assert images.manifest() != before
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.png"):
        images.manifest()


def test_read_images_for_prediction(tmp_path, monkeypatch):
    grey = write_image(tmp_path / "a.png", size=(8, 8))
    write_image(tmp_path / "b.png", mode="RGB", size=(30, 20))
    monkeypatch.chdir(tmp_path)
    got = read_images(["a.png", tmp_path / "b.png"], (1, 8, 8))
    assert got.shape == (2, 1, 8, 8)
    assert np.array_equal(got[0, 0], grey)
    with pytest.raises(DataError, match=r"c\.png"):
        read_images(["c.png"], (1, 8, 8))
