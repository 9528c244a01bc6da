"""What every run of the tests says at its end: what was skipped, and the processor's time."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

_KEY = "processor seconds"
# tests/interop has what these pages show
_SLOW_PAGES = {"from-opacus.md", "huggingface.md", "lightning.md"}


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
