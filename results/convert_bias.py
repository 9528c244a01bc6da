"""Turns the records of the first study of the bias into those of recipes; goes when they are gone.

python results/convert_bias.py     # results/bias/STUDY/*.json -> results/pocket/STUDY/*.json
"""

import json
from dataclasses import asdict
from pathlib import Path

from dpbam.experiments.recipes import load_recipe
from dpbam.experiments.records import Record, _text, find_record, machine, record_path

HERE = Path(__file__).parent
NOTE = (
    "Trained before there were recipes, by the same library: images were halved as floats, where "
    "the recipe rounds them to whole grey values; accuracy and flatness are of the final model."
)
COMMIT = "2c0e876"


def converted(old, run):
    size = str(old["plan"]["batch_size"])
    where = {**machine({"threads": 1, "device": "cpu"}), "commit": COMMIT}
    batches = [row["non_private_units"] for row in old["non_private_bias"]]
    return Record(
        run.arm, {}, run.seed, run.config.to_mapping(), old["plan"], old["epsilon"],
        old["accuracy"], old["accuracy_curve"], old["seconds"],
        {"batch_size": size, "batches": repr(batches)[:60]}, where, NOTE,
        old["non_private_bias"], old["non_private_flatness"],
    )  # fmt: skip


for study in ("methods", "batch-size"):
    recipe = load_recipe(study)
    for run in recipe.runs():
        source, folder = HERE / "bias" / study / f"{run.name}.json", HERE / "pocket" / study
        if source.exists():
            old = json.loads(source.read_text())
            assert old["arm"]["clip_norm"] == run.config.clip_norm
            assert (old["arm"]["method"], old["seed"]) == (run.config.method, run.config.seed)
            assert run.config.method == "dp-sgd" or old["arm"]["lam"] == run.config.lam
            assert old["plan"]["batch_size"] == run.config.batch_size
            folder.mkdir(parents=True, exist_ok=True)
            record_path(folder, run).write_text(_text(converted(old, run)))
            assert find_record(folder, run)
            print(run.name)
