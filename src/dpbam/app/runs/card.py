"""The model card: ``README.md`` with Hugging Face's front matter, from what may be published.

It is made from the privacy statement and ``model.json``, both public. Accuracy on test records is
computed without noise, so it is in the card only where the records are public: those of the data
sets that everyone has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dpbam.privacy.rounding import up

_NO_METRICS = ("step", "epoch", "epsilon", "loss", "records")  # of a row of metrics.jsonl
_TAGS = {"single-label": "image-classification", "multi-label": "image-classification",
         "segmentation": "image-segmentation"}  # fmt: skip
_PREDICTS = {
    "single-label": "to one of these classes",
    "multi-label": "to any of these findings",
    "regression": "to a number",
    "segmentation": "to one of these classes for every pixel",
}


def model_card(
    statement: Mapping[str, Any], model: Mapping[str, Any], metrics: Mapping[str, Any] | None
) -> str:
    """Return the card.

    Args:
        statement: the privacy statement.
        model: what ``model.json`` holds.
        metrics: the last evaluation, if there is one; it is left out unless it may be published.
    """
    shown = None
    if metrics is not None and statement["evaluated_on"].get("public"):
        shown = {k: v for k, v in metrics.items() if k not in _NO_METRICS and v is not None}
    return _TEMPLATE.format(
        matter=_front_matter(statement, model, shown),
        title=f"{model['model']}, trained with {statement['method']}",
        shape=" x ".join(map(str, model["image_shape"])),
        predicts=_PREDICTS[model.get("task", "single-label")],
        classes=", ".join(map(str, model["class_names"])),
        metrics=_evaluation(statement, shown),
        privacy=_privacy(statement),
        weights=statement["initial_weights"],
    )


def _front_matter(
    statement: Mapping[str, Any], model: Mapping[str, Any], metrics: Mapping[str, Any] | None
) -> str:
    """Return YAML: its values are written as JSON, which YAML includes."""
    tag = _TAGS.get(model.get("task", "single-label"))
    values: dict[str, Any] = {
        "library_name": "dpbam",
        **({"pipeline_tag": tag} if tag else {}),
        "tags": ["differential-privacy" if statement["private"] else "not-private",
                 statement["method"]],
    }  # fmt: skip
    public = statement.get("public_weights")
    if public and "/" in public["source"]:  # a name of the hub
        values["base_model"] = public["source"].removeprefix("hf:").partition("@")[0]
    if metrics is not None:
        scores = [{"type": name, "value": round(value, 4)} for name, value in metrics.items()]
        name = statement["evaluated_on"]["set"]
        result = {"task": {"type": tag or "other"}, "dataset": {"name": name, "type": name},
                  "metrics": scores}  # fmt: skip
        values["model-index"] = [{"name": str(model["model"]), "results": [result]}]
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items())


def _evaluation(statement: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> str:
    evaluated = statement["evaluated_on"]
    if metrics is None:
        return (
            f"The model was evaluated on {evaluated['records']:,} records. The figures are not in "
            "this card: they come from those records without noise, so publishing them is a "
            "decision of its own. Add them if the test records are not sensitive."
        )
    scores = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    return f"On {evaluated['set']}, {evaluated['records']:,} public records: {scores}."


def _privacy(s: Mapping[str, Any]) -> str:
    if not s["private"]:
        return "**None.** It was trained without noise, as a reference: do not publish it."
    research = " Research only: the run was seeded." if s["seeded"] else ""
    return (
        f"(epsilon = {up(s['epsilon'])}, delta = {s['delta']:g})-differential privacy for every "
        f"{s['unit']} of the training set, {s['neighbouring_relation']}; method {s['method']}, "
        f"accountant {s['accountant']}.{research} `privacy-statement.md` has the whole statement: "
        "what it covers, and what not."
    )


_TEMPLATE = """---
{matter}
---

# {title}

## Intended use

Images of {shape} (channels x height x width, values 0 to 255), {predicts}: {classes}.
It knows images like those that it was trained on; evaluate it on your own before you rely on it.
It is no medical device, and no person should be judged by its output alone.

    from dpbam.app.runs import load_run_model

    model = load_run_model("FOLDER")  # the folder of this file

## Evaluation

{metrics}

## Privacy

{privacy}

Initial weights: {weights}.
"""
