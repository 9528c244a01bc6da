"""What may be done with a setting is in its definition, and is strict unless it says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from dpbam.app.report.groups import groups
from dpbam.app.report.records import PUBLIC_SETTINGS, Run
from dpbam.app.runs import RunConfig, RunError
from dpbam.app.runs.facts import check_config
from dpbam.app.runs.identity import config_digest
from dpbam.app.runs.meaning import NAMES
from dpbam.app.runs.settings import Policy, named, policies, setting, settings
from dpbam.app.search.search import Search, parse_space
from dpbam.catalogue import METHODS
from tests.results import run_facts

BASE = RunConfig(epsilon=3.0, model="auto", public_encoder="hf:/home/ann/vit", seed=1)


def test_a_new_setting_is_refused_hidden_and_distinguished() -> None:
    class Model(BaseModel):
        new: int = setting("Run", "New.", 1)

    assert policies(Model) == {"new": Policy()}
    strict = Policy()
    assert (strict.resume, strict.published, strict.searchable) == ("never", False, False)
    assert strict.distinguishes


@pytest.mark.parametrize(
    "changes",
    [
        {"public_encoder": "hf:/home/bob/elsewhere/vit"},
        {"data": "/home/bob/digits"},
        {"purpose": "/home/ann/why"},
        {"label_columns": ("/home/ann/label",)},
        {"data_root": Path("/home/bob")},
        {"budget": Path("/home/bob/budget.jsonl")},
    ],
    ids=str,
)
def test_the_digest_of_settings_has_no_path(changes: dict[str, object]) -> None:
    last = {k: v if isinstance(v, Path) else _last_part(v) for k, v in changes.items()}
    last = {k: None if isinstance(v, Path) else v for k, v in last.items()}
    assert config_digest(BASE.replace(**changes)) == config_digest(BASE.replace(**last))


def _last_part(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_last_part, value))
    prefix, colon, rest = str(value).rpartition(":")
    return f"{prefix}{colon}{Path(rest).name}"


@pytest.mark.parametrize("name", ["seed", "noise_seed"])
def test_the_digest_of_settings_does_not_depend_on_a_seed(name: str) -> None:
    """Else anyone could try out seeds until the digest fits, and subtract the noise."""
    assert config_digest(BASE.replace(**{name: 7})) == config_digest(BASE)


def test_a_setting_that_takes_names_of_the_catalogue_may_be_code_without_saying_so() -> None:
    class Model(BaseModel):
        new: named(METHODS) = setting("Method", "New.", "bam")  # type: ignore[valid-type]
        built_in: named(METHODS, own_code=False) = setting(  # type: ignore[valid-type]
            "Method", "New.", "bam"
        )
        text: str = setting("Run", "Text.", "")

    assert [one.may_be_code for one in settings(Model)] == [True, False, False]
    assert {*NAMES} == {"data", "model", "method", "clipping", "filter"}


def test_the_digest_tells_settings_apart() -> None:
    assert config_digest(BASE) != config_digest(BASE.replace(lr=0.1))
    assert config_digest(BASE) != config_digest(BASE.replace(public_encoder="hf:/home/ann/other"))


def test_what_may_change_on_resume_is_the_policy() -> None:
    facts = run_facts(BASE)
    free = {name for name, one in policies(RunConfig).items() if one.resume == "always"}
    # how the bias is measured is as free as whether it is
    assert {"measure_bias", "purpose", "num_workers"} <= free
    check_config(facts, BASE.replace(measure_bias=3, purpose="a test", num_workers=0))
    with pytest.raises(RunError, match="clip_norm was"):
        check_config(facts, BASE.replace(clip_norm=2.0))
    with pytest.raises(RunError, match="device was"):  # seeded: the same to the bit
        check_config(facts, BASE.replace(device="cuda"))


def test_seeds_with_another_purpose_are_one_group() -> None:
    runs = [
        Run(str(seed), {"method": "bam", "seed": seed, "purpose": purpose})
        for seed, purpose in enumerate(("a first look", "the paper"))
    ]
    assert [len(group.runs) for group in groups(runs)] == [2]


def test_no_path_and_no_seed_is_published() -> None:
    paths = {one.name for one in settings(RunConfig) if one.type is Path}
    assert not PUBLIC_SETTINGS & (paths | {"seed", "noise_seed", "data"})


def test_an_accounted_search_varies_what_its_policy_allows() -> None:
    shared = {"settings": {"epsilon": 3.0}, "pay": "accounted"}
    Search(space=parse_space(["lr=1e-3..1e-1:log"]), **shared)
    with pytest.raises(ValueError, match="epochs may change what a trial costs"):
        Search(space=parse_space(["epochs=1..5"]), **shared)
