"""DICOM files: pixels by the standard's formulas, patients as units, and what is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from dpbam.data import DataError, check, load, load_pair, read_images
from dpbam.data.registry import inspect
from dpbam.data.sources import Options

pydicom = pytest.importorskip("pydicom")

from pydicom.dataset import Dataset, FileDataset, FileMetaDataset  # noqa: E402
from pydicom.encaps import encapsulate  # noqa: E402
from pydicom.uid import (  # noqa: E402
    MPEG2MPML,
    ComputedRadiographyImageStorage,
    ExplicitVRLittleEndian,
    JPEGLSLossless,
    RLELossless,
    generate_uid,
)

SHAPE = (4, 5)


def values(seed=0, top=4095, shape=SHAPE):
    return np.random.default_rng(seed).integers(0, top + 1, shape, dtype=np.uint16)


def write(path, pixels=None, *, syntax=ExplicitVRLittleEndian, without=(), **tags):
    """A 12-bit grey file; ``tags`` override, ``without`` are left out."""
    pixels = values() if pixels is None else pixels
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = ComputedRadiographyImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[str(path)])
    data = FileDataset(str(path), Dataset(), file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID = ComputedRadiographyImageStorage
    data.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    given = {
        "PatientID": "P1", "Rows": pixels.shape[0], "Columns": pixels.shape[1],
        "SamplesPerPixel": 1, "BitsAllocated": 16, "BitsStored": 12, "HighBit": 11,
        "PixelRepresentation": 0, "PhotometricInterpretation": "MONOCHROME2", **tags,
    }  # fmt: skip
    for name, value in given.items():
        if name not in without:
            setattr(data, name, value)
    data.PixelData = pixels.tobytes()
    if syntax == RLELossless:
        data.compress(syntax)
    elif syntax != ExplicitVRLittleEndian:  # nothing that it could decode
        meta.TransferSyntaxUID = syntax
        data.PixelData = encapsulate([b"\0\0"])
        data["PixelData"].is_undefined_length = True
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)
    return path


def pixels_of(path):
    return read_images([path], (1, *SHAPE))[0, 0]


def expected(level):
    return (255 * np.clip(level, 0, 1)).round().astype(np.uint8)


def test_without_a_window_the_stored_bits_are_the_range(tmp_path):
    assert (pixels_of(write(tmp_path / "a.dcm")) == expected(values() / 4095)).all()


@pytest.mark.parametrize(
    ("function", "level"),
    [
        (None, lambda x: (x - (1000 - 0.5)) / (800 - 1) + 0.5),
        ("LINEAR", lambda x: (x - (1000 - 0.5)) / (800 - 1) + 0.5),
        ("LINEAR_EXACT", lambda x: (x - 1000) / 800 + 0.5),
        ("SIGMOID", lambda x: 1 / (1 + np.exp(-4 * (x - 1000) / 800))),
    ],
)
def test_windows_are_those_of_the_standard(tmp_path, function, level):
    tags = {"VOILUTFunction": function} if function else {}
    path = write(tmp_path / "a.dcm", WindowCenter=1000, WindowWidth=800, **tags)
    assert (pixels_of(path) == expected(level(values().astype(float)))).all()


def test_the_first_of_several_windows_is_taken(tmp_path):
    one = write(tmp_path / "a.dcm", WindowCenter=1000, WindowWidth=800)
    several = write(tmp_path / "b.dcm", WindowCenter=[1000, 50], WindowWidth=[800, 350])
    assert (pixels_of(one) == pixels_of(several)).all()


def test_the_window_applies_to_rescaled_values(tmp_path):
    tags = {"RescaleSlope": 2, "RescaleIntercept": -1024, "WindowCenter": 40, "WindowWidth": 400}
    hounsfield = 2.0 * values() - 1024
    level = (hounsfield - 39.5) / 399 + 0.5
    assert (pixels_of(write(tmp_path / "a.dcm", **tags)) == expected(level)).all()


def test_rescaled_values_without_a_window_keep_their_whole_range(tmp_path):
    path = write(tmp_path / "a.dcm", RescaleSlope=2, RescaleIntercept=-1024)
    assert (pixels_of(path) == expected(values() / 4095)).all()


def test_signed_values(tmp_path):
    signed = values().astype(np.int16) - 2048
    path = write(tmp_path / "a.dcm", signed, PixelRepresentation=1)
    assert (pixels_of(path) == expected(values() / 4095)).all()


def test_a_lookup_table_in_place_of_a_window(tmp_path):
    table = Dataset()
    table.LUTDescriptor = [4096, 0, 12]
    table.LUTData = (4095 - np.arange(4096)).astype(np.uint16).tobytes()
    path = write(tmp_path / "a.dcm", VOILUTSequence=[table])
    assert (pixels_of(path) == expected(1 - values() / 4095)).all()


def test_monochrome1_is_inverted(tmp_path):
    bright = write(tmp_path / "a.dcm")
    dark = write(tmp_path / "b.dcm", 4095 - values(), PhotometricInterpretation="MONOCHROME1")
    assert (pixels_of(bright) == pixels_of(dark)).all()


def test_colours_of_eight_bits(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (*SHAPE, 3), dtype=np.uint8)
    path = write(
        tmp_path / "a.dcm", colours, SamplesPerPixel=3, BitsAllocated=8, BitsStored=8, HighBit=7,
        PhotometricInterpretation="RGB", PlanarConfiguration=0,
    )  # fmt: skip
    assert (read_images([path], (3, *SHAPE))[0] == colours.transpose(2, 0, 1)).all()


def test_compression_with_a_decoder(tmp_path):
    plain, packed = write(tmp_path / "a.dcm"), write(tmp_path / "b.dcm", syntax=RLELossless)
    assert (pixels_of(plain) == pixels_of(packed)).all()


BAD = {
    "several frames": ({"NumberOfFrames": 12}, "has 12 frames: write each as a file"),
    "no image": ({"without": ("Rows", "Columns")}, "has no image: leave reports"),
    "palette": ({"PhotometricInterpretation": "PALETTE COLOR"}, "PALETTE COLOR: convert it"),
    "no photometric": ({"without": ("PhotometricInterpretation",)}, "interpretation none"),
    "deep colours": ({"PhotometricInterpretation": "RGB"}, "colours of 16 bits"),
    "no decoder": ({"syntax": JPEGLSLossless}, r"JPEG-LS.* pip install 'pylibjpeg\[all\]'"),
    "a film": ({"syntax": MPEG2MPML}, "MPEG2.* which no decoder reads"),
    "a window of nothing": ({"WindowCenter": 9, "WindowWidth": 0}, "width 0: it must be at least"),
    "too large": ({"Rows": 60_000, "Columns": 60_000}, "60000x60000 pixels, which is too large"),
    "too few pixels": ({"Rows": 400}, "cannot be read as DICOM .*it may be damaged"),
}


@pytest.mark.parametrize(("tags", "sentence"), BAD.values(), ids=BAD)
def test_a_file_that_cannot_be_used_is_named(tmp_path, monkeypatch, tags, sentence):
    for k in range(4):
        write(tmp_path / "ab"[k % 2] / f"{k}.dcm", values(k), PatientID=f"P{k}")
    write(tmp_path / "a" / "bad.dcm", PatientID="P9", **tags)
    with pytest.raises(DataError, match=rf"bad\.dcm .*{sentence}"):
        load(str(tmp_path), split="all", image_size=SHAPE).batch(np.arange(5))
    findings, parts = inspect(str(tmp_path), Options(image_size=SHAPE))
    problems = findings.problems + check(parts["train"], parts["test"])
    assert sum("bad.dcm" in problem for problem in problems) == 1
    monkeypatch.chdir(tmp_path)
    findings, parts = inspect("a/..", Options(image_size=SHAPE))
    problems = findings.problems + check(parts["train"], parts["test"])
    assert [problem.partition(" ")[0] for problem in problems] == ["a/../a/bad.dcm"]


@pytest.mark.parametrize("content", [b"", b"\0" * 128 + b"DICM", b"\0" * 128 + b"DICM" + b"x" * 99])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "a.dcm").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.dcm .*(cannot be read as DICOM|has no image)"):
        read_images([tmp_path / "a.dcm"], (1, *SHAPE))


def test_without_pydicom_the_extra_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.dcm")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DataError, match=r"a\.dcm is a DICOM file: pip install 'dpbam\[dicom\]'"):
        read_images([path], (1, *SHAPE))


def study(folder, patients, suffix=".dcm", **tags):
    """One file per name in ``patients``, classes in turn."""
    for k, patient in enumerate(patients):
        write(folder / "ab"[k % 2] / f"{k}{suffix}", values(k), PatientID=patient, **tags)
    return str(folder)


def test_the_patient_is_a_column_and_the_unit(tmp_path):
    names = [f"P{k // 3}" for k in range(30)]
    train, test = load_pair(study(tmp_path, names))
    assert train.unit == test.unit == "patient"
    assert not set(train.columns["patient"]) & set(test.columns["patient"])
    assert set(train.columns["patient"]) | set(test.columns["patient"]) == set(names)
    assert "30 DICOM files of 10 patients" in train.notes
    assert "30 DICOM files have no window: the whole range of values is used" in train.notes


def test_files_without_a_suffix_are_found_by_their_mark(tmp_path):
    study(tmp_path, ["A", "B", "C", "D"], suffix="")
    (tmp_path / "a" / "DICOMDIR").write_bytes(b"\0" * 128 + b"DICM")
    (tmp_path / "a" / "notes.txt").write_text("x" * 200)
    data = load(str(tmp_path), split="all")
    assert len(data) == 4
    assert "ignored 2 files that are not images" in data.notes


def test_padding_does_not_make_another_patient(tmp_path):
    data = load(study(tmp_path, ["A", "A ", " A", "B"]), split="all")
    assert set(data.columns["patient"]) == {"A", "B"}


PATIENTS = {
    "missing": (["A", "", "B", "C"], "1 of 4 DICOM files have no PatientID, .*1.dcm first: name"),
    "blank": (["A", "  ", "B", "C"], "1 of 4 DICOM files have no PatientID"),
    "constant": (["ANON"] * 4, "all 4 DICOM files in .* have the same PatientID, as if"),
}


@pytest.mark.parametrize(("names", "sentence"), PATIENTS.values(), ids=PATIENTS)
def test_patients_that_are_no_units_are_refused_unless_records_are(tmp_path, names, sentence):
    spec = study(tmp_path, names)
    for unit in (None, "patient"):
        with pytest.raises(DataError, match=sentence):
            load(spec, split="all", unit=unit)
    assert len(load(spec, split="all", unit="record")) == 4


def with_table(folder, named):
    rows = [f"{'ab'[k % 2]}/{k}.dcm,{k % 2},{name}" for k, name in enumerate(named)]
    (folder / "labels.csv").write_text("\n".join(["file,label,patient", *rows]))


def test_a_column_of_the_table_takes_the_place_of_missing_identifiers(tmp_path):
    spec = study(tmp_path, ["ANON"] * 4)
    with_table(tmp_path, ["x", "x", "y", "z"])
    assert load(spec, split="all").columns["patient"].tolist() == ["x", "x", "y", "z"]


def test_a_table_may_not_split_a_patient_of_the_files(tmp_path):
    spec = study(tmp_path, ["A", "A", "B", "C"])
    with_table(tmp_path, ["x", "other", "y", "z"])
    with pytest.raises(DataError, match=r"1 PatientIDs of the DICOM files .* several values"):
        load(spec, split="all")


def test_dicom_and_other_images_do_not_mix(tmp_path):
    from .helpers import write_image

    spec = study(tmp_path, ["A", "B"])
    write_image(tmp_path / "a" / "x.png")
    with pytest.raises(DataError, match="has DICOM files and other images: keep them"):
        load(spec, split="all")


def test_a_refusal_does_not_name_the_patients(tmp_path):
    for names in (["SECRET7"] * 4, ["SECRET7", "", "SECRET8", "SECRET9"]):
        with pytest.raises(DataError) as error:
            load(study(tmp_path, names), split="all")
        assert "SECRET" not in str(error.value)


def test_an_error_of_a_decoder_does_not_quote_the_file(tmp_path, recwarn):
    path = write(tmp_path / "a.dcm", PatientID="SECRET" * 20, Rows=400)
    with pytest.raises(DataError, match="cannot be read as DICOM") as error:
        read_images([path], (1, *SHAPE))
    assert "SECRET" not in str(error.value)
    assert not [w for w in recwarn if "SECRET" in str(w.message)]


def test_a_given_window_is_used_for_every_file(tmp_path):
    own = write(tmp_path / "a.dcm", WindowCenter=1000, WindowWidth=800)
    bare = write(tmp_path / "b.dcm", PhotometricInterpretation="MONOCHROME1")
    level = (values() - (2000 - 0.5)) / (500 - 1) + 0.5
    found = read_images([own, bare], (1, *SHAPE), (2000.0, 500.0))[:, 0]
    assert (found[0] == expected(level)).all()
    assert (found[1] == expected(1 - level)).all()
    assert (pixels_of(own) != found[0]).any()  # the control: its own window shows another image


def test_a_set_with_a_window_keeps_it_in_its_parts(tmp_path):
    spec = study(tmp_path, ["A", "B", "C", "D"])
    train, test = load_pair(spec, dicom_window=(2000, 500))
    plain = load_pair(spec).train
    assert train.images.window == test.images.window == (2000, 500)
    assert (train.images.read(np.arange(1)) != plain.images.read(np.arange(1))).any()
    assert not [n for n in train.notes if "no window" in n]
    assert [n for n in plain.notes if "no window" in n]


@pytest.mark.parametrize("window", [(40, 0), (float("nan"), 400), (40, float("inf"))])
def test_a_window_that_shows_nothing_is_refused(window, tmp_path):
    with pytest.raises(DataError, match="a centre and a width of at least 1"):
        load(study(tmp_path, ["A", "B"]), dicom_window=window)


def test_a_window_without_dicom_files_is_refused():
    with pytest.raises(DataError, match="has no DICOM files: leave it out"):
        load_pair("digits", dicom_window=(40, 400))


def test_every_problem_of_dicom_files_is_listed(tmp_path):
    from .helpers import write_image

    spec = study(tmp_path, ["A", "A", "B", "C", "C", "D"])
    with_table(tmp_path, ["x", "other", "y", "z", "z", "u"])
    write(tmp_path / "a" / "0.dcm", NumberOfFrames=3, PatientID="A")
    write(tmp_path / "a" / "2.dcm", PhotometricInterpretation="PALETTE COLOR", PatientID="B")
    path = write(tmp_path / "b" / "5.dcm", values(5), PatientID="D")
    path.write_bytes(path.read_bytes()[:-9])
    write_image(tmp_path / "a" / "x.png")
    with (tmp_path / "labels.csv").open("a") as table:
        table.write("\na/x.png,1,v\na/9.dcm,0,w")
    findings, parts = inspect(spec, Options())
    problems = findings.problems + check(*parts.values(), unit="patient")
    for words in ("a/9.dcm, which does not exist", "DICOM files and other images", "3 frames",
                  "PALETTE COLOR", "5.dcm cannot be read as DICOM"):  # fmt: skip
        assert sum(words in problem for problem in problems) == 1, (words, problems)
    assert sum(map(len, parts.values())) == 4


def test_a_split_of_which_no_file_can_be_used_does_not_hide_the_other(tmp_path):
    for k in range(4):
        write(tmp_path / "train" / "ab"[k % 2] / f"{k}.dcm", values(k), PatientID=f"p{k}")
    path = tmp_path / "test" / "a" / "9.dcm"
    write(path, values(9), PatientID="p9")
    path.write_bytes(path.read_bytes()[:140])
    findings, parts = inspect(str(tmp_path), Options())
    assert len(findings.problems) == 1
    assert "9.dcm" in findings.problems[0]
    assert sum(map(len, parts.values())) == 4
