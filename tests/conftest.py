"""Settings that every test shares: hypothesis tries the same examples in every run."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest
from hypothesis import settings


def pytest_configure(config: pytest.Config) -> None:
    """Try the same examples in every run, and twice as many where slow tests run, too."""
    examples = 20 if config.option.markexpr == "not slow" else 40
    settings.register_profile("steady", deadline=None, derandomize=True, max_examples=examples)
    settings.load_profile("steady")
    gc.disable()  # until all is imported


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look at it in every test."""
    gc.collect()
    gc.enable()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor at what the tests of a file have imported and cached, once its fixtures are gone.

    The engines collect garbage where a model is refused, which else takes longer from file to file.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for no examples in the tests themselves, and import no helper that no test imports."""
    found = yield
    return [each for each in found if type(each).__name__ != "DoctestModule"]
