"""The report of a run that really was: the files as the package itself writes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpbam.app.cli import main
from dpbam.app.report.groups import groups
from dpbam.app.report.html import build, render
from dpbam.app.report.records import Run, read_run
from dpbam.app.runs import RunConfig, execute
from dpbam.catalogue import FIGURES
from tests.app.report.synthetic import Page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A short training on digits, measured and evaluated."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    config = RunConfig(
        data="digits", model="mlp", method="bam", noise_multiplier=2.0, epochs=1, batch_size=256,
        accountant="rdp", device="cpu", num_workers=0, measure_bias=2,
        release_norms=20.0, seed=0,
    )  # fmt: skip
    execute(config, out)
    assert main(["evaluate", str(out), "--save", "--json"]) == 0
    return read_run(out)


def test_every_figure_that_one_run_can_have_is_there(run: Run) -> None:
    built = {name: build(name, groups([run])) for name in FIGURES}
    empty = {name for name, figure in built.items() if not figure.panels}
    # more runs, columns of sub-groups, and other tasks
    assert empty == {"differences", "groups", "roc", "predicted"}
    assert [row["step"] for row in run.bias] == [0, 2, 4]


def test_the_page_says_what_the_statement_says(run: Run) -> None:
    text = render([run])
    assert "BAM on digits" in text
    assert run.statement.accountant in text
    assert all(name in text for name in run.statement.must_not_be_published)
    assert run.environment["torch"] in text


def test_it_can_be_published(run: Run) -> None:
    """The publishable page is the same whatever was measured without noise."""
    other = replace(run, bias=(), steps=())
    text = render([run], publishable=True)
    assert run.statement.run[:8] in text
    assert text == render([other], publishable=True)
    assert Page(text).figures == {"released-norms", "released-clipping"}
    operator = render([run])  # the control
    assert operator != render([other])
    assert {"bias", "norms", "loss"} <= Page(operator).figures
