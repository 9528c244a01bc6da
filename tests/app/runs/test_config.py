import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbam.app.runs import ConfigError, RunConfig
from dpbam.app.runs.config import default_batch_size
from dpbam.errors import ArgumentError
from dpbam.privacy.plan import PrivacyPlan, default_delta


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"epsilon": -1}, "epsilon must be positive and finite, got -1"),
        ({"epsilon": math.nan}, "epsilon must be a number, got NaN"),
        ({"epsilon": 3, "noise_multiplier": 1}, "give either epsilon"),
        ({}, "give either epsilon"),
        ({"method": "sgd", "epsilon": 3}, "a reference without privacy"),
        ({"epsilon": 3, "delta": 1.5}, "delta must lie strictly between 0 and 1"),
        ({"epsilon": 3, "batchsize": 5}, "batchsize is unknown: did you mean 'batch_size'?"),
        ({"epsilon": 3, "xyzzy": 5}, "xyzzy is unknown: see dpbam train --help-all"),
        ({"epsilon": 3, "method": "bum"}, "method 'bum' is unknown: did you mean 'bam'?"),
        ({"epsilon": 3, "optimizer": "x"}, "choose from nadam, sgd, adam, adamw"),
        ({"epsilon": 3, "batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"epsilon": 3, "batch_size": "many"}, "batch_size must be a valid integer, got 'many'"),
        ({"epsilon": 3, "lr": "fast"}, "lr must be a valid number, got 'fast'"),
        ({"epsilon": 3, "lr": 0}, "lr must be positive"),
        ({"epsilon": 3, "momentum": 2}, "momentum must lie between 0 and 1"),
        ({"epsilon": 3, "ema": 0.9, "swa": 0.5}, "choose one"),
        ({"epsilon": 3, "freeze": ["a"], "train": "head"}, "leave freeze out"),
        ({"epsilon": 3, "max_records": 4, "unit": "record"}, "the unit is a record"),
        ({"epsilon": 3, "seed": -1}, "seed must be at least 0"),
    ],
)
def test_a_wrong_value_is_named_in_one_sentence(values, says):
    with pytest.raises(ConfigError) as error:
        RunConfig(**values)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100, 321, 546, 1365, 1366, 1438, 50_000])
def test_the_default_batch_fits_any_data_set(n):
    plan = RunConfig(noise_multiplier=4.0).plan(n)
    assert plan.batch_size == default_batch_size(n)
    assert plan.batch_size == 1 or plan.batch_size <= 3 * n / 8
    assert plan.steps >= min(53, 20 * n)
    assert plan.batch_size == 512 or 2 * plan.batch_size > 3 * n / 8, "the largest"


def test_a_batch_above_n_is_refused_with_one_that_works():
    with pytest.raises(ConfigError) as refused:
        RunConfig(noise_multiplier=4.0, batch_size=512).plan(321)
    (size,) = re.findall(r"which means (\d+) here", str(refused.value))
    assert RunConfig(noise_multiplier=4.0, batch_size=int(size)).plan(321).batch_size == 64


def test_toml_and_json_read_back_the_same(tmp_path):
    config = RunConfig(
        epsilon=3, model="resnet9", model_options={"width": 0.25, "scale_norm": True}, ema=0.999,
        freeze=("conv1.*", 'odd "name"'), init="weights.safetensors", image_size=(28, 32), seed=3,
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(config.to_toml())
    (tmp_path / "run.json").write_text(json.dumps(config.to_mapping()))
    assert RunConfig.from_file(tmp_path / "run.toml") == config
    assert RunConfig.from_file(tmp_path / "run.json") == config
    assert RunConfig.from_file(tmp_path / "run.toml", lr=0.5).lr == 0.5


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.toml", "lr = ", "is not valid"),
        ("a.json", "[1]", "must hold names and values"),
        ("b.toml", None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=says):
        RunConfig.from_file(tmp_path / name)


def test_replace_checks_again():
    with pytest.raises(ConfigError, match="lr must be positive"):
        RunConfig(epsilon=3).replace(lr=-1)


def test_the_plan_calibrates_and_a_resumed_one_keeps_its_sigma():
    config = RunConfig(epsilon=3, epochs=2, accountant="rdp")
    plan = config.plan(1438)
    assert plan.epsilon() <= 3 < plan.epsilon(plan.steps + 1)
    again = config.replace(epochs=1).plan(1438, noise_multiplier=plan.noise_multiplier)
    assert again.noise_multiplier == plan.noise_multiplier
    assert again.steps == round(1438 / 512)


def test_a_reference_has_neither_noise_nor_clipping():
    plan = RunConfig(method="sgd", clipping="automatic").plan(1000)
    assert (plan.noise_multiplier, plan.clip_norm, plan.private) == (0.0, math.inf, False)


def test_records_of_a_unit_are_capped_by_default():
    assert RunConfig(noise_multiplier=1, unit="patient").plan(1000).max_records == 8


def test_the_limit_of_records_is_of_the_unit_that_the_data_has():
    config = RunConfig(noise_multiplier=1, max_records=3)
    assert config.plan(1000, unit="patient").max_records == 3
    with pytest.raises(ArgumentError, match="max_records is 3 but the unit is a record"):
        config.plan(1000, unit="record")


@given(st.integers(1, 10**9))
def test_default_delta_is_the_largest_power_of_ten_at_most_one_over_100_n(n):
    delta = default_delta(n)
    assert 0 < delta <= 1 / (100 * n) * (1 + 1e-12) < 10.00001 * delta
    assert RunConfig(noise_multiplier=1).plan(max(n, 512)).delta == default_delta(max(n, 512))
    assert PrivacyPlan.non_private(n=n, batch_size=1, steps=1).delta == delta
    assert round(math.log10(delta)) == pytest.approx(math.log10(delta))
