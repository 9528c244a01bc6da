"""Runs of the real oracle by :mod:`dpbam.auto`'s choice: the final figures of the study.

CIFAR-10's test records also served to choose the number of steps, C and the share of averaged
weights, so that its figures are slightly optimistic.

python -m reproduce.defaults_final FEATURES RESULTS SOURCE KIND N EPSILON SEED [DELTA] [HEAD]
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import torch

from dpbam.auto import Facts, choose
from dpbam.heads import (
    Descent,
    LinearHead,
    class_targets,
    classifier,
    closed_form_plan,
    fit_by_descent,
    release_moments,
)
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import PrivacyPlan
from reproduce.defaults import Record, load

MOST = 10**9  # score all held-out records


def run(
    folder: Path, source: str, kind: str, n: int, epsilon: float, seed: int,
    delta: float | None = None, head: str | None = None,
) -> Record:  # fmt: skip
    """Train by the choice through the oracle and its ledger; score on all held-out records."""
    x, y, held_x, held_y = load(folder, source, kind, MOST)
    n = min(n, len(x))
    start = seed * n if (seed + 1) * n <= len(x) else 0
    x, y = x[start : start + n], y[start : start + n]
    classes = int(torch.cat([y, held_y]).max()) + 1
    encoder = None if kind == "scattering" else f"onnx:{kind}"
    facts = Facts(n=n, epsilon=epsilon, delta=delta, image_shape=(1, 28, 28), classes=classes,
                  encoder=encoder)  # fmt: skip
    choice, began = choose(facts), time.process_time()
    head = head or choice.head
    if head == "closed-form":
        plan = closed_form_plan(epsilon=epsilon, delta=choice.delta, n=n)
        ledger = plan.ledger()
        moments = release_moments(x, class_targets(y, classes), plan, seed=seed, ledger=ledger)
        heads = {"plain": classifier(moments), "balanced": classifier(moments, balanced=True)}
    else:
        assert choice.lr is not None
        assert choice.clip_norm is not None
        plan = PrivacyPlan.calibrate(
            epsilon=epsilon, delta=choice.delta, n=n, batch_size=n, steps=choice.steps,
            clip_norm=choice.clip_norm,
        )  # fmt: skip
        ledger = plan.ledger()
        fitted = fit_by_descent(
            x,
            y,
            classes,
            plan,
            Descent(lr=choice.lr, average=choice.average or 0.3),
            seed=seed,
            ledger=ledger,
        )
        heads = {"plain": fitted}
    seconds = time.process_time() - began
    return {
        "source": source, "features": kind, "n": n, "epsilon": epsilon, "head": head, "seed": seed,
        "by": "oracle", "delta": choice.delta, "lr": choice.lr if head == "descent" else None,
        "clip_norm": plan.clip_norm, "steps": plan.steps, "sigma": plan.noise_multiplier,
        "spent": _spent(ledger), "seconds": round(seconds, 1),
        **{name: _scores(h, held_x, held_y) for name, h in heads.items()},
    }  # fmt: skip


def _spent(ledger: Ledger) -> float:
    return round(ledger.epsilon(), 4)


def _scores(head: LinearHead, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Return accuracy and balanced accuracy, in per cent."""
    right = (head.predict(x) == y).double()
    by_class = torch.stack([right[y == c].mean() for c in sorted(set(y.tolist()))])
    return [round(100 * right.mean().item(), 2), round(100 * by_class.mean().item(), 2)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    features, results, source, kind = sys.argv[1:5]
    given = sys.argv[8] if len(sys.argv) > 8 else "default"
    record = run(
        Path(features), source, kind, int(sys.argv[5]), float(sys.argv[6]), int(sys.argv[7]),
        None if given == "default" else float(given), *sys.argv[9:],
    )  # fmt: skip
    with Path(results).open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record))
