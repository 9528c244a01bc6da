"""Neither a report nor an export repeats a statement that the run's other files contradict."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dpbam.app.audit import check_run
from dpbam.app.report import write_report
from dpbam.app.runs import RunConfig, RunError, RunFolder, execute
from dpbam.app.runs.documents import Statement
from dpbam.app.runs.export import export
from dpbam.app.runs.folder import MARK
from dpbam.app.runs.statement import write_statement


@pytest.fixture(scope="module")
def finished(tiny: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    execute(tiny.replace(epochs=0.25), out)
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def edit(run: Path, **changes: object) -> None:
    """Edit the statement for machines alone."""
    path = run / "privacy-statement.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def forge(run: Path, **changes: object) -> None:
    """Edit the statement, and write texts and card anew: they agree with one another."""
    values = json.loads((run / "privacy-statement.json").read_text())
    write_statement(RunFolder(run), Statement.model_validate({**values, **changes}))


def replace_text(run: Path, name: str, old: str, new: str) -> None:
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new))


CHANGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "epsilon": (lambda run: edit(run, epsilon=0.1), "epsilon, privacy-statement.md"),
    "epsilon everywhere": (lambda run: forge(run, epsilon=0.1), "epsilon"),
    "epsilon, by another version": (lambda run: forge(run, epsilon=0.1, dpbam="0.0.1"), "epsilon"),
    "delta": (lambda run: forge(run, delta=1e-9), "delta"),
    "the unit": (lambda run: forge(run, unit_name="patient"), "unit_name"),
    "attacks": (lambda run: forge(run, trade_off={"not_given": "none"}), "trade_off"),
    "evaluations": (lambda run: (run / "non-private/evaluations.jsonl").unlink(), "evaluated_on"),
    "the text": (
        lambda run: replace_text(run, "privacy-statement.md", "epsilon", "Epsilon"),
        "privacy-statement.md",
    ),
    "the card": (
        lambda run: replace_text(run, "README.md", "## Evaluation", "epsilon 0.1\n## Evaluation"),
        "README.md",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_statement_is_neither_reported_nor_exported(
    name: str, run: Path, tmp_path: Path
) -> None:
    change, fields = CHANGED[name]
    change(run)
    words = f"privacy-statement.json disagrees with the other files of the run about {fields}"
    for publishable in (False, True):
        with pytest.raises(RunError, match=words):
            write_report([run], tmp_path / "page.html", publishable=publishable)
    with pytest.raises(RunError, match=words):
        export(run, "safetensors", tmp_path / "out")
    assert not (tmp_path / "page.html").exists()
    assert not (tmp_path / "out").exists()


def test_what_was_published_is_compared_with_its_own_texts(run: Path, tmp_path: Path) -> None:
    for secret in ("non-private", "checkpoints"):
        shutil.rmtree(run / secret)
    for secret in ("ledger.jsonl", "config.toml"):
        (run / secret).unlink()
    write_report([run], tmp_path / "page.html", publishable=True)
    edit(run, epsilon=0.1)
    with pytest.raises(RunError, match=r"about privacy-statement\.md, README\.md"):
        write_report([run], tmp_path / "page.html", publishable=True)


def test_a_ledger_with_endless_kinds_of_steps_is_refused_at_once(run: Path, tmp_path: Path) -> None:
    path = run / "ledger.jsonl"
    entry = json.loads(path.read_text().splitlines()[0])
    many = [{**entry, "step": k, "noise_multiplier": 1.0 + k} for k in range(21)]
    path.write_text("".join(json.dumps(one) + "\n" for one in many))
    with pytest.raises(RunError, match="21 kinds of steps"):
        write_report([run], tmp_path / "page.html")


def test_words_of_another_version_are_not_compared(run: Path, tmp_path: Path) -> None:
    edit(run, dpbam="0.0.1", noise_mode="in other words")
    write_report([run], tmp_path / "page.html", publishable=True)
    export(run, "safetensors", tmp_path / "out")


def test_a_trial_of_a_search_agrees_with_its_settings(run: Path) -> None:
    folder = RunFolder(run)
    (run / MARK).touch()
    write_statement(folder, Statement.read(folder.statement_json))
    assert [finding for finding in check_run(run) if not finding.right] == []
