"""Flags and configuration files together make one checked configuration."""

from __future__ import annotations

import re

import pytest
import typer

from dpbam.app.cli.app import command
from dpbam.app.cli.flags import as_typed, merged, run_config, with_flags
from dpbam.app.runs import RunConfig
from dpbam.app.runs.settings import settings


def given(*args, leave_out=()):
    """What a command gets of its flags."""
    seen = {}

    def command(flags):
        seen.update(flags)

    app = typer.Typer()
    app.command()(with_flags(command, leave_out=leave_out))
    typer.main.get_command(app).main(args=[str(a) for a in args], standalone_mode=False)
    return seen


def test_every_field_of_a_run_has_a_flag_but_what_is_not_given_by_hand():
    flags = {one.name: one.flag for one in settings(RunConfig)}
    assert list(flags) == list(RunConfig.model_fields)
    assert [name for name, flag in flags.items() if not flag] == [
        "auto_facts",
        "auto_settings",
        "noise_seed",
    ]
    assert flags["clip_norm"] == "--clip-norm"
    assert flags["model_options"] == "--model-option"


def test_a_field_defines_the_help_of_its_flag():
    helps = {one.name: one.help for one in settings(RunConfig)}
    assert helps["accountant"] == "The accountant: pld or rdp [pld]. pld is tighter."
    assert "head, lora, norms or all [all; of a public encoder, head]" in helps["train"]
    assert "[chosen to fit]" in helps["physical_batch_size"]


def test_only_flags_really_given_are_passed_on():
    assert given() == {}
    assert given("--lr", 0.005) == {"lr": 0.005}  # though it is the default


def test_flags_that_are_not_plain_values():
    flags = given(
        "--image-size", "64x48", "--model-option", "width=0.25", "--model-option",
        "activation=tanh", "--freeze", "conv1.*", "--freeze", "*.bias", "--train", "head",
    )  # fmt: skip
    assert flags == {
        "image_size": (64, 48),
        "model_options": {"width": 0.25, "activation": "tanh"},
        "freeze": ["conv1.*", "*.bias"],
        "train": "head",
    }


@pytest.mark.parametrize("text", ["big", "64x", "1x2x3", "-4"])
def test_an_image_size_that_is_none(text):
    with pytest.raises(ValueError, match="64x48"):
        given("--image-size", text)


@pytest.mark.parametrize("text", ["width", "=3"])
def test_a_model_option_that_is_none(text):
    with pytest.raises(ValueError, match=r"width=0\.25"):
        given("--model-option", text)


def test_flags_override_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('data = "digits"\nepsilon = 8\nlr = 0.1\n[model_options]\nwidth = 0.25\n')
    config = run_config(file, {"lr": 0.2})
    assert (config.method, config.epsilon, config.lr) == ("dp-sgd", 8, 0.2)
    assert config.model_options == {"width": 0.25}


def test_a_flag_takes_the_place_of_its_alternative_in_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('data = "digits"\nepsilon = 8\nema = 0.9\n')
    config = run_config(file, {"noise_multiplier": 2.0, "swa": 0.5})
    assert (config.epsilon, config.noise_multiplier, config.ema, config.swa) == (None, 2, None, 0.5)
    assert merged(file, {}) == {"data": "digits", "epsilon": 8, "ema": 0.9}


def test_the_help_shows_the_configurations_own_defaults(dpbam):
    text = " ".join(dpbam("train", "--help").out.replace("│", " ").split())
    assert f"Learning rate [chosen by auto; {RunConfig(epsilon=1).lr:g} for a net]" in text
    epochs = f"chosen by auto; {RunConfig(epsilon=1).epochs:g} for a net"
    assert f"Expected passes over the data [{epochs}]" in text
    assert "Expected units per step [chosen by auto; the largest power of two" in text


def shown_flags(text):
    """The flags that a help lists, each once, at the beginning of its row."""
    return re.findall(r"^│ [* ] {0,2}(--[a-z-]+)|^│ (--[a-z-]+)", text, re.MULTILINE)


def listed(dpbam, *words):
    return [first or second for first, second in shown_flags(dpbam(*words).out)]


@pytest.mark.parametrize("name", ["train", "compare", "search"])
def test_the_help_shows_few_flags_and_help_all_shows_every_one(dpbam, name):
    every = [p.opts[0] for p in command().commands[name].params]
    short, full = listed(dpbam, name, "--help"), listed(dpbam, name, "--help-all")
    assert 12 <= len(short) <= 20
    assert {*full} == {*every, "--help"}
    assert {*short} < {*full}
    assert {"--data", "--epsilon", "--unit", "--model", "--out", "--help-all"} <= {*short}
    assert len(dpbam(name, "--help").out.splitlines()) < 90
    assert listed(dpbam, name, "--help-all") == full  # the short help hid nothing for good


def test_the_definition_of_a_setting_decides_whether_the_help_shows_it(dpbam):
    own = {"--config", "--out", "--resume", "--dry-run", "--help-all", "--help"}
    common = {one.flag for one in settings(RunConfig) if one.common}
    assert {*listed(dpbam, "train", "--help")} == common | own


def test_a_command_of_few_flags_shows_them_all(dpbam):
    parameters = command().commands["epsilon"].params
    assert {*listed(dpbam, "epsilon", "--help")} == {p.opts[0] for p in parameters} | {"--help"}
    assert dpbam("epsilon", "--help-all").code == 2


def test_a_command_may_leave_flags_out():
    with pytest.raises(Exception, match="No such option"):
        given("--seed", 1, leave_out=("seed",))


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("lr must be positive", "--lr must be positive"),
        ("ema and swa are two ways", "--ema and --swa are two ways"),
        ("leave epsilon and noise_multiplier out", "leave --epsilon and --noise-multiplier out"),
        ("clip_nrom is unknown: did you mean 'clip_norm'?",) * 2,
        ("the method of a file data/clip_norm.npz is unknown",) * 2,
        ("data of another run",) * 2,
    ],
)
def test_a_message_names_settings_as_flags_and_nothing_else(message, typed):
    assert as_typed(message, {one.name: one.flag for one in settings(RunConfig)}) == typed
