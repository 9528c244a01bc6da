"""The check that runs after each test: it names each kind of leak, and no test here leaves one."""

from __future__ import annotations

import gc
import locale
import logging
import multiprocessing
import os
import random
import secrets
import signal
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from dpbam.engines.fused import tape
from tests import surroundings

Undo = Callable[[], object]


def change_directory() -> Undo:
    before = Path.cwd()
    os.chdir("/")
    return lambda: os.chdir(before)


def set_variable() -> Undo:
    os.environ["DPBAM_LEFT"] = "1"
    return lambda: os.environ.pop("DPBAM_LEFT")


def extend_path() -> Undo:
    sys.path.append("/left")
    return lambda: sys.path.remove("/left")


def handle_signal() -> Undo:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGTERM, before)


def start_thread() -> Undo:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left")
    thread.start()
    return lambda: (end.set(), thread.join())


def choose_start_method() -> Undo:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    return lambda: multiprocessing.set_start_method(before, force=True)


def stop_collector() -> Undo:
    gc.disable()
    return gc.enable


def choose_locale() -> Undo:
    before = locale.setlocale(locale.LC_ALL)
    locale.setlocale(locale.LC_ALL, "C" if before != "C" else "C.UTF-8")
    return lambda: locale.setlocale(locale.LC_ALL, before)


def silence_logging() -> Undo:
    logging.disable(logging.CRITICAL)
    return lambda: logging.disable(logging.NOTSET)


def replace_entropy() -> Undo:
    patch = mock.patch.object(secrets, "randbits", return_value=4)
    patch.start()
    return patch.stop


def ignore_overflow() -> Undo:
    before = np.seterr(over="ignore")
    return lambda: np.seterr(**before)


def print_fewer_digits() -> Undo:
    before = np.get_printoptions()
    np.set_printoptions(precision=2)
    return lambda: np.set_printoptions(**before)


def hook_modules() -> Undo:
    return register_module_forward_hook(lambda module, inputs, output: None).remove


def register_rule() -> Undo:
    tape.RULES[hook_modules] = None
    return lambda: tape.RULES.pop(hook_modules)


def count_threads() -> Undo:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    return lambda: torch.set_num_threads(before)


def choose_type() -> Undo:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def be_deterministic() -> Undo:
    torch._C._set_deterministic_algorithms(True)  # the public function imports the compiler first
    return lambda: torch._C._set_deterministic_algorithms(False)


def drop_gradients() -> Undo:
    torch.set_grad_enabled(False)
    return lambda: torch.set_grad_enabled(True)


def detect_anomalies() -> Undo:
    torch.autograd.set_detect_anomaly(True)
    return lambda: torch.autograd.set_detect_anomaly(False)


def multiply_coarsely() -> Undo:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    return lambda: torch.set_float32_matmul_precision(before)


LEAKS = {
    "the working directory": change_directory,
    "an environment variable": set_variable,
    "sys.path": extend_path,
    "a signal handler": handle_signal,
    "a running thread": start_thread,
    "the way processes start": choose_start_method,
    "the garbage collector": stop_collector,
    "the locale": choose_locale,
    "logging": silence_logging,
    "the source of entropy": replace_entropy,
    "numpy.seterr": ignore_overflow,
    "numpy.set_printoptions": print_fewer_digits,
    "a global hook of torch.nn.Module": hook_modules,
    "dpbam.engines.fused.tape.RULES": register_rule,
    "torch.set_num_threads": count_threads,
    "torch.set_default_dtype": choose_type,
    "torch.use_deterministic_algorithms": be_deterministic,
    "torch.set_grad_enabled": drop_gradients,
    "torch.autograd.set_detect_anomaly": detect_anomalies,
    "torch.set_float32_matmul_precision": multiply_coarsely,
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_named(name: str) -> None:
    before = surroundings.observe()
    undo = LEAKS[name]()
    try:
        sentences = surroundings.differences(before, surroundings.observe())
    finally:
        undo()
    assert [name in sentence for sentence in sentences] == [True]


def test_work_on_a_model_is_no_leak() -> None:
    before = surroundings.observe()
    nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
    assert surroundings.differences(before, surroundings.observe()) == []


def test_a_leak_fails_the_test_that_leaves_it(request: pytest.FixtureRequest) -> None:
    assert "_nothing_left" in request.fixturenames  # of the root conftest.py
    sentence = "the test leaves an environment variable changed, from {} to .*DPBAM_LEFT.*: undo it"
    with pytest.raises(AssertionError, match=sentence), surroundings.unchanged():
        undo = set_variable()
    undo()


Drawn = tuple[int, float, float, float]


def draw() -> Drawn:
    """One number of each generator."""
    legacy = float(np.random.rand())  # noqa: NPY002
    return secrets.randbits(64), random.random(), legacy, float(torch.rand(()))


def expected(name: str) -> Drawn:
    legacy = np.random.RandomState(zlib.crc32(name.encode()))
    entropy, own = random.Random(name), random.Random(name)
    torchs = torch.rand((), generator=torch.Generator().manual_seed(0))
    return entropy.getrandbits(64), own.random(), float(legacy.rand()), float(torchs)


@pytest.fixture(scope="module")
def shared() -> Drawn:
    return draw()


@pytest.mark.parametrize("turn", [1, 2])
def test_draws_are_a_function_of_the_name(turn: int, request: pytest.FixtureRequest) -> None:
    assert draw() == expected(request.node.nodeid)
    assert draw() != expected(request.node.nodeid)


@pytest.mark.parametrize("turn", [1, 2])
def test_a_shared_fixture_draws_the_same_whoever_asks_first(
    turn: int, shared: Drawn, request: pytest.FixtureRequest
) -> None:
    module = request.node.nodeid.partition("::")[0]
    assert shared == expected(f"{module} shared")
    assert draw() == expected(request.node.nodeid)
