"""A privacy statement for people: Markdown, and the same as a page to print.

A reader who knows no mathematics finds first who is protected, against what, how well, and what is
not covered. Every number is computed from the statement, and rounded against the operator.
"""

from __future__ import annotations

import html
import math
import re
from typing import Any

from dpbam.privacy.rounding import up


def to_markdown(s: dict[str, Any]) -> str:
    """Format a statement, as :func:`dpbam.app.runs.statement.statement` returns it."""
    parts = [
        "# Privacy statement",
        _promise(s),
        *(["## In plain words", *_plain_words(s)] if s["private"] else []),
        "## What an attacker can achieve at best",
        *_attacks(s["trade_off"], s["unit_name"]),
        "## What this promise does not cover",
        _bullets(s["outside_the_promise"]),
        "## Tuning and evaluation",
        _bullets(_looked_at(s)),
        "## Other releases from the same data",
        _others(s["budget"]),
        "## Who, what for, and who sees what",
        _table([
            ("Operator, who trained the model", s["operator"] or "not named"),
            ("Curator of the data", s["curator"] or "not named"),
            ("Purpose", s["purpose"] or "not stated"),
            ("Reason for the unit of privacy", s["unit_reason"] or "not stated"),
            *((f"Seen by {who}", what) for who, what in s["who_sees_what"].items()),
        ]),
        "## What was done",
        _table(_mechanism(s)),
        "## Which model this is about",
        _table(_identity(s)),
        "## What may be published",
        _bullets(_files(s["may_be_published"])),
        "If the test records are not sensitive, also:",
        _bullets(_files(s["may_be_published_if_the_test_records_are_not_sensitive"])),
        "## What must not be published",
        "These hold facts taken from the data without noise, or what would help to undo it:",
        _bullets(_files(s["must_not_be_published"])),
        f"Run {s['run']}, made by dpbam {s['dpbam']}. `dpbam audit` checks this statement against "
        "the run's files, and the signature if there is one.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def to_html(markdown: str) -> str:
    r"""Format the Markdown of a statement as a page without scripts or outside references.

    It knows what :func:`to_markdown` writes: headings, paragraphs, lists, tables, bold and code.

    Example:
        >>> to_html("# A\n\n- **b** <c>").partition("<body>")[2]
        '\n<h1>A</h1>\n<ul><li><strong>b</strong> &lt;c&gt;</li></ul>\n</body>\n</html>\n'
    """
    blocks = "\n".join(_block(block) for block in markdown.strip().split("\n\n"))
    return f"{_HEAD}<body>\n{blocks}\n</body>\n</html>\n"


_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Privacy statement</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 2rem auto; padding: 0 1rem;
  color: #111; background: #fff }
h2 { margin-top: 2rem; break-after: avoid } tr, li { break-inside: avoid }
table { border-collapse: collapse; width: 100% }
th, td { border: 1px solid #bbb; padding: .3rem .6rem; text-align: left; vertical-align: top }
td { overflow-wrap: anywhere }
@media print { body { margin: 0; max-width: none; font-size: 10pt } }
</style>
</head>
"""


def _block(block: str) -> str:
    lines = block.split("\n")
    if block.startswith("#"):
        marks, _, title = block.partition(" ")
        return f"<h{len(marks)}>{_inline(title)}</h{len(marks)}>"
    if block.startswith("- "):
        return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>"
    if block.startswith("|"):
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
        cells = [_row("th", rows[0])] if any(cell.strip() for cell in rows[0]) else []
        return "<table>" + "".join([*cells, *(_row("td", row) for row in rows[2:])]) + "</table>"
    return f"<p>{_inline(block)}</p>"


def _row(tag: str, cells: list[str]) -> str:
    texts = [_inline(cell.strip().replace("\\|", "|")) for cell in cells]
    return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"


def _inline(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


def _promise(s: dict[str, Any]) -> str:
    if not s["private"]:
        return (
            "**This model is not private.** It was trained without noise, as a reference: epsilon "
            "is infinite. Publishing it may reveal its training data."
        )
    epsilon, delta = up(s["epsilon"]), f"{s['delta']:g}"
    research = "**Research only**: the run was seeded (see Noise). " if s["seeded"] else ""
    return (
        f"{research}The model in this folder is **(epsilon = {epsilon}, delta = {delta})-"
        f"differentially private** for every {s['unit']}: whether that one's data was in the "
        "training set or not changes the probability of any outcome of the training by at most a "
        f"factor of e^{epsilon}, up to the probability {delta}. This holds for all that is "
        "computed from the model, whoever computes it and whatever else they know."
    )


def _plain_words(s: dict[str, Any]) -> list[str]:
    """Who, against what, how well: the example is computed from this run."""
    unit = s["unit_name"]
    whole = (
        "by itself. A person with several records has this promise for each of them, and a weaker "
        "one for all together"
        if unit == "record" else "with all records that belong together"
    )  # fmt: skip
    return [
        f"**Who is protected.** Each {unit} of the {s['units']:,} in the training data, {whole}.",
        "**Against what.** Against everyone who has the model, or anything made from it, and tries "
        f"to find out whether a certain {unit} was in the training data, or what that one's data "
        "were; now or later, with any computer, and whatever else they know.",
        f"**How well.** Suppose someone knows all of the training data but for one {unit}, which "
        "was used or left out by the toss of a coin. Without the model they guess right half of "
        f"the time; with the model at most {_percent(right_guesses(s))} of the time. If they want "
        f"to be sure, and wrongly accuse only 1 in 1,000 of those left out, they find at most "
        f"{_of_thousand(_at_best(s, 0.001))} in 1,000 of those used. Or suppose that something may "
        f"happen because of the model, with a probability of 1% if one {unit} is left out: with "
        f"that one's data its probability is at most {_percent(_at_best(s, 0.01))}.",
        f"**What epsilon and delta are.** Epsilon {up(s['epsilon'])} limits the change of every "
        f"probability to a factor of e^{up(s['epsilon'])} = {_factor(s['epsilon'])}, for the worst "
        f"case. Delta {s['delta']:g} is the probability, {_one_in(s['delta'])}, with which even "
        "that limit may be passed. Smaller is more private for both.",
        "**What is not covered.** Accuracy on the test records; other releases from the same data; "
        "those who can watch the machine that trains; and choices made by looking at this data, "
        "unless the section on tuning says otherwise. The sections below have the whole list.",
    ]


def right_guesses(s: dict[str, Any]) -> float:
    """How often the best guess is right: (1 + advantage) / 2; (e^eps + delta) / (e^eps + 1)."""
    if "advantage" in s["trade_off"]:
        return (1 + float(s["trade_off"]["advantage"])) / 2
    odds = math.exp(min(s["epsilon"], 700))
    return float((odds + s["delta"]) / (odds + 1))


def _at_best(s: dict[str, Any], rate: float) -> float:
    """1 - f(rate), of the trade-off or, where there is none, of epsilon and delta alone."""
    rates = s["trade_off"].get("true_positive_rates")
    if rates is not None:
        return float(rates[f"{rate:g}"])
    odds = math.exp(min(s["epsilon"], 700))
    return float(min(odds * rate + s["delta"], 1 - (1 - s["delta"] - rate) / odds, 1.0))


def _attacks(found: dict[str, Any], unit: str) -> list[str]:
    if "not_given" in found:
        return [f"Not given: {found['not_given']}."]
    rates, rebuilt = (
        [(_percent(float(before)), _percent(after)) for before, after in found[name].items()]
        for name in ("true_positive_rates", "reconstruction")
    )
    profile = [(f"{row['delta']:g}", up(row["epsilon"])) for row in found["profile"]]
    return [
        f"Of those who decide whether a {unit} was in the training data, no one does better than "
        f"this. True positives exceed false positives by at most {_percent(found['advantage'])} "
        "(the advantage).",
        _table(rates, f"wrongly accused, of each {unit} left out", "found, of those used"),
        f"Guessing the data of a {unit}: who would succeed with the left probability without the "
        "model succeeds with at most the right one with it.",
        _table(rebuilt, "without the model", "with the model, at most"),
        "For those who compare mechanisms: the same training at other deltas, and the Gaussian "
        f"mechanism that bounds it, mu = {up(found['gaussian_mu'])} (Gaussian DP; for attacks with "
        f"both error rates at least {found['gaussian_least_error']:g}; it overstates the attacker "
        f"by at most {up(found['gaussian_regret'])}, its regret). Everything here holds for adding "
        "a unit and for removing one.",
        _table(profile, "delta", "epsilon"),
    ]


def _looked_at(s: dict[str, Any]) -> list[str]:
    evaluated = s["evaluated_on"]
    return [
        f"Tuning: {s['tuned_on']}.",
        f"Evaluation: {evaluated['set']}, {evaluated['records']:,} records, {evaluated['times']} "
        f"times; {evaluated['note']}.",
        f"Was a {s['unit_name']} of the test data trained on? {evaluated['trained_on']}.",
    ]


def _others(budget: dict[str, Any] | None) -> str:
    if budget is None:
        return (
            "No budget was kept for this data set. Every other model, statistic or accuracy that "
            "was published from the same data adds to this epsilon, and nothing here counts them."
        )
    runs = [f"{r['run']}{'' if r['finished'] else ' (reserved)'}" for r in budget["other_runs"]]
    return (
        f"The budget of the data set, {budget['file']}, allows epsilon {up(budget['epsilon'])} at "
        f"delta {budget['delta']:g} for all runs that were given it. When this run ended, "
        f"{up(budget['taken'])} was taken by this run and {len(runs)} others"
        f"{': ' if runs else ''}{', '.join(runs)}. Releases that were made without the budget file "
        "add to that, and nothing here counts them."
    )


def _mechanism(s: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Unit of privacy", s["unit"]),
        ("Records of a unit beyond max_records", s["beyond_max_records"]),
        ("Units in the training set", f"{s['units']:,} (a public fact)"),
        ("Neighbouring relation", s["neighbouring_relation"]),
        ("Method", s["method"]),
        ("Sampling", s["sampling"]),
        ("Sampling rate q", f"{s['sampling_rate']:.6g}"),
        ("Expected batch size", str(s["expected_batch_size"])),
        ("Steps", _steps(s)),
        ("Noise multiplier sigma", f"{s['noise_multiplier']:.6g}"),
        ("Released beside the gradients", s["released_beside_the_gradients"]),
        ("Clipping", f"{s['clipping']}, norm C = {s['clip_norm']:g}"),
        *_parts(s),
        ("Accountant", s["accountant"]),
        ("Noise", s["noise_mode"]),
        ("Initial weights", s["initial_weights"]),
    ]


def _parts(s: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows for what most runs do not have."""
    rows = []
    if s.get("class_weights", "none") != "none":
        rows.append(("Class weights", s["class_weights"]))
    for name, text in (("noise_schedule", "sigma"), ("clip_schedule", "C")):
        if (factors := s.get(name, [1.0])) != [1.0]:
            phases = ", ".join(f"{f:g}" for f in factors)
            rows.append((f"Schedule of {text}", f"times {phases} in phases of equal length"))
    if s.get("filter", "none") != "none":
        rows.append(("Filter", f"{s['filter']}: of released gradients alone, at no cost"))
    if s.get("own_code", "none") != "none":
        rows.append(("Code of the user's own", s["own_code"]))
    return rows


def _identity(s: dict[str, Any]) -> list[tuple[str, str]]:
    identity = s["identity"]
    return [
        ("Date (UTC)", identity["date"]),
        *((f"SHA-256 of {name}", f"`{value}`") for name, value in identity["files"].items()),
        ("SHA-256 of the configuration, without seeds and paths",
         f"`{identity['configuration_sha256']}`"),
        ("Made with", ", ".join(f"{k} {v}" for k, v in identity["versions"].items())),
    ]  # fmt: skip


def _steps(s: dict[str, Any]) -> str:
    if s["charged_steps"] == s["steps"]:
        return str(s["steps"])
    return (
        f"{s['steps']} reached the model, {s['charged_steps']} are charged: the run was "
        "interrupted, and steps that were lost are paid for"
    )


def _percent(share: float) -> str:
    return f"{up(min(100.0, 100 * share), 3)}%"


def _of_thousand(share: float) -> str:
    return up(min(1000.0, 1000 * share), 3)


def _factor(epsilon: float) -> str:
    return f"{up(math.exp(epsilon), 3)}" if epsilon < 20 else "more than 100 million"


def _one_in(delta: float) -> str:
    return f"1 in {math.floor(1 / delta * (1 + 1e-9)):,}"


def _table(rows: list[tuple[str, str]], *header: str) -> str:
    lines = [header or ("", ""), ("---", "---"), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _files(names: list[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {' '.join(line.split())}" for line in lines) or "- nothing"
