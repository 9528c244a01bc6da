"""Recipes: all of them load, specify valid runs, and have the paper's settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dpbam.app.runs import ConfigError
from dpbam.data import DataError, load_pair
from reproduce.accuracy_claims import paper
from reproduce.recipes import SCALES, load_recipe, read_recipe, recipe_names
from tests.reproduce.tiny import tiny

EVERY = [(scale, name) for scale in SCALES for name in recipe_names(scale)]


@pytest.mark.parametrize(("scale", "name"), EVERY)
def test_every_recipe_is_whole(scale, name):
    recipe = load_recipe(name, scale)
    runs = recipe.runs()
    assert len({run.name for run in runs}) == len(runs)
    assert len({run.config.noise_seed for run in runs}) == len(runs)  # no noise is shared
    assert recipe.seeds >= 5 or name.startswith("tune-")
    for run in runs:
        plan = run.config.replace(noise_multiplier=1.0, epsilon=None).plan(recipe.images)
        assert plan.steps > 10
        heads_take_full_batches = name == "laptop" or name.startswith("encoder-")
        assert plan.batch_size < recipe.images or heads_take_full_batches
        assert run.config.delta < 1 / recipe.images


@pytest.mark.parametrize(
    ("name", "accountant"),
    [
        pytest.param("table1-cifar10", "pld", marks=pytest.mark.slow),  # desk scale has it too
        ("table1-imagenet32", "rdp"),
    ],
)
def test_full_size_calibrates(name, accountant):
    recipe = load_recipe(name, "full")
    config = recipe.runs(1)[-1].config.replace(accountant=accountant)  # rdp: in a tenth of the time
    plan = config.plan(recipe.images)
    assert config.epsilon == 10
    assert plan.epsilon() <= 10
    assert plan.epsilon() > 9.99
    assert plan.steps == round(75 * recipe.images / 4096)


@pytest.mark.parametrize(
    ("name", "model", "lr", "views", "lambdas", "delta"),
    [
        ("table1-cifar10", "resnet9", 2e-3, 16, [0.086, 0.02], 1e-5),
        ("table1-cifar100", "resnet9", 2e-3, 16, [0.086, 0.01], 1e-5),
        ("table1-imagenet32", "wrn-16-4", 1e-3, 4, [0.07, 0.005], 7.5e-7),
    ],
)
def test_full_size_is_the_papers_table_2(name, model, lr, views, lambdas, delta):
    recipe = load_recipe(name, "full")
    configs = {run.arm: run.config for run in recipe.runs(1)}
    assert list(configs) == ["dp-sgd", "dp-sat", "bam"]
    assert [configs[arm].lam for arm in ("dp-sat", "bam")] == lambdas
    for config in configs.values():
        assert (config.model, config.lr, config.augment_multiplicity) == (model, lr, views)
        assert (config.batch_size, config.epochs, config.clip_norm) == (4096, 75, 1)
        assert (config.optimizer, config.delta, config.gradient) == ("nadam", delta, "approximate")
        assert (config.shift, config.flip, config.augment_probability) == (4, "horizontal", 0.5)
    asked = {row["epsilon"] for row in paper()["table1"] if row["recipe"] == name}
    assert set(recipe.grid["epsilon"]) == asked


@pytest.mark.parametrize(
    ("scale", "name", "shared"),
    [
        ("pocket", "exact", 5), ("pocket", "lambda", 10), ("desk", "exact", 24),
        ("full", "exact", 5), ("full", "lambda", 10),
    ],
)  # fmt: skip
def test_recipes_that_build_on_another_share_its_runs(scale, name, shared):
    base = {run.name: run.config for run in load_recipe("table1-cifar10", scale).runs()}
    recipe = load_recipe(name, scale)
    assert recipe.records == "table1-cifar10"
    same = [run for run in recipe.runs() if run.name in base]
    assert len(same) == shared
    assert all(base[run.name] == run.config for run in same)


def test_a_variant_changes_its_own_fields_alone():
    recipe = load_recipe("when-mlp", "desk")
    runs = {run.name: run for run in recipe.runs(1)}
    assert list(runs)[:2] == ["dp-sgd-at-centre-seed-0", "bam-at-centre-seed-0"]
    centre = runs["bam-at-centre-seed-0"].config
    fields = {"noise_seed": None}
    for name, changed in recipe.variants.items():
        config = runs[f"bam-at-{name}-seed-0"].config
        assert config.replace(**fields) == centre.replace(**{**fields, **changed})


def test_a_study_of_lambda_shares_the_runs_at_the_default():
    base, other = (load_recipe(name, "desk") for name in ("when-mlp", "share-mlp"))
    runs = {run.name: run.config for run in base.runs()}
    same = [run for run in other.runs() if run.name in runs]
    assert len(same) == 2 * len(other.variants) * other.seeds
    assert all(runs[run.name] == run.config for run in same)


@pytest.mark.slow
def test_desk_scale_calibrates():
    recipe = load_recipe("table1-cifar10", "desk")
    config = recipe.runs(1)[0].config
    plan = config.plan(recipe.images)
    assert (config.epsilon, plan.steps, plan.batch_size) == (10, 150, 2000)
    assert 9.99 < plan.epsilon() <= 10
    assert plan.noise_multiplier == pytest.approx(0.629, abs=0.001)


@pytest.mark.slow
def test_desk_scale_tunes_dp_sgd_no_less_than_the_others():
    table = load_recipe("table1-cifar10", "desk")
    names = [
        name
        for name in recipe_names("desk")
        if name.startswith("tune-") and name.endswith("-cifar10")
    ]
    tuning = [load_recipe(name, "desk") for name in names]
    tried = Counter(arm["method"] for recipe in tuning for arm in recipe.arms.values())
    assert tried == {"dp-sgd": 4, "dp-sat": 4, "bam": 4}
    for recipe in tuning:
        seeds = {run.seed for run in recipe.runs()}
        assert seeds.isdisjoint(run.seed for run in table.runs())
        same = ("model", "model_options", "delta", "clip_norm", "batch_size", "optimizer", "swa")
        for field in same:
            assert recipe.setting[field] == table.setting[field]
    for recipe in (*tuning, table):
        config = recipe.runs(1)[0].config.replace(accountant="rdp")  # the same steps, sooner
        assert config.plan(recipe.images).steps == 150


@pytest.mark.parametrize(
    ("scale", "name"),
    [
        pytest.param(*one, marks=() if one == ("desk", "other-digits") else pytest.mark.slow)
        for one in EVERY
        if one[0] != "full"
    ],
)
def test_the_public_facts_are_those_of_the_data(scale, name):
    recipe = load_recipe(name, scale)
    try:
        train, _ = load_pair(str(recipe.setting["data"]), download=False)
    except DataError:
        pytest.skip(f"no {recipe.setting['data']}: dpbam data fetch, or put it there")
    facts = (recipe.images, tuple(recipe.shape), recipe.classes)
    assert facts == (len(train), train.shape, train.num_classes)


def test_a_run_is_named_by_arm_place_and_seed(tmp_path):
    recipe = tiny(tmp_path, clip_norms=(1.0, 0.5))
    names = [run.name for run in recipe.runs(1)]
    assert names[0] == "dp-sgd-clip_norm-1-seed-0"
    assert names[-1] == "bam-clip_norm-0.5-seed-0"
    assert len(names) == 6
    seeds = [run.seed for run in recipe.runs()]
    assert seeds == sorted(seeds)  # whole pairs first


def test_a_place_of_the_grid_has_its_own_number_of_seeds(tmp_path):
    recipe = replace(tiny(tmp_path, clip_norms=(1.0, 0.5)), seeds_at={"clip_norm-0.5": 3})
    names = [run.name for run in recipe.runs() if run.arm == "bam"]
    few, many = recipe.seeds, 3
    assert few < many
    assert [n for n in names if "-1-" in n] == [f"bam-clip_norm-1-seed-{k}" for k in range(few)]
    assert [n for n in names if "0.5" in n] == [f"bam-clip_norm-0.5-seed-{k}" for k in range(many)]
    asked = [run.seed for run in recipe.runs(1)]
    assert set(asked) == {0}


def test_wrong_recipes_are_refused_with_a_sentence(tmp_path):
    tiny(tmp_path)
    path = tmp_path / "pocket" / "wrong.toml"
    for text, says in (
        ("title = 'x'\ncolour = 3", "'colour', which is not known"),
        ("images = 1\nshape = [1]\nclasses = 2", "has no arms"),
        ("title = 'x'\n[arms.bam]\nmethod = 'bam'", "lacks images"),
        ("base = 'tiny'\nuse = ['sam']", "no arm 'sam'"),
        (
            "images = 1\nshape = [1]\nclasses = 2\n[arms.bam]\nmethod = 'bam'\n[grid]\nlr = [0.1]\n"
            "[seeds_at]\n'lr-0.2' = 3",
            r"no place 'lr-0\.2' for seeds: did you mean 'lr-0\.1'",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            read_recipe(path)
    with pytest.raises(ConfigError, match="did you mean 'table1-cifar10'"):
        load_recipe("table1-cifar", "pocket")
    with pytest.raises(ConfigError, match="pocket, desk or full"):
        load_recipe("exact", "huge")
