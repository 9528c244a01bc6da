"""What one test could leave behind for the next: compared before and after each.

Only what is cheap to read, some 100 microseconds in all. Draws are not in it, the root
``conftest.py`` seeds them for each test; nor are warning filters, which pytest restores.
"""

from __future__ import annotations

import gc
import locale
import logging
import multiprocessing
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_THREADS = "a running thread"
_PATIENCE = 60.0  # seconds for a thread to end, on a loaded machine
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
_HOOKS = ("forward", "forward_pre", "backward", "backward_pre")
#: By pytest in each phase; by torch's compiler and by scikit-learn as they are imported.
_SET_BY_OTHERS = (
    b"PYTEST_CURRENT_TEST",
    b"TORCHINDUCTOR_CACHE_DIR",
    b"KMP_DUPLICATE_LIB_OK",
    b"KMP_INIT_AT_FORK",
    b"PYTORCH_NVML_BASED_CUDA_CHECK",  # by Lightning, when it is imported
)
#: Registries of the library, by module: what a test registers, it takes away.
_REGISTRIES = {"dpbam.engines.fused.tape": ("RULES", "ALWAYS", "LOOKUPS")}


@contextmanager
def unchanged() -> Iterator[None]:
    """Fail if the body leaves the process in another state than before.

    Raises:
        AssertionError: with a sentence for each thing that is not as it was.
    """
    before = observe()
    yield
    _wait_for_threads(before[_THREADS])
    left = differences(before, observe())
    assert not left, "; ".join(left)


def _wait_for_threads(names: set[str]) -> None:
    """Let new threads end that are about to: transformers does not wait for those it loads with."""
    new = [thread for thread in threading.enumerate() if not thread.daemon]
    for thread in (thread for thread in new if thread.name not in names):
        thread.join(_PATIENCE)


def observe() -> dict[str, Any]:
    """Return the state of the process that tests share, by name."""
    return {
        "the working directory": os.getcwd(),
        "an environment variable": _environment(),
        "sys.path": list(sys.path),
        "a signal handler": {number.name: signal.getsignal(number) for number in _SIGNALS},
        _THREADS: {thread.name for thread in threading.enumerate() if not thread.daemon},
        "the way processes start": multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0],  # the default, which the first use fixes
        "the garbage collector": gc.isenabled(),
        "the locale": locale.setlocale(locale.LC_ALL),
        "logging": (
            logging.root.level, logging.root.manager.disable, logging.getLogger("dpbam").level,
        ),
        "the source of entropy": (secrets.randbits, secrets.token_bytes, secrets.token_hex),
        **_of_numpy(),
        **_of_torch(),
        **_of_registries(),
    }  # fmt: skip


def _environment() -> dict[Any, Any]:
    """Read undecoded, which takes a hundredth of the time."""
    variables = dict(os.environ._data)
    for name in _SET_BY_OTHERS:
        variables.pop(name, None)
    return variables


def _of_numpy() -> dict[str, Any]:
    numpy = sys.modules["numpy"]
    return {"numpy.seterr": numpy.geterr(), "numpy.set_printoptions": numpy.get_printoptions()}


def _of_torch() -> dict[str, Any]:
    torch = sys.modules["torch"]
    module = torch.nn.modules.module
    return {
        "torch.set_num_threads": torch.get_num_threads(),
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.set_default_device": torch.get_default_device(),
        "torch.use_deterministic_algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "torch.set_grad_enabled": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "torch.autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled(),
        "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.backends": (
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        ),
        "a global hook of torch.nn.Module": [
            dict(getattr(module, f"_global_{kind}_hooks")) for kind in _HOOKS
        ],
        "torch.distributed.init_process_group": torch.distributed.is_available()
        and torch.distributed.is_initialized(),
    }


def _of_registries() -> dict[str, Any]:
    """Of modules that are loaded: loading them is no leak."""
    return {
        f"{name}.{registry}": set(getattr(sys.modules[name], registry))
        for name, registries in _REGISTRIES.items()
        if name in sys.modules
        for registry in registries
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a sentence for each thing that is not as it was."""
    return [
        f"the test leaves {name} changed, from {_shown(value, after[name])} to "
        f"{_shown(after[name], value)}: undo it in the test (monkeypatch, try and finally)"
        for name, value in before.items()
        if (after[name] - value if name == _THREADS else after[name] != value)  # others may end
    ]


def _shown(value: Any, other: Any) -> str:
    """The value, of a dictionary or set that which the other has not."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {name: v for name, v in value.items() if name not in other or other[name] != v}
    elif isinstance(value, set) and isinstance(other, set):
        value = value - other
    return repr(value)
