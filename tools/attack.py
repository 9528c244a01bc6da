"""Attack models trained at epsilon 1, 8 and without privacy: ``python tools/attack.py``.

Trains an MLP on half of scikit-learn's digits at each epsilon, attacks it with the other half as
non-members (as ``dpbam audit RUN --attack`` does), prints the rates, and writes
benchmarks/results/attack.json and docs/assets/attack.svg. Trainings are seeded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from dpbam.app.audit import MembershipResult, attack_run
from dpbam.app.audit.membership import save_roc
from dpbam.app.runs import RunConfig, execute

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "assets" / "attack.svg"
FIGURES = ROOT / "benchmarks" / "results" / "attack.json"
EPSILONS = (1.0, 8.0, None)


def main() -> None:
    """Train, attack, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shadows", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = half_of_digits(Path(folder) / "digits.npz")
        results = []
        for epsilon in EPSILONS:
            run, accuracy = train(data, epsilon, Path(folder) / f"epsilon-{epsilon}")
            found = attack_run(run, shadows=options.shadows, jobs=options.jobs)
            results.append((found, accuracy))
            show(found, accuracy)
        save_roc([found for found, _ in results], PICTURE, about="public")
    rows = [{**found.to_dict(), "run": "", "accuracy": accuracy,
             "above_chance": found.above_chance} for found, accuracy in results]  # fmt: skip
    FIGURES.write_text(json.dumps(rows, indent=1) + "\n")


def half_of_digits(path: Path) -> Path:
    """Half of the records to train on, the others to be non-members."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    order = np.random.default_rng(0).permutation(len(raw.target))
    images = (raw.images * (255 / 16)).round().astype(np.uint8)
    parts = {"train": order[: len(order) // 2], "test": order[len(order) // 2 :]}
    arrays = {f"{name}_images": images[own] for name, own in parts.items()}
    np.savez(path, **arrays, **{f"{name}_labels": raw.target[own] for name, own in parts.items()})
    return path


def train(data: Path, epsilon: float | None, out: Path) -> tuple[Path, float]:
    """Train one model; return its folder and its accuracy on the non-members."""
    method = "sgd" if epsilon is None else "dp-sgd"
    config = RunConfig(
        data=str(data), model="mlp", method=method, epsilon=epsilon, delta=1e-5, epochs=120,
        batch_size=256, seed=0, eval_every=10**9, num_workers=0,
    )  # fmt: skip
    return out, execute(config, out).evaluations[-1].score


def show(found: MembershipResult, accuracy: float) -> None:
    """Print the rates of all attacks."""
    print(f"epsilon {found.epsilon:g}: test accuracy {accuracy:.1%}; violated {found.violated}, "
          f"above chance {found.above_chance}")  # fmt: skip
    for attack in found.attacks:
        for rate in found.rates(attack):
            print(f"  {attack.name:24} fpr <= {rate.level:g}: {rate.seen:.3f}, at least "
                  f"{rate.least:.3f}, best possible {rate.best_possible:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
