"""Run folders made up for the tests, with the files and names that real ones have."""

from __future__ import annotations

import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import tomli_w

from dpbam.app.runs import RunConfig
from dpbam.app.runs.documents import Statement
from tests.results import run_facts

#: figures of other tasks than single-label: test_figures.py has their runs
TASK_FIGURES = ("roc", "predicted")
CLASSES = ("heron", "walrus", "yacht")
SECRET = 0.123454321  # a training loss that must not leave the operator's page


def write_run(
    folder: Path, *, method: str = "bam", seed: int | None = None, epochs: int = 6,
    batch_size: int = 100, lam: float = 0.02, classes: tuple[str, ...] = CLASSES,
    measured: bool = True, evaluated: bool = True, finished: bool = True, every: int = 1,
    plain: bool = True,
) -> Path:  # fmt: skip
    """A folder as a run of ``epochs`` on 1000 records leaves it."""
    rng = random.Random(f"{method} {seed}")
    (folder / "non-private").mkdir(parents=True)
    q = batch_size / 1000
    steps = round(epochs / q)
    config = {
        "data": "/home/alice/scans", "model": "small-cnn", "method": method, "epsilon": 3.0,
        "lam": lam, "clip_norm": 1.0, "batch_size": batch_size, "epochs": float(epochs),
        "freeze": [], "device": "cpu", "accountant": "rdp",
    }  # fmt: skip
    if seed is not None:
        config["seed"] = seed
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    if finished:
        statement(method, seed, q, steps, rng).write(folder / "privacy-statement.json")
    given = {k: v for k, v in config.items() if method != "sgd" or k != "epsilon"}
    changes = {"sampling_rate": q, "noise_multiplier": 1.5, "threads": 2,
               "versions": {"torch": "2.13.0", "python": "3.11.7"}}  # fmt: skip
    facts = run_facts(RunConfig.from_mapping(given)).model_copy(update=changes)
    facts.write(folder / "non-private" / "run.json")
    _lines(folder / "metrics.jsonl", [_metrics(k, epochs, q, rng) for k in range(1, epochs + 1)])
    losses = [{"step": s, "non_private_loss": SECRET} for s in range(1, steps + 1, 5)]
    _lines(folder / "non-private" / "training.jsonl", losses)
    if measured and method != "sgd":
        _lines(folder / "statistics.jsonl", [released_row(s, rng) for s in range(steps)])
    if measured:
        rows = [bias_row(s, steps, method, lam, rng, plain=plain) for s in range(0, steps, every)]
        _lines(folder / "non-private" / "bias.jsonl", rows)
    if evaluated:
        _json(folder / "non-private" / "evaluation-test.json", evaluation(classes, rng))
    return folder


def statement(
    method: str = "bam", seed: int | None = None, q: float = 0.1, steps: int = 60,
    rng: random.Random | None = None, **changes: Any,
) -> Statement:  # fmt: skip
    """As :func:`dpbam.app.runs.statement.statement` makes it."""
    rng = rng or random.Random(0)
    return Statement.model_validate({
        "format": 4, "run": f"{rng.getrandbits(64):016x}", "private": method != "sgd",
        "epsilon": "infinite" if method == "sgd" else 2.97654, "delta": 1e-4,
        "unit": "record (one image and its label)", "units": 1000,
        "neighbouring_relation": "add or remove one unit of privacy",
        "accountant": "dp-accounting 0.6.0, RDP", "method": method,
        "sampling": "Poisson: at each step every unit enters on its own with probability q",
        "sampling_rate": q, "expected_batch_size": round(1000 * q), "steps": steps,
        "charged_steps": steps, "noise_multiplier": 1.5, "charged_noise_multiplier": 1.4958,
        "released_beside_the_gradients": "norms", "clip_norm": 1.0, "clipping": "flat",
        "seeded": seed is not None, "noise_mode": "from the operating system's entropy",
        "initial_weights": "random, independent of the data", "tuned_on": "not accounted",
        "evaluated_on": {"set": "scans/test", "records": 300, "times": 6, "note": "not covered",
                         "public": False, "trained_on": "no", "shared_units_allowed": False},
        "operator": None, "curator": None, "purpose": None, "unit_name": "record",
        "unit_reason": None, "beyond_max_records": "none", "noise_multiplier_before": None,
        "class_weights": "none", "filter": "none", "own_code": "none", "noise": "standard",
        "public_weights": None, "chosen_by_rule": None, "who_sees_what": {},
        "outside_the_promise": [], "dpbam": "0", "trade_off": {"not_given": "by RDP"},
        "identity": {"date": "2026-01-01", "files": {}, "configuration_sha256": "0" * 64,
                     "versions": {}},
        "budget": None, "may_be_published": ["model.safetensors", "privacy-statement.json"],
        "may_be_published_if_the_test_records_are_not_sensitive": ["metrics.jsonl"],
        "must_not_be_published": ["non-private/", "config.toml"],
        **changes,
    })  # fmt: skip


def bias_row(
    step: int, steps: int, method: str, lam: float, rng: random.Random, *, plain: bool = True
) -> dict[str, Any]:
    """As :class:`dpbam.bias.record.BiasRecord` writes it."""
    t = step / steps
    norms = {"quantiles": [x * (2 - t) for x in (0.2, 0.5, 1.0, 1.5, 2.0, 4.0, 9.0)], "mean": 1.7}
    norms["counts"] = [0] * 6 + [20, 37, 40 - step % 5, step % 5] + [0] * 16
    layer = {"norms": norms, "share": 0.5, "bias": 1.0, "relative_bias": 0.5, "cosine": 0.9}
    return {
        "step": step, "method": method, "lam": lam, "batch_size": 100,
        "clip_norm": "infinite" if method == "sgd" else 1.0,
        "noise_multiplier": 1.5, "noise_norm": 2.0, "non_private_units": 97,
        "non_private_broken": 0,
        "non_private_against_plain": reading(t, method, rng) if plain or step == 0 else None,
        "non_private_against_own": reading(t, method, rng), "non_private_lemma2_bound": 9.0,
        "non_private_norms": norms, "non_private_plain_norms": None,
        "non_private_clip_share": 0.9 - 0.5 * t,
        "non_private_alignment": None if method == "dp-sgd" else 0.3 - 0.1 * t,
        "non_private_flatness_slack": 0.01 if method == "bam" else None,
        "non_private_layers": {"conv1": layer, "head": layer},
    }  # fmt: skip


def released_row(step: int, rng: random.Random) -> dict[str, Any]:
    """As :class:`dpbam.bias.ReleasedStatistics` writes it."""
    return {
        "step": step, "thresholds": [0.5, 1.0, 2.0, 4.0], "clip_norm": 1.0, "count_std": 20.0,
        "counts": [10 + rng.gauss(0, 20), 30.0, 50.0, 10.0, -3.0], "bias": 2.0,
        "bias_square_std": 0.5,
    }  # fmt: skip


def reading(t: float, method: str, rng: random.Random) -> dict[str, Any]:
    """A decomposition that holds: bias^2 = ((a - 1) r)^2 + c^2."""
    r, a = 4 - 2 * t, (0.4 if method == "bam" else 0.2) + rng.uniform(0, 0.02)
    c = (0.3 if method == "bam" else 0.1) * r
    if method == "sgd":  # clips nothing
        a, c = 1.0, 0.0
    bias = math.hypot((a - 1) * r, c)
    share = None if method == "sgd" else (c / bias) ** 2
    return {
        "reference_norm": r, "clipped_norm": math.hypot(a * r, c), "bias": bias,
        "relative_bias": bias / r, "a": a, "a_from_eta": True, "c_norm": c, "orthogonality": 0.0,
        "magnitude_share": None if share is None else 1 - share, "direction_share": share,
        "cosine": a * r / math.hypot(a * r, c), "private_a": a, "private_c_norm": 2.0,
        "private_cosine": 0.3, "noise_share": 4 / (4 + bias**2),
    }  # fmt: skip


def evaluation(classes: tuple[str, ...], rng: random.Random) -> dict[str, Any]:
    """As ``dpbam evaluate --save`` keeps it."""
    from dpbam.tasks.scores import wilson

    k = len(classes)
    confusion = [[rng.randint(40, 80) if i == j else 10 for j in range(k)] for i in range(k)]

    def share(right: int, count: int) -> dict[str, Any]:
        return {"value": right / count, "interval": list(wilson(right, count)), "count": count}

    by_class = {name: share(confusion[i][i], sum(confusion[i])) for i, name in enumerate(classes)}
    counts = [one["count"] for one in by_class.values()]
    groups = {name: {"accuracy": right / 100, **share(right, 100)} for name, right in
              (("f", 60), ("m", 75))}  # fmt: skip
    return {
        "test_set_of_the_run": True, "task": "single-label", "metric": "accuracy",
        "scores": {"accuracy": 2 / 3}, "interval": list(wilson(200, 300)), "count": sum(counts),
        "trivial": max(counts) / sum(counts), "classes": by_class, "confusion": confusion,
        "groups": {"sex": {"worst": "f", "groups": groups}},
    }  # fmt: skip


def _metrics(k: int, epochs: int, q: float, rng: random.Random) -> dict[str, Any]:
    accuracy = 0.8 * (1 - math.exp(-k / 2)) + rng.uniform(0, 0.02)
    epsilon = 3 * math.sqrt(k / epochs)
    return {"step": round(k / q), "epoch": float(k), "epsilon": epsilon, "accuracy": accuracy,
            "loss": 1.0, "records": 300}  # fmt: skip


def _json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values))


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Page(HTMLParser):
    """What a browser would see: tags, addresses, the text of every script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.figures: set[str] = set()
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "action")]
        self.figures |= {v or "" for k, v in attrs if k == "data-figure"}
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, dict[str, Any]]:
        found = json.loads(self.scripts[0])
        assert isinstance(found, dict)
        return found
