"""A dry run's estimate of the time uses no record, charges nothing and changes nothing."""

import dataclasses

import numpy as np
import pytest
import torch

from dpbam.app.runs import RunConfig, preparation, prepare
from dpbam.app.runs.preparation import estimated_seconds
from dpbam.data import DataError, DataSet, Images
from dpbam.privacy import ledger

SETTINGS = {
    "dp-sgd": {},
    "bam, with views": {"method": "bam", "augment_multiplicity": 2},
    "dp-sat": {"method": "dp-sat"},
    "without privacy": {"method": "sam", "noise_multiplier": None},
    "counts and statistics": {"release_counts": 20.0, "release_norms": 20.0},
    "secure, averaged": {"noise": "secure", "ema": 0.9},
    "one step": {"epochs": 0.05},
}


class Unreadable(Images):
    """Records that nothing may read."""

    def __init__(self, shape):
        self.shape = shape

    def read(self, indices):
        raise AssertionError("a record was read")

    def describe(self, index):
        return "a record"


def unreadable(data):
    hidden = object.__new__(DataSet)  # its own checks would read
    fields = {f.name: getattr(data, f.name) for f in dataclasses.fields(data)}
    for name, value in (fields | {"images": Unreadable(data.images.shape)}).items():
        object.__setattr__(hidden, name, value)
    return hidden


def prepared(**changes):
    config = {"model": "mlp", "model_options": {"hidden": [8]}, "noise_multiplier": 4.0,
              "accountant": "rdp", "delta": 1e-4, "batch_size": 64, "epochs": 1}  # fmt: skip
    ready = prepare(RunConfig(**{**config, **changes}))
    train, test = unreadable(ready.train), unreadable(ready.test)
    return dataclasses.replace(ready, train=train, test=test)


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_it_reads_no_record_and_leaves_the_model_as_it_was(changes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = prepared(**changes)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    assert 0 < estimated_seconds(run, 32) < 3600
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert all(p.grad is None for p in run.model.parameters())
    assert not list(tmp_path.iterdir())


def test_records_that_are_read_are_noticed(monkeypatch):
    """The negative control: a measurement on the data's own records."""

    def of_the_data(data, records):
        return data.batch(np.arange(records))[0]

    monkeypatch.setattr(preparation, "blank", of_the_data)
    with pytest.raises(DataError, match="a record was read"):
        estimated_seconds(prepared(), 32)


def test_it_charges_no_ledger_on_disk(monkeypatch):
    paths = []
    real = ledger.Ledger.__init__

    def noticed(self, delta, accountant="pld", path=None, **more):
        paths.append(path)
        real(self, delta, accountant, path, **more)

    monkeypatch.setattr(ledger.Ledger, "__init__", noticed)
    estimated_seconds(prepared(), 32)
    assert paths
    assert set(paths) == {None}


def test_more_steps_take_longer_by_their_number(monkeypatch):
    monkeypatch.setattr(
        preparation, "_step_seconds", lambda prepared, units, rows: 0.01 + 0.001 * units
    )
    monkeypatch.setattr(preparation, "_evaluation_seconds", lambda prepared: 0.0)
    few, more = (estimated_seconds(prepared(epochs=epochs), 32) for epochs in (1, 3))
    assert few == pytest.approx(22 * 0.074)  # steps of 64 units, from 16 and 32
    assert more == pytest.approx(67 * 0.074)
