"""Figures of the real command: one record per finished run folder of ``dpbam train``.

    python -m reproduce.defaults_final RESULTS RUN ...

A run counts if every setting that bears on accuracy was left to the rule (``auto_settings``). What
is read is the run's own configuration, ledger and evaluation, so no figure is typed by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dpbam.app.runs import load_run_model, stored_config
from dpbam.app.runs.files import read_json, read_json_lines
from dpbam.app.runs.predict import evaluate_dataset
from dpbam.data import load

_FEW = 2000
CHOSEN = {"model", "lr", "epochs", "batch_size", "clip_norm", "momentum", "optimizer", "swa",
          "release_counts", "release_centre", "balance"}  # fmt: skip


def record(run: Path) -> dict[str, Any]:
    """Return what a finished run reached on its test records, and by which settings."""
    config, statement = stored_config(run), read_json(run / "privacy-statement.json")
    missing = CHOSEN - set(config.auto_settings)
    if missing:
        raise ValueError(f"{run} was not trained by pure defaults: {', '.join(sorted(missing))}")
    last = read_json_lines(run / "metrics.jsonl")[-1]
    balanced = None
    if last["records"] <= _FEW:  # else features of all test records would be computed anew
        found = evaluate_dataset(load_run_model(run), load(config.data, split="test"))
        balanced = round(100 * found.scores["balanced_accuracy"], 2)
    return {
        "data": Path(config.data).name, "model": Path(config.model).name, "seed": config.seed,
        "facts": dict(config.auto_facts), "epsilon": statement["epsilon"],
        "lr": config.lr, "release_counts": config.release_counts,
        "release_centre": config.release_centre, "records": last["records"],
        "accuracy": round(100 * last["accuracy"], 2), "balanced_accuracy": balanced,
    }  # fmt: skip


if __name__ == "__main__":
    with Path(sys.argv[1]).open("a") as file:
        for name in sys.argv[2:]:
            line = json.dumps(record(Path(name)))
            file.write(line + "\n")
            print(line)
