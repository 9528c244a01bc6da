"""The pages of the reference: which modules are on which page, in which order.

A name is a module, with a heading of its own. One that follows a plus is shown under the heading
before it. What it says is from the docstrings, by mkdocstrings.
"""

from __future__ import annotations

#: page: title, opening, and its sections: title, opening, names.
PAGES = {
    "oracle": (
        "The private step",
        "The oracle, the methods, the engines, and what several processes share.",
        [
            ("The private gradient oracle",
             "Everything private passes through `mechanism.release`, which the oracle calls.",
             "dpbam.oracle dpbam.compute dpbam.guard dpbam.assembly dpbam.own_code dpbam.mechanism "
             "dpbam.scratch dpbam.reference "
             "dpbam.batches dpbam.reading"),
            ("Methods", "What a sample's direction is.",
             "dpbam.methods dpbam.filters dpbam.params"),
            ("Engines", "How directions are computed.",
             "dpbam.engines +dpbam.engines.Loss +dpbam.engines.fused.FusedDirections "
             "dpbam.engines.fused.rules"),
            ("Many processes", "One run on several processes, devices or machines.",
             "dpbam.distributed"),
            ("Errors", "What a user can fix.", "dpbam.errors"),
        ],
    ),
    "plan": (
        "The guarantee",
        "What is promised, what was spent, and the parts of the mechanism.",
        [
            ("Plan, ledger, accounting", "What is promised, and what was spent.",
             "dpbam.privacy.plan dpbam.privacy.ledger dpbam.privacy.writer_lock "
             "dpbam.privacy.accounting "
             "dpbam.privacy.tradeoff dpbam.privacy.calibration "
             "dpbam.privacy.rounding"),
            ("Clipping, sampling, noise",
             "The parts of the private mechanism. They import downwards only (`.importlinter`).",
             "dpbam.privacy.clipping dpbam.contenders.clippings dpbam.privacy.sampling "
             "dpbam.privacy.noise dpbam.privacy.secure_noise dpbam.privacy.randomness"),
        ],
    ),
    "training": (
        "Training",
        "The loop, data, models, features and heads, and what clipping does.",
        [
            ("Training", "The loop, what watches it, and what it hands out.",
             "dpbam.training.trainer dpbam.tasks +dpbam.tasks.base +dpbam.tasks.scores "
             "+dpbam.tasks.single_label +dpbam.tasks.multi_label +dpbam.tasks.regression "
             "+dpbam.tasks.segmentation dpbam.training.adam_bc dpbam.training.averaging "
             "dpbam.training.evaluation dpbam.observers dpbam.joint_release dpbam.inspection "
             "dpbam.training.events "
             "dpbam.engines.memory dpbam.loading"),
            ("Data", "Data sets and augmentation.", "dpbam.data dpbam.data.fetch"),
            ("Models", "Models, and repairs of models.", "dpbam.nn +dpbam.nn.freeze.freeze"),
            ("Features and heads",
             "Fixed features of images, private linear heads on them, and the choice of both from "
             "public facts.",
             "dpbam.auto dpbam.features dpbam.features.scattering dpbam.features.leaves "
             "dpbam.heads dpbam.heads.closed_form"),
            ("Bias", "Measuring what clipping does.", "dpbam.bias dpbam.app.runs.bias"),
            ("Estimates", "Means and paired differences over seeds.", "dpbam.estimates"),
        ],
    ),
    "interop": (
        "Other libraries",
        "Private training with Opacus, Lightning or Hugging Face. Each needs its extra.",
        [
            ("Opacus", "A training that Opacus began.", "dpbam.interop.opacus"),
            ("Lightning", "A LightningModule.", "dpbam.interop.lightning"),
            ("Hugging Face", "The Trainer.", "dpbam.interop.huggingface"),
        ],
    ),
    "app": (
        "The application",
        "Run folders, reports, comparisons, searches, audits, and programs of your own.",
        [
            ("Runs", "Run folders: configuration, checkpoints, statement, budget.",
             "dpbam.app.runs dpbam.app.runs.export dpbam.app.runs.pool dpbam.app.runs.preparation "
             "dpbam.app.runs.predict dpbam.app.runs.files dpbam.app.runs.rows "
             "dpbam.app.runs.first_release"),
            ("Report", "The HTML page and its figures.",
             "dpbam.app.report dpbam.app.report.html dpbam.app.report.figure "
             "dpbam.app.report.charts dpbam.app.report.training_figures dpbam.app.report.groups "
             "dpbam.app.report.records"),
            ("Comparing and searching",
             "Comparisons with paired seeds, and searches for hyper-parameters.",
             "dpbam.app.compare.comparison dpbam.app.compare.pairing "
             "dpbam.app.search.search dpbam.app.search.selection dpbam.app.search.study"),
            ("Audit", "Checks of a finished run, and attacks on its model.", "dpbam.app.audit"),
            ("Programs",
             "A program of one function with the help, tables, progress and errors of `dpbam`, "
             "such as `python -m reproduce`.",
             "dpbam.app.cli dpbam.app.cli.output dpbam.app.cli.progress"),
            ("Catalogue", "One entry for each thing that users name.", "dpbam.catalogue"),
        ],
    ),
}  # fmt: skip
#: Functions and types, which mkdocstrings shows by their own names.
OBJECTS = ("dpbam.engines.Loss", "dpbam.engines.fused.FusedDirections", "dpbam.nn.freeze.freeze")
#: Shown although a name has no docstring.
BARE = ("dpbam.engines.Loss", "dpbam.engines.fused.rules", "dpbam.features")


def pages() -> dict[str, str]:
    """Return the pages by the name of their file."""
    return {f"reference/{name}.md": _page(*parts) for name, parts in PAGES.items()}


def _page(title: str, opening: str, sections: list[tuple[str, str, str]]) -> str:
    lines = [f"# {title}", "", opening, ""]
    for heading, text, names in sections:
        lines += [f"## {heading}", "", text, ""]
        for name in names.split():
            lines += _entry(name)
    return "\n".join(lines)


def _entry(name: str) -> list[str]:
    heading, name = ([], name[1:]) if name.startswith("+") else ([f"### {name}", ""], name)
    options = ["      heading_level: 4"]
    if name in OBJECTS:
        options.append("      show_root_heading: true")
    if name in BARE:
        options.append("      show_if_no_docstring: true")
    return [*heading, f"::: {name}", "    options:", *options, ""]
