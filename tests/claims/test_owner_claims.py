"""Records of one owner: a promise per record is never assumed where a data set names owners."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpbam import DPSGD, PrivateGradientOracle, loading
from dpbam.app.runs import RunConfig, prepare
from dpbam.data import dataset, from_arrays
from dpbam.errors import DPBAMError
from dpbam.privacy.randomness import Randomness
from dpbam.privacy.sampling import UnitIndex
from planting import Mistake, catches
from support import private_plan

PATIENTS = [f"p{k // 3}" for k in range(12)]  # three records each


def check_a_run_does_not_guess_the_unit() -> None:
    """A table with a column "Patient ID" is refused until the unit is named."""
    with tempfile.TemporaryDirectory() as folder:
        rows = ["file,label,Patient ID"]
        for k, patient in enumerate(PATIENTS):
            pixels = np.random.default_rng(k).integers(0, 256, (4, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(Path(folder) / f"{k}.png")
            rows.append(f"{k}.png,{'ab'[k % 2]},{patient}")
        (Path(folder) / "labels.csv").write_text("\n".join(rows))
        config = RunConfig(
            data=folder, model="mlp", batch_size=2, noise_multiplier=4.0, accountant="rdp"
        )
        for unit, n in (("patient", 2), ("record", 6)):
            assert prepare(config.replace(unit=unit)).plan.n == n
        refused(lambda: prepare(config))


def check_a_loop_does_not_guess_the_unit() -> None:
    """A plan per record is refused on a data set that names owners."""
    images = np.random.default_rng(0).integers(0, 256, (12, 4, 4), dtype=np.uint8)
    data = from_arrays(images, np.arange(12) % 2, columns={"patient": PATIENTS})
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    oracle = PrivateGradientOracle(model, loss, private_plan(n=12, batch_size=3), DPSGD())
    refused(lambda: oracle.batches(data))


def check_a_unit_chooses_its_records_by_itself() -> None:
    """Which records of a unit above the cap enter a step does not depend on the other units."""
    index = UnitIndex(np.arange(40) // 5, max_records=2)  # 8 units of 5 records
    for step in range(5):
        records, units = index.records(np.arange(8), Randomness(7), step)
        others = index.records(np.arange(1, 8), Randomness(7), step)[0]
        assert len(records) == 16
        same = np.array_equal(records[units > 0], others)
        assert same, "one unit more changes which records the others contribute"


def one_generator_per_step(real: Any) -> Any:
    def records(self: UnitIndex, units: Any, randomness: Randomness, step: int) -> Any:
        generator = randomness.generator("records", step)
        owned = [self._order[self._starts[u] : self._starts[u + 1]] for u in units]
        chosen = [np.sort(generator.choice(r, self.max_records, replace=False)) for r in owned]
        return np.concatenate(chosen), np.repeat(units, self.max_records)

    return records


def refused(call: Any) -> None:
    try:
        call()
    except DPBAMError:
        return
    raise AssertionError("patients with three records each are protected per record, unasked")


def no_owner(real: Any) -> Any:
    return lambda columns, class_names, paths: None


def any_plan(real: Any) -> Any:
    return lambda plan, data: None


MISTAKES = {
    "records that are chosen from one generator": Mistake(
        check_a_unit_chooses_its_records_by_itself, UnitIndex, "records", one_generator_per_step
    ),
    "patients of a table as records": Mistake(
        check_a_run_does_not_guess_the_unit, dataset, "find_owner", no_owner
    ),
    "patients of a loop as records": Mistake(
        check_a_loop_does_not_guess_the_unit, loading, "_refuse_weaker_unit", any_plan
    ),
}


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
