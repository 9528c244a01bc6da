"""A privacy statement for people: Markdown, and the same as a page to print.

A reader who knows no mathematics finds first who is protected, against what, how well, and what is
not covered. Every number is computed from the statement, and rounded against the operator.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

from dpbam.app.runs.documents import Attacks, BudgetState, ChosenByRule, NotGiven, Statement
from dpbam.app.runs.escaping import each_text, markdown
from dpbam.privacy.rounding import up


def to_markdown(s: Statement) -> str:
    """Format a statement, as :func:`dpbam.app.runs.statement.statement` returns it.

    Every text in it is escaped first: names of columns, files, data sets and people stay text.
    """
    s = each_text(s, markdown)
    parts = [
        "# Privacy statement",
        *(["**Research only**: the run was seeded (see Noise)."] if s.seeded else []),
        *(["## In plain words", *_plain_words(s)] if s.private else [_NOT_PRIVATE]),
        "## What this promise does not cover",
        _bullets(s.outside_the_promise),
        *(["## The promise in formal words", _promise(s)] if s.private else []),
        "## What an attacker can achieve at best",
        *_attacks(s.trade_off, unit_noun(s.unit_name)),
        "## Tuning and evaluation",
        _bullets(_looked_at(s)),
        "## Other releases from the same data",
        _others(s.budget),
        "## Who, what for, and who sees what",
        _table([
            ("Operator, who trained the model", s.operator or "not named"),
            ("Curator of the data", s.curator or "not named"),
            ("Purpose", s.purpose or "not stated"),
            ("Reason for the unit of privacy", s.unit_reason or "not stated"),
            *((f"Seen by {who}", what) for who, what in s.who_sees_what.items()),
        ]),
        "## What was done",
        _table(_mechanism(s)),
        "## Which model this is about",
        _table(_identity(s)),
        "`sha256sum model.safetensors` prints the fingerprint of the file that you have: compare. "
        "Unless `privacy-statement.sig` is next to this file and verifies with the operator's "
        "public key, this statement is not signed: an attacker who alters the model could alter "
        "the fingerprints too. A model in another format, as `dpbam export` writes it, has another "
        "fingerprint: `exported.json` next to it lists it.",
        "## What may be published",
        *([_NOT_OF_SENSITIVE_DATA] if s.seeded and s.private else []),
        _bullets(_files(s.may_be_published)),
        "If the test records are not sensitive, also:",
        _bullets(_files(s.may_be_published_if_the_test_records_are_not_sensitive)),
        "## What must not be published",
        "These hold facts taken from the data without noise, or what would help to undo it:",
        _bullets(_files(s.must_not_be_published)),
        "## For specialists",
        _table(_specialists(s)),
        f"Run {s.run}, made by dpbam {s.dpbam}. The operator can check this statement and "
        "its signature against the run's files: `dpbam audit RUN --public-key KEY.pem`.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def to_html(text: str) -> str:
    r"""Format the Markdown of a statement as a page without scripts or outside references.

    Example:
        >>> to_html("# A\n\n- **b** <c>").partition("<body>")[2]
        '\n<h1>A</h1>\n<ul>\n<li><strong>b</strong> &lt;c&gt;</li>\n</ul>\n</body>\n</html>\n'
    """
    from markdown_it import MarkdownIt

    # HTML in the text stays text, whatever it is
    body = str(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))
    return f"{_HEAD}<body>\n{body.replace(_NO_HEADER, '')}</body>\n</html>\n"


def unit_noun(unit: str) -> str:
    """Return the word for one unit of privacy in a sentence.

    Example:
        >>> [unit_noun(name) for name in ("record", "patient", "folder1")]
        ['record', 'patient', 'folder']
    """
    return "folder" if re.fullmatch(r"folder\d+", unit) else unit


#: of a table without a header: Markdown has none without
_NO_HEADER = "<thead>\n<tr>\n<th></th>\n<th></th>\n</tr>\n</thead>\n"
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
td { overflow-wrap: anywhere } td:first-child { min-width: 9rem }
p, li { orphans: 3; widows: 3 } p:has(+ table, + ul) { break-after: avoid }
@page { margin: 18mm 16mm }
@media print { body { margin: 0; padding: 0; max-width: none; font-size: 10pt } }
</style>
</head>
"""


_NOT_PRIVATE = (
    "**This model gives no privacy.** It was trained without noise, as a reference: epsilon is "
    "infinite. Publishing it may reveal its training data."
)
_NOT_OF_SENSITIVE_DATA = (
    "**Of sensitive data nothing**: the run was seeded, and an attacker who knows or tries out the "
    "seed can subtract the noise. Of data that are not sensitive:"
)


def _promise(s: Statement) -> str:
    epsilon, delta = up(s.epsilon), f"{s.delta:g}"
    return (
        f"The model in this folder is **(epsilon = {epsilon}, delta = {delta})-differentially "
        f"private** for every {s.unit}: whether that {unit_noun(s.unit_name)} was in the "
        "training set or not changes the probability of any outcome of the training by at most a "
        f"factor of e^{epsilon}, up to the probability {delta}. This holds for all that is "
        "computed from the model, under the conditions and with the exceptions named above."
    )


def _plain_words(s: Statement) -> list[str]:
    """Who, against what, how well: the example is computed from this run."""
    unit, record = unit_noun(s.unit_name), s.unit_name == "record"
    extent = (
        "by itself: a person with several records is not protected as a person, see below"
        if record else f"with all records of that {unit}"
    )  # fmt: skip
    seed = ", nor against those who know the seed" if s.seeded else ""
    digits = ", nor against attacks on the last digits of floating-point numbers"
    guesses = partial(right_guesses, s.epsilon, s.delta, s.trade_off)
    rates = ", ".join(f"{_percent(guesses(k))} for {k} {unit}s" for k in (2, 5, 10))
    return [
        f"**Who is protected.** Each {s.unit if record else unit} of the {s.units:,} in the "
        f"training data, {extent}.",
        "**Against what.** Against those who have the model, or anything made from it, and try to "
        f"find out whether a certain {unit} was in the training data, or what was in it; now or "
        "later, with any computer and any other knowledge. Not against the operator and those who "
        f"see the operator's machine or unpublished files{seed}"
        f"{'' if s.noise == 'secure' else digits}. And only if the software worked as described "
        "and the settings stated here are honest.",
        "**How well.** This example is about the model alone. Suppose someone knows all of the "
        f"training data but for one {unit}, which was used or left out by the toss of a coin. "
        "Without the model they guess right half of the time; with the model at most "
        f"{_percent(guesses(1))} of the time. If they wrongly name only 1 in 1,000 of those "
        f"not used, they rightly name at most {_in(_at_best(s, 0.001), '0.001')} of those used. Or "
        "suppose that something may happen because of the model, with a probability of 1% if one "
        f"{unit} is left out: with that {unit} its probability is at most "
        f"{_percent(_at_best(s, 0.01))}. The number of {unit}s, {s.units:,}, is treated as "
        "public and is not protected: someone who really knew all the others could count.",
        f"**Several {unit}s of one {'person' if record else 'family'}.** If one toss of the coin "
        f"decides about several at once, guesses are right at most this often: {rates}. Near "
        "100% there is little protection.",
        f"**What epsilon and delta are.** Epsilon {up(s.epsilon)} is a ceiling: because of one "
        f"{unit} nothing becomes more than e^{up(s.epsilon)} = {_factor(s.epsilon)} times as "
        "likely. Only very rare events come near it; for ordinary ones see the figures above and "
        f"the tables below. Delta {s.delta:g} is the probability, 1 in "
        f"{math.floor(1 / s.delta * (1 + 1e-9)):,}, with "
        "which even that ceiling may be passed. Smaller is more private for both.",
        "**What is not covered.** The operator, the test records, other releases from the same "
        "data, tuning, and more: the next section is the whole list.",
    ]


def right_guesses(
    epsilon: float, delta: float, attacks: Attacks | NotGiven | None, k: int = 1
) -> float:
    """How often the best guess about k units at once is right: (1 + advantage) / 2.

    From epsilon, delta alone: (e^(k eps) + d) / (e^(k eps) + 1), with d <= k e^((k - 1) eps) delta.
    """
    if isinstance(attacks, Attacks):
        advantage = attacks.advantage if k == 1 else attacks.advantage_of_several[str(k)]
        return (1 + float(advantage)) / 2
    right = (1 + k * math.exp(-epsilon) * delta) / (1 + math.exp(-k * epsilon))
    return float(min(1.0, right))


def _at_best(s: Statement, rate: float) -> float:
    """1 - f(rate), of the trade-off or, where there is none, of epsilon and delta alone."""
    if isinstance(s.trade_off, Attacks):
        return float(s.trade_off.true_positive_rates[f"{rate:g}"])
    odds = math.exp(min(s.epsilon, 700))
    return float(min(odds * rate + s.delta, 1 - (1 - s.delta - rate) / odds, 1.0))


def _attacks(attacks: Attacks | NotGiven, unit: str) -> list[str]:
    if isinstance(attacks, NotGiven):
        return [f"Not given: {attacks.not_given}."]
    rates = [(f"{100 * float(wrong):g}", _percent(right)[:-1])
             for wrong, right in attacks.true_positive_rates.items()]  # fmt: skip
    rebuilt = [(_in(float(prior), prior), f"at most {_in(share, prior)}")
               for prior, share in attacks.reconstruction.items()]  # fmt: skip
    return [
        f"Of attacks that decide whether a {unit} was in the training data, none does better than "
        f"this, under the same conditions and exceptions. The share of {unit}s used that are "
        "rightly named is higher than the share of those not used that are wrongly named by at "
        f"most {_percent(attacks.advantage)[:-1]} percentage points (the advantage).",
        _table(rates, f"of 100 {unit}s not used, wrongly named",
               f"of 100 {unit}s used, rightly named, at most"),
        f"Guessing what was in a {unit}: the chance of success without the model, and with it.",
        _table(rebuilt, "without the model", "with the model"),
    ]  # fmt: skip


def _looked_at(s: Statement) -> list[str]:
    evaluated = s.evaluated_on
    return [
        f"Tuning: {s.tuned_on}.",
        *_chosen(s.chosen_by_rule),
        f"Evaluation: the model was tried {evaluated.times} times on {evaluated.records:,} "
        f"test records ({evaluated.set}); {evaluated.note}.",
        f"Was a {unit_noun(s.unit_name)} of the test data trained on? {evaluated.trained_on}.",
    ]


def _chosen(by_rule: ChosenByRule | None) -> list[str]:
    if by_rule is None:
        return []
    facts = ", ".join(f"{name} {_fact(value)}" for name, value in by_rule.facts.items())
    return [
        f"Chosen by a rule: {', '.join(by_rule.settings)}, from public facts alone: {facts}; "
        f"{by_rule.note}."
    ]


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return " x ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _others(budget: BudgetState | None) -> str:
    if budget is None:
        return (
            "No budget was kept for this data set. This software does not know what else was "
            "published from these data: ask the curator. All of it adds to this epsilon."
        )
    runs = [f"{r.run}{'' if r.finished else ' (reserved)'}" for r in budget.other_runs]
    return (
        f"The budget of the data set, {budget.file}, allows epsilon {up(budget.epsilon)} at "
        f"delta {budget.delta:g} for all runs that were given it. When this run ended, "
        f"{up(budget.taken)} of it, at that delta, was taken by this run and {len(runs)} others"
        f"{': ' if runs else ''}{', '.join(runs)}. Releases that were made without the budget file "
        "add to that, and nothing here counts them."
    )


def _mechanism(s: Statement) -> list[tuple[str, str]]:
    return [
        ("Unit of privacy", s.unit),
        ("Limit of records", s.beyond_max_records),
        ("Units in the training set", f"{s.units:,} (a public fact)"),
        ("Method", s.method),
        ("Other quantities released from the data", s.released_beside_the_gradients),
        *_parts(s),
        ("Noise", s.noise_mode),
        ("Initial weights", s.initial_weights),
    ]


def _specialists(s: Statement) -> list[tuple[str, str]]:
    kind = "approximate DP: epsilon holds but for a probability delta" if s.private else "none"
    attacks = s.trade_off
    return [
        ("Kind of privacy", kind),
        ("Trust model", "central: the operator has the data, and adds the noise"),
        ("Neighbouring relation", s.neighbouring_relation),
        ("Sampling", s.sampling),
        ("Sampling rate q", f"{s.sampling_rate:.6g}"),
        ("Expected batch size", str(s.expected_batch_size)),
        ("Steps", _steps(s)),
        ("Noise multiplier sigma", f"{s.noise_multiplier:.6g}"),
        ("Clipping", f"{s.clipping}, norm C = {s.clip_norm:g}"),
        ("Accountant", s.accountant),
        *([] if isinstance(attacks, NotGiven) else [
            *((f"Epsilon at delta {p.delta:g}", up(p.epsilon)) for p in attacks.profile), (
            f"Gaussian DP, for error rates of at least {attacks.gaussian_least_error:g}",
            f"mu = {up(attacks.gaussian_mu)}, with a regret of {up(attacks.gaussian_regret)}",
            )]),
    ]  # fmt: skip


def _parts(s: Statement) -> list[tuple[str, str]]:
    """Rows for what most runs do not have."""
    rows = []
    if s.class_weights != "none":
        rows.append(("Class weights", s.class_weights))
    if s.filter != "none":
        rows.append(("Filter", f"{s.filter}: of released gradients alone, at no cost"))
    if s.own_code != "none":
        rows.append(("Code of the user's own", s.own_code))
    return rows


def _identity(s: Statement) -> list[tuple[str, str]]:
    identity = s.identity
    return [
        ("Day on which this statement was written (UTC)", identity.date),
        *((f"SHA-256 of {markdown(name)}", f"`{value}`")
          for name, value in identity.files.items()),
        ("SHA-256 of the configuration, without seeds and paths",
         f"`{identity.configuration_sha256}`"),
        ("Made with", ", ".join(f"{k} {v}" for k, v in identity.versions.items())),
    ]  # fmt: skip


def _steps(s: Statement) -> str:
    if s.charged_steps == s.steps:
        return str(s.steps)
    return (
        f"{s.steps} reached the model, {s.charged_steps} are charged: the run was "
        "interrupted, and steps that were lost are paid for"
    )


def _percent(share: float) -> str:
    return f"{up(min(100.0, 100 * share), 3)}%"


def _in(share: float, prior: str) -> str:
    many = round(1 / float(prior))
    return f"{up(min(float(many), many * share), 3)} in {many:,}"


def _factor(epsilon: float) -> str:
    return f"{up(math.exp(epsilon), 3)}" if epsilon < 20 else "more than 100 million"


def _table(rows: list[tuple[str, str]], *header: str) -> str:
    lines = [header or ("", ""), ("---", "---"), *rows]
    return "\n".join("| " + " | ".join(" ".join(x.split()) for x in line) + " |" for line in lines)


def _files(names: list[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {' '.join(line.split())}" for line in lines) or "- nothing"
