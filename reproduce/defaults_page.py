"""The tables and the picture of docs/how-good.md, from the study's records.

    python -m reproduce.defaults_page        (writes the page's tables and its picture anew)

Regret is the test accuracy of the alternative that validation records select, minus the rule's; the
rule is one of the alternatives. It is negative where validation chose what did worse on test
records.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpbam.auto import Facts, choose
from reproduce.defaults import FITTED, Record
from reproduce.recipes import recipes_folder

LEVELS = "src/dpbam/app/runs/levels.json"
_REFERENCE = "not private"  # no alternative: it spends no budget
Cell = dict[str, Any]
_COLOURS = {"scattering": "#0072b2", "mobilenet": "#d55e00"}


def cells(records: Sequence[Record]) -> list[Cell]:
    """Return per record: accuracies of rule, best and no privacy on test records, and regret."""
    found = []
    for record in records:
        means = {name: np.mean(rows, axis=0) for name, rows in record["scores"].items()}
        private = {name: m for name, m in means.items() if name != _REFERENCE}
        best = max(private, key=lambda name: float(private[name][0]))
        found.append({
            **{k: record[k] for k in ("source", "features", "n", "epsilon", "constant")},
            "rule": float(means["rule"][1]), "balanced": float(means["rule"][2]),
            "best": float(private[best][1]), "chosen": best,
            "not private": float(means[_REFERENCE][1]),
            "regret": float(private[best][1] - means["rule"][1]),
        })  # fmt: skip
    return found


def regret_table(found: Sequence[Cell]) -> str:
    """Return Markdown: mean and worst regret by source and features, sources left out last."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for cell in found:
        groups[cell["source"], cell["features"]].append(cell["regret"])
    lines = ["| source | features | cells | mean regret | worst |", "|---|---|---|---|---|"]
    for (source, kind), values in sorted(groups.items(), key=lambda g: (g[0][0] not in FITTED, g)):
        lines.append(_row([source, kind], values))
    for kind in sorted({cell["features"] for cell in found}):
        others = _left_out(found, kind)
        if others:
            lines.append(_row(["all sources that chose nothing", kind], others))
    return "\n".join(lines)


def _left_out(found: Sequence[Cell], kind: str) -> list[float]:
    return [c["regret"] for c in found if c["source"] not in FITTED and c["features"] == kind]


def _row(names: list[str], values: Sequence[float]) -> str:
    interval = f" ± {_half_width(values):.1f}" if len(values) > 1 else ""
    cells = [*names, str(len(values)), f"{np.mean(values):.1f}{interval}", f"{max(values):.1f}"]
    return f"| {' | '.join(cells)} |"


def _half_width(values: Sequence[float]) -> float:
    """Return the half width of the 95% t interval of the mean."""
    from scipy.stats import t

    deviation = float(np.std(values, ddof=1))
    return float(t.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))


def final_table(records: Sequence[Record]) -> str:
    """Return Markdown: the real command's accuracy by data, model, epsilon and rule."""
    groups: dict[tuple[str, str, float, str], list[Record]] = defaultdict(list)
    for record in records:
        rule = "present" if by_present_rule(record) else "earlier"
        groups[record["data"], record["model"], record["facts"]["epsilon"], rule].append(record)
    names = ("data", "model that was chosen", "epsilon", "rule", "seeds", "accuracy, %")
    header = f"| {' | '.join(names)} | balanced, % |"
    lines = [header, "|---|---|---|---|---|---|---|"]
    for (data, model, epsilon, rule), runs in sorted(groups.items()):
        accuracies, balanced = (
            ", ".join(
                f"{run[name]:.1f}"
                for run in sorted(runs, key=lambda r: r["seed"])
                if run[name] is not None
            )
            for name in ("accuracy", "balanced_accuracy")
        )
        cells = (data, model, f"{epsilon:g}", rule, str(len(runs)), accuracies, balanced)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def by_present_rule(record: Record) -> bool:
    """Whether a run had the settings that the rule chooses today from the same facts."""
    facts = {**record["facts"], "image_shape": tuple(record["facts"]["image_shape"])}
    unnamed = {name: None for name in ("encoder", "head") if facts[name] == "none named"}
    choice = choose(Facts(**{**facts, **unnamed}))
    names = ("lr", "release_counts", "release_centre")
    return all(record[name] == getattr(choice, name) for name in names)


def findings_table(records: Sequence[Record]) -> str:
    """Return Markdown: mean accuracy over the findings, of the rule and of the best alternative."""
    lines = [
        "| features | n | epsilon | best constant | rule | best on validation records | regret |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        means = {name: np.mean(rows, axis=0) for name, rows in record["scores"].items()}
        best = max(means, key=lambda name: float(means[name][0]))
        rule, other = float(means["path 1 C 1"][1]), float(means[best][1])
        cells = (record["features"], str(record["n"]), f"{record['epsilon']:g}",
                 f"{record['constant']:.1f}", f"{rule:.1f}", f"{other:.1f} ({best})",
                 f"{other - rule:.1f}")  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def level_table(found: Sequence[Cell]) -> str:
    """Return Markdown: test accuracy of the rule by source, features, n and epsilon."""
    groups: dict[tuple[str, str, int], dict[float, Cell]] = defaultdict(dict)
    for cell in found:
        groups[cell["source"], cell["features"], cell["n"]][cell["epsilon"]] = cell
    epsilons = sorted({cell["epsilon"] for cell in found})
    heads = " | ".join(f"epsilon {e:g}" for e in epsilons)
    lines = [f"| source | features | n | constant | {heads} | without privacy |"]
    lines.append("|---" * (5 + len(epsilons)) + "|")
    for (source, kind, n), row in sorted(groups.items()):
        some = next(iter(row.values()))
        shown = " | ".join(f"{row[e]['rule']:.1f}" if e in row else "" for e in epsilons)
        lines.append(
            f"| {source} | {kind} | {n} | {some['constant']:.1f} | {shown} | "
            f"{some['not private']:.1f} |"
        )
    return "\n".join(lines)


def levels(records: Sequence[Record]) -> str:
    """Return the JSON that ``dpbam train --dry-run`` reads: what the rule reached, in short."""
    rows = [
        {
            "source": record["source"], "features": record["features"], "n": record["trained_on"],
            "classes": record["classes"], "epsilon": record["epsilon"],
            "accuracy": round(float(np.mean([row[1] for row in record["scores"]["rule"]])), 1),
            "constant": round(record["constant"], 1),
        }
        for record in records
    ]  # fmt: skip
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def picture(found: Sequence[Cell]) -> str:
    """Return an SVG: regret of every cell by source, and mean accuracy against epsilon."""
    sources = sorted({c["source"] for c in found}, key=lambda s: (s not in FITTED, s))
    height = 60 + 24 * len(sources)
    span = max(4.0, *(abs(c["regret"]) for c in found))
    marks = [_text(10, 20, "Regret, points of test accuracy; blue: scattering, orange: encoder")]
    for value in (-2, 0, 1, 2):
        x = 260 + 180 * value / span
        marks.append(f'<path d="M{x:.1f} 36V{height - 24}" stroke="#bbb"/>')
        marks.append(_text(x - 6, height - 8, f"{value:+g}"))
    for k, source in enumerate(sources):
        y = 50 + 24 * k
        marks.append(_text(10, y + 4, f"{source} (fitted)" if source in FITTED else source))
        for cell in (c for c in found if c["source"] == source):
            x, colour = 260 + 180 * cell["regret"] / span, _COLOURS[cell["features"]]
            marks.append(f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{colour}" opacity="0.6"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {max(height, 260)}" '
        'font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join([*marks, *_curves(found)])
        + "\n</svg>\n"
    )


def _curves(found: Sequence[Cell]) -> list[str]:
    """Draw mean accuracy over the sources against epsilon: rule, best, no privacy."""
    epsilons = sorted({c["epsilon"] for c in found})
    places = {e: 560 + 216 * math.log(e) / math.log(8) for e in epsilons}
    marks = [_text(560, 20, "Mean accuracy against epsilon, %")]
    marks += [_text(x - 3, 250, f"{e:g}") for e, x in places.items()]
    for kind, colour in _COLOURS.items():
        chosen = [c for c in found if c["features"] == kind]
        for name, dashes in {"rule": "", "best": "6 3", _REFERENCE: "2 3"}.items():
            if not chosen:
                continue
            heights = {
                e: 230 - 1.9 * float(np.mean([c[name] for c in chosen if c["epsilon"] == e]))
                for e in epsilons
            }
            points = " ".join(f"{places[e]:.1f},{heights[e]:.1f}" for e in epsilons)
            line = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
            marks.append(f'<polyline points="{points}" fill="none" {line}/>')
            label = "no privacy" if name == _REFERENCE else name
            marks.append(_text(782, heights[epsilons[-1]] + 4, label))
    return marks


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{words}</text>'


def page(text: str, folder: Path) -> str:
    """Return the page's text with its tables made anew from the records in ``folder``."""
    study = cells(_read(folder / "defaults.jsonl"))
    tables: dict[str, Callable[[], str]] = {
        "final": lambda: final_table(_read(folder / "defaults-final.jsonl")),
        "regret": lambda: regret_table(study),
        "level": lambda: level_table(study),
        "findings": lambda: findings_table(_read(folder / "defaults-findings.jsonl")),
    }
    for name, make in tables.items():
        place = re.compile(f"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert place.search(text)  # else the table would be lost
        text = place.sub(lambda m, made=make: f"{m[1]}\n{made()}\n\n{m[2]}", text)  # type: ignore[misc]
    return text


def _read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    root = recipes_folder().parents[1]
    results, docs = root / "reproduce" / "results", root / "docs"
    how_good = docs / "how-good.md"
    how_good.write_text(page(how_good.read_text(encoding="utf-8"), results), encoding="utf-8")
    (root / LEVELS).write_text(levels(_read(results / "defaults.jsonl")), encoding="utf-8")
    shown = picture(cells(_read(results / "defaults.jsonl")))
    (docs / "assets" / "how-good.svg").write_text(shown, encoding="utf-8")
