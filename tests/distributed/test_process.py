"""The parts: messages, time-outs, a rank that is late, and how the command line joins."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from dpbam.app.cli.train import _asked
from dpbam.app.runs import RunConfig
from dpbam.app.runs.folder import RunFolder
from dpbam.distributed import EndedElsewhereError, RankLostError, Ranks
from dpbam.distributed.process import flatten, timeout, unflatten
from tests.results import run_facts
from together import LIMIT, together


def test_a_message_is_undone_exactly_also_with_mixed_dtypes():
    params = {"a": torch.randn(2, 3), "b": torch.randn(4).double(), "c": torch.tensor(0.1)}
    message = flatten(params, shapes=params, length=13)
    assert message.dtype == torch.float64
    assert message.shape == (13,)
    assert not message[11:].any()
    for name, found in unflatten(message[:11], params).items():
        assert found.dtype == params[name].dtype
        assert torch.equal(found, params[name])


def test_a_message_is_a_copy():
    own = {"a": torch.zeros(3)}
    flatten(own, shapes=own, length=3).add_(1)
    assert torch.equal(own["a"], torch.zeros(3))


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_wrong_time_out_is_named(monkeypatch, text):
    monkeypatch.setenv("DPBAM_RANK_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"DPBAM_RANK_TIMEOUT must be a number.*{text}"):
        timeout()


def test_sums_and_what_the_leader_says():
    def work(ranks: Ranks):
        return ranks.sums(ranks.rank, 1.5), ranks.from_leader(lambda: {"rank": ranks.rank})

    assert together(3, work) == [([3.0, 4.5], {"rank": 0})] * 3


@pytest.mark.slow
def test_a_rank_that_is_late_is_not_called_lost(monkeypatch):
    monkeypatch.setenv("DPBAM_RANK_TIMEOUT", "3")
    told = multiprocessing.get_context("fork").Event()

    def work(ranks: Ranks) -> str:
        if not ranks.leads:
            told.wait(LIMIT)  # late until the leader has given up
        try:
            ranks.sums(1.0)
        except (RankLostError, EndedElsewhereError) as error:
            return str(error)
        finally:
            told.set()
        return "met"

    said, _ = together(2, work)
    assert "the 2 ranks are alive but did not meet within 3 s" in said
    assert "DPBAM_RANK_TIMEOUT" in said


# --- the command line


@pytest.fixture
def launched(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")


def test_several_processes_need_a_folder(launched):
    with pytest.raises(ValueError, match="several processes need --out"):
        _asked(None, {"data": "digits", "epsilon": 3.0}, None, False)


def test_a_restarted_command_resumes(launched, monkeypatch, tmp_path):
    flags = {"data": "digits", "epsilon": 3.0}
    assert _asked(None, flags, tmp_path, False)[2] is False
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert _asked(None, flags, tmp_path, False)[2] is False  # it had not begun
    folder = RunFolder(tmp_path)
    folder.non_private.mkdir()
    run_facts(RunConfig(**flags, lr=0.5)).write(folder.facts)
    settings, out, resume = _asked(None, flags, tmp_path, False)
    assert resume
    assert out == tmp_path
    assert settings.lr == 0.5
