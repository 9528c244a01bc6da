"""The model card: ``README.md`` with Hugging Face's front matter, from what may be published.

It is made from the privacy statement and ``model.json``, both public. Accuracy on test records is
computed without noise, so it is in the card only where the records are public: those of the data
sets that everyone has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pydantic import JsonValue

from dpbam.app.runs.documents import ModelFacts, Statement
from dpbam.app.runs.escaping import each_text, json_text, markdown, visible
from dpbam.catalogue import TASKS
from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from dpbam.tasks.base import Words
    from dpbam.training.events import EvaluationReport

#: Library -> how it loads the model.
_LOADING = {
    "dpbam": """\
    from dpbam.app.runs import load_run_model

    model = load_run_model("FOLDER")  # the folder of this file; or: dpbam predict FOLDER image.png
""",
    "onnx": """\
    import onnxruntime

    session = onnxruntime.InferenceSession("model.onnx")
    (outputs,) = session.run(None, {"images": images})  # uint8 [N, channels, height, width]
""",
    "transformers": """\
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    processor = AutoImageProcessor.from_pretrained("FOLDER")  # the folder of this file
    model = AutoModelForImageClassification.from_pretrained("FOLDER")
    outputs = model(**processor(image, return_tensors="pt")).logits  # image in RGB
""",
}


def model_card(statement: Statement, model: ModelFacts, evaluation: EvaluationReport | None) -> str:
    """Return the card.

    Args:
        statement: the privacy statement.
        model: what ``model.json`` holds.
        evaluation: the last one, if there is one; it is left out unless it may be published.
    """
    scores = None
    if evaluation is not None and statement.evaluated_on.public:
        scores = {k: v for k, v in evaluation.scores.items() if not math.isnan(v)}
    stated, words = each_text(statement, markdown), _words(model)
    return _TEMPLATE.format(
        matter=_front_matter(statement, model, scores),
        title=f"{markdown(str(model.model))}, trained with {stated.method}",
        shape=" x ".join(map(str, model.image_shape)),
        gives=_of_task(words.gives, model),
        outputs=_of_task(words.outputs, model),
        loading=_LOADING["dpbam"],
        metrics=_evaluation(stated, scores),
        privacy=_privacy(stated),
        weights=stated.initial_weights,
    )


def exported_card(card: str, library: str) -> str:
    """Return a run's card for a model that another library loads."""
    return card.replace('library_name: "dpbam"', f'library_name: "{library}"', 1).replace(
        _LOADING["dpbam"], _LOADING[library], 1
    )


def _words(model: ModelFacts) -> Words:
    words: Words = TASKS.load(model.task).words
    return words


def listed(names: Iterable[object]) -> str:
    """Return names as the card lists them."""
    return ", ".join(markdown(str(name)) for name in names)


def _of_task(text: str, model: ModelFacts) -> str:
    low, high = model.target_range or (0.0, 0.0)
    return text.format(names=listed(model.class_names), low=low, high=high, width=high - low)


def _front_matter(
    statement: Statement, model: ModelFacts, scores: Mapping[str, float] | None
) -> str:
    """Return YAML: its values are written as JSON, which YAML includes, in one line each."""
    tag = _words(model).pipeline_tag
    values: dict[str, JsonValue] = {
        "library_name": "dpbam",
        **({"pipeline_tag": tag} if tag else {}),
        "tags": ["differential-privacy" if statement.private else "not-private", statement.method],
    }
    public = statement.public_weights
    if public and "/" in public.source:  # a name of the hub
        values["base_model"] = public.source.removeprefix("hf:").partition("@")[0]
    if scores is not None:
        name = statement.evaluated_on.set
        result: dict[str, JsonValue] = {
            "task": {"type": tag or "other"},
            "dataset": {"name": name, "type": name},
            "metrics": [{"type": k, "value": round(value, 4)} for k, value in scores.items()],
        }
        values["model-index"] = [{"name": str(model.model), "results": [result]}]
    shown = each_text(values, visible)
    return "\n".join(f"{name}: {json_text(value)}" for name, value in shown.items())


def _evaluation(statement: Statement, scores: Mapping[str, float] | None) -> str:
    evaluated = statement.evaluated_on
    if scores is None:
        return (
            f"The model was evaluated on {evaluated.records:,} records. The figures are not in "
            "this card: they come from those records without noise, so publishing them is a "
            "decision of its own. Add them if the test records are not sensitive."
        )
    figures = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    return f"On {evaluated.set}, {evaluated.records:,} public records: {figures}."


def _privacy(s: Statement) -> str:
    if not s.private:
        return "**None.** It was trained without noise, as a reference: do not publish it."
    research = " Research only: the run was seeded." if s.seeded else ""
    return (
        f"(epsilon = {up(s.epsilon)}, delta = {s.delta:g})-differential privacy for every "
        f"{s.unit} of the training set, {s.neighbouring_relation}; method {s.method}, "
        f"accountant {s.accountant}.{research} `privacy-statement.md` has the whole statement: "
        "what it covers, and what not."
    )


_TEMPLATE = """---
{matter}
---

# {title}

## Intended use

For an image of {shape} (channels x height x width, values 0 to 255) the model gives {gives}.
It knows images like those that it was trained on; evaluate it on your own before you rely on it.
It is no medical device, and no person should be judged by its output alone.

{loading}
{outputs}

## Evaluation

{metrics}

## Privacy

{privacy}

Initial weights: {weights}.
"""
