import pytest

from dpbam.app.runs import RunError
from dpbam.app.runs.folder import RunFolder, stored_config
from tests.results import run_facts


def begin(folder: RunFolder, config) -> None:
    folder.non_private.mkdir(exist_ok=True)
    run_facts(config).write(folder.facts)


def test_a_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(KeyError), RunFolder(tmp_path / "run").opened(resume=False):
        raise KeyError
    assert not (tmp_path / "run").exists()


def test_a_folder_that_was_there_stays(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(KeyError), RunFolder(tmp_path / "run").opened(resume=False):
        raise KeyError
    assert (tmp_path / "run").exists()


def test_a_run_that_has_begun_stays_and_can_be_resumed(tmp_path, tiny):
    folder = RunFolder(tmp_path / "run")
    with folder.opened(resume=False):
        begin(folder, tiny)
    assert stored_config(tmp_path / "run") == tiny
    with pytest.raises(RunError, match="holds a run already"), folder.opened(resume=False):
        pass
    with folder.opened(resume=True):
        pass


def test_two_runs_in_one_folder(tmp_path, tiny):
    folder = RunFolder(tmp_path / "run")
    with folder.opened(resume=False):
        with pytest.raises(RunError, match="another run is at work"), folder.opened(resume=False):
            pass
        assert folder.path.exists()  # the second one's refusal did not remove the first one's
        begin(folder, tiny)
        with pytest.raises(RunError, match="another run is at work"), folder.opened(resume=True):
            pass


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(RunError, match="is not empty"), RunFolder(tmp_path).opened(resume=False):
        pass
    with pytest.raises(RunError, match="no run to resume"), RunFolder(tmp_path).opened(resume=True):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match="cannot be made"), RunFolder(out).opened(resume=False):
            pass
    with pytest.raises(RunError, match="there is no run folder"):
        stored_config(tmp_path / "none")
