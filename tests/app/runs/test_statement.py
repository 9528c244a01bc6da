import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from dpbam.app.runs import build, prepare
from dpbam.app.runs.statement import statement, to_markdown
from dpbam.data import load_pair
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.rounding import up


def made(config, charges=8, **facts):
    prepared = prepare(config)
    ledger = Ledger(prepared.plan.delta, prepared.plan.accountant)
    for step in range(charges):
        ledger.charge("s", step, noise_multiplier=prepared.plan.noise_multiplier,
                      sampling_rate=prepared.plan.sampling_rate)  # fmt: skip
    return statement(prepared, ledger, **{"run": "r", "steps": 8, "evaluations": 3, **facts})


def test_it_names_all_that_a_privacy_officer_has_to_know(tiny):
    values = made(tiny.replace(seed=None))
    text = to_markdown(values)
    for words in (
        "record (one image and its label)", "add or remove one unit of privacy", "Poisson",
        "dp-accounting", "RDP", "epsilon = 0.3", "delta = 0.0001", "| Noise multiplier sigma | 4 |",
        "| Sampling rate q | 0.125174 |", "| Steps | 8 |", "flat, norm C = 1",
        "operating system's entropy", "not accounted: choices", "digits/test, 359 records, 3 times",
        "`model.safetensors`", "`non-private/`", "random, independent of the data",
    ):  # fmt: skip
        assert words in text, words
    assert "Research only" not in text
    assert json.loads(json.dumps(values)) == values


OWN = """
from torch import nn

def net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""


def test_initial_weights_are_called_independent_only_where_that_is_known(
    tiny, tmp_path, monkeypatch
):
    (tmp_path / "net_of_unknown_weights.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = tiny.replace(model="net_of_unknown_weights:net", model_options={})
    weights = build.make_model(tiny, load_pair("digits")[0]).state_dict()
    save_file(weights, tmp_path / "w.safetensors")
    public = tiny.replace(init=tmp_path / "w.safetensors")
    for config, says in (
        (own, "made by net_of_unknown_weights:net, code of the user's own, who has to know"),
        (public, "from w.safetensors, taken to be public"),
    ):
        text = to_markdown(made(config))
        assert says in text
        assert "independent of the data" not in text
    assert "random, independent of the data" in to_markdown(made(tiny))


def test_unseeded_initial_weights_do_not_depend_on_what_the_process_did_before(tiny):
    """torch's generator as it stands may have been moved by the data; a seed is kept."""

    def first_weights(config):
        torch.manual_seed(0)
        return next(build.make_model(config, load_pair("digits")[0]).parameters())

    fresh = tiny.replace(seed=None)
    assert not torch.equal(first_weights(fresh), first_weights(fresh))
    assert torch.equal(first_weights(tiny), first_weights(tiny))


def test_a_seeded_run_is_for_research_only(tiny):
    text = to_markdown(made(tiny))
    assert "**Research only**" in text
    assert "reproducible, research only" in text
    assert "operating system's entropy" not in text


def test_lost_steps_are_named_and_counted(tiny):
    values = made(tiny, charges=11)
    assert values["epsilon"] > made(tiny)["epsilon"]
    assert "8 reached the model, 11 are charged" in to_markdown(values)


def test_a_reference_promises_nothing(tiny):
    values = made(tiny.replace(method="sgd", noise_multiplier=None))
    assert values["private"] is False
    assert values["epsilon"] == float("inf")
    assert "**This model is not private.**" in to_markdown(values)
    assert "differentially private" not in to_markdown(values)


def test_public_weights_and_the_budget_are_named(tiny, tmp_path):
    prepared = made(tiny, budget={"file": "b.json", "epsilon": 8, "delta": 1e-5, "taken": 1.2341})
    prepared["initial_weights"] = "from public.safetensors"
    assert "b.json: 1.235 of epsilon 8 taken" in to_markdown(prepared)


@given(st.floats(1e-6, 1e6))
def test_a_stated_epsilon_is_never_below_the_true_one(x):
    assert x <= float(up(x)) <= x * 1.0011


@pytest.mark.parametrize(("x", "shown"), [(8.0, "8"), (7.99961, "8"), (0.0, "0")])
def test_round_values_stay_round(x, shown):
    assert up(x) == shown
