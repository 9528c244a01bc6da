"""The study behind the defaults: its simulation, its records, and the page that shows them."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from dpbam.auto import (
    BALANCE,
    BY_CLASSES,
    BY_SIGNAL,
    CLIP_NORM,
    PATH,
    STEPS,
    UPDATES_LR,
    Facts,
    choose,
)
from dpbam.features import standardise_rows
from dpbam.heads import Descent, fit_by_descent
from dpbam.privacy.plan import PrivacyPlan
from reproduce.defaults import FITTED, descend, rule_of, train_cell
from reproduce.defaults_fit import UNIT, table
from reproduce.defaults_lora import make_model
from reproduce.defaults_page import LEVELS, _read, cells, levels, page, picture
from tests.tiny_encoders import save_encoder

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "reproduce" / "results"
STUDY = _read(RESULTS / "defaults.jsonl")
FINAL = _read(RESULTS / "defaults-final.jsonl")


def test_the_simulation_computes_what_the_oracle_does_without_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    x = standardise_rows(torch.randn(60, 5, generator=generator))
    y = (x[:, 0] > 0).long()
    lr = 0.7
    plan = PrivacyPlan(
        n=60, batch_size=60, steps=STEPS, clip_norm=CLIP_NORM, delta=1e-3, noise_multiplier=1e-6,
        unit="record",
    )  # fmt: skip
    head = fit_by_descent(x, y, 2, plan, Descent(lr=lr), seed=0)
    ((weight, bias),) = descend(x, y, 2, 1e-12, [(lr * CLIP_NORM * STEPS, CLIP_NORM)], seed=0)
    assert torch.allclose(head.weight.T, weight, rtol=1e-3, atol=1e-3)
    assert torch.allclose(head.bias, bias, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("record", STUDY, ids=lambda r: f"{r['source']}-{r['features']}-{r['n']}")
def test_the_records_are_of_the_rule_that_the_library_has(record: dict[str, Any]) -> None:
    n, classes = record["trained_on"], record["classes"]
    facts = Facts(n=n, epsilon=record["epsilon"], image_shape=(1, 1, 1), classes=classes)
    assert record["rule"] == rule_of(choose(facts))


def test_a_cell_is_trained_by_the_command_with_its_setting() -> None:
    setting = {"model": "mlp", "model_options": {"hidden": [8]}, "batch_size": 400, "epochs": 0.5}
    result = train_cell("digits", {"epsilon": 8.0, "seed": 3, "setting": setting})
    config = result.spec.config
    assert (config.model, config.seed, config.epsilon, config.batch_size) == ("mlp", 3, 8.0, 400)
    assert len(result.evaluations) == 1
    assert not result.out.exists()


def test_the_sources_that_judge_the_rule_chose_nothing_of_it() -> None:
    assert {record["source"] for record in STUDY} - set(FITTED)
    assert {record["source"] for record in _read(RESULTS / "defaults-fit.jsonl")} <= set(FITTED)


def test_the_settings_that_the_fit_prefers_are_those_of_the_rule() -> None:
    """The first row of its table: C, balance, factor, exponents of classes and of n / sigma."""
    best = table(_read(RESULTS / "defaults-fit.jsonl")).splitlines()[1].split(maxsplit=2)[2]
    clip, balance, factor, by_classes, bent = map(float, best.split(","))
    assert (clip, balance) == (CLIP_NORM, BALANCE)
    assert by_classes == pytest.approx(BY_CLASSES, abs=0.01)
    assert 1 - bent == pytest.approx(BY_SIGNAL)
    assert pytest.approx(factor * UNIT * 300**bent, rel=0.02) == PATH


@pytest.mark.parametrize("record", FINAL, ids=lambda r: f"{r['data']}-{r['facts']['epsilon']}")
def test_a_final_run_stays_within_its_epsilon(record: dict[str, float]) -> None:
    assert record["epsilon"] <= record["facts"]["epsilon"]


def test_the_command_line_expects_what_the_records_have() -> None:
    assert (ROOT / LEVELS).read_text(encoding="utf-8") == levels(STUDY)


def test_the_page_shows_the_records() -> None:
    text = (ROOT / "docs" / "how-good.md").read_text(encoding="utf-8")
    assert page(text, RESULTS) == text
    shown = (ROOT / "docs" / "assets" / "how-good.svg").read_text(encoding="utf-8")
    assert shown == picture(cells(STUDY))


def test_the_sources_left_out_meet_the_goal_of_the_page_in_the_mean() -> None:
    found = [c for c in cells(STUDY) if c["source"] not in FITTED]
    for kind in ("scattering", "mobilenet"):
        assert fmean(c["regret"] for c in found if c["features"] == kind) <= 1


def test_the_rule_for_updates_has_the_rate_that_validation_records_chose() -> None:
    records = _read(RESULTS / "defaults-lora.jsonl")
    for epsilon in (1.0, 3.0, 8.0):
        tried = [r for r in records if (r["part"], r["epsilon"]) == ("B alone", epsilon)]
        by_rate = {
            lr: fmean(r["validation"] for r in tried if r["lr"] == lr)
            for lr in {r["lr"] for r in tried}
        }
        assert max(by_rate, key=lambda lr: by_rate[lr]) == UPDATES_LR


def test_the_study_of_updates_trains_what_each_part_says(tmp_path: Path) -> None:
    encoder = save_encoder(tmp_path, "convnext")
    factors = {}
    for part in ("B alone", "A and B", "A and B, A four times"):
        model = make_model(encoder, part, seed=0)
        named = {n: p for n, p in model.named_parameters() if "lora_" in n}
        assert {n for n, p in named.items() if p.requires_grad} == {
            n for n in named if "lora_B" in n or part != "B alone"
        }
        factors[part] = {n: p for n, p in named.items() if "lora_A" in n}
    for name, plain in factors["A and B"].items():
        torch.testing.assert_close(factors["A and B, A four times"][name], 4 * plain)
