"""Make a folder of DICOM files from real images, to try dpbam on: digits, or a MedMNIST file.

    python examples/make_dicom.py scans
    python examples/make_dicom.py xrays --source pneumoniamnist.npz --names normal,pneumonia

The pixels are real; patients are made up, three images each. An image that occurs twice is taken
once, or two patients would share it. Values have 12 bits and a window, and every fourth file is
MONOCHROME1, as those of some detectors are. Needs the extra ``dicom``.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import ComputedRadiographyImageStorage, ExplicitVRLittleEndian, generate_uid

from dpbam.data import load

_EACH = 3  # images of a patient
_TOP = 4095  # 12 bits


def write_dicom(path: Path, pixels: np.ndarray, patient: str, *, inverted: bool = False) -> None:
    """Write grey pixels 0..255 [H, W] as values 0..4095 with a window over all of them."""
    values = np.round(pixels * (_TOP / 255)).astype(np.uint16)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = ComputedRadiographyImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    data = FileDataset(str(path), Dataset(), file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID = meta.MediaStorageSOPClassUID
    data.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    data.PatientID, data.Modality = patient, "CR"
    data.Rows, data.Columns = values.shape
    data.SamplesPerPixel, data.PixelRepresentation = 1, 0
    data.BitsAllocated, data.BitsStored, data.HighBit = 16, 12, 11
    data.PhotometricInterpretation = "MONOCHROME1" if inverted else "MONOCHROME2"
    data.WindowCenter, data.WindowWidth = 2048, 4096
    data.PixelData = (_TOP - values if inverted else values).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)


def make(
    folder: Path, source: str, images: int, names: Sequence[str] = (), split: str = "train"
) -> int:
    """Write the first images of a split of a data set; return how many patients they have."""
    data = load(source, split=split)
    names = names or data.class_names
    pixels = data.images.read(np.arange(len(data))).mean(axis=1)  # grey
    own = np.sort(np.unique(pixels, axis=0, return_index=True)[1])[:images]  # without copies
    by_class = own[np.argsort(data.labels[own], kind="stable")]  # a patient has one diagnosis
    rows = []
    for position, index in enumerate(by_class.tolist()):
        patient = f"MRN-{70000 + 17 * (position // _EACH)}"
        path = Path(f"{position // _EACH:04d}") / f"{position % _EACH}.dcm"
        write_dicom(folder / path, pixels[index], patient, inverted=position % 4 == 3)
        rows.append((path.as_posix(), names[data.labels[index]]))
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file", "label"), *rows])
    return len({path.split("/")[0] for path, _ in rows})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", default="digits", help="digits, or a MedMNIST .npz file")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--names", default="", help="of the classes, with commas between them")
    parser.add_argument("--split", default="train", help="train, val or test")
    given = parser.parse_args()
    names = given.names.split(",") if given.names else ()
    patients = make(given.folder, given.source, given.images, names, given.split)
    print(f"{given.folder}: {given.images} DICOM files of {patients} patients, and labels.csv")
