"""The paper's figures about bias, measured anew: 2, 4, 5, 6, and what decides accuracy.

``python -m dpbam.experiments.bias_figures methods OUT`` trains every arm with paired seeds on
CIFAR-10, halved in size: bias, direction and alignment over training, accuracy, flatness.
``... batch-size OUT`` trains DP-SGD at several batch sizes (Figures 5 and 6). Both print a table.

One JSON file a finished run; the same command again does what is missing. A run of one seed shares
initial weights and Poisson batches with the others, and not the noise. CIFAR-10 is public: all that
is measured here is without noise, and may not be done with private data.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbam import BAM, DPSAT, DPSGD, Method, PrivacyPlan, PrivateGradientOracle
from dpbam.bias import BiasLens, measure_flatness
from dpbam.data import load_pair, to_float
from dpbam.experiments.statistics import Estimate, estimate, paired_difference
from dpbam.nn import build_model

Pair = tuple[Tensor, Tensor]
Record = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: of its files.
        method: "dp-sgd", "dp-sat" or "bam" (exact).
        lam: lambda.
        clip_norm: C.
        batch_size: l; None takes the setting's.
    """

    name: str
    method: str
    lam: float = 0.0
    clip_norm: float = 1.0
    batch_size: int | None = None

    def build(self) -> Method:
        """The method itself."""
        if self.method == "bam":
            return BAM(self.lam, exact=True)
        return DPSAT(self.lam) if self.method == "dp-sat" else DPSGD()


@dataclass(frozen=True)
class Setting:
    """What all runs share: CIFAR-10 images halved to 16x16, a narrow ResNet-9, NAdam."""

    data: str = "cifar10"
    images: int = 10_000
    halve: bool = True
    model: str = "resnet9"
    width: float = 0.125
    batch_size: int = 250
    epochs: float = 4.0
    epsilon: float = 8.0
    delta: float = 1e-5
    lr: float = 2e-3
    every: int = 5
    engine: str = "fused"
    flatness_images: int = 200


#: The three methods of Figure 2, BAM at two lambdas, and DP-SGD clipped less: it has less bias
#: and more noise with no change of the objective, so it tells what bias alone does.
METHOD_ARMS = (
    Arm("dp-sgd", "dp-sgd"),
    Arm("dp-sat", "dp-sat", 0.086),
    Arm("bam-0.005", "bam", 0.005),
    Arm("bam-0.02", "bam", 0.02),
    Arm("dp-sgd-c4", "dp-sgd", clip_norm=4.0),
)
BATCH_ARMS = tuple(
    Arm(f"dp-sgd-l{size}", "dp-sgd", batch_size=size) for size in (62, 125, 250, 500, 1000)
)
STUDIES = {"methods": METHOD_ARMS, "batch-size": BATCH_ARMS}


def study(arms: Sequence[Arm], seeds: Sequence[int], setting: Setting, out: Path) -> list[Record]:
    """Every arm with every seed, seed by seed; finished runs are read, not repeated."""
    out.mkdir(parents=True, exist_ok=True)
    pair: tuple[Pair, Pair] | None = None
    found = []
    for seed in seeds:
        for arm in arms:
            path = out / f"{arm.name}-seed-{seed}.json"
            if not path.exists():
                pair = pair or load_images(setting)
                record = train_and_measure(arm, seed, setting, *pair)
                _write(path, record)
                print(f"{path.name}: {record['accuracy']:.4f} in {record['seconds']:.0f} s")
            found.append(json.loads(path.read_text()))
    return found


def train_and_measure(arm: Arm, seed: int, setting: Setting, train: Pair, test: Pair) -> Record:
    """One run, measured every few steps: its record."""
    began = time.monotonic()
    plan = _plan(arm, setting, len(train[0]))
    model = _model(setting, train, seed)
    lens = BiasLens(every=setting.every, plain=True, layers=False)
    loss = nn.CrossEntropyLoss(reduction="none")
    oracle = PrivateGradientOracle(
        model, loss, plan, arm.build(), engine=setting.engine, physical_batch_size=350, lens=lens,
        seed=seed, noise_seed=zlib.crc32(f"{arm.name} {seed}".encode()),
    )  # fmt: skip
    optimizer = torch.optim.NAdam(model.parameters(), lr=setting.lr)
    curve = []
    for step, batch in enumerate(plan.batches(train, seed=seed), 1):
        oracle.backward(*batch)
        optimizer.step()
        if step % (5 * setting.every) == 0 or step == plan.steps:
            few = (test[0][:2000], test[1][:2000])
            curve.append((step, accuracy(model, few)))
    x, y = (t[: setting.flatness_images] for t in train)
    flatness = measure_flatness(model, loss, x, y, lam=arm.lam, engine=setting.engine)
    return {
        "arm": asdict(arm),
        "seed": seed,
        "setting": asdict(setting),
        "plan": asdict(plan),
        "epsilon": oracle.ledger.epsilon(),
        "seconds": time.monotonic() - began,
        "accuracy": accuracy(model, test),
        "accuracy_curve": curve,
        "non_private_flatness": asdict(flatness),
        "non_private_bias": [json.loads(record.to_json()) for record in lens.records],
    }


def load_images(setting: Setting) -> tuple[Pair, Pair]:
    """(images float, labels) to train on, and to test on."""
    train, test = load_pair(setting.data)

    def tensors(data: Any, count: int) -> Pair:
        images, labels = data.batch(torch.arange(min(count, len(data))))
        images = to_float(images)
        return (F.avg_pool2d(images, 2) if setting.halve else images), labels

    return tensors(train, setting.images), tensors(test, len(test))


@torch.no_grad()
def accuracy(model: nn.Module, data: Pair) -> float:
    """The share of images that are classified rightly."""
    model.eval()
    right = 0
    for x, y in zip(torch.split(data[0], 500), torch.split(data[1], 500), strict=True):
        right += int((model(x).argmax(1) == y).sum())
    model.train()
    return right / len(data[1])


def summary(records: Sequence[Record]) -> str:
    """A table: accuracy, its paired difference to the first arm, and the last quarter's means.

    Bias and cosines are against the plain gradient g_hat, the paper's reading.
    """
    arms: dict[str, dict[int, Record]] = {}
    for record in records:
        arms.setdefault(record["arm"]["name"], {})[record["seed"]] = record
    baseline = {seed: record["accuracy"] for seed, record in next(iter(arms.values())).items()}
    lines = [_COLUMNS]
    for name, by_seed in arms.items():
        runs = list(by_seed.values())
        accuracies = {seed: record["accuracy"] for seed, record in by_seed.items()}
        mean, difference = (
            estimate(list(accuracies.values())),
            paired_difference(accuracies, baseline),
        )
        figures = [sum(last_quarter(run, key) for run in runs) / len(runs) for key in _READ]
        top = sum(run["non_private_flatness"]["non_private_top_eigenvalue"] for run in runs)
        lines.append(
            f"| {name} | {mean.count} | {mean.mean:.1%} | {_interval(difference)} | "
            + " | ".join(f"{value:.3g}" for value in [*figures, top / len(runs)])
            + " |"
        )
    return "\n".join(lines)


def _interval(e: Estimate) -> str:
    """A mean in points with its interval, which one seed has not."""
    return f"{e.mean:+.1%}" + (f" [{e.low:+.1%}, {e.high:+.1%}]" if e.count > 1 else "")


_READ = ("bias", "relative_bias", "magnitude_share", "cosine", "private_cosine")
_COLUMNS = (
    "| arm | seeds | accuracy | paired difference | bias | relative | length's share | cosine | "
    "cosine with noise | top eigenvalue |\n|---|---|---|---|---|---|---|---|---|---|"
)


def last_quarter(record: Record, key: str, reading: str = "non_private_against_plain") -> float:
    """The mean of a reading over the last quarter of the measured steps."""
    measured = record["non_private_bias"]
    tail = measured[-max(1, len(measured) // 4) :]
    return sum(float(step[reading][key]) for step in tail) / len(tail)


def _plan(arm: Arm, setting: Setting, n: int) -> PrivacyPlan:
    return PrivacyPlan.calibrate(
        epsilon=setting.epsilon,
        delta=setting.delta,
        n=n,
        batch_size=arm.batch_size or setting.batch_size,
        epochs=setting.epochs,
        clip_norm=arm.clip_norm,
    )


def _model(setting: Setting, train: Pair, seed: int) -> nn.Module:
    channels, side = train[0].shape[1:3]
    options = {"width": setting.width} if setting.model == "resnet9" else {}
    return build_model(
        setting.model, in_channels=channels, image_size=side,
        num_classes=int(train[1].max()) + 1, seed=seed, **options,
    )  # fmt: skip


def _write(path: Path, record: Record) -> None:
    """All or nothing: an interrupted run leaves no file behind."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(_rounded(record), separators=(",", ":")) + "\n")
    part.replace(path)


def _rounded(value: Any) -> Any:
    """Floats to six digits: these files are kept."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value


def main(argv: Sequence[str] | None = None) -> None:
    """Do a study, or what is missing of it."""
    parser = argparse.ArgumentParser(prog="python -m dpbam.experiments.bias_figures")
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=float, default=Setting.epochs)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    setting = replace(Setting(), epochs=options.epochs)
    print(summary(study(STUDIES[options.study], range(options.seeds), setting, options.out)))


if __name__ == "__main__":
    main()
