"""Hostile files, the short of it; ``benchmarks/fuzz.py`` does the same a hundred thousand times."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from folders import FOLDERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutation import KINDS, NASTY, Mutation, mutate
from parsers import PARSERS

MUTATIONS = st.lists(
    st.builds(
        Mutation,
        st.integers(0, KINDS - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", PARSERS)
def test_valid_files_are_read(name: str, tmp_path: Path) -> None:
    if name == "labels.csv":
        (tmp_path / "a").mkdir()
    for content in PARSERS[name].valid:
        assert PARSERS[name].try_on(content, tmp_path) == "read"


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 7), mutations=MUTATIONS)
def test_no_file_gives_a_traceback(
    name: str, tmp_path: Path, which: int, mutations: list[Mutation]
) -> None:
    parser = PARSERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parser.try_on(mutate(parser.valid[which % len(parser.valid)], mutations), tmp_path)


@pytest.mark.parametrize("name", ["audit config.toml", "report config.toml"])
def test_honest_run_folders_are_read(name: str, tmp_path: Path) -> None:
    parser = FOLDERS[name]()
    assert parser.try_on(parser.valid[0], tmp_path) == "read"


@pytest.mark.parametrize("name", FOLDERS)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=MUTATIONS)
def test_no_run_folder_gives_a_traceback(
    name: str, tmp_path: Path, mutations: list[Mutation]
) -> None:
    parser = FOLDERS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parser.try_on(mutate(parser.valid[0], mutations), tmp_path)


@pytest.mark.parametrize("name", ["config.toml", "config.json", "facts", "ledger", "budget",
                                  "metrics", "model.json"])  # fmt: skip
def test_every_word_replaced_by_every_nasty_one(name: str, tmp_path: Path) -> None:
    """Once each, in turn: the places are spread over the file."""
    parser = PARSERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in range(len(NASTY)):
            place = (value * 2654435761) % 2**32
            parser.try_on(mutate(parser.valid[0], [Mutation(6, place, value)]), tmp_path)
