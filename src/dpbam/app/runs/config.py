"""What a run is asked to do: one frozen, checked object, from flags, TOML or JSON.

No torch here: a command line reads its options fast. What is built from it is in
:mod:`dpbam.app.runs.build`; the privacy plan comes from :meth:`RunConfig.plan`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from dpbam import _validate
from dpbam._names import did_you_mean
from dpbam.app.runs.toml import to_toml
from dpbam.errors import ArgumentError, DPBAMError
from dpbam.methods import is_private
from dpbam.privacy.plan import PrivacyPlan, epoch_steps

DEFAULT_GRADIENT: Literal["approximate", "exact"] = "approximate"  # the paper's


class ConfigError(DPBAMError, ValueError):
    """A configuration that cannot be used: one sentence that names the field and the way out."""


class RunConfig(BaseModel):
    """One training run. Fields are named as the flags of ``dpbam train``, with underscores.

    Attributes:
        data: a data set's name or path, as :func:`dpbam.data.load_pair` takes it.
        data_root: where downloads live; None: the default.
        image_size: what to resize images of a folder to: one number, or (height, width).
        channels: 1 or 3, what to convert images of a folder to.
        model: a model's name, as :func:`dpbam.nn.build_model` takes it, or ``module:function``.
        model_options: the model's own options, such as ``{"width": 0.25}``.
        method: "dp-sgd", "dp-sat", "bam"; or a reference without privacy: "sgd", "sam".
        epsilon: the privacy budget; sigma is calibrated to it. Give it or noise_multiplier.
        noise_multiplier: sigma itself.
        delta: None: the largest power of ten that is at most 1/(2n), :func:`default_delta`.
        lam: the paper's lambda, for "bam", "dp-sat" and "sam".
        gradient: BAM's: "approximate" (Eq. 12) or "exact" (Eq. 11).
        clip_norm: C.
        clipping: "flat", "automatic" or "per-layer".
        batch_size: the expected number of units a step.
        physical_batch_size: rows computed at once; None: chosen. Changes memory only.
        epochs: expected passes over the data.
        optimizer: "nadam", "sgd", "adam" or "adamw".
        lr: the learning rate.
        momentum: of "sgd".
        weight_decay: of the optimiser.
        schedule: "constant", "cosine" or "linear": a function of the step alone.
        augment_multiplicity: K augmented views a sample; 0: no augmentation.
        shift: the furthest shift of a view, in pixels.
        flip: "horizontal", "vertical" or "none".
        augment_probability: of the shift and of the flip, each.
        ema: decay of an exponential moving average of the weights; None: none.
        swa: from which share of the run on (0..1) the weights of every step are averaged; None.
        init: a safetensors file of public weights to start from.
        freeze: shell patterns of parameter names that are not trained.
        head_only: train the last layer alone.
        unit: "record", or the column that says whose record it is.
        max_records: the most records of one unit in a step; None: 1 for records, 8 otherwise.
        budget: a budget file of the data set, shared by its runs.
        seed: reproducible, research only; None takes the system's entropy.
        noise_seed: in a seeded run, the noise's own seed, so that paired runs share data order and
            initial weights but not noise; None: as ``seed``.
        noise: "standard"; or "secure": noise and Poisson draws from a cryptographic generator, the
            noise exactly rounded to a grid. It has no seed.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        engine: "auto", "fused" or "functional". Changes speed only.
        accountant: "pld" or "rdp".
        eval_every: epochs between evaluations; None: some ten in a run. The end is evaluated too.
        checkpoint_every: seconds between checkpoints; 0: after every step.
        num_workers: threads that read ahead; 0 reads when needed.
        tensorboard: also write curves for TensorBoard, into ``non-private/``.
        release_norms: sigma_1: release with every step, noised, how many units have norms in which
            range; it shares the budget with the gradients. None: nothing.
        release_bias: B: release the length of the bias too, of contributions clipped to B and with
            the same sigma_1. None: no.
        measure_bias: steps between measurements of the clipping bias, which are written to
            ``non-private/bias.jsonl``; None: none. Costs up to a fifth of a measured step.
        measure_plain: measure DP-SAT's bias against the plain gradient too: another pass.

    Example:
        >>> config = RunConfig(method="bam", epsilon=3, epochs=5)
        >>> config.method, config.lam
        ('bam', 0.02)
        >>> RunConfig(epsilon=3, clip_nrom=1)
        Traceback (most recent call last):
        dpbam.app.runs.config.ConfigError: clip_nrom is unknown: did you mean 'clip_norm'?
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    data: str = "digits"
    data_root: Path | None = None
    image_size: int | tuple[int, int] | None = None
    channels: Literal[1, 3] | None = None
    model: str = "small-cnn"
    model_options: dict[str, Any] = {}
    method: Literal["dp-sgd", "dp-sat", "bam", "sgd", "sam"] = "bam"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    lam: float = 0.02
    gradient: Literal["approximate", "exact"] = DEFAULT_GRADIENT
    clip_norm: float = 1.0
    clipping: Literal["flat", "automatic", "per-layer"] = "flat"
    batch_size: int = 512
    physical_batch_size: int | None = None
    epochs: float = 20.0
    optimizer: Literal["nadam", "sgd", "adam", "adamw"] = "nadam"
    lr: float = 0.005
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    augment_multiplicity: int = 0
    shift: int = 4
    flip: Literal["horizontal", "vertical", "none"] = "horizontal"
    augment_probability: float = 0.5
    ema: float | None = None
    swa: float | None = None
    init: Path | None = None
    freeze: tuple[str, ...] = ()
    head_only: bool = False
    unit: str = "record"
    max_records: int | None = None
    budget: Path | None = None
    seed: int | None = None
    noise_seed: int | None = None
    noise: Literal["standard", "secure"] = "standard"
    device: str = "auto"
    engine: str = "auto"
    accountant: Literal["pld", "rdp"] = "pld"
    eval_every: int | None = None
    measure_bias: int | None = None
    measure_plain: bool = False
    release_norms: float | None = None
    release_bias: float | None = None
    checkpoint_every: float = 60.0
    num_workers: int = 2
    tensorboard: bool = False

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_sentence(error)) from None

    @field_validator(
        "epsilon", "noise_multiplier", "clip_norm", "epochs", "lr", "release_norms", "release_bias"
    )
    @classmethod
    def _positive(cls, value: float | None, info: Any) -> float | None:
        return value if value is None else _validate.positive(info.field_name, value)

    @field_validator("lam", "weight_decay", "checkpoint_every")
    @classmethod
    def _non_negative(cls, value: float, info: Any) -> float:
        return _validate.non_negative(info.field_name, value)

    @field_validator("delta", "ema")
    @classmethod
    def _probability(cls, value: float | None, info: Any) -> float | None:
        return value if value is None else _validate.probability(info.field_name, value)

    @field_validator(
        "batch_size", "physical_batch_size", "max_records", "eval_every", "measure_bias"
    )
    @classmethod
    def _count(cls, value: int | None, info: Any) -> int | None:
        return value if value is None else _validate.count(info.field_name, value)

    @field_validator("augment_multiplicity", "shift", "seed", "noise_seed", "num_workers")
    @classmethod
    def _from_zero(cls, value: int | None, info: Any) -> int | None:
        return value if value is None else _validate.count(info.field_name, value, least=0)

    @field_validator("momentum", "swa", "augment_probability")
    @classmethod
    def _share(cls, value: float | None, info: Any) -> float | None:
        if value is not None and not 0 <= value <= 1:
            raise ArgumentError(f"{info.field_name} must lie between 0 and 1, got {value!r}")
        return value

    @model_validator(mode="after")
    def _together(self) -> RunConfig:
        if self.private and (self.epsilon is None) == (self.noise_multiplier is None):
            raise ArgumentError(
                "give either epsilon (the noise is calibrated to it) or noise_multiplier, "
                + ("not both" if self.epsilon else "for a private method")
            )
        if not self.private and (self.epsilon or self.noise_multiplier):
            raise ArgumentError(
                f"method {self.method!r} is a reference without privacy: leave epsilon and "
                "noise_multiplier out, or choose dp-sgd, dp-sat or bam"
            )
        if self.noise_seed is not None and self.seed is None:
            raise ArgumentError(
                "noise_seed needs a seed: without one all randomness is the system's"
            )
        if self.noise == "secure" and self.seed is not None:
            raise ArgumentError(
                "secure noise cannot have a seed: leave seed out, or take standard noise"
            )
        if self.release_bias is not None and self.release_norms is None:
            raise ArgumentError("release_bias needs release_norms: the noise multiplier of both")
        if self.release_norms is not None and not self.private:
            raise ArgumentError(
                f"release_norms has no noise to count on with method {self.method!r}"
            )
        if self.ema is not None and self.swa is not None:
            raise ArgumentError("ema and swa are two ways to average the weights: choose one")
        if self.freeze and self.head_only:
            raise ArgumentError("head_only freezes all but the last layer: leave freeze out")
        if self.unit == "record" and self.max_records not in (None, 1):
            raise ArgumentError(
                f"max_records is {self.max_records} but the unit is a record: name the column "
                "that owns several records with unit"
            )
        return self

    @property
    def private(self) -> bool:
        """Whether the method promises anything."""
        return is_private(self.method)

    @property
    def joint_noise_multipliers(self) -> tuple[float, ...]:
        """Of what is released beside the gradients."""
        if self.release_norms is None:
            return ()
        return (self.release_norms,) * (1 if self.release_bias is None else 2)

    @classmethod
    def from_file(cls, path: str | Path, **overrides: Any) -> RunConfig:
        """From a ``.toml`` or ``.json`` file; ``overrides`` win.

        Raises:
            ConfigError: naming the file and what is wrong with it.
        """
        return cls.from_mapping({**read_file(path), **overrides})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RunConfig:
        """From plain values, such as parsed JSON."""
        return cls(**values)

    def replace(self, **changes: Any) -> RunConfig:
        """This configuration with changes, checked again.

        Example:
            >>> RunConfig(epsilon=3).replace(seed=7).seed
            7
        """
        return RunConfig(**{**self.model_dump(exclude_unset=True), **changes})

    def to_mapping(self) -> dict[str, Any]:
        """Every field that is not None, as plain JSON values."""
        values: dict[str, Any] = self.model_dump(mode="json", exclude_none=True)
        return values

    def to_toml(self) -> str:
        """Every field that is not None, as TOML that :meth:`from_file` reads back."""
        return to_toml(self.to_mapping())

    def plan(self, n: int, *, noise_multiplier: float | None = None) -> PrivacyPlan:
        """The privacy plan for n units of privacy.

        Args:
            n: how many units the training set has.
            noise_multiplier: a sigma found before, so that a resumed run keeps it.

        Example:
            >>> RunConfig(noise_multiplier=2.0, epochs=3, batch_size=100).plan(1000).steps
            30
        """
        common: dict[str, Any] = {
            "n": n,
            "batch_size": self.batch_size,
            "delta": self.delta or default_delta(n),
            "unit": self.unit,
            "max_records": self.max_records or (1 if self.unit == "record" else 8),
            "accountant": self.accountant,
        }
        if not self.private:
            return PrivacyPlan.non_private(epochs=self.epochs, **common)
        sigma = noise_multiplier or self.noise_multiplier
        common |= {
            "clip_norm": self.clip_norm,
            "clipping": self.clipping,
            "joint_noise_multipliers": self.joint_noise_multipliers,
        }
        if sigma is None:
            assert self.epsilon is not None  # one of the two is given: checked above
            return PrivacyPlan.calibrate(epsilon=self.epsilon, epochs=self.epochs, **common)
        steps = epoch_steps(n, self.batch_size, self.epochs)
        return PrivacyPlan(steps=steps, noise_multiplier=sigma, **common)


def default_delta(n: int) -> float:
    """The largest power of ten that is at most 1/(2n).

    Example:
        >>> default_delta(50_000), default_delta(1438)
        (1e-05, 0.0001)
    """
    digits = len(str(2 * _validate.count("n", n) - 1))  # the least k with 10^k >= 2n
    return float(f"1e-{digits}")


def read_file(path: str | Path) -> dict[str, Any]:
    """The values of a ``.toml`` or ``.json`` configuration file, unchecked."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # JSON, TOML or UTF-8; or nested too deeply
        raise ConfigError(f"the configuration {path} is not valid: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"the configuration {path} must hold names and values, like lr = 0.1")
    return values


def _sentence(error: ValidationError) -> str:
    """The first problem as one sentence with the field's name."""
    problem = error.errors(include_url=False)[0]
    message, value = str(problem["msg"]), problem.get("input")
    where = ".".join(str(part) for part in problem["loc"][:1])
    if problem["type"] == "extra_forbidden":
        otherwise = "see dpbam train --help for what there is"
        return f"{where} is unknown: {did_you_mean(where, RunConfig.model_fields, otherwise)}"
    if problem["type"] == "value_error":
        return message.removeprefix("Value error, ")
    if problem["type"] == "literal_error":
        return _choice(where, value, str(problem["ctx"]["expected"]))
    said = message.removeprefix("Input should be ").removesuffix(", unable to parse string")
    return f"{where} must be {said.split(', unable')[0]}, got {value!r}"


def _choice(where: str, value: object, expected: str) -> str:
    choices = [c.strip(" '") for c in expected.replace(" or ", ",").split(",")]
    return f"{where} {value!r} is unknown: {did_you_mean(value, choices)}"
