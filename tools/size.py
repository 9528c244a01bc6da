"""Lines by package: ``python tools/size.py [CHECKOUT]``; also ``... audit`` and ``... library``.

Counts the lines of Python in each package of ``src/dpbam`` and in ``reproduce``, those of templates
and scripts of our own, and the functions: how many, and their median length. ``audit`` prints the
table of docs/mechanism.md: what an auditor reads, in which order, and how many lines that is.
``library`` prints the table of docs/architecture.md: lines of the library, in hundreds, next to
what was planned, and what the guarantee needs them for.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TEMPLATES = {".js", ".css", ".html", ".j2"}


def lines(path: Path) -> int:
    """The lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def by_package(root: Path, depth: int) -> Counter[str]:
    """Lines of Python by folder, down to ``depth`` below ``root``; loose modules by their own."""
    found: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts[:-1][:depth]
        found["/".join((root.name, *parts))] += lines(path)
    return found


def bodies(root: Path) -> Iterator[int]:
    """The length of every function, docstring left out."""
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if body:
                    yield (body[-1].end_lineno or 0) - body[0].lineno + 1


#: What an auditor reads, in this order: a file of src/dpbam, and the names in it (none: all).
AUDIT = {
    "mechanism.py": "",
    "scratch.py": "",
    "joint_release.py": "StepStatistics check_counted",
    "observers.py": "UnitFacts Observation Watch",
    "params.py": "shifted restored overwrite _copy_into add_into sum_of_none separated bits_of",
    "privacy/clipping.py": "Clipping StepClipping shield_norms measure check_factors check_alone "
    "portions check_groups",
    "own_code.py": "",
    "privacy/noise.py": "",
    "privacy/randomness.py": "Randomness",
    "privacy/plan.py": "PrivacyPlan._make_plain _plain PrivacyPlan.sampling_rate "
    "PrivacyPlan.charged_noise_multiplier "
    "PrivacyPlan.noise_multiplier_at PrivacyPlan.charged_at PrivacyPlan.check_step "
    "PrivacyPlan.check_before PrivacyPlan.check_resumed PrivacyPlan.sampler _factor",
    "privacy/sampling.py": "",
    "guard.py": "",
    "oracle.py": "PrivateGradientOracle.backward PrivateGradientOracle._take_step "
    "PrivateGradientOracle._prepare "
    "PrivateGradientOracle.release_before PrivateGradientOracle._terms "
    "PrivateGradientOracle._present PrivateGradientOracle._gradient_for_ascent "
    "PrivateGradientOracle._settle PrivateGradientOracle._commit "
    "PrivateGradientOracle._is_charged PrivateGradientOracle._hand_out "
    "PrivateGradientOracle._write PrivateGradientOracle._explain",
    "loading.py": "PoissonBatches._samples",
    "batches.py": "Views LogicalBatch _alike _is_close _sizes",
    "privacy/ledger.py": "",
    "_jsonl.py": "append_durably _append sync_folder",
    "privacy/accounting.py": "total_epsilon joint_noise_multiplier checked _refine_epsilon "
    "_is_out_of_reach _on_grid _without_lost _compose _step_loss _by_rdp _step_rdp",
}


#: The library: files and packages, the lines that were planned, what the guarantee needs more for.
LIBRARY = {
    "mechanism": (
        "mechanism.py joint_release.py scratch.py own_code.py guard.py assembly.py oracle.py "
        "observers.py "
        "inspection.py reference.py",
        950,
        "whatever a user's own clipping, method, statistic or observer may do is measured at each "
        "step",
    ),
    "engines/": (
        "engines",
        5830,
        "a model sees one unit at a time, whatever it keeps, draws or mixes; two further "
        "engines check the fused one",
    ),
    "privacy/": (
        "privacy",
        2200,
        "each function states guarantee, assumptions and proof, a third of the lines; a ledger "
        "that another process wrote, cut or replaced; exactly rounded noise; small deltas",
    ),
    "batches, loading, reading": (
        "batches.py loading.py reading.py",
        540,
        "a record is read alone, at its own key, compared with a second reading; records twice and "
        "weaker units are refused",
    ),
    "interop/": (
        "interop",
        770,
        "each hook, option and callback by which a trainer would go past the oracle is refused "
        "by name",
    ),
    "distributed/": ("distributed", 400, "a rank that is lost is named, and no rank steps alone"),
    "bias/": (
        "bias",
        720,
        "the private release alone; the rest measures and advises: against two references, by "
        "layer, over ranks",
    ),
    "methods, filters, contenders/": (
        "methods.py filters.py contenders",
        400,
        "the rivals of the bench, each with its bound and proof",
    ),
    "heads/": ("heads", 0, "two releases of their own, with bounds of their own"),
    "features/": ("features", 0, "none: fixed features, from public encoders"),
    "catalogue.py": ("catalogue.py", 0, "none: one entry per name that users write"),
}


def code_lines(path: Path, names: str) -> tuple[int, int]:
    """Return the lines of the named functions and classes, and how many of them are code."""
    text = path.read_text(encoding="utf-8")
    tree, source = ast.parse(text), text.splitlines()
    chosen: list[ast.AST] = [_find(tree, name) for name in names.split()] if names else [tree]
    spans = [(n.lineno, n.end_lineno) if hasattr(n, "lineno") else (1, len(source)) for n in chosen]
    inside = {k for first, last in spans for k in range(first, (last or first) + 1)}
    prose = {k for k in inside if not source[k - 1].strip() or source[k - 1].strip()[0] == "#"}
    for node in (n for root in chosen for n in ast.walk(root)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            prose |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(inside), len(inside - prose)


def _find(tree: ast.AST, name: str) -> ast.AST:
    for part in name.split("."):
        tree = next(n for n in getattr(tree, "body", []) if getattr(n, "name", None) == part)
    return tree


def audit_table(source: Path) -> str:
    """Return the table of what an auditor reads."""
    rows = ["| file | of it | lines | of code |", "|---|---|---:|---:|"]
    total = [0, 0]
    for file, names in AUDIT.items():
        counts = code_lines(source / file, names)
        total = [a + b for a, b in zip(total, counts, strict=True)]
        shown = ", ".join(f"`{name.rpartition('.')[2]}`" for name in names.split()) or "all"
        link = f"[`{file}`](../src/dpbam/{file})"
        rows.append(f"| {link} | {shown} | {counts[0]:,} | {counts[1]:,} |")
    return "\n".join([*rows, f"| {len(AUDIT)} files | | {total[0]:,} | {total[1]:,} |"])


def library_table(source: Path) -> str:
    """Return the table of the library's size."""
    rows = ["| part | lines | of code | planned | what the guarantee needs the lines for |"]
    rows.append("|---|---:|---:|---:|---|")
    for name, (places, planned, reason) in LIBRARY.items():
        paths = [source / place for place in places.split()]
        files = [f for path in paths for f in ([path] if path.is_file() else path.rglob("*.py"))]
        counts = [code_lines(file, "") for file in files]
        total, code = (round(sum(column), -2) for column in zip(*counts, strict=True))
        rows.append(
            f"| {name} | {total:,} | {code:,} | {f'{planned:,}' if planned else ''} | {reason} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Print the table."""
    if sys.argv[1:] == ["audit"]:
        print(audit_table(Path(__file__).parents[1] / "src" / "dpbam"))
        return
    if sys.argv[1:] == ["library"]:
        print(library_table(Path(__file__).parents[1] / "src" / "dpbam"))
        return
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    source = checkout / "src" / "dpbam"
    total = Counter({"src/dpbam": sum(lines(p) for p in source.rglob("*.py"))})
    total += by_package(source, 2)
    if (checkout / "reproduce").is_dir():
        total += by_package(checkout / "reproduce", 0)
    for name, count in total.items():
        print(f"{count:7,}  {name}")
    ours = [path for path in source.rglob("*") if path.suffix in TEMPLATES]
    print(f"{sum(map(lines, ours)):7,}  templates and scripts")
    lengths = list(bodies(source))
    print(f"{len(lengths):7,}  functions, of {statistics.median(lengths):g} lines in the median")


if __name__ == "__main__":
    main()
