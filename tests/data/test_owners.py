"""Whose a record is: what is recognised, and that a promise per record is then never assumed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dpbam import DPSGD, PrivacyPlan, PrivateGradientOracle
from dpbam.data import DataError, DataSet, from_arrays, load, load_pair
from dpbam.data.owners import find_owner, names_person
from dpbam.errors import ArgumentError

from .helpers import random_pixels, write_image

PERSONS = [
    "patient", "Patient", "Patient ID", "patient_id", "PatientID", "PATIENTID", "patient-no", "mrn",
    "Patient Number", "patients", "subject", "Subject_ID", "subjectid", "USUBJID", "participant",
    "participant id", "person_id", "anon patient id", "MRN", "user", "userId", "pat_id", "sub id",
    "donor", "Proband", "client_id", "ｐａｔｉｅｎｔ",
]  # fmt: skip
OTHERS = [
    "age", "sex", "Patient Age", "patient_sex", "Patient Gender", "label", "site", "hospital",
    "superclass", "scanner", "subset", "split", "paternal", "",
]  # fmt: skip


@pytest.mark.parametrize("name", PERSONS)
def test_a_column_of_persons_is_recognised_in_any_spelling(name):
    assert names_person(name)
    assert find_owner({"age": np.arange(4), name: np.array(list("abcd"))}, (), ()).column == name


@pytest.mark.parametrize("name", OTHERS)
def test_other_columns_are_not_persons(name):
    assert not names_person(name)
    assert find_owner({name: np.array(list("aabb"))}, ("ill", "well"), ()) is None


@pytest.mark.parametrize(
    "name", ["study", "case id", "CaseID", "StudyInstanceUID", "accession_number", "exam", "id"]
)
def test_an_identifier_is_an_owner_where_it_repeats(name):
    assert find_owner({name: np.array(list("abca"))}, (), ()).column == name
    assert find_owner({name: np.array(list("abcd"))}, (), ()) is None


@pytest.mark.parametrize("name", ["site id", "scanner_id", "class_name", "file name", "image_id"])
def test_an_identifier_of_what_many_share_is_not_an_owner(name):
    assert find_owner({name: np.array(list("aabb"))}, (), ()) is None


@pytest.mark.parametrize(
    ("folders", "owned"),
    [
        (["patient_001", "patient_002", "patient_003"], True),
        (["sub-01", "sub-02", "sub-03"], True),
        (["0012", "0013", "0012"], True),
        (["0012", "0013", "0014"], False),
        (["left", "right", "left"], False),
        (["2021", "2022", "2021"], False),
        (["site1", "site2", "site1"], False),
    ],
)
def test_folder_levels(folders, owned):
    owner = find_owner({"folder1": np.array(folders)}, (), ())
    assert (owner is not None) == owned


@pytest.mark.parametrize(
    ("names", "owned"),
    [
        (["a/person7_bacteria_1.png", "a/person7_bacteria_2.png"], True),
        (["a/IMG-patient003_l.png", "b/IMG-patient003_r.png"], True),
        (["a/patient1.png", "a/patient2.png"], False),
        (["a/00012_001.png", "a/00012_002.png"], False),  # cannot be known
    ],
)
def test_file_names(names, owned):
    assert (find_owner({}, ("a", "b"), names) is not None) == owned


def test_classes_that_are_persons():
    assert find_owner({}, ("subject 1", "subject 2", "other"), ()).column is None
    assert find_owner({}, ("ill", "well", "patient1"), ()) is None


def scans(**options) -> DataSet:
    columns = {"patient": [f"p{k // 3}" for k in range(12)]}
    return from_arrays(random_pixels(12, 0, (4, 4)), np.arange(12) % 2, columns=columns, **options)


def test_the_refusal_names_the_column_and_both_ways():
    says = r"the column 'patient'.*--unit patient.*--unit record"
    with pytest.raises(DataError, match=says):
        scans().chosen_unit()
    with pytest.raises(DataError, match=r"--unit 'Patient No'"):
        replace(scans(), columns={"Patient No": np.arange(12)}).chosen_unit()
    with pytest.raises(DataError, match=r"rename it to patient") as refused:
        replace(scans(), columns={"patient\n\x1b[31m": np.arange(12)}).chosen_unit()
    assert str(refused.value).isprintable()
    assert scans().chosen_unit("record") == scans(unit="record").chosen_unit() == "record"
    assert scans().chosen_unit("patient") == scans(unit="patient").chosen_unit() == "patient"
    assert replace(scans(), columns={}).chosen_unit() == "record"


def plan(**options) -> PrivacyPlan:
    return PrivacyPlan(steps=3, noise_multiplier=1.0, delta=1e-3, **options)


def oracle(the_plan: PrivacyPlan) -> PrivateGradientOracle:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    return PrivateGradientOracle(model, loss, the_plan, DPSGD())


def test_the_oracle_refuses_a_plan_per_record():
    records = plan(n=12, batch_size=3)
    with pytest.raises(ArgumentError, match=r"unit='patient'.*units=data.column\('patient'\)"):
        oracle(records).batches(scans())
    with pytest.raises(ArgumentError, match=r"has the unit 'patient', but the plan's"):
        oracle(records).batches(scans(unit="patient"))
    assert next(iter(oracle(records).batches(scans(unit="record"))))
    patients = plan(n=4, batch_size=2, unit="patient", max_records=3)
    data = scans()
    assert next(iter(oracle(patients).batches(data, units=data.column("patient"))))


def test_files_of_persons_leave_no_column_to_name(tmp_path):
    for k in range(6):
        write_image(tmp_path / "ab"[k % 2] / f"person{k // 2}_{k}.png", seed=k)
    data = load(str(tmp_path), split="all")
    with pytest.raises(DataError, match=r"names have 'person' with.*column patient of labels.csv"):
        data.chosen_unit()
    with pytest.raises(ArgumentError, match=r"pass units=, the owner of each record"):
        oracle(plan(n=6, batch_size=3)).batches(data)


def test_loading_notes_the_unit_that_was_chosen(tmp_path):
    for k in range(6):
        write_image(tmp_path / f"{k}.png", seed=k)
    rows = [f"{k}.png,{'ab'[k % 2]},{k // 2}" for k in range(6)]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label,Participant No", *rows]))
    for unit in ("record", "Participant No"):
        pair = load_pair(str(tmp_path), unit=unit)
        assert [part.chosen_unit() for part in pair] == [unit] * 2
    train, test = load_pair(str(tmp_path), unit="record")
    name = "Participant No"
    assert not set(train.columns[name]) & set(test.columns[name]), "persons stay together"
    with pytest.raises(DataError, match="which says whose each record is"):
        load_pair(str(tmp_path))[0].chosen_unit()


def test_an_array_of_persons_that_belongs_to_no_split_is_refused(tmp_path):
    images, labels = random_pixels(6, 0, (4, 4)), np.arange(6) % 2
    np.savez(
        tmp_path / "x.npz", train_images=images, train_labels=labels, test_images=images[:2],
        test_labels=labels[:2], patient=list("aabbcc"),
    )  # fmt: skip
    with pytest.raises(DataError, match=r"'patient'.*train_patient.*--unit patient.*--unit record"):
        load_pair(str(tmp_path / "x.npz"))
    assert len(load_pair(str(tmp_path / "x.npz"), unit="record").train) == 6
