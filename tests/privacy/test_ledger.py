"""The ledger: append-only, on disk, charged by the rules for replays."""

from __future__ import annotations

import gc
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpbam.privacy.accounting import Charge, epsilon
from dpbam.privacy.ledger import Ledger
from support import ACCOUNTANTS

STEP = {"noise_multiplier": 2.0, "sampling_rate": 0.1}


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_epsilon_is_that_of_what_was_charged(accountant: str) -> None:
    ledger = Ledger(delta=1e-5, accountant=accountant)
    assert ledger.epsilon() == 0
    for step in range(5):
        ledger.charge("a", step, **STEP)
    ledger.charge("b", 0, noise_multiplier=3.0, sampling_rate=0.2)
    assert ledger.charges() == [Charge(2.0, 0.1, 5), Charge(3.0, 0.2, 1)]
    assert len(ledger) == 6
    assert ledger.epsilon() > epsilon(2.0, 0.1, 5, 1e-5, accountant=accountant)
    assert ledger.epsilon(1e-3) < ledger.epsilon()


def test_a_signal_handler_that_asks_for_charges_changes_no_count(monkeypatch: Any) -> None:
    """As one that prints epsilon on Ctrl-C, between two lines of the count."""
    ledger, latest, asked = Ledger(delta=1e-5), Ledger._latest, []

    def interrupted(self: Ledger, count: int) -> Any:
        entries = latest(self, count)
        if count and not asked:
            asked.append(True)
            self.charges()
        return entries

    for step, sigma in enumerate((5.0, 0.5)):
        asked.clear()
        ledger.charge("stream", step, noise_multiplier=sigma, sampling_rate=0.1)
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "_latest", interrupted)
            ledger.charges()
    assert [(c.noise_multiplier, c.steps) for c in ledger.charges()] == [(0.5, 1), (5.0, 1)]
    assert len(ledger) == 2


def test_a_step_without_noise_makes_epsilon_infinite() -> None:
    ledger = Ledger(delta=1e-5)
    ledger.charge("a", 0, **STEP)
    ledger.charge("a", 1, noise_multiplier=0.0, sampling_rate=0.1)
    assert ledger.epsilon() == math.inf


def test_the_same_release_is_charged_once() -> None:
    ledger = Ledger(delta=1e-5)
    for _ in range(2):
        ledger.charge("seed-1", 0, **STEP, release="abc")
    assert len(ledger) == 1


@pytest.mark.parametrize("release", ["other", None])
def test_another_release_with_the_same_noise_is_refused(release: str | None) -> None:
    ledger = Ledger(delta=1e-5)
    ledger.charge("seed-1", 0, **STEP, release="abc")
    with pytest.raises(ValueError, match=r"step 0 \(stream seed-1\) was already used"):
        ledger.charge("seed-1", 0, **STEP, release=release)
    assert len(ledger) == 1


def test_without_a_digest_the_same_key_is_never_taken_for_a_replay() -> None:
    ledger = Ledger(delta=1e-5)
    ledger.charge("a", 0, **STEP)
    with pytest.raises(ValueError, match="already used"):
        ledger.charge("a", 0, **STEP)


def test_a_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = Ledger(delta=1e-5, path=path)
    first.charge("a", 0, **STEP, release="abc")
    first.charge("a", 1, **STEP)
    second = Ledger(delta=1e-5, path=path)
    assert second.charges() == first.charges()
    second.charge("a", 0, **STEP, release="abc")  # a replay of another process
    second.charge("b", 0, **STEP)
    assert len(Ledger(delta=1e-5, path=path)) == 3
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 0]


def test_a_charge_is_on_disk_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "ledger.jsonl", []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd)), real(fd)))
    ledger = Ledger(delta=1e-5, path=path)
    for step in range(2):
        ledger.charge("a", step, **STEP)
        assert synced[-1].st_size == path.stat().st_size  # the file, whole
        assert len(Ledger(delta=1e-5, path=path)) == step + 1
    assert os.stat(tmp_path).st_ino in {s.st_ino for s in synced}  # and its name in the folder


def test_a_torn_last_line_is_cut_off_before_the_next_charge(tmp_path: Path) -> None:
    """Its step was never released: the write had not returned. A reader leaves it alone."""
    path = tmp_path / "ledger.jsonl"
    Ledger(delta=1e-5, path=path).charge("a", 0, **STEP)
    whole = path.read_bytes()
    torn = whole + b'{"stream": "a", "ste'
    path.write_bytes(torn)
    ledger = Ledger(delta=1e-5, path=path)
    assert (len(ledger), path.read_bytes()) == (1, torn)
    ledger.charge("a", 1, **STEP)
    assert path.read_bytes().startswith(whole + b'{"stream": "a", "step": 1,')
    assert len(Ledger(delta=1e-5, path=path)) == 2


def test_a_whole_entry_without_its_line_end_counts(tmp_path: Path) -> None:
    """An editor may have taken it off, after the step was released."""
    path = tmp_path / "ledger.jsonl"
    for step in range(2):
        Ledger(delta=1e-5, path=path).charge("a", step, **STEP)
    whole = path.read_bytes()
    path.write_bytes(whole.rstrip(b"\n"))
    ledger = Ledger(delta=1e-5, path=path)
    assert len(ledger) == 2
    ledger.charge("a", 2, **STEP)
    assert path.read_bytes().startswith(whole)
    assert len(Ledger(delta=1e-5, path=path)) == 3


def test_a_write_that_fails_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(delta=1e-5, path=path)
    ledger.charge("a", 0, **STEP)
    whole = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            ledger.charge("a", 1, **STEP)
    assert (path.read_bytes(), len(ledger)) == (whole, 1)


@pytest.mark.parametrize(
    "line",
    ["not json", "{}", '{"stream": "a", "step": 0, "noise_multiplier": NaN, "sampling_rate": 1}'],
)
def test_a_damaged_file_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(delta=1e-5, path=path).charge("a", 0, **STEP)
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(ValueError, match=r"line 1 is not a ledger entry .* restore the file"):
        Ledger(delta=1e-5, path=path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("noise_multiplier", v) for v in ("1e300", "1e-300", "Infinity", "NaN", "-1", "1" * 400)],
        *[("sampling_rate", v) for v in ("1e300", "Infinity", "NaN", "-0.1", "0", "1.5", "true")],
        *[("step", v) for v in ("1e300", "0.5", "-1", "NaN", "Infinity", '"0"', "1" * 5000)],
    ],
)
def test_an_entry_that_cannot_be_accounted_is_refused_in_a_sentence(
    tmp_path: Path, name: str, value: str
) -> None:
    """Before, sigma = 1e300 was read, and epsilon ended in an OverflowError."""
    path = tmp_path / "ledger.jsonl"
    fields = {"stream": '"a"', "step": "0", "noise_multiplier": "2.0", "sampling_rate": "0.1",
              "unit": '"record"', "release": "null"}  # fmt: skip

    def write(changes: dict[str, str]) -> None:
        entry = ", ".join(f'"{k}": {v}' for k, v in {**fields, **changes}.items())
        path.write_text("{" + entry + "}\n")

    write({})
    assert len(Ledger(delta=1e-5, path=path)) == 1
    write({name: value})
    with pytest.raises(ValueError, match=r"line 1 is not a ledger entry .* restore the file"):
        Ledger(delta=1e-5, path=path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise_multiplier": 1e300}, "noise_multiplier must be 0 or between"),
        ({"sampling_rate": 1.5}, "sampling_rate must be at most 1"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be a number"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be zero or positive"),
        ({"sampling_rate": 0.0}, "sampling_rate must be positive"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(changes: dict[str, float], words: str) -> None:
    ledger = Ledger(delta=1e-5)
    with pytest.raises(ValueError, match=words):
        ledger.charge("a", 0, **{**STEP, **changes})
    assert len(ledger) == 0


def test_delta_and_accountant_are_checked() -> None:
    with pytest.raises(ValueError, match="delta must lie strictly between 0 and 1"):
        Ledger(delta=0.0)
    with pytest.raises(ValueError, match="accountant 'prv' is unknown"):
        Ledger(delta=1e-5, accountant="prv")


def test_a_checkpoints_entries_are_merged_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = Ledger(delta=1e-5)
    for step in range(3):
        first.charge("a", step, **STEP)
    resumed = Ledger(delta=1e-5, path=path)
    resumed.charge("a", 2, **STEP)
    resumed.charge("a", 3, **STEP)
    resumed.merge(first.entries())
    assert resumed.charges() == [Charge(2.0, 0.1, 4)]
    assert Ledger(delta=1e-5, path=path).entries() == resumed.entries()


def test_two_runs_under_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger, other = Ledger(delta=1e-5, path=path), Ledger(delta=1e-5)
    ledger.charge("a", 1, **STEP)
    other.charge("a", 0, **STEP)
    other.charge("a", 1, noise_multiplier=3.0, sampling_rate=0.1)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"step 1 of a is on the ledger with other values"):
        ledger.merge(other.entries())
    assert (len(ledger), path.read_bytes()) == (1, before)


def test_one_ledger_has_one_unit_of_privacy(tmp_path: Path) -> None:
    """Where steps protect records, a patient with eight of them moves the sum by 8 C."""
    path = tmp_path / "ledger.jsonl"
    ledger, records = Ledger(delta=1e-5, path=path), Ledger(delta=1e-5)
    ledger.charge("a", 0, **STEP, unit="patient")
    records.charge("b", 0, **STEP)
    before, words = path.read_bytes(), "protect a patient and a record"
    with pytest.raises(ValueError, match=words):
        ledger.charge("a", 1, **STEP)
    with pytest.raises(ValueError, match=words):
        ledger.merge(records.entries())
    assert (len(ledger), path.read_bytes()) == (1, before)
    again = Ledger(delta=1e-5, path=path)
    assert again.unit == "patient"
    with pytest.raises(ValueError, match=words):
        again.charge("a", 1, **STEP)


def test_invalid_entries_are_not_merged() -> None:
    bad = {"stream": "a", "step": 0, "noise_multiplier": -1.0, "sampling_rate": 0.1, "unit": "a"}
    with pytest.raises(ValueError, match="noise_multiplier must be zero or positive"):
        Ledger(delta=1e-5).merge([{**bad, "release": None}])
    with pytest.raises(ValueError, match="needs release: another version"):
        Ledger(delta=1e-5).merge([bad])


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_a_new_object_does_not_continue_a_file_that_was_cut_or_replaced(
    tmp_path: Path, lines: int
) -> None:
    """Emptied, cut, or an older copy put back; also by a link to the folder."""
    path = tmp_path / "ledger.jsonl"
    first = Ledger(1e-5, path=path)
    for step in range(3):
        first.charge("a", step, noise_multiplier=1.0, sampling_rate=0.1)
    first.close()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
    (tmp_path / "link").symlink_to(tmp_path)
    for way in (path, tmp_path / "link" / "ledger.jsonl"):
        with pytest.raises(ValueError, match="does not hold the 3 entries"):
            Ledger(1e-5, path=way)


def test_a_new_object_does_not_begin_a_deleted_file_anew(tmp_path: Path) -> None:
    """Once any object of the process has seen entries in it, also one that is gone."""
    path = tmp_path / "ledger.jsonl"
    first = Ledger(1e-5, path=path)
    first.charge("a", 0, noise_multiplier=1.0, sampling_rate=0.1)
    path.unlink()
    with pytest.raises(ValueError, match="does not hold the 1 entries"):
        Ledger(1e-5, path=path).charge("a", 1, noise_multiplier=1.0, sampling_rate=0.1)
    del first
    gc.collect()
    with pytest.raises(ValueError, match="does not hold the 1 entries"):
        Ledger(1e-5, path=path)
    assert not path.exists()
    assert len(Ledger(1e-5, path=tmp_path / "another.jsonl")) == 0


def test_numbers_of_numpy_are_written_as_plain_ones(tmp_path: Path) -> None:
    entry = {"stream": "s", "step": np.int8(3), "noise_multiplier": np.float16(2),
             "sampling_rate": np.float32(0.5), "unit": "record", "release": None}  # fmt: skip
    ledger = Ledger(1e-5, path=tmp_path / "ledger.jsonl")
    ledger.merge([entry])
    ledger.charge("t", np.int64(1), noise_multiplier=np.float16(2), sampling_rate=np.float16(1))
    assert Ledger(1e-5, path=ledger.path).entries() == ledger.entries()
    assert {type(e["noise_multiplier"]) for e in ledger.entries()} == {float}
