from __future__ import annotations

from pathlib import Path

import pytest

from dpbam.app.report.records import PUBLIC_SETTINGS, ReportError, read_run, read_runs
from dpbam.app.runs import RunConfig
from tests.app.report.synthetic import write_run


def test_everything_in_a_run_folder_is_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "first", epochs=2))
    assert run.name == "first"
    assert run.method == "BAM"
    assert run.data == "scans"  # the statement's name of it, not a path
    assert len(run.metrics) == 2
    assert len(run.bias) == 20
    assert run.evaluation is not None
    assert run.environment["torch"] == "2.13.0"


def test_missing_files_are_empty(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "bare", measured=False, evaluated=False))
    assert run.bias == ()
    assert run.evaluation is None


def test_an_unfinished_run_is_read_but_cannot_be_published(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "half", finished=False))
    assert run.statement["unfinished"]
    assert run.statement["epsilon"] == pytest.approx(3.0)  # of the last evaluation
    with pytest.raises(ReportError, match="no privacy statement yet"):
        run.publishable(public_test_data=True)


def test_publishing_drops_what_is_not_private_and_what_undoes_noise(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "seed-7", seed=7))
    public = run.publishable(public_test_data=False)
    assert "seed" in run.config
    assert "data" in run.config
    assert not {"seed", "data", "device"} & set(public.config)
    assert "7" not in public.name.removeprefix("run " + run.statement["run"][:8])
    assert (public.bias, public.steps, public.metrics, public.evaluation) == ((), (), (), None)
    assert public.environment == {}
    assert run.publishable(public_test_data=True).metrics == run.metrics


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "torn", epochs=2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "epo')
    assert len(read_run(folder).metrics) == 2


def test_a_step_taken_again_counts_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "again", epochs=3)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    again = lines[1].replace('"loss": 1.0', '"loss": 0.5')
    (folder / "metrics.jsonl").write_text("".join([*lines, again]))
    rows = read_run(folder).metrics
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert rows[1]["loss"] == 0.5


def test_public_settings_are_settings_and_neither_paths_nor_seeds() -> None:
    fields = RunConfig.model_fields
    assert set(fields) >= PUBLIC_SETTINGS
    for name in PUBLIC_SETTINGS:
        assert "seed" not in name
        assert "Path" not in str(fields[name].annotation)
    assert not {"data", "device", "budget", "init"} & PUBLIC_SETTINGS


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metrics.jsonl", "{\n", "line 1 is not JSON"),
        ("metrics.jsonl", "[1]\n", "line 1 is not an object"),
        ("config.toml", "a = = b", "config.toml cannot be read"),
        ("privacy-statement.json", "[]", "does not hold names and values"),
    ],
)
def test_damage_is_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = write_run(tmp_path / "damaged", epochs=2)
    (folder / file).write_text(content)
    with pytest.raises(ReportError, match=message):
        read_run(folder)


def test_a_folder_of_runs_stands_for_its_runs(tmp_path: Path) -> None:
    for method in ("bam", "dp-sgd"):
        for seed in (0, 1):
            write_run(tmp_path / "both" / method / f"seed-{seed}", method=method, epochs=1)
    (tmp_path / "both" / "comparison.json").write_text("{}")
    names = [run.name for run in read_runs([tmp_path / "both"])]
    assert names == ["dp-sgd/seed-0", "dp-sgd/seed-1", "bam/seed-0", "bam/seed-1"]
    alone = write_run(tmp_path / "alone", epochs=1)
    assert [run.name for run in read_runs([alone])] == ["alone"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match=r"has no config\.toml"):
        read_runs([tmp_path / "empty"])


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is not a folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ReportError, match=r"has no config\.toml"):
        read_run(tmp_path)
