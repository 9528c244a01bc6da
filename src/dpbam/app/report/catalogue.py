"""Every figure by name, in the order of the report."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from dpbam._names import did_you_mean
from dpbam.app.report import bias_figures as of_bias
from dpbam.app.report import comparison_figures as of_comparison
from dpbam.app.report import evaluation_figures as of_evaluation
from dpbam.app.report import norm_figures as of_norms
from dpbam.app.report import released_figures as of_released
from dpbam.app.report import training_figures as of_training
from dpbam.app.report import vector_figures as of_vectors
from dpbam.app.report.bias_figures import Builder
from dpbam.app.report.figure import Figure
from dpbam.app.report.groups import Group
from dpbam.app.report.headline import unit_of
from dpbam.app.report.meaning import meaning
from dpbam.app.report.records import ReportError

#: Section of the report -> its figures.
SECTIONS: dict[str, dict[str, Builder]] = {
    "Quality": {
        "differences": of_comparison.differences,
        "accuracy": of_training.accuracy,
        "classes": of_evaluation.classes,
        "confusion": of_evaluation.confusion,
        "roc": of_evaluation.roc,
        "predicted": of_evaluation.predicted,
        "groups": of_evaluation.subgroups,
    },
    "Clipping bias": {
        "bias": of_bias.bias,
        "decomposition": of_vectors.decomposition,
        "direction": of_bias.direction,
        "noise": of_bias.noise,
        "relative-bias": of_bias.relative,
        "alignment": of_bias.alignment,
        "batch-size": of_bias.batch_size,
    },
    "Released with noise": {
        "released-norms": of_released.norms,
        "released-clipping": of_released.clipping,
    },
    "Gradients and loss": {
        "norms": of_norms.norms,
        "histogram": of_norms.histogram,
        "clip-share": of_bias.clip_share,
        "loss": of_training.loss,
        "layers": of_norms.layers,
        "flatness": of_bias.flatness,
    },
}

BUILDERS: dict[str, Builder] = {
    "clipping": of_vectors.clipping,
    **{name: build for section in SECTIONS.values() for name, build in section.items()},
}


def build(name: str, groups: Sequence[Group]) -> Figure:
    """The figure ``name`` of the runs in ``groups``.

    Raises:
        ReportError: if there is no such figure.

    Example:
        >>> build("biass", [])
        Traceback (most recent call last):
        dpbam.app.report.records.ReportError: there is no figure 'biass': did you mean 'bias'?
    """
    if name not in BUILDERS:
        raise ReportError(f"there is no figure {name!r}: {did_you_mean(name, BUILDERS)}")
    figure = BUILDERS[name](groups)
    units = unit_of([run for group in groups for run in group.runs])
    return replace(in_units(figure, units), meaning=meaning(name, groups) if figure.panels else ())


def in_units(figure: Figure, units: str) -> Figure:
    """The figure with its words for what is clipped and counted: patients, not samples."""
    if units == "samples":
        return figure

    def worded(text: str) -> str:
        text = text.replace("samples", units).replace("per-sample", f"per-{units[:-1]}")
        return re.sub(r"\b(a|no) sample\b", rf"\1 {units[:-1]}", text)

    panels = [replace(p, view=json.loads(worded(json.dumps(p.view)))) for p in figure.panels]
    return replace(
        figure, title=worded(figure.title), caption=worded(figure.caption), panels=panels
    )
