"""Files of another version are read or refused with a sentence, never misread."""

from __future__ import annotations

import json

import pytest

from dpbam.app.report.records import read_run
from dpbam.app.runs import execute, load_run_model, stored_config
from dpbam.app.runs.files import FORMAT, check_format
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.run import RunError

READERS = {
    "model.json": load_run_model,
    "privacy-statement.json": read_run,
    "non-private/run.json": stored_config,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from dpbam.app.runs import RunConfig

    config = RunConfig(
        model="mlp", model_options={"hidden": [4]}, method="dp-sgd", noise_multiplier=4.0,
        accountant="rdp", batch_size=180, epochs=0.25, seed=0, num_workers=0,
    )  # fmt: skip
    return execute(config, tmp_path_factory.mktemp("formats") / "run").out


@pytest.mark.parametrize("name", READERS)
def test_each_file_has_a_number_and_a_newer_one_is_refused(run, name):
    path = run / name
    text = path.read_text()
    assert json.loads(text)["format"] == FORMAT
    READERS[name](run)
    path.write_text(json.dumps({**json.loads(text), "format": FORMAT + 1}))
    try:
        with pytest.raises(
            RunError, match=f"{path.name} is of format {FORMAT + 1}.*use the dpbam that wrote it"
        ):
            READERS[name](run)
    finally:
        path.write_text(text)


def test_a_newer_run_is_not_resumed(run):
    path = RunFolder(run).facts
    text = path.read_text()
    path.write_text(text.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    try:
        with pytest.raises(RunError, match="use the dpbam that wrote it"):
            execute(stored_config(run), run, resume=True)
    finally:
        path.write_text(text)


@pytest.mark.parametrize("number", [0, "1", None, 1.5, True])
def test_a_number_that_is_none_is_refused(tmp_path, number):
    with pytest.raises(RunError, match="restore it from a backup"):
        check_format(tmp_path / "x.json", {"format": number})
    with pytest.raises(RunError, match="use the dpbam that wrote it"):
        check_format(tmp_path / "x.json", {"format": FORMAT - 1})
