"""Settings that every test shares: hypothesis tries the same examples in every run."""

from __future__ import annotations

import gc
from collections.abc import Generator
from functools import cache
from types import ModuleType

import pytest
from hypothesis import settings

_FORKING = {"tests.forked", "end_to_end.kill_driver", "distributed.driver"}


def pytest_configure(config: pytest.Config) -> None:
    """Try the same examples in every run, and twice as many where slow tests run, too."""
    examples = 20 if config.option.markexpr == "not slow" else 40
    settings.register_profile("steady", deadline=None, derandomize=True, max_examples=examples)
    settings.load_profile("steady")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that fork: one process gets them all, and starts the only fork server.

    Otherwise the order stays random, also among them.
    """
    items.sort(key=lambda item: not _forks(getattr(item, "module", None)))


@cache
def _forks(module: ModuleType | None) -> bool:
    origins = {getattr(value, "__module__", None) for value in vars(module or object).values()}
    return not origins.isdisjoint(_FORKING)


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look at it in every test."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for no examples in the tests themselves, and import no helper that no test imports."""
    found = yield
    return [each for each in found if type(each).__name__ != "DoctestModule"]
