"""``dpbam methods`` lists what configurations take."""

from __future__ import annotations

from typing import get_args

from dpbam.app.cli.methods import PARTS
from dpbam.app.runs.config import RunConfig
from dpbam.filters import FILTERS
from dpbam.methods import METHODS
from dpbam.privacy.plan import CLIPPING_NAMES


def listed(flag: str) -> set[str]:
    return {part.name for part in PARTS if part.flag == flag}


def choices(field: str) -> set[str]:
    return set(get_args(get_args(RunConfig.model_fields[field].annotation)[0]))


def test_what_is_listed_is_what_is_built_in() -> None:
    assert listed("--method") == set(METHODS) == choices("method")
    assert listed("--clipping") == set(CLIPPING_NAMES) == choices("clipping")
    assert listed("--filter") == set(FILTERS) == choices("filter") - {"none"}
