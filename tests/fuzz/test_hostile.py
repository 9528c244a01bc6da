"""Files made to harm: bombs, escapes and links. Each has the sentence that refuses it."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import FOLDERS, write_run
from parsers import PARSERS
from PIL import Image
from safetensors.torch import save

from dpbam.app.cli.boundary import guarded
from dpbam.app.cli.output import console, facts, table
from dpbam.app.report import draw, write_report
from dpbam.app.report.records import ReportError
from dpbam.app.runs import RunError, load_run_model
from dpbam.app.runs import checkpoint as checkpoints
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.folder import RunFolder
from dpbam.data import DataError, decode
from dpbam.data.fetch import extract
from tests.results import run_facts


def npz_of(folder: Path, header: bytes, body: bytes = b"") -> Path:
    """An .npz whose images are an .npy with this header."""
    labels = io.BytesIO()
    np.save(labels, np.array([0, 1]))
    head = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    path = folder / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", head + body)
        archive.writestr("labels.npy", labels.getvalue())
    return path


def test_an_array_that_claims_more_than_there_is(tmp_path: Path) -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (900000000, 32, 32)}\n"
    path = npz_of(tmp_path, header, bytes(100))
    with pytest.raises(DataError, match="more than there is"):
        PARSERS["npz"].read(path)


def test_an_entry_that_claims_more_than_deflate_can_pack(tmp_path: Path) -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 8, 8)}\n"
    path = npz_of(tmp_path, header, bytes(128))
    raw = bytearray(path.read_bytes())
    central = raw.index(b"PK\x01\x02")
    raw[central + 24 : central + 28] = (2**31).to_bytes(4, "little")  # its unpacked size
    path.write_bytes(raw)
    with pytest.raises(DataError, match="claims 2147483648 bytes"):
        PARSERS["npz"].read(path)


def test_an_image_bomb(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    Image.new("1", (14_000, 14_000)).save(path)  # 196 million pixels
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match="too large"):
        decode.read_images([path], (1, 8, 8))


@pytest.mark.parametrize("kind", ["escape", "link"])
def test_an_archive_cannot_reach_out(kind: str, tmp_path: Path) -> None:
    archive, secret = tmp_path / "set.tar", tmp_path / "secret"
    secret.write_text("mine")
    with tarfile.open(archive, "w") as tar:
        member = tarfile.TarInfo("set/a.bin")
        if kind == "link":
            member.type, member.linkname = tarfile.SYMTYPE, str(secret)
            tar.addfile(member)
        else:
            member.name, member.size = "../escaped", 4
            tar.addfile(member, io.BytesIO(b"evil"))
    with pytest.raises(DataError, match=r"no file|cannot be unpacked"):
        extract(archive, ["set/a.bin"], tmp_path / "data" / "set")
    assert not (tmp_path / "escaped").exists()
    assert not (tmp_path / "data" / "set").exists()


def test_a_run_folder_with_a_link_out_is_refused(tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("untouched")
    (run / "non-private").mkdir(parents=True)
    run_facts(RunConfig(epsilon=3.0)).write(run / "non-private" / "run.json")
    with RunFolder(run).opened(resume=True):
        pass  # as it is, it opens
    (run / "ledger.jsonl").symlink_to(victim)
    with pytest.raises(RunError, match="leads out"), RunFolder(run).opened(resume=True):
        pass
    assert victim.read_text() == "untouched"


def test_a_model_behind_a_link_is_refused(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside.json"
    run.mkdir()
    outside.write_text("{}")
    (run / "model.json").symlink_to(outside)
    (run / "model.safetensors").write_bytes(save({"w": torch.ones(1)}))
    with pytest.raises(RunError, match="leads out"):
        load_run_model(run)


def test_a_report_follows_no_link_out(tmp_path: Path) -> None:
    run, secret = write_run(tmp_path / "run", epochs=1), tmp_path / "secret.jsonl"
    (run / "metrics.jsonl").rename(secret)
    (run / "metrics.jsonl").symlink_to(secret)
    with pytest.raises(RunError, match="leads out"):
        write_report([run], tmp_path / "report.html")
    with pytest.raises(RunError, match="leads out"):
        draw("accuracy", [run], tmp_path / "accuracy.csv")


def test_a_pipe_in_a_run_folder_does_not_block_a_reader(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1)
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(RunError, match="no plain file"):
        write_report([run], tmp_path / "report.html")


@pytest.mark.parametrize("confusion", [[[1, 2, 3]], [[1], [2], [3]], [[1, 2, 3, 4]] * 3])
@pytest.mark.parametrize("kind", ["csv", "svg"])
def test_a_confusion_of_another_size_is_damage(
    confusion: object, kind: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", epochs=1, batch_size=500)
    path = run / "non-private" / "evaluation-test.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "confusion": confusion}))
    with pytest.raises(ReportError, match="not of its 3 classes"):
        draw("confusion", [run], tmp_path / f"confusion.{kind}")


def test_names_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither rich's markup nor escape sequences, in tables and in errors."""
    name = "[/red]\x1b[2J"
    console().print(table((name, "n"), [(name, 1)], title=name))
    console().print(facts({"class": name}, title=name))
    assert guarded(lambda: load_run_model(f"/nowhere/{name}")) == 2
    out, err = capsys.readouterr()
    assert "\x1b[2J" not in out + err
    assert out.count("[/red]\ufffd[2J") == 5
    assert "[/red]\ufffd[2J" in err


def test_class_names_are_text_in_every_picture(tmp_path: Path) -> None:
    """Neither HTML nor any other markup."""
    names = ("$\\frac{", "$$x_{", "<script>alert(1)</script>")
    run = write_run(tmp_path / "run", epochs=1, batch_size=500, classes=names)
    page = write_report([run], tmp_path / "report.html")
    picture = draw("confusion", [run], tmp_path / "confusion.svg")
    assert "<script>alert" not in page.read_text() + picture.read_text()


def test_an_audit_makes_no_list_of_the_steps_that_a_statement_claims(tmp_path: Path) -> None:
    parser = FOLDERS["audit privacy-statement.json"]()
    facts = json.loads(parser.valid[0])
    assert parser.try_on(json.dumps({**facts, "steps": 10**15}).encode(), tmp_path) == "read"
    wrong = [f.check for f in parser.read(tmp_path / parser.filename) if not f.right]
    assert "every step is on the ledger" in wrong


def test_an_audit_of_a_thousand_kinds_of_steps(tmp_path: Path) -> None:
    parser = FOLDERS["audit ledger.jsonl"]()
    entry = json.loads(parser.valid[0].splitlines()[0])
    lines = [json.dumps({**entry, "step": k, "noise_multiplier": 1 + k}) for k in range(1000)]
    parser.try_on(("\n".join(lines) + "\n").encode(), tmp_path)
    assert [f.right for f in parser.read(tmp_path / parser.filename)] == [False]


def test_a_model_larger_than_its_weights_is_refused_before_it_is_made(tmp_path: Path) -> None:
    facts = json.loads(PARSERS["model.json"].valid[0])
    facts["image_shape"] = [1, 100_000, 100_000]  # its first layer alone would take terabytes
    assert "not of the shape" in PARSERS["model.json"].try_on(json.dumps(facts).encode(), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "wrn-600000004-1"},
        {"model_options": {"hidden": [1] * 100_000}},
    ],
)
def test_a_model_of_endless_layers_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    facts = {**json.loads(PARSERS["model.json"].valid[0]), **changes}
    assert "at most 1000" in PARSERS["model.json"].try_on(json.dumps(facts).encode(), tmp_path)


def test_files_that_only_look_like_checkpoints_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-many.safetensors").touch()
    (tmp_path / "step-1e9.x.safetensors").touch()
    assert checkpoints.load_latest(tmp_path, "r") is None
