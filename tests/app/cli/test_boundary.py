"""Users' errors are one sentence with code 2; bugs of ours keep their traceback with code 1."""

from __future__ import annotations

import errno
import warnings

import numpy as np
import pytest

from dpbam import _validate
from dpbam.app.cli.boundary import BUG, INTERRUPTED, USER_ERROR, guarded
from dpbam.data import load


def raises(error):
    def command():
        raise error

    return command


def ours():
    return guarded(lambda: int(_validate.positive("epsilon", -1)))


def test_a_sentence_of_ours_is_shown_alone(capsys):
    assert ours() == USER_ERROR
    assert capsys.readouterr().err == "error: epsilon must be positive and finite, got -1\n"


def test_data_errors_too(capsys):
    assert guarded(lambda: len(load("cifra10"))) == USER_ERROR
    assert "did you mean 'cifar10'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bug",
    [
        lambda: int("no number"),  # Python's
        lambda: int(np.zeros(2) @ np.zeros(3)),  # numpy's ValueError
        lambda: int(_validate.count("n", 3, most=5)),  # a TypeError in a call of ours
        raises(ValueError("raised outside the package")),
        raises(KeyError("lost")),
        raises(RuntimeError("torch is unhappy")),
        raises(AssertionError("broken invariant")),
    ],
)
def test_bugs_keep_their_traceback(bug, capsys):
    assert guarded(bug) == BUG
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "bug" in err.splitlines()[-1]


def test_an_implicit_error_inside_our_own_code_is_a_bug(capsys):
    """The last frame is the package's, but no ``raise`` statement made the error."""
    assert guarded(lambda: int(_validate.one_of("x", "y", None))) == BUG  # type: ignore[arg-type]
    assert "Traceback" in capsys.readouterr().err


def test_a_traceback_can_be_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("DPBAM_TRACEBACK", "1")
    assert ours() == USER_ERROR
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: epsilon")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), "out/x: No space left on"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (MemoryError(), "out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "--physical-batch-size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "--physical-batch-size"),
    ],
)
def test_lack_of_disk_or_memory_is_a_user_error(error, says, capsys):
    assert guarded(raises(error)) == USER_ERROR
    err = capsys.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 1


def test_ctrl_c(capsys):
    assert guarded(raises(KeyboardInterrupt())) == INTERRUPTED
    assert capsys.readouterr().err == ""


def test_a_sentence_over_several_lines_becomes_one(capsys):
    guarded(lambda: int(_validate.number("x", "a\nb", hint="c\nd")))
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_warnings_are_told_once(capsys):
    def command():
        for _ in range(3):
            warnings.warn("delta is large", stacklevel=1)
        return 0

    assert guarded(command) == 0
    assert capsys.readouterr().err == "warning: delta is large\n"
