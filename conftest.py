"""The same draws in every run of the tests; and at its end what was skipped, and the time."""

from __future__ import annotations

import os
import random
import resource
import secrets
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

_KEY = "processor seconds"
# tests/interop has what these pages show
_SLOW_PAGES = {"from-opacus.md", "trainers.md"}


class Entropy:
    """Replaces the operating system's entropy: repeats from run to run, never within one.

    Unseeded noise would fail a statistical check now and then. A forked or started process has the
    system's own, or all of them would draw the same: what it draws needs a false-alarm rate.
    """

    def __init__(self) -> None:
        self._stream, self._owner, self._real = random.Random(), os.getpid(), secrets.randbits

    def restart(self, name: str) -> None:
        """Seed the entropy and the global generators for a test or a shared fixture.

        Entropy differs by name (by its SHA-512, whatever PYTHONHASHSEED is); torch starts at 0.
        """
        import numpy as np  # here: the process that only hands tests to others needs neither
        import torch

        self._stream.seed(name)
        random.seed(name)
        np.random.seed(zlib.crc32(name.encode()))  # noqa: NPY002
        torch.manual_seed(0)

    def randbits(self, k: int) -> int:
        """``secrets.randbits``."""
        return self._stream.getrandbits(k) if os.getpid() == self._owner else self._real(k)

    def token_bytes(self, nbytes: int = 32) -> bytes:
        """``secrets.token_bytes``."""
        return self.randbits(8 * nbytes).to_bytes(nbytes, "little")

    def token_hex(self, nbytes: int = 32) -> str:
        """``secrets.token_hex``."""
        return self.token_bytes(nbytes).hex()


_ENTROPY = Entropy()


def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest-randomly to the order: its seeds differ from run to run."""
    config.option.randomly_reset_seed = False


@pytest.fixture(scope="session", autouse=True)
def _entropy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("randbits", "token_bytes", "token_hex"):
            patch.setattr(secrets, name, getattr(_ENTROPY, name))
        yield


@pytest.fixture(scope="session", autouse=True)
def _present_devices() -> Iterator[None]:
    """Seed the devices that are there: for an absent one torch keeps each call and its stack."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda seed: None)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> None:
    """Restart before a shared fixture: it draws the same whichever test asks for it first."""
    if fixturedef.scope != "function":
        _ENTROPY.restart(f"{request.node.nodeid} {fixturedef.argname}")


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest) -> None:
    _ENTROPY.restart(request.node.nodeid)


@pytest.fixture(autouse=True)
def _nothing_left(_same_start: None) -> Iterator[None]:
    """Fail a test that leaves the process in another state for the next."""
    from tests import surroundings

    with surroundings.unchanged():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--processor-time FILE``: a table of each file's tests and their processor time."""
    parser.addoption("--processor-time", type=Path, metavar="FILE", help=_KEY + " per test file")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the pages whose examples import the most."""
    for item in items:
        if item.path.name in _SLOW_PAGES:
            item.add_marker(pytest.mark.slow)


def _spent() -> float:
    """Seconds of this process and of the children that it has waited for, user and system."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note on each phase's report what the processor did since the last one."""
    report = yield
    now = _spent()
    report.user_properties.append((_KEY, now - getattr(item.config, "_spent", now)))
    item.config._spent = now  # type: ignore[attr-defined]
    return report


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin to count."""
    session.config._spent = _spent()  # type: ignore[attr-defined]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write the table, and, as the last line, what was skipped and which command enables it."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # one of several workers
        return
    reports = [r for rs in reporter.stats.values() for r in rs if isinstance(r, pytest.TestReport)]
    if (path := config.getoption("--processor-time")) is not None:
        path.write_text(_times(reports), encoding="utf-8")
    why = Counter(_reason(report) for report in reporter.stats.get("skipped", ()))
    if why:
        said = ", ".join(f"{count} ({reason})" for reason, count in sorted(why.items()))
        reporter.write_line(f"skipped: {said}")


def _reason(report: pytest.TestReport) -> str:
    """The reason of a skip: by our convention "what is missing: the command that brings it"."""
    found = report.longrepr
    text = str(found[2] if isinstance(found, tuple) else found)
    return text.removeprefix("Skipped: ")


def _times(reports: list[pytest.TestReport]) -> str:
    """Seconds, tests and file, the most expensive first, and the sum in the last line."""
    seconds: Counter[str] = Counter()
    tests: dict[str, set[str]] = {}
    for report in reports:
        file = report.nodeid.partition("::")[0]
        own = (value for key, value in report.user_properties if key == _KEY)
        seconds[file] += sum(own)  # type: ignore[assignment, arg-type]
        tests.setdefault(file, set()).add(report.nodeid)
    lines = [f"{spent:8.1f}  {len(tests[file]):5}  {file}" for file, spent in seconds.most_common()]
    total = f"{sum(seconds.values()):8.1f}  {sum(map(len, tests.values())):5}  all"
    return "\n".join([" seconds  tests  file", *lines, total, ""])
