"""A run on DICOM files protects patients, and their identifiers are in no file that it writes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from dpbam.app.cli.evaluate import _load
from dpbam.app.report import write_report
from dpbam.app.runs import execute, load_run_model, stored_config
from dpbam.app.runs.export import export
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.predict import _chunks, _raise, files_in
from dpbam.data import read_images

pytest.importorskip("pydicom")
SCRIPT = Path(__file__).parents[3] / "examples" / "make_dicom.py"


def made(folder):
    spec = importlib.util.spec_from_file_location("make_dicom", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.make(folder, "digits", 90)


def naming(folder):
    """The files that hold an identifier of a patient."""
    return [path for path in folder.rglob("*") if path.is_file() and b"MRN-" in path.read_bytes()]


def test_a_run_protects_patients_and_writes_none_of_their_names(tiny, tmp_path):
    assert made(tmp_path / "scans") == 30
    assert len(naming(tmp_path / "scans")) == 90  # the search would find them
    config = tiny.replace(
        data=str(tmp_path / "scans"), batch_size=8, measure_bias=1, release_norms=20.0
    )
    result = execute(config, tmp_path / "out")
    assert (result.plan.unit, result.plan.n, result.plan.max_records) == ("patient", 20, 8)
    folder = RunFolder(tmp_path / "out")
    statement = json.loads(folder.statement_json.read_text())
    assert statement["unit"].startswith("patient (all records with the same patient")
    assert statement["units"] == 20
    write_report([folder.path], folder.path / "all.html")
    write_report([folder.path], folder.path / "public.html", publishable=True)
    assert naming(folder.path) == []


def test_what_reads_dicom_files_for_a_run_uses_its_window(tiny, tmp_path):
    made(tmp_path / "scans")
    spec = str(tmp_path / "scans")
    config = tiny.replace(data=spec, batch_size=8, dicom_window=(100, 50), max_records=2)
    assert execute(config, tmp_path / "out").plan.max_records == 2  # of a patient
    model = load_run_model(tmp_path / "out")
    assert model.dicom_window == (100.0, 50.0)
    files = files_in([tmp_path / "scans"])[:3]
    windowed = next(_chunks(files, model, _raise))[1]
    assert (windowed == read_images(files, model.image_shape, (100, 50))).all()
    assert (windowed != read_images(files, model.image_shape)).any()  # each file has its own
    data = _load(tmp_path / "out", model, None, "train", None, None, None)
    assert data.images.window == (100, 50)
    assert stored_config(tmp_path / "out").dicom_window == (100, 50)
    moved, _ = export(tmp_path / "out", "safetensors")
    assert load_run_model(moved).dicom_window == (100, 50)
