"""Settings that a run leaves out, from public facts alone: ``--model auto`` in a run.

The rule is :func:`dpbam.auto.choose`. It fills in what the user left out: every setting that was
given stays. It is applied to ``auto``, to models that are a head on fixed features, and to LoRA and
norm layers of a public encoder. The facts and the names of the settings chosen become part of the
run's configuration, so that its statement can list them, and a resumed run does not choose anew.

What the defaults reached on public data sets, for settings like the user's, is in ``levels.json``:
the rows of the study ``reproduce/defaults.py`` (docs/how-good.md). They say what to expect, and
which change gained most there.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dpbam import auto
from dpbam._names import AUTO, ENCODER, FEATURES, SCATTERING, public_name
from dpbam.app.runs.config import ConfigError, RunConfig
from dpbam.app.runs.settings import settings
from dpbam.catalogue import is_private
from dpbam.privacy.plan import default_delta, epoch_steps
from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from dpbam.app.runs.config import RunConfig
    from dpbam.data import DataSet

_OTHERWISE = {"segmentation": "unet"}  # the model for a task that the rule does not know
_DEFAULT = "small-cnn"
_OF_NETS = ("train", "freeze", "init", "model_options", "augment_multiplicity")
_HIDDEN = ("auto_facts", "auto_settings")
_NEAR_UNITS, _NEAR_EPSILON, _NEAR_CLASSES = 3.0, 1.8, 2.5  # factors within which cells are alike
_FEW = 3  # sources without which a mean over them is not stated


@dataclass(frozen=True)
class Resolved:
    """A configuration with nothing left to choose.

    Attributes:
        config: explicit; ``auto_facts`` has the facts that were used.
        lines: for the user: what was chosen and why, and the command that asks for the same.
    """

    config: RunConfig
    lines: tuple[str, ...] = ()


def with_default_model(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``dpbam train`` with model auto, where no model is named.

    Without epsilon the rule cannot choose, and a setting that shapes a net (:data:`_OF_NETS`) asks
    for one: then the configuration's own default stays.

    Example:
        >>> with_default_model({"epsilon": 3.0})["model"]
        'auto'
        >>> "model" in with_default_model({"epsilon": 3.0, "augment_multiplicity": 4})
        False
    """
    asks_for_net = any(values.get(name) for name in _OF_NETS)
    private = is_private(values.get("method", "dp-sgd"))
    if "model" in values or asks_for_net or not private or values.get("epsilon") is None:
        return dict(values)
    return {**values, "model": AUTO}


def resolve(config: RunConfig, train: DataSet, n: int) -> Resolved:
    """Fill in what the user left out: of ``auto``, of heads on fixed features, of LoRA and norms.

    Args:
        config: what the user asks for.
        train: whose shape, task and number of classes are used, and no record.
        n: the number of units of privacy, a public number.
    """
    if config.auto_facts:
        _check_facts(config, train, n)
        return Resolved(config)
    if config.encoder and config.trained == "head" and config.private:
        return Resolved(config, (_about_raw_features(config),))
    if config.model != AUTO and not config.fixed_features and not _trains_updates(config):
        return Resolved(config)
    reason = _without_rule(config, train)
    if reason:
        return _by_default(config, train, reason)
    facts = _facts(config, train, n)
    choice = auto.choose(facts)
    chosen = _chosen(config, choice, n)
    if not chosen:
        return Resolved(config)
    explicit = config.replace(**chosen, public_encoder=None)
    resolved = explicit.replace(
        auto_facts=_public(facts, choice.delta), auto_settings=tuple(sorted(chosen))
    )
    batch_size = explicit.expected_batch(n)
    head = choice.reason[1]
    if choice.head == "descent" and facts.trained == "head":
        head = auto.about_descent(
            facts, steps=epoch_steps(n, batch_size, explicit.epochs), batch_size=batch_size,
            by_rule="lr" in chosen,
        )  # fmt: skip
    return Resolved(resolved, (choice.reason[0], head, f"the same as {command(explicit)}"))


def _about_raw_features(config: RunConfig) -> str:
    """Warn of features with a scale of their own, on which most learning rates fail."""
    return (
        f"the head sees the features as {public_name(config.model)} scales them, so lr and "
        "clip_norm have to fit that scale; for features of one scale, and settings that need no "
        f"tuning: --encoder {config.model} in place of --model and --train"
    )


def _without_rule(config: RunConfig, train: DataSet) -> str:
    """Say why the rule does not apply; empty if it does."""
    if train.task not in auto.TASKS:
        return f"for {train.task}"
    if config.epsilon is None:
        return "without epsilon"
    if train.task != "single-label" and _trains_updates(config):
        return f"for {config.trained} and {train.task}"
    by_descent = config.head == "descent" and "head" in config.model_fields_set
    gradients = by_descent or config.method != "dp-sgd" or config.measure_bias is not None
    return "for a regression with gradients" if train.task == "regression" and gradients else ""


def _trains_updates(config: RunConfig) -> bool:
    """Whether a part of a public encoder is trained next to the head."""
    return config.encoder and config.private and config.trained in ("lora", "norms")


def _by_default(config: RunConfig, train: DataSet, reason: str) -> Resolved:
    if config.model != AUTO:
        return Resolved(config)
    model = config.public_encoder or _OTHERWISE.get(train.task, _DEFAULT)
    explicit = config.replace(model=model, public_encoder=None)
    return Resolved(explicit, (
        f"auto has no rule {reason} yet: the model is {public_name(model)}, with the defaults of "
        "the other settings",
        f"the same as {command(explicit)}",
    ))  # fmt: skip


def _facts(config: RunConfig, train: DataSet, n: int) -> auto.Facts:
    channels, height, width = train.shape
    encoder = config.public_encoder if config.model == AUTO else config.model
    assert config.epsilon is not None
    return auto.Facts(
        n=n, epsilon=config.epsilon, delta=config.delta, image_shape=(channels, height, width),
        task=train.task, classes=train.num_classes,
        encoder=None if encoder == SCATTERING else encoder,
        gradients=config.method != "dp-sgd" or config.measure_bias is not None,
        head=config.head if "head" in config.model_fields_set else None,
        trained=config.trained if _trains_updates(config) else "head",
    )  # fmt: skip


def _public(facts: auto.Facts, delta: float) -> dict[str, Any]:
    """Return the facts for the statement: no path, and nothing that is None."""
    values = asdict(facts) | {"delta": delta, "image_shape": list(facts.image_shape)}
    if facts.trained == "head":
        del values["trained"]
    return values | {
        "encoder": public_name(facts.encoder) if facts.encoder else "none named",
        "head": facts.head or "none named",
    }


def _chosen(config: RunConfig, choice: auto.Choice, n: int) -> dict[str, Any]:
    """Return the settings that the user left out, with the values of the rule."""
    user_set = config.model_fields_set
    by_user = "head" in user_set or _trains_updates(config)
    values: dict[str, Any] = {} if by_user else {"head": choice.head}
    if config.model == AUTO:
        encoder = choice.features.startswith(ENCODER)
        values["model"] = FEATURES + choice.features if encoder else choice.features
    batch_size = config.batch_size or choice.batch_size
    if choice.head == "closed-form" and batch_size != n:
        raise ConfigError(
            f"the head in closed form is one release from all {n} units, and batch_size is "
            f"{batch_size}: leave it out, or take head descent"
        )
    rule = {
        "batch_size": choice.batch_size,
        "epochs": choice.steps * batch_size / n,
        "clip_norm": choice.clip_norm,
        "optimizer": choice.optimizer,
    }
    if choice.release_centre is not None:
        rule["release_centre"] = choice.release_centre
    if config.ema is None and choice.average is not None:
        rule["swa"] = round(1 - choice.average, 6)
    wanted = choice.balance and (config.balance or "balance" not in user_set)
    if choice.head == "closed-form":  # the moments hold the frequencies of the classes
        rule |= {"balance": choice.balance}
    elif wanted and not config.class_weights and "release_counts" not in user_set:
        rule |= {"release_counts": choice.release_counts, "balance": choice.balance}
    values |= {name: value for name, value in rule.items() if name not in user_set}
    resolved = config.replace(**values, public_encoder=None)
    if resolved.optimizer == choice.optimizer:  # the rule has no learning rate of any other
        steps = epoch_steps(n, batch_size, resolved.epochs)
        # the length of the path is what the rule chooses: lr C T, and lr T of NAdam
        path = choice.lr * choice.steps
        rule = {"lr": float(f"{path / steps:.3g}")}
        if choice.optimizer == "sgd":
            lr = path * choice.clip_norm / (resolved.clip_norm * steps)
            rule = {"lr": float(f"{lr:.3g}"), "momentum": choice.momentum}
        values |= {name: value for name, value in rule.items() if name not in user_set}
    return values


def as_chosen(config: RunConfig, stored: RunConfig) -> RunConfig:
    """Return the configuration with what the run that is resumed has chosen before."""
    if config.auto_facts or not stored.auto_facts:
        return config
    names = [name for name in stored.auto_settings if name == "model" or
             name not in config.model_fields_set]  # fmt: skip
    if config.model not in (AUTO, stored.model):
        return config
    changes = {name: getattr(stored, name) for name in (*names, *_HIDDEN)}
    return config.replace(**changes, public_encoder=None)


def _check_facts(config: RunConfig, train: DataSet, n: int) -> None:
    """Refuse facts of a file that are not those of this data and these settings."""
    values = {
        "n": n, "epsilon": config.epsilon, "delta": config.delta or default_delta(n),
        "image_shape": list(train.shape), "task": train.task, "classes": train.num_classes,
    }  # fmt: skip
    for name, value in values.items():
        if config.auto_facts.get(name) != value:
            raise ConfigError(
                f"auto_facts has {name} {config.auto_facts.get(name)}, and here it is {value}: the "
                "settings were chosen for other data; take model auto, or leave auto_facts out"
            )
    reason = not_by_rule(config)
    if reason:
        raise ConfigError(f"{reason}; take model auto, or leave auto_facts and auto_settings out")


def not_by_rule(config: RunConfig) -> str:
    """Say why the settings that are stated as chosen by the rule are not; empty if they are.

    The rule is applied again to the facts stated, with those settings left out: a file may hold
    anything, and settings that were tuned on private data must not pass for a free choice.
    """
    if not config.auto_facts:
        return "auto_settings needs auto_facts" if config.auto_settings else ""
    try:
        expected = _by_rule(config)
    except (KeyError, TypeError, ValueError) as error:  # a file may hold anything
        return f"auto_facts cannot be read ({error})"
    for name in sorted({*expected, *config.auto_settings}):
        value = getattr(config, name, None)
        if name not in expected or name not in config.auto_settings or value != expected[name]:
            rule = expected.get(name, "left to the user")
            return f"{name} is {value}, which is not what the rule chooses ({rule})"
    return ""


def _by_rule(config: RunConfig) -> dict[str, Any]:
    """Return what the rule chooses from the facts stated, where the user left it out."""
    by_auto = "model" in config.auto_settings  # which names an encoder without our prefix
    named = config.model.removeprefix(FEATURES) if by_auto else config.model
    encoder = None if config.model == SCATTERING else named
    stated = dict(config.auto_facts)
    shape = tuple(stated.pop("image_shape"))
    head = None if stated["head"] == "none named" else stated["head"]
    stated["trained"] = config.trained if _trains_updates(config) else "head"
    facts = auto.Facts(**{**stated, "image_shape": shape, "encoder": encoder, "head": head})
    if _public(facts, stated["delta"]) != config.auto_facts:
        raise ValueError("the encoder is another one")
    left_out = {"auto_facts", "auto_settings", *config.auto_settings}
    values = {k: getattr(config, k) for k in config.model_fields_set if k not in left_out}
    if by_auto:
        values |= {"model": AUTO, "public_encoder": encoder}
    return _chosen(RunConfig(**values), auto.choose(facts), facts.n)


def command(config: RunConfig) -> str:
    """Return the command line that asks for the settings which were given or chosen.

    Example:
        >>> command(RunConfig(data="digits", epsilon=3, model="scattering", batch_size=100))
        'dpbam train --data digits --epsilon 3.0 --model scattering --batch-size 100'
    """
    words = ["dpbam", "train"]
    for one in settings(RunConfig):
        if one.flag and one.name in config.model_fields_set and one.name not in _HIDDEN:
            words += one.words(getattr(config, one.name))
    return shlex.join(words)


@dataclass(frozen=True)
class Level:
    """The rule's test accuracy on one public source, in percent."""

    source: str
    features: str
    n: int
    classes: int
    epsilon: float
    accuracy: float
    constant: float


@cache
def recorded_levels() -> tuple[Level, ...]:
    rows = json.loads(files("dpbam.app.runs").joinpath("levels.json").read_text("utf-8"))
    return tuple(Level(**row) for row in rows)


def expectation(config: RunConfig, n: int, classes: int, task: str) -> str:
    """Return what to expect of these settings, by records of like ones, in one sentence."""
    alike = _alike(config, n, classes)
    if task != "single-label":
        return f"unknown: the study of defaults has no {task} data"
    if not config.auto_facts or not config.fixed_features or config.epsilon is None:
        return "unknown: the study of defaults ran the settings of --model auto alone"
    if not alike:
        return (
            f"unknown: the study of defaults has no data like {n} units in {classes} classes at "
            f"epsilon {up(config.epsilon)}"
        )
    sources = ", ".join(sorted({level.source for level in alike}))
    units = _range([float(level.n) for level in alike])
    return (
        f"accuracy {_range([x.accuracy for x in alike])}% on {sources} with {units} units in the "
        f"study of defaults, where the best constant has {_range([x.constant for x in alike])}%; "
        "your images may be easier or harder"
    )


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.0f}", f"{max(values):.0f}"
    return least if least == most else f"{least} to {most}"


def best_change(config: RunConfig, n: int, classes: int) -> str:
    """Name the change that gained most on the study's sources from settings like these."""
    if config.epsilon is None or not config.fixed_features:
        return ""
    kind = "scattering" if config.model == SCATTERING else "mobilenet"
    near = _alike(config, n, classes) or [x for x in recorded_levels() if x.features == kind]
    changes: dict[str, Callable[[Level, Level], bool]] = {
        "more epsilon (about three times)": lambda a, b: (
            (a.features, a.n) == (b.features, b.n) and 2 < b.epsilon / a.epsilon < 4
        ),
        "more data (about four times)": lambda a, b: (
            (a.features, a.epsilon) == (b.features, b.epsilon) and 3 < b.n / a.n < 5
        ),
    }
    if kind == "scattering":
        changes["a public encoder (--encoder)"] = lambda a, b: (
            (a.n, a.epsilon) == (b.n, b.epsilon) and b.features == "mobilenet"
        )
    gains = {words: _gains(near, allowed) for words, allowed in changes.items()}
    known = {words: gain for words, gain in gains.items() if len(gain) >= _FEW}
    if not known:
        return ""
    words = max(known, key=lambda name: fmean(known[name].values()))
    gain = known[words]
    return (
        f"{words}: {fmean(gain.values()):+.0f} points in the mean over {len(gain)} sources of the "
        f"study from settings like these, {min(gain.values()):+.0f} to {max(gain.values()):+.0f}"
    )


def _alike(config: RunConfig, n: int, classes: int) -> list[Level]:
    kind = "scattering" if config.model == SCATTERING else "mobilenet"
    return [
        level for level in recorded_levels()
        if level.features == kind
        and _near(level.n, n, _NEAR_UNITS)
        and _near(level.epsilon, config.epsilon or 0.0, _NEAR_EPSILON)
        and _near(level.classes, classes, _NEAR_CLASSES)
    ]  # fmt: skip


def _near(value: float, other: float, factor: float) -> bool:
    return other > 0 and 1 / factor <= value / other <= factor


def _gains(near: Sequence[Level], allowed: Callable[[Level, Level], bool]) -> dict[str, float]:
    """Return the mean gain by source, over pairs of cells of that source."""
    by_source: dict[str, list[float]] = {}
    for before in near:
        for after in recorded_levels():
            if after.source == before.source and allowed(before, after):
                by_source.setdefault(before.source, []).append(after.accuracy - before.accuracy)
    return {source: fmean(values) for source, values in by_source.items()}
