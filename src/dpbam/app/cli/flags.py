"""The flags of a run, one for each field of :class:`~dpbam.app.runs.RunConfig`.

Every flag's default is None, so that only those really given override a file's values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from dpbam.app.runs.config import RunConfig, read_file
from dpbam.app.runs.folder import stored_config
from dpbam.app.runs.own_code import check_code
from dpbam.errors import ArgumentError


class Flag(NamedTuple):
    """How a field is said on the command line."""

    type: Any
    panel: str
    help: str


FLAGS: dict[str, Flag] = {
    "data": Flag(str, "Data", "A data set: a name, a path, or module:function."),
    "data_root": Flag(Path, "Data", "Where downloads live (or set DPBAM_DATA)."),
    "image_size": Flag(str, "Data", "Resize a folder's images: 64, or 64x48 (height x width)."),
    "channels": Flag(int, "Data", "Convert a folder's images: 1 (grey) or 3 (RGB)."),
    "epsilon": Flag(float, "Privacy", "The budget; the noise is calibrated to it."),
    "noise_multiplier": Flag(float, "Privacy", "Sigma, in place of epsilon."),
    "delta": Flag(float, "Privacy", "Delta [a power of ten, at most 1/(2n)]."),
    "clip_norm": Flag(float, "Privacy", "C: each unit's gradient is clipped to it."),
    "clipping": Flag(str, "Privacy", "flat, automatic or per-layer."),
    "unit": Flag(str, "Privacy", "Whom privacy is promised to: record, or a COLUMN."),
    "max_records": Flag(int, "Privacy", "Most records of one unit in a step [8]."),
    "accountant": Flag(str, "Privacy", "pld (tight) or rdp."),
    "budget": Flag(Path, "Privacy", "The data set's own ledger over all its runs."),
    "release_norms": Flag(float, "Privacy", "Also release norm counts, with this sigma, say 20."),
    "release_bias": Flag(float, "Privacy", "And the bias's length, of what B = this bounds."),
    "method": Flag(str, "Method", "dp-sgd, dp-sat or bam; sgd and sam are not private."),
    "lam": Flag(float, "Method", "The paper's lambda, of bam and dp-sat."),
    "gradient": Flag(str, "Method", "BAM's: approximate or exact."),
    "model": Flag(str, "Model", "resnet9, wrn-16-4, small-cnn, mlp, module:function."),
    "model_options": Flag(list[str], "Model", "NAME=VALUE, such as width=0.25; repeatable."),
    "init": Flag(Path, "Model", "Public weights to start from, a .safetensors file."),
    "freeze": Flag(list[str], "Model", "Do not train parameters of this pattern; repeatable."),
    "head_only": Flag(bool, "Model", "Train the last layer alone."),
    "batch_size": Flag(int, "Training", "Expected units a step."),
    "physical_batch_size": Flag(int, "Training", "Rows computed at once [chosen to fit]."),
    "epochs": Flag(float, "Training", "Expected passes over the data."),
    "optimizer": Flag(str, "Training", "nadam, sgd, adam or adamw."),
    "lr": Flag(float, "Training", "Learning rate."),
    "momentum": Flag(float, "Training", "Of sgd."),
    "weight_decay": Flag(float, "Training", "Of the optimiser."),
    "schedule": Flag(str, "Training", "Of the learning rate: constant, cosine, linear."),
    "augment_multiplicity": Flag(int, "Training", "K augmented views a record; 0: none."),
    "shift": Flag(int, "Training", "Furthest shift of a view, in pixels."),
    "flip": Flag(str, "Training", "horizontal, vertical or none."),
    "augment_probability": Flag(float, "Training", "Of the shift, and of the flip."),
    "ema": Flag(float, "Training", "Hand out a moving average of the weights, of this decay."),
    "swa": Flag(float, "Training", "Hand out the mean weights from this share of the run on."),
    "seed": Flag(int, "Run", "Reproducible: research only. Without it the system's entropy."),
    "noise": Flag(str, "Privacy", "standard or secure: cryptographic, safe from float attacks."),
    "device": Flag(str, "Run", "auto, cpu, cuda, cuda:1, mps."),
    "engine": Flag(str, "Run", "auto, fused or functional: speed only."),
    "measure_bias": Flag(str, "Run", "every=N: the bias of each Nth step, into non-private/."),
    "measure_plain": Flag(bool, "Run", "Measure dp-sat's against the plain gradient too."),
    "eval_every": Flag(int, "Run", "Epochs between evaluations [some ten a run]."),
    "checkpoint_every": Flag(float, "Run", "Seconds between checkpoints."),
    "num_workers": Flag(int, "Run", "Threads that read ahead."),
    "tensorboard": Flag(bool, "Run", "Write curves for TensorBoard into non-private/."),
}
_SPELLED = {"model_options": "--model-option"}
_ALTERNATIVES = (("epsilon", "noise_multiplier"), ("ema", "swa"), ("freeze", "head_only"))


def with_flags(
    command: Callable[..., None], *, leave_out: Collection[str] = ()
) -> Callable[..., None]:
    """Give ``command`` the flags of a run; it gets those that were given as the dict ``flags``."""

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        flags = {name: values.pop(name) for name in taken}
        given = {name: value for name, value in flags.items() if value is not None and value != []}
        command(flags=_parsed(given), **values)

    taken = [name for name in FLAGS if name not in leave_out]
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [p for p in own if p.name != "flags"] + [_parameter(name) for name in taken]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    del wrapped.__wrapped__  # typer would read its signature instead
    return wrapped


def merged(file: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration file, if there is one, overridden by the flags.

    A flag also takes the place of its alternative: ``--noise-multiplier`` that of a file's epsilon.
    """
    values = read_file(file) if file is not None else {}
    check_code(values, flags, file)
    for pair in _ALTERNATIVES:
        if any(name in flags for name in pair):
            values = {name: value for name, value in values.items() if name not in pair}
    return {**values, **flags}


def run_config(file: Path | None, flags: Mapping[str, Any]) -> RunConfig:
    """The run that a file and the flags ask for, checked."""
    return RunConfig.from_mapping(merged(file, flags))


def resumed_config(run: Path, flags: Mapping[str, Any]) -> RunConfig:
    """The run in a folder, with the flags in place of what it began with."""
    stored = stored_config(run)
    check_code(stored.to_mapping(), flags, run)
    return stored.replace(**flags)


def _parameter(name: str) -> inspect.Parameter:
    flag = FLAGS[name]
    option = typer.Option(
        _SPELLED.get(name, f"--{name.replace('_', '-')}"),
        help=_help(name).replace("[", "\\["),
        rich_help_panel=flag.panel,
        show_default=False,
    )
    kind: Any = flag.type | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _help(name: str) -> str:
    """The help with the configuration's own default, where it has one."""
    default = RunConfig.model_fields[name].default
    if default is None or isinstance(default, bool | tuple | dict):
        return FLAGS[name].help
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{FLAGS[name].help.removesuffix('.')} [{shown}]."


def _parsed(given: dict[str, Any]) -> dict[str, Any]:
    """Bring the flags that are not plain values into the configuration's form."""
    if "image_size" in given:
        given["image_size"] = _size(given["image_size"])
    if "model_options" in given:
        given["model_options"] = dict(_option(text) for text in given["model_options"])
    if "measure_bias" in given:
        given["measure_bias"] = _every(given["measure_bias"])
    return given


def _every(text: str) -> int:
    """``every=5``, or 5."""
    number = text.removeprefix("every=")
    if not number.isdecimal() or int(number) < 1:
        raise ArgumentError(f"--measure-bias must be every=N, such as every=10, got {text!r}")
    return int(number)


def _size(text: str) -> int | tuple[int, int]:
    sides = text.lower().split("x")
    if not all(side.isdigit() for side in sides) or len(sides) > 2:
        raise ArgumentError(f"--image-size must be like 64 or 64x48, got {text!r}")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _option(text: str) -> tuple[str, Any]:
    """``width=0.25`` as ("width", 0.25): the value is read as TOML, else taken as text."""
    import tomllib

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ArgumentError(f"--model-option must be like width=0.25, got {text!r}")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value
