from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dpbam.app.report.html import render
from dpbam.app.report.records import Run, read_run
from tests.app.report.page import Page
from tests.app.report.synthetic import CLASSES, SECRET, write_run

NASTY = '</script><img src=x onerror="window.pwned=1"><!-- \'&'


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(write_run(tmp_path / "ward-seven"))


def test_the_page_stands_alone(run: Run) -> None:
    text = render([run])
    page = Page(text)
    assert all(a.startswith("#") or a == "data:," for a in page.addresses)
    assert "@import" not in text
    assert "url(http" not in text
    assert "default-src 'none'" in text
    assert "unsafe-inline'; script-src 'sha256-" in text  # one script, known by its hash


RELEASED = {"released-norms", "released-clipping"}
PUBLIC = RELEASED


def test_every_panel_is_there_with_its_data_and_its_mark(run: Run) -> None:
    text = render([run])
    page = Page(text)
    assert page.figures == set(page.data)
    assert {"accuracy", "bias", "direction", "norms", "confusion", "groups"} <= page.figures
    for name in page.figures:
        card = text[text.index(f'id="figure-{name}"') :]
        head = card[: card.index("</header>")]
        about_test = name in ("accuracy", "classes", "confusion", "groups")
        mark = "test records: publish only if public" if about_test else "not protected by privacy"
        assert (mark in head) == (name not in PUBLIC), name
        assert page.data[name]["title"]["text"].startswith(mark) == (name not in PUBLIC), name


def test_publishable_leaves_out_panels_and_their_data(run: Run) -> None:
    text = render([run], publishable=True)
    assert set(Page(text).data) == PUBLIC
    for leak in ("non_private", "figure-bias", "figure-norms", *CLASSES, run.name, "/home/alice"):
        assert leak not in text, leak
    assert "not protected by privacy: do not share" not in text.split("<script")[0]


def test_the_leaks_looked_for_are_in_the_operators_page(run: Run) -> None:
    """The control of the test above: it could find them."""
    text = render([run])
    for leak in ("figure-bias", "figure-norms", *CLASSES, run.name, "/home/alice"):
        assert leak in text, leak
    loss = Page(text).data["loss"]
    assert f"{SECRET:.5g}" in json.dumps(loss)


def test_public_test_data_keep_accuracy_alone(run: Run) -> None:
    page = Page(render([run], publishable=True, public_test_data=True))
    assert page.figures == {"accuracy", "classes", "confusion", "groups"} | PUBLIC
    assert all(f["title"]["text"] == "" for f in page.data.values())


def test_a_seed_is_never_published(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run-90210", seed=90210))
    assert run.config["seed"] == 90210
    assert run.name in render([run])
    other = replace(run, name="run-1", config={**run.config, "seed": 1})
    public, others = (
        render([one], publishable=True, public_test_data=True) for one in (run, other)
    )
    assert public == others  # whatever the seed
    assert "Research only" in public


def test_names_from_outside_cannot_break_out(tmp_path: Path) -> None:
    nasty = read_run(write_run(tmp_path / "x", classes=(NASTY, "dog", "ship")))
    run = replace(nasty, name=NASTY, config={**nasty.config, "model": NASTY})
    text = render([run, read_run(write_run(tmp_path / "y", method="dp-sgd"))])
    page = Page(text)
    assert "img" not in page.tags
    assert page.tags.count("script") == 2
    assert NASTY in json.dumps(page.data, ensure_ascii=False).replace('\\"', '"')


def test_a_comparison_highlights_what_differs(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / m, method=m)) for m in ("dp-sgd", "bam")]
    text = render(runs)
    changed = text[text.index('id="configuration"') :].split('class="changed"')
    rows = [row.split("</tr>")[0] for row in changed[1:]]
    assert len(rows) == 2  # the method, and lambda, which DP-SGD does not have
    assert any("dp-sgd" in row for row in rows)


def test_empty_sections_say_why(tmp_path: Path) -> None:
    text = render([read_run(write_run(tmp_path / "a", measured=False, evaluated=False))])
    assert "The bias was not measured in this run." in text
    assert "dpbam evaluate RUN --save" in text


def test_a_long_measured_run_stays_small(tmp_path: Path) -> None:
    """75 epochs, every step measured, 100 classes: under 3 MB."""
    classes = tuple(f"class {k}" for k in range(100))
    folder = write_run(tmp_path / "long", epochs=75, batch_size=25, classes=classes)
    run = read_run(folder)
    assert len(run.bias) == 3000
    assert len(render([run]).encode()) < 3_000_000
