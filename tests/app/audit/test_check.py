"""A second look at a run folder signs off an honest one, and names every tampering."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file, save_file

from dpbam.app.audit import accountant, check_run
from dpbam.app.audit.check import check_export, passed, sign
from dpbam.app.cli import main
from dpbam.app.runs import RunConfig, RunError, execute
from dpbam.app.runs.documents import Statement
from dpbam.app.runs.export import export
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.identity import config_digest, file_digest, write_signature
from dpbam.app.runs.statement import write_statement
from dpbam.errors import ArgumentError

CONFIG = RunConfig(
    data="digits", model="mlp", method="dp-sgd", epsilon=3.0, epochs=1, batch_size=400,
    engine="functional", num_workers=0, ema=0.9,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second accountant on a coarser grid: a wider bracket, sooner."""
    monkeypatch.setattr(accountant, "_POINTS", 2**15)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audited")
    (folder / "budget.json").write_text('{"epsilon": 8.0, "delta": 1e-5}')
    execute(CONFIG.replace(budget=folder / "budget.json"), folder / "run")
    return folder / "run"


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    """A copy of the run, next to a copy of its budget."""
    shutil.copyfile(honest.parent / "budget.json", tmp_path / "budget.json")
    copy = Path(shutil.copytree(honest, tmp_path / "run"))
    for path in (copy / "config.toml", copy / "non-private" / "run.json"):
        path.write_text(path.read_text().replace(str(honest.parent), str(tmp_path)))
    return copy


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_ledger(run: Path, change: Callable[[list[dict[str, object]]], object]) -> None:
    path = run / "ledger.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    change(entries)
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))


def other_weights(run: Path) -> None:
    weights = {k: v + 1 for k, v in load_file(run / "model.safetensors").items()}
    save_file(weights, run / "model.safetensors")


def damage_checkpoint(run: Path) -> None:
    path = max((run / "checkpoints").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def tear(run: Path) -> None:
    with (run / "ledger.jsonl").open("a") as file:
        file.write('{"stream')


def link_out(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/etc/hostname")


def statement(**changes: object) -> Callable[[Path], None]:
    return lambda run: edit_json(run / "privacy-statement.json", **changes)


def forged(**changes: object) -> Callable[[Path], None]:
    """Edit the statement, and write page, text and card anew: they agree with one another."""

    def edit(run: Path) -> None:
        values = json.loads((run / "privacy-statement.json").read_text())
        write_statement(RunFolder(run), Statement.model_validate({**values, **changes}))

    return edit


def nested(field: str, **changes: object) -> Callable[[Path], None]:
    """The same for a part of the statement."""

    def edit(run: Path) -> None:
        values = json.loads((run / "privacy-statement.json").read_text())
        forged(**{field: {**values[field], **changes}})(run)

    return edit


def edit_budget(run: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    path = run.parent / "budget.json"
    values = json.loads(path.read_text())
    change(values["entries"])
    path.write_text(json.dumps(values))


def edit_card(run: Path, promise: str = "epsilon = 0.1") -> None:
    text = (run / "README.md").read_text()
    (run / "README.md").write_text(text.replace("## Evaluation", f"{promise}\n\n## Evaluation"))


def of_another_run(run: Path) -> None:
    values = json.loads((run / "privacy-statement.json").read_text())
    forged(run="0" * len(values["run"]))(run)


WORDS = "the statement's words follow from the settings"
TAMPERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "epsilon": (statement(epsilon=1.0), "a second accountant agrees"),
    "epsilon a little": (statement(epsilon=2.9), "a second accountant agrees"),
    "delta": (statement(delta=0.1), "the statement's delta is the run's"),
    "sigma": (statement(noise_multiplier=9.0), "the statement's sigma is the run's"),
    "clip norm": (statement(clip_norm=2.0), "the statement's C is the configured one"),
    "units": (statement(units=10), "the statement's n is the run's"),
    "steps": (statement(charged_steps=1), "all charged steps are stated"),
    "seeded": (statement(seeded=True), "seeding is stated"),
    "method": (statement(method="bam"), WORDS),
    "published": (
        statement(may_be_published=["ledger.jsonl"]),
        "only harmless files are listed for publishing",
    ),
    "a field gone": (
        statement(evaluated_on=None), "the statement has the fields of a statement",
    ),
    "prose": (
        lambda run: (run / "privacy-statement.md").write_text("all is well"),
        "the statement for people is the one for machines",
    ),
    "a step removed": (
        lambda run: edit_ledger(run, lambda e: e.pop(1)), "every step is on the ledger",
    ),
    "a step twice": (
        lambda run: edit_ledger(run, lambda e: e.append(e[0])), "no noise is used twice",
    ),
    "a ledger's sigma": (
        lambda run: edit_ledger(run, lambda e: e[0].update(noise_multiplier=99.0)),
        "the ledger's sigma is the run's",
    ),
    "a ledger's rate": (
        lambda run: edit_ledger(run, lambda e: e[0].update(sampling_rate=0.01)),
        "the ledger's q is batch size / n",
    ),
    "a torn ledger": (tear, "the ledger ends in a whole line"),
    "configuration": (
        lambda run: (run / "config.toml").write_text(CONFIG.replace(delta=1e-4, lr=1).to_toml()),
        "config.toml is what the run began with",
    ),
    "weights": (other_weights, "the model handed out is the checkpoint's"),
    "checkpoint": (damage_checkpoint, "the checkpoint is whole and of this run"),
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoints"), "a checkpoint is there"),
    "private facts published": (
        lambda run: edit_json(run / "model.json", non_private_loss=1.0),
        "nothing unprotected is in them",
    ),
    "weaker attacks": (
        lambda run: edit_json(run / "privacy-statement.json", trade_off={
            **json.loads((run / "privacy-statement.json").read_text())["trade_off"],
            "true_positive_rates": {"0.001": 0.0011, "0.01": 0.011, "0.1": 0.11}}),
        "a second accountant finds no better attack",
    ),
    "no attacks": (
        statement(trade_off={"not_given": "no reason"}), "the statement's attacks are the ledger's",
    ),
    "another model's file": (
        other_weights, "model.safetensors is the file that the statement names"
    ),
    "no files": (
        lambda run: edit_json(run / "privacy-statement.json", identity={
            **json.loads((run / "privacy-statement.json").read_text())["identity"], "files": {}}),
        "the statement names the model's files and what was released",
    ),
    "another configuration": (
        lambda run: (run / "config.toml").write_text(CONFIG.replace(delta=1e-6, lr=1).to_toml()),
        "the configuration is the one that the statement names",
    ),
    "the printed page": (
        lambda run: (run / "privacy-statement.html").write_text("<p>all is well"),
        "the statement to print is the one for people",
    ),
    "nothing outside the promise": (forged(outside_the_promise=[]), WORDS),
    "a larger unit": (forged(unit_name="patient", unit="patient (all records)"), WORDS),
    "secure noise": (forged(noise="secure", noise_mode="secure"), WORDS),
    "never tuned": (forged(tuned_on="nothing was tuned"), WORDS),
    "another operator": (forged(operator="a hospital"), WORDS),
    "secrets not named": (forged(must_not_be_published=[]), WORDS),
    "another accountant": (forged(accountant="dp-accounting 0.6.0, RDP"), WORDS),
    "fewer looks": (
        nested("evaluated_on", times=0), "the statement's evaluations are the run's",
    ),
    "other test people": (
        nested("evaluated_on", trained_on="No"), "the statement's evaluations are the run's",
    ),
    "another run's": (of_another_run, "the statement is this run's"),
    "a future date": (
        nested("identity", date="2999-01-01"), "the statement's date is not in the future",
    ),
    "no budget": (forged(budget=None), "the statement names the run's budget"),
    "a larger budget": (
        nested("budget", epsilon=100.0), "the statement's budget is the file's",
    ),
    "less taken": (
        nested("budget", taken=0.1), "what the budget had given by then holds this run",
    ),
    "outside the budget": (
        lambda run: edit_budget(run, lambda e: e.clear()),
        "the budget counts this run as its ledger does",
    ),
    "less in the budget": (
        lambda run: edit_budget(run, lambda e: e[0]["charges"][0].__setitem__(2, 1)),
        "the budget counts this run as its ledger does",
    ),
    "the card": (edit_card, "the model card promises what the statement does"),
    **{
        f"the card, {how}": (
            lambda run, promise=promise: edit_card(run, promise),
            "the model card promises what the statement does",
        )
        for how, promise in {
            "over two lines": "epsilon\n= 0.1",
            "far from its figure": f"An epsilon {'that is very small, ' * 9}0.1",
            "by an entity": "&#949; = 0.1",
            "in wide letters": "\uff25psilon = 0.1",
            "as a pair": "(0.1, 1e-9)-differentially private",
            "as a privacy loss": "The privacy loss is at most 0.1",
            "hidden by a comment": "<!--",
        }.items()
    },
    "the card in words": (
        lambda run: edit_card(run, "It has an epsilon of only 0.1."),
        "the model card promises what the statement does",
    ),
    "a link out": (link_out, "no link leads out of the folder, all files are plain"),
}  # fmt: skip


def test_an_honest_run_passes(run: Path) -> None:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    findings = check_run(run)
    assert passed(findings), [f for f in findings if not f.right]
    assert len(findings) >= 20
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}  # only read


@pytest.mark.parametrize("name", TAMPERED)
def test_tampering_is_named(name: str, run: Path) -> None:
    tamper, check = TAMPERED[name]
    tamper(run)
    assert check in [f.check for f in check_run(run) if not f.right]


def test_the_command_signs_off_or_fails(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed"] is True
    assert "agree with one another" in answer["means"]
    assert "made up all of them" in answer["does_not_mean"]
    assert main(["audit", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "This means that the files of the run agree" in shown
    assert "It does not mean that the program did what the ledger records" in shown
    edit_json(run / "privacy-statement.json", epsilon=1.0)
    assert main(["audit", str(run)]) == 1
    assert "not passed" in capsys.readouterr().out


def test_an_audit_lists_what_is_wrong_and_the_rest_on_request(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["audit", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "│" not in shown  # a statement that nobody asked to be signed is nothing wrong
    assert "signed" not in shown.partition("This means that")[0]
    edit_json(run / "privacy-statement.json", epsilon=1.0)
    assert main(["audit", str(run), "--all"]) == 1
    shown = capsys.readouterr().out
    states = [line.split()[1] for line in shown.splitlines() if line.startswith("│")]
    states = [state for state in states if state in ("WRONG", "right")]
    assert states == sorted(states, key=["WRONG", "right"].index)
    assert {*states} == {"WRONG", "right"}
    assert "not signed" not in shown.lower()
    assert len(states) > 30
    cells = [line for line in shown.splitlines() if "q is batch size / n" in line]
    assert len(cells) == 2
    assert not [line for line in cells if re.search(r"[0-9]\.[0-9]{7}", line)]
    main(["audit", str(run), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert {f["state"] for f in answer["findings"]} == {"wrong", "right"}


def keys(folder: Path, name: str) -> tuple[Path, Path]:
    """A private and a public key, in PEM."""
    private = Ed25519PrivateKey.generate()
    paths = folder / f"{name}.pem", folder / f"{name}-public.pem"
    pem, raw = serialization.Encoding.PEM, serialization.NoEncryption()
    paths[0].write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, raw))
    paths[1].write_bytes(
        private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return paths


def wrong_after(run: Path, operator: Path | None) -> list[str]:
    return [f.check for f in check_run(run, operator) if not f.right]


def test_a_signature_vouches_for_the_statement_as_it_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, public = keys(tmp_path, "operator")
    other = keys(tmp_path, "other")[1]
    assert wrong_after(run, public) == ["the statement is signed"]
    assert main(["sign", str(run), "--key", str(key)]) == 0
    assert "public key" in capsys.readouterr().out
    assert wrong_after(run, public) == wrong_after(run, None) == []
    assert wrong_after(run, other) == ["the signature is the operator's"]
    before = (run / "privacy-statement.json").read_text()
    (run / "privacy-statement.json").write_text(before + " ")
    assert wrong_after(run, public) == ["the signature is the statement's"]
    (run / "privacy-statement.json").write_text(before)
    edit_json(run / "privacy-statement.sig", signature="AAAA")
    assert wrong_after(run, public) == ["the signature is the statement's"]


def swap(folder: Path) -> None:
    """Another model, and a list of files that agrees with it."""
    other_weights(folder)
    values = json.loads((folder / "exported.json").read_text())
    values["files"]["model.safetensors"] = file_digest(folder / "model.safetensors")
    edit_json(folder / "exported.json", files=values["files"])


def signed_again(folder: Path) -> None:
    swap(folder)
    write_signature(RunFolder(folder), keys(folder.parent, "attacker")[0])


EXPORTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another model": (other_weights, "model.safetensors is the file that was exported"),
    "another model and list": (swap, "the signature is the statement's"),
    "another file": (
        lambda out: (out / "more.bin").write_bytes(b"x"),
        "the folder holds the files that were exported, no others",
    ),
    "another source": (
        lambda out: edit_json(out / "exported.json", exported_from={"model.safetensors": "0"}),
        "the statement is about the model that was exported",
    ),
    "another statement": (
        forged(epsilon=0.1), "privacy-statement.json is the file that was exported",
    ),
    "no signature": (
        lambda out: (out / "exported.sig").unlink(), "the statement is signed",
    ),
    "signed again": (
        signed_again,
        "the signature is the operator's",
    ),
}  # fmt: skip


def test_an_export_is_signed_as_a_whole(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, public = keys(tmp_path, "operator")
    out, _ = export(run, "safetensors", tmp_path / "out")
    assert main(["sign", str(out), "--key", str(key)]) == 0
    assert (out / "exported.sig").is_file()
    assert main(["audit", str(out), "--public-key", str(public)]) == 0
    assert "that exported.json lists" in " ".join(capsys.readouterr().out.split())
    for name, (tamper, check) in EXPORTS.items():
        copy = Path(shutil.copytree(out, tmp_path / name))
        tamper(copy)
        assert check in [f.check for f in check_export(copy, public) if not f.right], name


@pytest.mark.parametrize("change", ["another model", "another file", "another statement"])
def test_an_export_that_was_changed_is_not_signed(run: Path, tmp_path: Path, change: str) -> None:
    key, _ = keys(tmp_path, "operator")
    out, _ = export(run, "safetensors", tmp_path / "out")
    sign(out, key)
    sign(out, key)  # its own signature is no change
    (out / "exported.sig").unlink()
    EXPORTS[change][0](out)
    with pytest.raises(RunError, match=r"nothing was signed: in .*it does not hold that"):
        sign(out, key)
    assert not (out / "exported.sig").exists()


@pytest.mark.parametrize("name", ["lower epsilon", "another model", "a step less", "other words"])
def test_a_run_that_does_not_hold_is_not_signed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    key, _ = keys(tmp_path, "operator")
    changes: dict[str, Callable[[], object]] = {
        "lower epsilon": lambda: edit_json(run / "privacy-statement.json", epsilon=0.1),
        "another model": lambda: other_weights(run),
        "a step less": lambda: edit_ledger(run, lambda entries: entries.pop()),
        "other words": lambda: (run / "privacy-statement.md").write_text("All is well.\n"),
    }
    changes[name]()
    assert main(["sign", str(run), "--key", str(key)]) == 2
    assert "nothing was signed" in capsys.readouterr().err
    assert not (run / "privacy-statement.sig").exists()


def test_an_older_signature_is_replaced(run: Path, tmp_path: Path) -> None:
    key, public = keys(tmp_path, "operator")
    (run / "privacy-statement.sig").write_text("{}")
    assert main(["sign", str(run), "--key", str(key)]) == 0
    assert wrong_after(run, public) == []


def test_openssl_accepts_the_signature(run: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, public = keys(tmp_path, "operator")
    assert main(["sign", str(run), "--key", str(key)]) == 0
    values = json.loads((run / "privacy-statement.sig").read_text())
    (tmp_path / "raw").write_bytes(base64.b64decode(values["signature"]))
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", str(public)]
    command += ["-in", str(run / "privacy-statement.json"), "-sigfile", str(tmp_path / "raw")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_what_is_no_key_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("nonsense")
    for path in (tmp_path / "bad.pem", tmp_path / "missing.pem"):
        with pytest.raises(ArgumentError, match="cannot be read"):
            sign(run, path)
        with pytest.raises(ArgumentError, match="cannot be read"):
            check_run(run, path)
    with pytest.raises(RunError, match="needs the folder of a finished run"):
        sign(tmp_path, keys(tmp_path, "a")[0])


def test_the_digest_of_the_settings_does_not_depend_on_seeds_and_paths() -> None:
    same = CONFIG.replace(seed=3, noise_seed=4, data_root=Path("elsewhere"))
    assert config_digest(same) == config_digest(CONFIG)
    assert config_digest(CONFIG.replace(lr=0.1)) != config_digest(CONFIG)


def in_folder(folder: str) -> RunConfig:
    """Every setting that can name a file, below one folder."""
    return RunConfig(
        epsilon=3, data=f"{folder}/scans", data_root=Path(folder), budget=Path(folder, "b.json"),
        model="nets:make", init=Path(folder, "w.safetensors"),
        model_options={"weights": f"{folder}/w.pt", "paths": [f"{folder}/a"]},
        method="mine:Method", method_options={"table": f"{folder}/t.csv"},
    )  # fmt: skip


@pytest.mark.parametrize("config", [
    in_folder, lambda folder: RunConfig(epsilon=3, model=f"hf:{folder}/tiny-vit", train="head",
                                        feature_cache=Path(folder), data=f"hf:{folder}/x.parquet"),
])  # fmt: skip
def test_no_path_changes_the_digest_of_the_settings(config: Callable[[str], RunConfig]) -> None:
    digests = {config_digest(config(folder)) for folder in ("/home/ann", "/srv/b/c", "../x")}
    assert len(digests) == 1
    here, elsewhere = config("/home/ann"), config("/srv/b/c")
    named = {k for k, v in here.to_mapping().items() if v != elsewhere.to_mapping()[k]}
    with_paths = {json.dumps(c.to_mapping(), default=str) for c in (here, elsewhere)}
    assert len(with_paths) == 2  # the settings themselves differ: a digest of them would
    assert {"data", "feature_cache"} <= named or {"data", "data_root", "budget", "init"} <= named


def test_every_setting_that_is_a_path_is_left_out_of_the_digest() -> None:
    for name, field in RunConfig.model_fields.items():
        if "Path" in str(field.annotation):
            one, two = (
                RunConfig.model_construct(**{**dict(CONFIG), name: Path(p)}) for p in ("/a", "/b")
            )
            assert config_digest(one) == config_digest(two), name


def test_a_statement_of_an_older_format_is_refused(run: Path) -> None:
    edit_json(run / "privacy-statement.json", format=3)
    with pytest.raises(RunError, match="of format 3, and this dpbam reads format 4"):
        check_run(run)


def test_what_is_no_finished_run_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="finished run"):
        check_run(tmp_path)
    (run / "ledger.jsonl").write_text("nonsense\n")
    with pytest.raises(RunError, match="line 1"):
        check_run(run)
