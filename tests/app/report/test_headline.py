"""The top of the page, and the sentence that each figure has, are computed from the run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dpbam.app.report.charts import Series, dots, lines
from dpbam.app.report.figure import Figure, picture
from dpbam.app.report.groups import groups
from dpbam.app.report.html import build, in_units, render
from dpbam.app.report.records import Run, read_run, unit_of
from dpbam.app.report.statement import headline
from dpbam.app.runs.documents import Statement
from dpbam.catalogue import FIGURES
from tests.app.report.synthetic import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "bam"))


def changed(run: Run, **changes: object) -> Statement:
    assert run.statement is not None
    return run.statement.model_copy(update=changes)


def test_accuracy_has_its_interval_and_epsilon_one_sentence(run: Run) -> None:
    known = replace(run, metrics=({"epoch": 1.0, "accuracy": 0.92, "records": 100},))
    found = headline(known)
    assert (found.score, found.quality) == (
        "92.0%", "accuracy, 95% interval 85.0% to 95.9%, on 100 test records.",
    )  # fmt: skip
    assert "guesses that right at most 95.16% of the time" in found.privacy  # e^2.97654 / (1 + ..)
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
