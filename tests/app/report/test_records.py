from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpbam.app.report.groups import curves, groups
from dpbam.app.report.records import PUBLIC_SETTINGS, ReportError, Run, read_run, read_runs
from dpbam.app.report.training_figures import of_loss
from dpbam.app.runs import RunConfig, RunError
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
    assert run.statement is None
    assert run.epsilon == pytest.approx(3.0)  # of the last evaluation
    with pytest.raises(ReportError, match="no privacy statement yet"):
        run.publishable(public_test_data=True)


def test_publishing_drops_what_is_not_private_and_what_undoes_noise(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "seed-7", seed=7))
    public = run.publishable(public_test_data=False)
    assert "seed" in run.config
    assert "data" in run.config
    assert not {"seed", "data", "device"} & set(public.config)
    assert "7" not in public.name.removeprefix("run " + run.statement.run[:8])
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
        ("privacy-statement.json", "[]", "must hold a JSON object"),
    ],
)
def test_damage_is_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = write_run(tmp_path / "damaged", epochs=2)
    (folder / file).write_text(content)
    with pytest.raises((ReportError, RunError), match=message):
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


def make(name: str, **config: object) -> Run:
    return Run(name, dict(config))


def test_runs_that_differ_in_their_seed_are_one_group() -> None:
    found = groups([make(str(k), method="bam", seed=k, device=f"cuda:{k}") for k in range(3)])
    assert [(g.label, len(g.runs)) for g in found] == [("BAM", 3)]


def test_labels_name_the_data_and_no_facts_of_a_rule() -> None:
    """Runs of model auto differ in the facts that the rule read: a label has what it chose."""
    chosen = ({"n": 446, "epsilon": 8.0}, 2.0, "/home/ann/first"), ({"n": 900}, 3.0, "second")
    runs = [
        make(str(k), method="dp-sgd", auto_facts=facts, auto_settings=["clip_norm"] * (k + 1),
             clip_norm=clip_norm, data=data, ema=None if k else 0.9)
        for k, (facts, clip_norm, data) in enumerate(chosen)
    ]  # fmt: skip
    assert [g.label for g in groups(runs)] == [
        "DP-SGD, data first, C 2, ema 0.9", "DP-SGD, data second, C 3, ema unset",
    ]  # fmt: skip


def test_labels_name_what_tells_groups_of_a_method_apart() -> None:
    runs = [
        make("a", method="dp-sgd", lam=0.02, batch_size=256),
        make("b", method="dp-sgd", lam=0.02, batch_size=512),
        make("c", method="bam", lam=0.02, batch_size=256),
    ]
    assert [g.label for g in groups(runs)] == [
        "DP-SGD, batch size 256", "DP-SGD, batch size 512", "BAM",
    ]  # fmt: skip
    assert [g.colour for g in groups(runs)] == [0, 1, 2]


def test_runs_on_other_data_are_never_averaged() -> None:
    runs = [make(str(k), method="bam", data=name) for k, name in enumerate(("mnist", "scans"))]
    found = groups(runs)
    assert len(found) == 2
    assert len({g.label for g in found}) == 2


def test_seeds_are_drawn_faintly_behind_their_mean() -> None:
    found = groups([make("a", method="bam", seed=1), make("b", method="bam", seed=2)])
    heights = {"a": (1.0, 3.0), "b": (3.0, 5.0)}
    drawn = curves(found, lambda run: ((0.0, 1.0), heights[run.name]))
    assert [s.style for s in drawn] == ["seed", "seed", "line"]
    assert {s.group or s.label for s in drawn} == {"BAM"}  # one name in the legend
    assert drawn[-1].y == (2.0, 4.0)


def test_the_mean_is_taken_only_where_all_runs_have_a_point() -> None:
    found = groups([make("a", method="bam", seed=1), make("b", method="bam", seed=2)])
    points = {"a": ((0.0, 1.0, 2.0), (1.0, 1.0, 1.0)), "b": ((1.0,), (3.0,))}
    mean = curves(found, lambda run: points[run.name])[-1]
    assert (mean.x, mean.y) == ((1.0,), (2.0,))


def test_a_run_without_points_is_left_out() -> None:
    found = groups([make("a", method="bam"), make("b", method="dp-sgd")])
    drawn = curves(found, lambda run: ((0.0,), (1.0,)) if run.name == "b" else ((), ()))
    assert drawn[0].style == "points"  # a line through one point is not drawn
    assert [(s.label, s.colour) for s in drawn] == [("DP-SGD", 1)]
    assert drawn[0].y == pytest.approx((1.0,))


def test_a_loss_that_was_recorded_once_does_not_go_anywhere() -> None:
    steps = ({"step": 1, "non_private_loss": 2.3}, {"step": 2, "non_private_loss": None})
    assert of_loss([replace(make("a"), steps=steps)]) == "the loss was recorded once, 2.3"
    more = (*steps, {"step": 3, "non_private_loss": 2.3})
    assert of_loss([replace(make("a"), steps=more)]).startswith("the loss goes from 2.3 to 2.3")
