import html
import json
import math
import re
import runpy
import secrets
import sys
import types
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from dpbam.app.runs import ConfigError, build, prepare
from dpbam.app.runs.documents import BudgetState, Identity, Statement
from dpbam.app.runs.files import FORMAT
from dpbam.app.runs.statement import attacks, statement
from dpbam.app.runs.statement_text import right_guesses, to_html, to_markdown
from dpbam.data import load_pair
from dpbam.privacy.accounting import Charge
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.randomness import Randomness
from dpbam.privacy.rounding import up

IDENTITY = {
    "date": "2026-11-17",
    "files": {"model.safetensors": "0" * 64, "model.json": "1" * 64},
    "configuration_sha256": "2" * 64,
    "versions": {"dpbam": "0.1.0"},
}


def made(config, charges=8, **facts):
    prepared = prepare(config)
    ledger = Ledger(prepared.plan.delta, prepared.plan.accountant)
    for step in range(charges):
        ledger.charge("s", step, noise_multiplier=prepared.plan.noise_multiplier,
                      sampling_rate=prepared.plan.sampling_rate)  # fmt: skip
    facts = {"run": "r", "steps": 8, "evaluations": 3, "identity": Identity(**IDENTITY), **facts}
    return statement(prepared, ledger, **facts)


def test_it_names_all_that_a_privacy_officer_has_to_know(tiny):
    values = made(tiny.replace(seed=None))
    text = to_markdown(values)
    for words in (
        "record (one image and its label)", "add or remove one unit of privacy", "Poisson",
        "dp-accounting", "RDP", "epsilon = 0.3", "delta = 0.0001", "| Noise multiplier sigma | 4 |",
        "| Sampling rate q | 0.125174 |", "| Steps | 8 |", "flat, norm C = 1",
        "operating system's entropy", "the true epsilon is larger", "was tried 3 times",
        "approximate DP", "central", "no evaluation chose it", "is not signed: an attacker",
        "`model.safetensors`", "`non-private/`", "random, independent of the data",
    ):  # fmt: skip
        assert words in text, words
    assert "Research only" not in text
    assert text.index("## In plain words") < text.index("differentially private")
    assert Statement.model_validate(json.loads(json.dumps(values.to_json()))) == values


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
    listed = "## What may be published\n\n"
    assert f"{listed}**Of sensitive data nothing**: the run was seeded" in text
    assert f"{listed}- `model.safetensors`" in to_markdown(made(tiny.replace(seed=None)))


def test_the_noise_is_described_as_it_is_drawn(tiny, monkeypatch):
    """The size of a key and of a block are those of the draws, whose entropy is counted here."""
    keys, real = [], secrets.token_bytes

    def token_bytes(count):
        keys.append(count)
        return real(count)

    def keys_of(coordinates):
        keys.clear()
        GaussianNoise(Randomness()).add({"w": torch.zeros(coordinates)}, 1.0, 0)
        return keys

    text = made(tiny.replace(seed=None)).noise_mode
    (bits,) = re.findall(r"a new key of (\d+) bits per step and block", text)
    (block,) = re.findall(r"block of ([\d,]+) coordinates", text)
    block = int(block.replace(",", ""))
    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    assert keys_of(block) == [int(bits) // 8]
    assert keys_of(block + 1) == 2 * [int(bits) // 8]
    assert "Gaussian by Box and Muller's formula in single precision plus a fine uniform" in text


def test_lost_steps_are_named_and_counted(tiny):
    values = made(tiny, charges=11)
    assert values.epsilon > made(tiny).epsilon
    assert "8 reached the model, 11 are charged" in to_markdown(values)


def test_a_reference_promises_nothing(tiny):
    values = made(tiny.replace(method="sgd", noise_multiplier=None))
    assert values.private is False
    assert values.epsilon == float("inf")
    assert "**This model gives no privacy.**" in to_markdown(values)
    assert "differentially private" not in to_markdown(values)
    assert values.may_be_published == []
    assert values.may_be_published_if_the_test_records_are_not_sensitive == []


def test_a_private_folder_with_a_public_name_is_not_public(tiny, tmp_path):
    rng, folder = np.random.default_rng(0), tmp_path / "digits"
    for k in range(20):
        (folder / f"class{k % 2}").mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"class{k % 2}" / f"{k}.png")
    own = made(tiny.replace(data=str(folder), batch_size=2)).evaluated_on
    assert own.set.startswith("digits")
    assert own.public is False
    assert made(tiny).evaluated_on.public is True


def test_other_releases_are_named_or_said_to_be_unknown(tiny):
    others = [{"run": "aa", "finished": True}, {"run": "bb", "finished": False}]
    budget = {"file": "b.json", "epsilon": 8, "delta": 1e-5, "taken": 1.2341, "other_runs": others}
    text = to_markdown(made(tiny, budget=BudgetState.model_validate(budget)))
    assert "b.json, allows epsilon 8 at delta 1e-05" in text
    assert (
        "1.235 of it, at that delta, was taken by this run and 2 others: aa, bb (reserved)" in text
    )
    assert "No budget was kept" in to_markdown(made(tiny))


def test_what_the_promise_leaves_out_is_one_whole_list(tiny):
    listed = " ".join(made(tiny).outside_the_promise)
    for words in ("operator", "test records", "Other releases", "Tuning", "number of records",
                  "Several records", "not stated honestly", "floating-point"):  # fmt: skip
        assert words in listed, words
    secure = made(tiny.replace(seed=None, noise="secure"))
    assert "floating-point numbers" in to_markdown(made(tiny))
    assert "floating-point numbers" not in to_markdown(secure)


@pytest.mark.parametrize("k", [2, 5, 10])
def test_several_units_have_the_groups_bound(k):
    """Of a Gaussian mechanism of mu, k units have that of k mu; epsilon alone allows no less."""
    found = attacks([Charge(2.0, 1.0, 1)], "pld")
    exact = math.erf(k * 0.5 / 2 / math.sqrt(2))  # 2 Phi(k mu / 2) - 1, mu = 1 / 2
    assert exact <= found.advantage_of_several[str(k)] <= exact + 1e-3
    group = 1e-3 * math.expm1(2.0 * k) / math.expm1(2.0)
    least = min(1.0, (math.exp(2.0 * k) + group) / (math.exp(2.0 * k) + 1))
    assert least <= right_guesses(2.0, 1e-3, None, k) <= 1.0


def test_other_quantities_are_none_only_if_none_are_released(tiny):
    def released(**changes):
        return made(tiny.replace(**changes)).released_beside_the_gradients

    assert released() == "none"
    assert released(release_counts=10.0) == "class counts (see Class weights)"


@given(st.floats(1e-6, 1e6))
def test_a_stated_epsilon_is_never_below_the_true_one(x):
    assert x <= float(up(x)) <= x * 1.0011


@pytest.mark.parametrize(("x", "shown"), [(8.0, "8"), (7.99961, "8"), (0.0, "0")])
def test_round_values_stay_round(x, shown):
    assert up(x) == shown


SCHEMA = Path(__file__).parents[3] / "docs" / "assets" / "privacy-statement.schema.json"
KINDS = {
    "a private run": {},
    "no seed, secure noise": {"seed": None, "noise": "secure"},
    "a reference": {"method": "sgd", "noise_multiplier": None},
    "with statistics": {"release_norms": 20.0},
    "with the trade-off": {"accountant": "pld"},
    "with names": {"operator": "A", "curator": "B", "purpose": "C", "unit_reason": "D"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_statement_keeps_to_the_published_schema(tiny, kind):
    schema, values = json.loads(SCHEMA.read_text()), made(tiny.replace(**KINDS[kind])).to_json()
    checker = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in checker.iter_errors(values)] == []
    assert set(values) <= set(schema["properties"])
    for field in schema["required"]:
        assert not checker.is_valid({k: v for k, v in values.items() if k != field}), field
    assert not checker.is_valid({**values, "surprise": 1})


def test_the_published_schema_is_generated_from_the_type():
    script = Path(__file__).parents[3] / "tools" / "statements.py"
    assert SCHEMA.read_text() == runpy.run_path(str(script))["schema"]()
    assert json.loads(SCHEMA.read_text())["properties"]["format"]["const"] == FORMAT


def test_the_example_is_computed_from_the_run(tiny):
    """Rates, and what is right by a coin's toss, from the trade-off; else from epsilon, delta."""
    values = made(tiny.replace(accountant="pld", seed=None))
    text, found = to_markdown(values), values.trade_off
    assert f"at most {up(50 + 50 * found.advantage, 3)}% of the time" in text
    assert f"at most {up(1000 * found.true_positive_rates['0.001'], 3)} in 1,000" in text
    assert f"is at most {up(100 * found.true_positive_rates['0.01'], 3)}%" in text
    rough = made(tiny.replace(seed=None))
    assert "Not given: the accountant was RDP" in to_markdown(rough)
    odds = math.exp(rough.epsilon)
    assert f"at most {up(100 * (odds + 1e-4) / (odds + 1), 3)}% of the time" in to_markdown(rough)
    assert rough.epsilon > values.epsilon


@pytest.mark.parametrize(
    ("charges", "accountant", "why"),
    [
        ([Charge(0.0, 1.0, 5)], "pld", "without noise"),
        ([Charge(1.0, 0.1, 5)], "rdp", "RDP"),
        ([], "pld", "no step was taken"),
        ([Charge(1.0, 0.1, 2 * 10**6)], "pld", "more than a million steps"),
    ],
)
def test_what_cannot_be_given_is_said(charges, accountant, why):
    assert why in attacks(charges, accountant).not_given


def test_the_page_to_print_has_every_word_and_nothing_active(tiny):
    odd = "<script>alert(1)</script> a | b & `c`"
    text = to_markdown(made(tiny.replace(operator=odd)))
    page = to_html(text)
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    seen = html.unescape(re.sub(r"<[^>]+>", " ", page.partition("<body>")[2]))
    written = re.sub(r"[|*`#\\-]", " ", text)
    assert re.sub(r"[\W_]+", "", seen) == re.sub(r"[\W_]+", "", written)
    assert page.count("<h2>") == text.count("\n## ")


def patients(test_patients):
    """Eight-pixel images of six patients in training, and these in the test set."""

    def split(name):
        owners = np.repeat(np.arange(6) if name == "train" else np.array(test_patients), 4)
        images = np.zeros((len(owners), 8, 8), np.uint8)
        return images, np.arange(len(owners)) % 2, {"patient": owners} if test_patients else {}

    return split


@pytest.mark.parametrize(
    ("test_patients", "says"),
    [
        ([7, 8], "No: a run whose two sets share a patient is refused"),
        ([5, 8], None),
    ],
)
def test_no_unit_is_in_both_sets(tiny, tmp_path, monkeypatch, test_patients, says):
    """A share of patients would be a fact about the data, so a run that has any is refused."""
    module = types.ModuleType("patients_of_two_sets")
    module.split = patients(test_patients)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = tiny.replace(
        data="patients_of_two_sets:split", unit="patient", max_records=2, batch_size=2
    )
    if says is None:
        with pytest.raises(ConfigError, match="1 values of 'patient' are in both"):
            made(config)
        allowed = made(config.replace(allow_shared_units=True)).evaluated_on.trained_on
        assert allowed == "Not excluded: the operator allowed a patient to be in both sets"
        return
    values = made(config)
    assert values.evaluated_on.trained_on == says
    assert "of a patient with more than 2 records, 2 are drawn anew" in to_markdown(values)
    assert "Each patient of the 6 in the training data, with all records" in to_markdown(values)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "The published model is the last one of this training"),
        ({"swa": 0.5}, "is the mean of the weights after 50% of the planned steps of this"),
        ({"ema": 0.9}, "is an exponential moving average (decay 0.9) of the weights of all steps"),
    ],
)
def test_it_says_which_weights_are_published(tiny, settings, says):
    text = to_markdown(made(tiny.replace(**settings)))
    assert says in text
    assert ("the last one" in text) == (not settings)
