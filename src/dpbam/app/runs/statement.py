"""The privacy statement: what a run guarantees, for whom, and what it does not.

Everything in it is public: facts of the plan, the ledger's count, names. Nothing in it was
computed from the training data without noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpbam._version import __version__
from dpbam.app.runs.card import model_card
from dpbam.app.runs.files import FORMAT, read_json, read_json_lines, write_atomic, write_json
from dpbam.app.runs.folder import PUBLISHABLE, RunFolder
from dpbam.privacy import accounting
from dpbam.privacy.plan import RELATION
from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from dpbam.app.runs.config import RunConfig
    from dpbam.app.runs.preparation import Prepared
    from dpbam.privacy.ledger import Ledger

_SEEDED = (
    "seeded: reproducible, research only. Anyone who knows the seed can subtract the noise, so the "
    "epsilon above holds only against those who do not know it; do not publish such a model of "
    "sensitive data"
)
_FRESH = (
    "from the operating system's entropy, 256 new bits per step, never used twice; float32 "
    "Gaussian, not hardened against attacks on floating-point rounding"
)
_SECURE = (
    "secure: noise and Poisson draws from AES-256 in counter mode under new keys of the operating "
    "system's entropy; the noise is a Gaussian exactly rounded to a grid to which the sum is "
    "rounded, which withstands attacks on floating-point rounding"
)
_EVALUATION = (
    "accuracy on test records is computed without noise: it is a release about those records that "
    "this epsilon does not cover. The guarantee is for the training records only"
)
_SHARED = (
    ". The operator allowed units of privacy to be in both the training and the test set: for "
    "those the published accuracy is a further release, and it is not an accuracy on new ones"
)
_MODES = {"standard": _FRESH, "secure": _SECURE}


def statement(prepared: Prepared, ledger: Ledger, *, run: str, steps: int, evaluations: int,
              budget: dict[str, Any] | None = None) -> dict[str, Any]:  # fmt: skip
    """Return the statement as plain values.

    Args:
        prepared: the run.
        ledger: what was spent.
        run: its identifier.
        steps: steps that reached the model.
        evaluations: of the test data.
        budget: how the data set's budget stands, if there is one.
    """
    plan, config = prepared.plan, prepared.config
    return {
        "format": FORMAT,
        "run": run,
        "dpbam": __version__,
        "private": plan.private,
        "epsilon": ledger.epsilon(),
        "delta": plan.delta,
        "unit": _unit(plan.unit, plan.max_records),
        "units": plan.n,
        "neighbouring_relation": f"{RELATION} of privacy",
        "accountant": accounting.accountant_version(plan.accountant),
        "method": config.method,
        "sampling": "Poisson: at each step every unit enters on its own with probability q",
        "sampling_rate": plan.sampling_rate,
        "expected_batch_size": plan.batch_size,
        "steps": steps,
        "charged_steps": len(ledger),
        "noise_multiplier": plan.noise_multiplier,
        "charged_noise_multiplier": plan.charged_noise_multiplier,
        "released_beside_the_gradients": _beside(config),
        "clip_norm": plan.clip_norm,
        "clipping": plan.clipping,
        "noise_schedule": list(plan.noise_schedule),
        "clip_schedule": list(plan.clip_schedule),
        "filter": config.filter,
        "own_code": _own_code(config),
        "seeded": config.seed is not None,
        "noise": config.noise,
        "noise_mode": _SEEDED if config.seed is not None else _MODES[config.noise],
        "initial_weights": _initial(config, prepared.public_weights),
        "public_weights": prepared.public_weights,
        "tuned_on": (
            "not accounted: choices that were made by looking at runs on this data (learning rate, "
            "clipping norm, lambda, epochs, the model) are not covered by this epsilon"
        ),
        "evaluated_on": {
            "set": prepared.test.name,
            "records": len(prepared.test),
            "times": evaluations,
            "shared_units_allowed": config.allow_shared_units,
            "note": _EVALUATION + (_SHARED if config.allow_shared_units else ""),
        },
        "budget": budget,
        "may_be_published": [*PUBLISHABLE, *(["statistics.jsonl"] if config.release_norms else [])],
        "may_be_published_if_the_test_records_are_not_sensitive": ["metrics.jsonl"],
        "must_not_be_published": ["non-private/", "checkpoints/", "ledger.jsonl", "config.toml"],
    }


def write_statement(folder: RunFolder, values: dict[str, Any]) -> None:
    """Write the statement for machines and for people, and the model card with it in short."""
    write_json(folder.statement_json, values)
    write_atomic(folder.statement, to_markdown(values))
    if folder.model.exists():
        metrics = read_json_lines(folder.metrics)
        card = model_card(values, read_json(folder.model), metrics[-1] if metrics else None)
        write_atomic(folder.card, card)


def to_markdown(s: dict[str, Any]) -> str:
    """Format the statement for people."""
    evaluated, budget = s["evaluated_on"], s["budget"]
    rows = [
        ("Unit of privacy", s["unit"]),
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
        ("Tuning", s["tuned_on"]),
        ("Evaluation", f"{evaluated['set']}, {evaluated['records']:,} records, "
                       f"{evaluated['times']} times; {evaluated['note']}"),
        ("Budget of the data set", "none was given" if budget is None else
         f"{budget['file']}: {up(budget['taken'])} of epsilon {up(budget['epsilon'])} taken, at "
         f"delta {budget['delta']:g}"),
    ]  # fmt: skip
    table = "\n".join(f"| {name} | {text} |" for name, text in rows)
    return _TEMPLATE.format(
        promise=_promise(s),
        table=table,
        publish=_bullets(s["may_be_published"]),
        perhaps=_bullets(s["may_be_published_if_the_test_records_are_not_sensitive"]),
        never=_bullets(s["must_not_be_published"]),
        run=s["run"],
        dpbam=s["dpbam"],
    )


_TEMPLATE = """# Privacy statement

{promise}

| | |
|---|---|
{table}

## What may be published

{publish}

If the test records are not sensitive, also:

{perhaps}

## What must not be published

These hold facts taken from the data without noise, or what would help to undo it:

{never}

Run {run}, made by dpbam {dpbam}.
"""


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


def _unit(unit: str, max_records: int) -> str:
    if unit == "record":
        return "record (one image and its label)"
    return f"{unit} (all records with the same {unit}, at most {max_records} of them per step)"


def _steps(s: dict[str, Any]) -> str:
    if s["charged_steps"] == s["steps"]:
        return str(s["steps"])
    return (
        f"{s['steps']} reached the model, {s['charged_steps']} are charged: the run was "
        "interrupted, and steps that were lost are paid for"
    )


def _initial(config: RunConfig, public: dict[str, Any] | None) -> str:
    """Describe the initial weights; "independent of the data" only where that is known."""
    if public is not None:
        files = ", ".join(f"SHA-256 of {name}: {value}" for name, value in public["files"].items())
        return (
            f"from {public['source']}, taken to be public: if they were trained on sensitive data, "
            f"that training's privacy has to be added ({files})"
        )
    if ":" in config.model:
        return (
            f"made by {config.model}, code of the user's own, who has to know that they do not "
            "depend on the training data: if they do, that dependence is not covered by this "
            "epsilon"
        )
    return "random, independent of the data: drawn by a built-in model under a seed of its own"


def _beside(config: RunConfig) -> str:
    if config.release_norms is None:
        return "nothing"
    bias = "" if config.release_bias is None else (
        f"; the bias's length, of contributions clipped to B = {config.release_bias:g}"
    )  # fmt: skip
    return (
        f"how many units have norms in which range{bias}: with noise of sigma "
        f"{config.release_norms:g}, one Gaussian event with each step's gradient, and covered by "
        "the epsilon above"
    )


def _own_code(config: RunConfig) -> str:
    """Name the parts that are the user's own code, and what is known of them."""
    own = [f"{k} {getattr(config, k)}" for k in ("method", "clipping", "filter")
           if ":" in getattr(config, k)]  # fmt: skip
    if not own:
        return "none"
    return (
        f"{', '.join(own)}: code of the user's own. Every unit's contribution was checked at every "
        "step against the sensitivity to which the noise is calibrated; that the code lets no unit "
        "depend on another, and keeps nothing of the data, is for the user to know"
    )


def _parts(s: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows for what most runs do not have."""
    rows = []
    for name, text in (("noise_schedule", "sigma"), ("clip_schedule", "C")):
        if (factors := s.get(name, [1.0])) != [1.0]:
            phases = ", ".join(f"{f:g}" for f in factors)
            rows.append((f"Schedule of {text}", f"times {phases} in phases of equal length"))
    if s.get("filter", "none") != "none":
        rows.append(("Filter", f"{s['filter']}: of released gradients alone, at no cost"))
    if s.get("own_code", "none") != "none":
        rows.append(("Code of the user's own", s["own_code"]))
    return rows


def _bullets(names: list[str]) -> str:
    return "\n".join(f"- `{name}`" for name in names) or "- nothing"
