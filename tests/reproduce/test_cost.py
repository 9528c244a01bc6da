"""What a recipe costs: counted on a step, and in proportion to what is asked for."""

from __future__ import annotations

import pytest

from dpbam.app.runs import RunConfig
from reproduce.cost import GPU_FLOPS, GPU_USED, count_step, recipe_costs, take_steps
from tests.reproduce.tiny import tiny


def test_flops_of_a_linear_model_are_right(tmp_path):
    """DP-SGD by the fused engine on x -> W x: forward, and twice as much again for the sum."""
    recipe = tiny(tmp_path)
    config = RunConfig(model="mlp", model_options={"hidden": []}, noise_multiplier=1.0,
                       method="dp-sgd", device="cpu", seed=0)  # fmt: skip
    step = count_step(config, recipe)
    forward = 2 * 64 * 10  # a multiplication and an addition a weight
    assert forward <= step.flops_per_row <= 4 * forward


def test_costs_of_a_recipe(tmp_path):
    costs = {cost.name: cost for cost in recipe_costs(tiny(tmp_path), tmp_path)}
    sgd, bam = costs["dp-sgd-clip_norm-1"], costs["bam-clip_norm-1"]
    assert (sgd.done, sgd.asked, sgd.steps) == (0, 2, 4)
    assert sgd.passes == 4 * 64
    assert sgd.noise_multiplier == 1.0
    assert sgd.step.bytes > 0
    assert sgd.step.rows == 4096  # all that are ever computed at once: this net is small
    assert 1.5 < bam.flops / sgd.flops < 4  # a second gradient, at the sample's own point
    assert sgd.gpu_hours_left == pytest.approx(2 * sgd.flops / (GPU_FLOPS * GPU_USED) / 3600)


def test_twice_the_epochs_cost_twice_as_much(tmp_path):
    short = recipe_costs(tiny(tmp_path / "a", epochs=1.0), tmp_path)[0]
    long = recipe_costs(tiny(tmp_path / "b", epochs=2.0), tmp_path)[0]
    assert long.flops / short.flops == pytest.approx(long.steps / short.steps)
    assert long.step.bytes == short.step.bytes


def test_real_steps_are_taken_on_real_data(tmp_path):
    recipe = tiny(tmp_path)
    trial = take_steps(recipe.runs()[0].config, 2, recipe.images)
    assert len(trial.rows) == len(trial.losses) == 2
    assert all(30 < rows < 110 for rows in trial.rows)  # Poisson around 64
    assert all(before != after for before, after in trial.losses)
    assert 0 < trial.epsilon < 10


def test_a_trial_of_few_images_has_the_noise_of_the_run_and_tries_no_sizes(tmp_path, monkeypatch):
    """At full width the engine's search for a physical batch size took most of a trial."""
    monkeypatch.setattr(
        "dpbam.engines.memory.physical_batch_size", None
    )  # would fail if it were called
    recipe = tiny(tmp_path)
    config = recipe.runs()[0].config.replace(noise_multiplier=None, epsilon=2.0)
    trial, spent = (take_steps(config.replace(seed=seed), 2, recipe.images, 8) for seed in (0, 1))
    assert all(rows < 30 for rows in trial.rows)  # Poisson around 8
    sigma = config.plan(recipe.images).noise_multiplier
    small = config.replace(batch_size=8, noise_multiplier=sigma, epsilon=None, epochs=16 / 1438)
    assert trial.epsilon == spent.epsilon == pytest.approx(small.plan(recipe.images).epsilon())
