"""The trials of the contenders of bias-methods: the rule by which each next one follows.

``python -m reproduce.rival_trials`` writes the next trials of all contenders into
``reproduce/recipes/desk/tune-bias-methods.toml``, from the records of those before. When none is
left, it writes ``bias-methods.toml`` there, with the best trial of each, and exits with 1. Between
two calls, ``python -m reproduce bias-methods --scale desk --only '*-seed-100'`` trains them.

The rule, the same for all: four learning rates, each twice the one before; while the best is the
smallest or the largest of them, half or twice of it; then other values of the contender's own
setting at the best learning rate, :data:`TRIALS` in total. When all are tuned, BAM is combined with
the two rivals whose best trials were the most accurate on held-out training images.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from reproduce.outcome import Study, mean_of
from reproduce.recipes import load_recipe, recipes_folder
from reproduce.records import finished

Trial = Mapping[str, Any]
TRIALS = 7
COMBINED = "bam-"
_LAMBDAS = (0.02, 0.1, 0.005, 0.5)
_BARS = {"rate": 0.5, "bins": 34}
#: The other values of each contender's own setting, in the order in which they are tried.
OWN: dict[str, list[dict[str, Any]]] = {
    "dp-sgd": [{"clip_norm": c} for c in (0.5, 2.0, 4.0)],
    "dp-sat": [{"lam": x} for x in _LAMBDAS[1:]],
    "bam": [{"lam": x} for x in _LAMBDAS[1:]],
    "normalised": [
        {"clipping": "automatic", "clipping_options": {"gamma": r}} for r in (0.1, 0.01, 1.0)
    ],
    "psac": [{"clipping_options": {"r": r}} for r in (1.0, 0.01, 10.0)],
    "quantile": [{"clipping_options": {"quantile": q}} for q in (0.3, 0.7, 0.1)],
    "slaclip": [
        {"clipping_options": {"beta": 0.25, **_BARS}},
        {"clipping_options": {"beta": 0.75, **_BARS}},
        {"clipping_options": {"beta": 0.5, **_BARS, "rate": 0.2}},
    ],
    "exponential": [{"filter_options": {"beta": b}} for b in (0.8, 0.95, 0.98)],
    "doppler": [{"filter_options": {"b": [b, b], "a": [2 * b - 1]}} for b in (0.1, 0.25, 0.02)],
    "disk": [{"method_options": {"kappa": k}} for k in (0.5, 0.9, 0.3)],
    "adam-bc": [{"clip_norm": c} for c in (0.5, 2.0, 4.0)],
}


def following(name: str, trials: Sequence[Trial], accuracies: Sequence[float]) -> dict[str, Any]:
    """Return the next trial of a contender, from those before."""
    first = _without_rate(trials[0])
    rated = [k for k, t in enumerate(trials) if _without_rate(t) == first]
    at = max(rated, key=lambda k: accuracies[k])
    rate, rates = trials[at]["lr"], sorted(trials[k]["lr"] for k in rated)
    tried = len(trials) - len(rated)  # of the contender's own setting
    if not tried and rate in (rates[0], rates[-1]):
        return {**trials[0], "lr": _short(rate / 2 if rate == rates[0] else 2 * rate)}
    fields = {**trials[0], "lr": rate, **_own(name, trials[0])[tried]}
    if name == "dp-sgd":  # the length of a step stays
        fields["lr"] = _short(rate * trials[0]["clip_norm"] / fields["clip_norm"])
    return fields


def _own(name: str, first: Trial) -> Sequence[dict[str, Any]]:
    if name.startswith(COMBINED):
        return [{"lam": x} for x in _LAMBDAS if x != first["lam"]]
    return OWN[name]


def combined(trials: Mapping[str, Sequence[Trial]], accuracies: Mapping[str, Sequence[float]]
             ) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """Return the first trials of BAM with the two best rivals, at the settings of both."""
    at = {name: best(accuracies[name]) for name in OWN}
    rivals = sorted(set(OWN) - {"dp-sgd", "dp-sat", "bam"},
                    key=lambda n: -accuracies[n][at[n]])[:2]  # fmt: skip
    lam = trials["bam"][at["bam"]]["lam"]
    by_name: dict[str, list[dict[str, Any]]] = {}
    for rival in rivals:
        its = {**trials[rival][at[rival]], "lam": lam}
        if its["method"] == "disk":
            its["method_options"] = {**its["method_options"], "inner": "bam"}
        else:
            its["method"] = "bam"
        rates = [_short(its["lr"] * 2.0**k) for k in (-1, 0, 1, 2)]
        by_name[COMBINED + rival] = [{**its, "lr": rate} for rate in rates]
    return by_name


def by_contender(study: Study) -> tuple[dict[str, list[Trial]], dict[str, list[float]]]:
    """Return the trials of each contender, called CONTENDER-NUMBER, and their accuracies."""
    trials: dict[str, list[Trial]] = {}
    accuracies: dict[str, list[float]] = {}
    for arm, by_seed in study.arms().items():
        name = arm.rpartition("-")[0]
        trials.setdefault(name, []).append(study.recipe.arms[arm])
        accuracies.setdefault(name, []).append(mean_of(by_seed).mean)
    return trials, accuracies


def main() -> int:
    """Write the next trials, or the comparison; return 1 if no trial is left."""
    from pathlib import Path

    recipe = load_recipe("tune-bias-methods", "desk")
    study = Study(recipe, finished(recipe, Path("reproduce/results")), len(recipe.runs()))
    if len(study.records) < study.asked:
        sys.exit(f"{study.asked - len(study.records)} trials are not trained yet")
    trials, accuracies = by_contender(study)
    short = [name for name in trials if len(trials[name]) < TRIALS]
    added = {n: [following(n, trials[n], accuracies[n])] for n in short}
    if not short and not any(name.startswith(COMBINED) for name in trials):
        added = combined(trials, accuracies)
    every = {n: [*trials.get(n, []), *added.get(n, [])] for n in {**trials, **added}}
    _write(recipe.name, {f"{n}-{k}": t for n, ts in every.items() for k, t in enumerate(ts, 1)})
    if not added:
        _write("bias-methods", {n: ts[best(accuracies[n])] for n, ts in trials.items()})
    return 0 if added else 1


def _write(name: str, arms: Mapping[str, Trial]) -> None:
    """Replace the arms of a recipe."""
    path = recipes_folder() / "desk" / f"{name}.toml"
    head = path.read_text(encoding="utf-8").partition("[arms.")[0]
    texts = [f"[arms.{n}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in t.items())
             for n, t in arms.items()]  # fmt: skip
    path.write_text(head + "\n".join(texts), encoding="utf-8")


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(_short(value) if isinstance(value, float) else value)


def _without_rate(trial: Trial) -> dict[str, Any]:
    return {k: v for k, v in trial.items() if k != "lr"}


def best(accuracies: Sequence[float]) -> int:
    """Return the place of the largest, the first of equal ones."""
    return max(range(len(accuracies)), key=lambda k: accuracies[k])


def _short(value: float) -> float:
    return float(f"{value:.6g}")


if __name__ == "__main__":
    sys.exit(main())
