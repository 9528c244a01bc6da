"""A study: a private head and LoRA on a public encoder, against training from scratch.

The encoder, a small ConvNeXt, is trained here without privacy on five classes of CIFAR-10, which
count as public. The other five count as private: each arm trains on 1,000 images per class at the
same epsilon, with three seeds. Images are averaged to 16x16, so that all of it takes minutes.

    python examples/public_encoder.py encoder    # trains the encoder
    python examples/public_encoder.py tune       # learning rates, by a seed that is not compared
    python examples/public_encoder.py compare    # three seeds of each arm
    python examples/public_encoder.py table      # prints the table of results

Work is in ``runs/public-encoder``, one line per run in ``reproduce/results/encoders.jsonl``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from dpbam.app.runs import RunConfig, execute
from dpbam.data import DataSet, from_arrays, load, to_float
from dpbam.estimates import estimate, paired_difference

ROOT = Path(__file__).parents[1]
WORK, RECORDS = ROOT / "runs" / "public-encoder", ROOT / "reproduce" / "results" / "encoders.jsonl"
PUBLIC, PRIVATE = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)
PER_CLASS, SEEDS, TUNING_SEED = 1000, (0, 1, 2), 100
EPOCHS = 6  # of the encoder
SHAPE = {"hidden_sizes": [24, 48, 96], "depths": [1, 1, 1], "num_stages": 3, "patch_size": 2,
         "layer_scale_init_value": 1.0}  # fmt: skip
PREPROCESSING = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3,
                 "size": {"height": 16, "width": 16}}  # fmt: skip
COMMON = {"data": "public_encoder:private_half", "epsilon": 3.0, "method": "dp-sgd",
          "batch_size": 500, "epochs": 8, "clip_norm": 1.0, "eval_every": 8}  # fmt: skip
#: each arm's model, what is trained of it, and the learning rates that were tried
ARMS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "head": ("hf:encoder", "head", (0.01, 0.03)),
    "LoRA": ("hf:encoder", "lora", (0.002, 0.005)),
    "scratch, the same network": ("hf:untrained", "all", (0.002, 0.005)),
    "scratch, small-cnn": ("small-cnn", "all", (0.005,)),  # dpbam's defaults
}


def half(split: str, classes: tuple[int, ...], per_class: int | None) -> DataSet:
    """Return the images of some classes, averaged to 16x16."""
    data = load("cifar10", split=split)
    chosen = np.concatenate([np.flatnonzero(data.labels == k)[:per_class] for k in classes])
    images, labels = data.batch(np.sort(chosen))
    small = F.avg_pool2d(images.float(), 2).round().byte().numpy()
    names = [data.class_names[k] for k in classes]
    return from_arrays(small, [data.class_names[k] for k in labels], class_names=names)


def private_half(split: str) -> DataSet:
    """Return the data of the private training, as ``--data public_encoder:private_half``."""
    return half(split, PRIVATE, PER_CLASS if split == "train" else None)


def save(folder: Path, seed: int) -> object:
    """Save a ConvNeXt with new weights, and return it."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(**SHAPE, num_labels=len(PUBLIC))
    )
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING))
    return model


def train_encoder() -> None:
    """Train the encoder on the public classes without privacy, and save it."""
    train, test = (half(split, PUBLIC, None) for split in ("train", "test"))
    model = save(WORK / "encoder", seed=0)
    x, y = train.batch(torch.arange(len(train)))
    pixels = to_float(x) * 2  # (u - 0.5) / 0.25
    steps = EPOCHS * (len(y) // 250)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(y), (250,))
        images = pixels[rows]
        flipped = torch.where(torch.rand(250, 1, 1, 1) < 0.5, images.flip(3), images)
        loss = F.cross_entropy(model(pixel_values=flipped).logits, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    x, y = test.batch(torch.arange(len(test)))
    with torch.no_grad():
        right = model.eval()(pixel_values=to_float(x) * 2).logits.argmax(1) == y
    model.save_pretrained(WORK / "encoder")
    write("encoder", {"arm": "encoder", "accuracy": float(right.float().mean()), "epochs": EPOCHS,
                      "parameters": sum(p.numel() for p in model.parameters())})  # fmt: skip


def write(name: str, record: dict) -> None:
    """Append a record, and print what counts."""
    with RECORDS.open("a") as file:
        file.write(json.dumps({"run": name, **record}) + "\n")
    print(name, {k: v for k, v in record.items() if k in ("accuracy", "epsilon", "seconds")})


def records(kind: str) -> list[dict]:
    """Return the records of a part of the study."""
    rows = map(json.loads, RECORDS.read_text().splitlines()) if RECORDS.exists() else ()
    return [row for row in rows if row["run"].startswith(kind)]


def run(kind: str, arm: str, lr: float, seed: int) -> None:
    """Train one arm, unless there is a record of it."""
    name = f"{kind}-{arm.replace(', ', '-').replace(' ', '-')}-lr-{lr:g}-seed-{seed}"
    if any(record["run"] == name for record in records(kind)):
        return
    model, part, _ = ARMS[arm]
    if model == "hf:untrained":
        save(WORK / f"untrained-{seed}", seed)
    paths = {"hf:encoder": f"hf:{WORK}/encoder", "hf:untrained": f"hf:{WORK}/untrained-{seed}"}
    config = RunConfig(**COMMON, model=paths.get(model, model), train=part, lr=lr, seed=seed)
    began = time.process_time()
    result = execute(config, WORK / name)
    write(name, {
        "arm": arm, "seed": seed, "lr": lr, "model": model, "train": part, "common": COMMON,
        "accuracy": result.score, "epsilon": result.epsilon, "plan": asdict(result.plan),
        "seconds": round(time.process_time() - began, 1), "torch": torch.__version__,
    })  # fmt: skip


def tuned(arm: str) -> float:
    """Return the learning rate that was best with the seed for tuning, if several were tried."""
    rates = ARMS[arm][2]
    found = [r for r in records("tune") if r["arm"] == arm and r["lr"] in rates]
    return max(found, key=lambda r: r["accuracy"])["lr"] if len(rates) > 1 else rates[0]


def table() -> None:
    """Print accuracies, and paired differences to both ways of training from scratch."""
    found = records("compare")
    scores = {
        arm: {r["seed"]: 100 * r["accuracy"] for r in found if r["arm"] == arm} for arm in ARMS
    }
    bases = [arm for arm in ARMS if arm.startswith("scratch")]
    heads = ["arm", "accuracy, %", *(f"against {base}" for base in bases), "epsilon", "seconds"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for arm, values in scores.items():
        mean, mine = estimate(list(values.values())), [r for r in found if r["arm"] == arm]
        gains = ["" if arm == base else gain(values, scores[base]) for base in bases]
        epsilon = max(r["epsilon"] for r in mine)
        seconds = sum(r["seconds"] for r in mine) / len(mine)
        cells = [arm, f"{mean.mean:.1f} [{mean.low:.1f}, {mean.high:.1f}]", *gains]
        print(f"| {' | '.join(cells)} | {epsilon:.3f} | {seconds:.0f} |")


def gain(values: dict[int, float], base: dict[int, float]) -> str:
    """Return the mean difference of the seeds' pairs, with its interval."""
    apart = paired_difference(values, base)
    return f"{apart.mean:+.1f} [{apart.low:+.1f}, {apart.high:+.1f}]"


def main(command: str) -> None:
    """Do one part of the study."""
    sys.path.insert(0, str(Path(__file__).parent))  # for public_encoder:private_half
    if command == "encoder":
        train_encoder()
    elif command == "tune":
        for arm, (_, _, rates) in ARMS.items():
            for lr in rates if len(rates) > 1 else ():
                run("tune", arm, lr, TUNING_SEED)
    elif command == "compare":
        for seed in SEEDS:
            for arm in ARMS:
                run("compare", arm, tuned(arm), seed)
    elif command == "table":
        table()
    else:
        raise SystemExit("say encoder, tune, compare or table")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(sys.argv[1] if len(sys.argv) > 1 else "")
