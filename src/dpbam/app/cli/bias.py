"""``dpbam bias``: what clipping does to a model's gradients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpbam.app.cli.flags import resumed_config, run_config, settings_as_flags
from dpbam.app.cli.output import Json, facts, number, option, percent, print_json, say, table
from dpbam.app.runs import RunConfig
from dpbam.app.runs.bias import NOTE, READINGS, Measured, measure
from dpbam.catalogue import is_private
from dpbam.errors import ArgumentError

if TYPE_CHECKING:
    from dpbam.bias import Flatness

_SHARES = ("relative_bias", "magnitude_share", "direction_share", "noise_share")


@settings_as_flags()
def bias(
    flags: dict[str, object],
    folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run folder: its model is measured.")
    ] = None,
    batches: Annotated[int, option("Poisson batches to measure on.")] = 4,
    advise: Annotated[
        bool, option("The change of C, lambda, batch size or data that gains most.", "--advise")
    ] = False,
    flatness: Annotated[
        bool, option("L_Z, L_BAO and the Hessian's top eigenvalue.", "--flatness")
    ] = False,
    json: Json = False,
) -> None:
    """Measure the bias that clipping puts into a model's gradients: its length and direction.

    With RUN: the model of a finished run, or the latest checkpoint of one that has not ended, on
    the run's own data; flags change the run's settings. Without: a model with new weights on
    --data. What is shown is not protected by privacy: do not share it.

    Examples:
        $ dpbam bias runs/digits
        $ dpbam bias runs/digits --method dp-sgd --clip-norm 4 --batches 8
        $ dpbam bias --data cifar10 --model resnet9 --model-option width=0.25 --batch-size 256
            --advise
        $ dpbam bias runs/digits --flatness --json
    """
    settings = _settings(folder, flags)
    measured = measure(settings, run=folder, batches=batches, advice=advise, flatness=flatness)
    if json:
        print_json(measured.to_dict())
    else:
        _show(settings, measured)


def _settings(folder: Path | None, flags: dict[str, object]) -> RunConfig:
    """Return the run's settings, or the flags'; epsilon 8 where nothing sets the noise."""
    if folder is not None:
        return resumed_config(folder, flags)
    if "data" not in flags:
        raise ArgumentError("give a run folder, or --data to measure a new model on")
    if is_private(flags.get("method")) and "noise_multiplier" not in flags:
        flags = {"epsilon": 8.0, **flags}
    return run_config(None, flags)


def _show(settings: RunConfig, measured: Measured) -> None:
    record = measured.records[-1]
    plain, against_own = measured.means("plain"), measured.means("own")
    rows = [
        (words, _cell(name, plain), _cell(name, against_own)) for name, words in READINGS.items()
    ]
    count = len(measured.records)
    of = "one batch" if count == 1 else f"mean of {count} batches"
    title = f"{settings.method} on {settings.data}, {of}"
    say(table(("", "against the plain gradient", "against its own"), rows, title=title))
    norms = record.non_private_norms
    values = {
        "clipped": f"{percent(record.non_private_clip_share)} of the last batch",
        "norms": f"median {_at(norms.quantiles, 3)}, 95% below {_at(norms.quantiles, 5)}; "
        f"C is {number(record.clip_norm)}",
        "noise, its length": number(record.noise_norm),
        "ascent alignment": _number(record.non_private_alignment),
    }
    say(facts(values))
    layers = [
        (name, percent(layer.share or 0.0), percent(layer.relative_bias), number(layer.cosine))
        for name, layer in record.non_private_layers.items()
    ]
    say(table(("layer", "share of squared norms", "relative bias", "cosine"), layers))
    if measured.flatness:
        say(facts(_flatness(measured.flatness)))
    if measured.advice:
        from dpbam.bias import method_advice  # torch

        rule = method_advice(settings.method, averaged=settings.averaged)
        say(str(measured.advice), *filter(None, [rule, measured.gains_most]))
    say(NOTE)


def _flatness(flat: Flatness) -> dict[str, object]:
    return {
        "L, mean loss": flat.non_private_loss,
        "L_Z": flat.non_private_l_z,
        "L_BAO": flat.non_private_l_bao,
        "slack L_BAO - L_Z": flat.non_private_slack,
        "Hessian's largest eigenvalue": flat.non_private_top_eigenvalue or 0.0,
    }


def _cell(name: str, means: dict[str, float] | None) -> str:
    if means is None:
        return "-"
    return percent(means[name]) if name in _SHARES else number(means[name])


def _at(quantiles: tuple[float, ...], k: int) -> str:
    return number(quantiles[k]) if quantiles else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)
