"""``dpbam search``: bad input in a sentence, a plan before it begins, the best at the end."""

from __future__ import annotations

import pytest

from tests.forked import forked_workers

from .helpers import one_sentence

QUICK = ["search", "--data", "digits", "--model", "mlp", "--batch-size", 256, "--accountant", "rdp",
         "--epochs", 0.2, "--delta", "1e-4"]  # fmt: skip
LR = ["--vary", "lr=1e-3..1e-1:log"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--epsilon", 3, *LR], "--pay, how it is paid for: public"),
        (["--epsilon", 3, "--pay", "later", *LR], "pay 'later' is unknown"),
        (["--epsilon", 3, "--pay", "accounted", *LR], "--score public"),
        (["--epsilon", 3, "--pay", "accounted", "--score", "noised", *LR], "--score noised=S"),
        (["--epsilon", 3, "--pay", "public", "--score", "public", *LR], "goes with --pay"),
        (["--epsilon", 3, "--pay", "public"], "nothing to vary"),
        (["--epsilon", 3, "--pay", "public", "--vary", "lr"], "--vary must be like"),
        (["--pay", "public", *LR], "epsilon"),
        (["--epsilon", 3, "--pay", "public", *LR, "--trials", 0], "trials"),
        (["--epsilon", 3, "--pay", "public", *LR, "--workers", 0], "--workers"),
        (["--noise-multiplier", 2, "--pay", "public", *LR, "--shard", "3/2"], "--shard must be"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(dpbam, tmp_path, flags, says):
    one_sentence(dpbam(*QUICK, *flags, "--out", tmp_path / "s"), says)


def test_a_dry_run_shows_the_noise_and_writes_nothing(dpbam, tmp_path):
    out = tmp_path / "s"
    ended = dpbam(*QUICK, "--noise-multiplier", 2.5, "--pay", "accounted", "--score", "public",
                  *LR, "--trials", 5, "--dry-run", "--out", out)  # fmt: skip
    assert ended.code == 0, ended.err
    assert "Poisson, mean 5" in ended.out
    assert "2.5" in ended.out
    assert not out.exists()


def test_the_best_and_the_payment_are_shown(dpbam, tmp_path):
    ended = dpbam(*QUICK, "--noise-multiplier", 2, "--pay", "nothing", *LR, "--trials", 2,
                  "--out", tmp_path / "s")  # fmt: skip
    assert ended.code == 0, ended.err
    assert "not accounted" in ended.err
    assert [ended.err.count(f"trial {k} of 2: accuracy") for k in (1, 2)] == [1, 1]
    assert "(lr " in ended.out
    assert "NOT ACCOUNTED" in ended.out
    assert "result.json" in ended.out


@pytest.mark.slow
def test_two_workers_share_the_trials(dpbam, tmp_path):
    with forked_workers():
        ended = dpbam(*QUICK, "--noise-multiplier", 2, "--pay", "public", *LR, "--trials", 3,
                      "--workers", 2, "--out", tmp_path / "s")  # fmt: skip
    assert ended.code == 0, ended.err
    assert [ended.err.count(f"trial {k} of 3") for k in (1, 2, 3)] == [1, 1, 1]
    assert "costs no privacy" in ended.out
