"""What a page says in words: tables, privacy, and the summary of one run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dpbam.app.report.charts import Series, dots, lines
from dpbam.app.report.figure import Figure, picture
from dpbam.app.report.groups import groups
from dpbam.app.report.html import build, in_units, render
from dpbam.app.report.records import Run, read_run, unit_of
from dpbam.app.report.statement import headline, privacy
from dpbam.app.report.tables import results, side_by_side
from dpbam.app.runs.documents import Attacks, Statement
from dpbam.app.runs.meaning import used_settings
from dpbam.catalogue import FIGURES
from dpbam.privacy.accounting import Charge, total_epsilon
from tests.app.report.synthetic import statement, write_run


def test_settings_that_differ_come_first_and_are_marked() -> None:
    runs = [
        Run("a", {"model": "mlp", "method": "bam", "lr": 0.1, "seed": 1}),
        Run("b", {"model": "mlp", "method": "bam", "lr": 0.2, "seed": 1}),
    ]
    table = side_by_side(groups(runs), lambda run: run.config)
    assert [row[0] for row in table.rows] == ["lr", "model", "method", "seed"]
    assert table.differing == 1
    assert table.rows[0] == ("lr", "0.1", "0.2")


def test_seeds_of_one_group_share_a_cell() -> None:
    runs = [Run(str(k), {"method": "bam", "seed": k}) for k in (3, 5)]
    table = side_by_side(groups(runs), lambda run: run.config)
    assert table.rows[1] == ("seed", "3, 5")
    assert table.differing == 0


def test_every_epsilon_is_rounded_up() -> None:
    budget = {"epsilon": 1.00001, "taken": 0.99991}
    run = Run("a", {"method": "bam", "epsilon": 2.97654, "budget": budget})
    rows = dict(side_by_side(groups([run]), lambda run: run.config).rows)
    assert rows["epsilon"] == "2.977"
    assert rows["budget"] == "epsilon 1.001, taken 1"


def test_results_are_means_with_their_intervals(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    runs = [read_run(folder) for folder in folders]
    table = results(groups(runs))
    last = [run.metrics[-1]["accuracy"] for run in runs]
    mean, half = sum(last) / 2, 12.7062 * abs(last[0] - last[1]) / 2  # t of one degree of freedom
    assert table.rows[0][2] == f"{mean:.1%} [{mean - half:.1%}, {mean + half:.1%}]"
    assert [head in table.marked for head in table.heads] == [False] * 4 + [True]


def test_results_without_measurements_have_no_columns_for_them(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", measured=False))
    assert results(groups([run])).heads == ("setting", "runs", "final accuracy", "ε of one run")


def test_a_comparison_has_paired_differences_and_its_constant() -> None:
    scores = {"dp-sgd": (0.80, 0.90), "bam": (0.82, 0.94), "sgd": (0.95, 0.97)}
    constant = {"accuracy": {"score": 0.9, "constant": 0.25, "chance": 0.1}}
    runs = [
        Run(
            f"{method}-{seed}", {"method": method, "seed": seed},
            statement(method, seed, epsilon=2.9991),
            metrics=({"step": 1, "epoch": 1.0, "accuracy": accuracy},),
            compared=({"step": 1, "compared": constant},),
        )
        for method, accuracies in scores.items()
        for seed, accuracy in enumerate(accuracies)
    ]  # fmt: skip
    table = results(groups(runs))
    rows = {row[0]: dict(zip(table.heads, row, strict=True)) for row in table.rows}
    assert rows["BAM"]["difference to DP-SGD"] == "+3.0 [-9.7, +15.7]"  # 2 and 4 points
    assert rows["BAM"]["verdict"] == "no winner"
    assert rows["DP-SGD"]["verdict"] == ""
    assert rows["DP-SGD"]["ε of one run"] == "3"
    assert rows["best constant answer"]["final accuracy"] == "25.0%"
    figure = build("differences", groups(runs))
    assert figure.meaning[0] == (
        "BAM: +3.0 points on average over 2 seeds, 95% interval [-9.7, +15.7]: no winner."
    )
    (panel,) = figure.panels
    drawn = {row["setting"]: row for row in panel.rows}
    assert drawn["BAM"]["difference"] == pytest.approx(3.0)
    assert drawn["SGD, no privacy"]["seeds"] == 2
    alone = build("differences", groups([run for run in runs if run.config["seed"] == 0]))
    assert alone.meaning[0] == "BAM: +2.0 points with one seed, which shows no winner."
    assert '"field": "low", "type": "quantitative", "format"' in json.dumps(panel.view)
    assert '"field": "low", "type": "quantitative", "format"' not in json.dumps(
        alone.panels[0].view
    )
    unpaired = [replace(run, config={**run.config, "seed": None}) for run in runs]
    assert not build("differences", groups(unpaired)).panels


def test_settings_without_effect_are_not_shown() -> None:
    config = {
        "method": "dp-sgd", "gradient": "approximate", "lam_share": 1e-4, "momentum": 0.9,
        "optimizer": "nadam", "shift": 4, "augment_multiplicity": 0, "focal": 0.0, "lr": 0.1,
        "clip_norm": 1.0, "freeze": [], "tensorboard": False,
    }  # fmt: skip
    assert used_settings(config) == {
        "method": "dp-sgd", "optimizer": "nadam", "lr": 0.1, "clip_norm": 1.0,
    }  # fmt: skip
    assert set(used_settings({**config, "augment_multiplicity": 2})) >= {"shift"}
    assert "momentum" in used_settings({**config, "optimizer": "sgd"})
    assert "gradient" in used_settings({**config, "method": "bam"})
    assert "clip_norm" not in used_settings(config, private=False)
    page = render([Run("a", config, statement())])
    assert '<th scope="row">clip_norm</th>' in page
    assert '<th scope="row">gradient</th>' not in page


def test_one_run_in_full_rounded_up(tmp_path: Path) -> None:
    view = privacy(groups([read_run(write_run(tmp_path / "a"))]))
    assert view.epsilon == "2.977"  # of 2.97654: never below the truth
    assert view.promise == "at δ = 0.0001, for every record (one image and its label)"
    assert view.share == 99.3  # of 99.218, shown with one digit
    assert dict(view.facts.rows)["units"] == "1000"
    assert view.publishable == ("model.safetensors", "privacy-statement.json")
    assert view.perhaps == ("metrics.jsonl",)
    assert "non-private/" in view.withheld
    assert view.warnings == ()
    assert view.facts.differing == 0


def test_models_of_the_same_data_add_up(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / m, method=m) for m in ("dp-sgd", "bam", "sgd")]
    view = privacy(groups([read_run(f) for f in folders]))
    together = total_epsilon(
        [Charge(1.4958, 0.1, 60)] * 2, 1e-4, accountant="rdp"
    )  # as charged, released statistics included; the reference has no noise
    assert float(view.epsilon) == pytest.approx(together, rel=1e-3)
    assert float(view.epsilon) >= together
    assert "if all 2 private models are published" in view.promise
    assert ("epsilon", "2.977", "2.977", "infinite") in view.facts.rows


def test_several_runs_state_the_largest_advantage_of_one_model(tmp_path: Path) -> None:
    """Runs of one epsilon may differ in what an attacker achieves; the weakest one counts."""
    runs = [read_run(write_run(tmp_path / m, method=m)) for m in ("dp-sgd", "bam")]
    runs = [
        replace(run, statement=changed(run, trade_off=attacks(advantage)))
        for run, advantage in zip(runs, (0.39, 0.558), strict=True)
    ]
    for order in (runs, runs[::-1]):
        assert "at most 77.9% of the time" in privacy(groups(order)).promise


def test_warnings_come_first(tmp_path: Path) -> None:
    seeded = privacy(groups([read_run(write_run(tmp_path / "a", seed=1))]))
    assert [title for title, _ in seeded.warnings] == ["Research only"]
    reference = privacy(groups([read_run(write_run(tmp_path / "b", method="sgd"))]))
    assert (reference.epsilon, reference.share) == ("∞", None)
    assert [title for title, _ in reference.warnings] == ["No privacy"]
    half = privacy(groups([read_run(write_run(tmp_path / "c", finished=False))]))
    assert [title for title, _ in half.warnings] == ["Not finished"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "bam"))


def changed(run: Run, **changes: object) -> Statement:
    assert run.statement is not None
    return run.statement.model_copy(update=changes)


def attacks(advantage: float) -> Attacks:
    return Attacks(
        true_positive_rates={}, advantage=advantage, advantage_of_several={}, reconstruction={},
        gaussian_mu=1.0, gaussian_regret=0.0, gaussian_least_error=1e-9, profile=[],
    )  # fmt: skip


def test_accuracy_has_its_interval_and_epsilon_one_sentence(run: Run) -> None:
    known = replace(run, metrics=({"epoch": 1.0, "accuracy": 0.92, "records": 100},))
    found = headline(known)
    assert (found.score, found.quality) == (
        "92.0%", "accuracy, 95% interval 85.0% to 95.9%, on 100 test records.",
    )  # fmt: skip
    assert "is right at most 95.2% of the time" in found.privacy  # e^2.97654 / (1 + ..)
    assert "ε = 2.977" in found.privacy
    assert "model.safetensors" in found.publish


def test_another_metric_takes_the_interval_and_the_constant_of_its_evaluation(run: Run) -> None:
    known = replace(
        run, metrics=({"epoch": 1.0, "r2": 0.5, "mae": 2.0, "records": 40},),
        evaluation={"interval": [0.4, 0.6], "trivial": 0.0, "count": 40},
    )  # fmt: skip
    assert headline(known).quality == (
        "R2, 95% interval 0.400 to 0.600, on 40 test records. The best constant answer would have "
        "0.000."
    )
    of_others = {**known.evaluation, "count": 41}  # evaluate --data OTHER --save
    for evaluation in (None, of_others):
        assert headline(replace(known, evaluation=evaluation)).quality == "R2, on 40 test records."


def test_an_accuracy_is_compared_with_the_most_frequent_class(run: Run) -> None:
    shares = {"well": {"value": 1.0, "count": 75}, "ill": {"value": 0.0, "count": 25}}
    known = replace(
        run, metrics=({"epoch": 1.0, "accuracy": 0.75, "records": 100},),
        evaluation={"classes": shares, "trivial": 0.75, "count": 100},
    )  # fmt: skip
    assert headline(known).quality.endswith("The best constant answer would have 75.0%.")
    patients = replace(known, statement=changed(run, unit="patient (all records ...)"))
    assert headline(patients).quality.endswith("with several per patient the true one is wider.")


def test_a_page_for_publication_does_not_open_with_the_accuracy(run: Run) -> None:
    hidden = run.publishable(public_test_data=False)
    assert headline(hidden).score == ""
    last = f"{run.metrics[-1]['accuracy']:.1%}"
    assert last in render([run])
    assert last not in render([run], publishable=True)


def test_what_is_not_promised(run: Run) -> None:
    reference = replace(run, statement=changed(run, private=False))
    assert "There is no privacy" in headline(reference).privacy
    assert "has not finished" in headline(replace(run, statement=None)).privacy


def test_a_seeded_run_does_not_invite_to_publish(run: Run) -> None:
    seeded = replace(run, statement=changed(run, seeded=True))
    assert headline(seeded).publish.startswith("Of sensitive data nothing, since the run is seeded")
    assert "May be published, if the data are not sensitive:" in render([seeded])
    unseeded = replace(run, statement=changed(run, seeded=False))
    assert headline(unseeded).publish.startswith("model.safetensors")
    assert "May be published:" in render([unseeded])


def test_patients_are_called_patients(run: Run) -> None:
    patients = replace(run, statement=changed(run, unit="patient (all records ...)"))
    assert unit_of([run]) == "samples"
    assert unit_of([patients]) == "patients"
    assert unit_of([run, patients]) == "units"
    for name in FIGURES:
        figure = build(name, groups([patients]))
        assert not re.search("samples?[ ,.']", f"{figure.title} {figure.caption} {figure.meaning} ")
        assert "samples" not in str([panel.view for panel in figure.panels])
    assert "100 patients per batch" in render([patients])


def test_words_of_units_leave_records_alone(run: Run) -> None:
    figure = build("norms", groups([run]))
    assert in_units(figure, "samples") == figure


def test_every_figure_of_a_run_says_what_it_means(run: Run) -> None:
    drawn = {name: build(name, groups([run])) for name in FIGURES}
    silent = {name for name, figure in drawn.items() if figure.panels and not figure.meaning}
    assert not silent
    for sentence in (sentence for figure in drawn.values() for sentence in figure.meaning):
        assert not re.search("nan|inf|None|[ĝλεσ]", sentence), sentence
        assert sentence.endswith(".")


def test_a_sentence_is_computed_from_the_run(run: Run) -> None:
    rows = ({"epoch": 1.0, "accuracy": 0.9}, {"epoch": 2.0, "accuracy": 0.8})
    (text,) = build("accuracy", groups([replace(run, metrics=rows)])).meaning
    assert text == "the accuracy ends at 80.0%, the highest on the way was 90.0% at epoch 1."
    (other,) = build("accuracy", groups([replace(run, metrics=rows[:1])])).meaning
    assert other == "the accuracy ends at 90.0%, its highest."


def test_several_groups_are_named(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / method, method=method)) for method in ("dp-sgd", "bam")]
    first, second = build("norms", groups(runs)).meaning  # never strung into one
    assert re.fullmatch(r"DP-SGD: .* at last; .*\.", first)
    assert re.fullmatch(r"BAM.*: .* at last; .*\.", second)


def test_sentences_speak_of_all_seeds_and_not_of_the_first(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(seed), seed=seed)) for seed in (1, 2, 3)]
    values = (0.90, 0.92, 0.94)
    known = [
        replace(run, metrics=({"step": 1, "epoch": 1.0, "accuracy": value},))
        for run, value in zip(runs, values, strict=True)
    ]
    assert build("accuracy", groups(known)).meaning == (
        "the accuracy ends at 92.0% [87.0%, 97.0%].",  # t of 2 degrees of freedom: 4.303
    )
    for name in FIGURES:
        assert build(name, groups(known)).meaning == build(name, groups(known[::-1])).meaning


@pytest.mark.parametrize(("own", "useless"), [(0.699, True), (0.72, True), (0.80, False)])
def test_a_model_that_learned_nothing_has_no_large_number(
    run: Run, own: float, useless: bool
) -> None:
    row = {"step": 9, "epoch": 1.0, "accuracy": own, "records": 1000}
    compared = {"accuracy": {"score": own, "constant": 0.712, "chance": 0.0143}}
    known = replace(run, metrics=(row,), compared=({"step": 9, "compared": compared},))
    top = headline(known)
    assert (top.score == "useless") is useless
    assert f"{own:.1%}" in (top.quality if useless else top.score)
    assert "The best constant answer would have 71.2%." in top.quality
    assert (f'<p class="number">{own:.1%}</p>' in render([known])) is not useless


def test_few_test_records_are_no_verdict(run: Run) -> None:
    row = {"step": 9, "epoch": 1.0, "accuracy": 0.5, "records": 8}
    compared = {"accuracy": {"score": 0.5, "constant": 0.5, "chance": 0.177}}
    known = replace(run, metrics=(row,), compared=({"step": 9, "compared": compared},))
    evaluated = {"accuracy": 0.5, "trivial": 0.5, "count": 8}
    for few in (known, replace(known, compared=(), evaluation=evaluated)):
        assert few.useless is None
        top = headline(few)
        assert top.score == "50.0%"
        assert top.quality.startswith("There are too few test records to tell whether it is better")
        assert "useless" not in render([few])


def test_the_best_constant_is_a_line_in_the_picture(run: Run) -> None:
    scores = {"accuracy": {"score": 0.8, "constant": 0.4, "chance": 0.1}}
    compared = ({"step": run.metrics[-1]["step"], "compared": scores},)
    known = replace(run, compared=compared)
    for panel in build("accuracy", groups([known])).panels:
        named = [layer for layer in panel.view["layer"] if "text" in layer["mark"]]
        (line,) = [(one["encoding"]["y"]["datum"], one["mark"]["text"]) for one in named]
        assert line == (0.4, "best constant answer 40.0%")
    assert "answer 40.0%" in render([known])
    assert "40.0%" not in render([known], publishable=True, public_test_data=True)


@pytest.mark.parametrize("seeds", [(None,), (1, 2)])
def test_the_page_opens_with_the_picture_and_folds_facts(
    tmp_path: Path, seeds: tuple[int | None, ...]
) -> None:
    methods = ("bam",) if seeds == (None,) else ("dp-sgd", "bam")
    folders = [
        write_run(tmp_path / f"{m}-{seed}", method=m, seed=seed) for m in methods for seed in seeds
    ]
    runs = [read_run(folder) for folder in folders]
    page = render(runs)
    body = page[page.index("<body>") : page.index('<script type="application/json"')]
    picture = "accuracy" if len(runs) == 1 else "differences"
    first = body.index(f'id="figure-{picture}"')
    assert first < body.index("<table" if len(runs) > 1 else 'class="summary"')
    assert first < body.index(runs[0].statement.run)
    shown = re.sub(r"<details.*?</details>", "", body, flags=re.S)
    for fact in (runs[0].statement.run, "2.13.0", "batch_size"):
        assert fact in body
        assert fact not in shown


def test_what_was_not_recorded_is_out_of_the_way(tmp_path: Path) -> None:
    page = render([read_run(write_run(tmp_path / "bare", measured=False, evaluated=False))])
    body = page[: page.index('<script type="application/json"')]
    assert 'id="clipping-bias"' not in body  # no empty sections
    assert body.index('id="configuration"') < body.index("Figures that were not recorded")
    assert body.count("--measure-bias every=10") >= 1
    assert 'id="quality"' not in body  # its one figure is the page's first
    assert body.index('id="figure-accuracy"') < body.index('id="privacy"')


@pytest.mark.parametrize("top", [1e-6, 0.0012, 0.03, 0.7, 1.0])
def test_labels_of_ticks_differ(top: float) -> None:
    curve = Series("a", 0, (0.0, 1.0, 2.0), (0.0, top / 2, top))
    marks = Series("a", 0, ("x", "y"), (top / 2, top), (0.0, 0.0), (top, top))
    for panel in (lines("", "x", "y", [curve], percent=True), dots("", "y", [marks])):
        svg = picture(Figure("a", "", "", "public", [panel]).spec(), ".svg").decode()
        labels = re.findall(r">([^<]*%)<", svg)
        assert len(labels) > 2
        assert len(set(labels)) == len(labels)
