"""A pytest plugin: ``PYTHONPATH=tests pytest -p cpu_times --cpu-times FILE``.

FILE receives ``{"total": seconds, "files": {file: seconds}}``, the dearest file first. A test costs
the user and system time of its process and of the children that it waited for, from setup to
teardown; a shared fixture counts for its first test, and the imports of collection for none. The
worker processes of xdist send their figures along.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import cast

import pytest

NAME = "cpu_seconds"
STARTED = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """Processor time of this process and of its finished children so far."""
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", type=Path, help="processor time per file")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown":  # the report takes the properties that the item has by now
        item.user_properties.append((NAME, cpu_seconds() - item.stash[STARTED]))


class Collector:
    """Adds up what the reports say, in the process that writes the file."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.spent: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            file, spent = report.nodeid.split("::")[0], dict(report.user_properties)[NAME]
            self.spent[file] += cast(float, spent)

    def pytest_sessionfinish(self) -> None:
        dearest = sorted(self.spent.items(), key=lambda item: -item[1])
        files = {file: round(seconds, 2) for file, seconds in dearest}
        found = {"total": round(sum(self.spent.values()), 2), "files": files}
        self.out.write_text(json.dumps(found, indent=2) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    out = config.getoption("--cpu-times")
    if out is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Collector(out.absolute()))
