"""The privacy statement: what a run guarantees, for whom, and what it does not.

Everything in it is public: facts of the plan, the ledger's count, names. Nothing in it was
computed from the training data without noise. Its fields are those of
:class:`dpbam.app.runs.documents.Statement`; :mod:`dpbam.app.runs.statement_text` formats it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpbam._version import __version__
from dpbam.app.runs.card import model_card
from dpbam.app.runs.documents import (
    AtDelta,
    Attacks,
    ChosenByRule,
    EvaluatedOn,
    ModelFacts,
    NotGiven,
    Settled,
    Statement,
)
from dpbam.app.runs.facts import test_facts
from dpbam.app.runs.files import write_atomic
from dpbam.app.runs.folder import MARK, PUBLISHABLE, RunFolder
from dpbam.app.runs.rows import read_rows
from dpbam.app.runs.statement_text import to_html, to_markdown, unit_noun
from dpbam.catalogue import CLIPPINGS, FILTERS, METHODS, MODELS, Kind
from dpbam.data.registry import is_public
from dpbam.privacy import accounting
from dpbam.privacy.plan import RELATION, PrivacyPlan
from dpbam.privacy.randomness import NOISE_KEY_BITS
from dpbam.privacy.rounding import up
from dpbam.privacy.tradeoff import LEAST_ERROR, trade_off
from dpbam.training.events import EvaluationReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpbam.app.runs.config import RunConfig
    from dpbam.app.runs.documents import BudgetState, Identity, PublicWeights, TestFacts
    from dpbam.app.runs.preparation import Prepared
    from dpbam.privacy.ledger import Ledger

_SEEDED = (
    "seeded: reproducible, research only. Anyone who knows the seed can subtract the noise, so the "
    "epsilon above holds only against those who do not know it; do not publish such a model of "
    "sensitive data"
)
_FRESH = (
    "from the operating system's entropy, a new key of {bits} bits per step and block of "
    "{coordinates:,} coordinates, never used twice; Gaussian by Box and Muller's formula in single "
    "precision plus a fine uniform term in double precision, not hardened against attacks on "
    "floating-point rounding"
)
_SECURE = (
    "secure: noise and Poisson draws from AES-256 in counter mode under new keys of the operating "
    "system's entropy; the noise is a Gaussian exactly rounded to a grid to which the sum is "
    "rounded, which withstands attacks on floating-point rounding"
)
_EVALUATION = (
    "accuracy on them is computed without noise: it is a release about those records that this "
    "epsilon does not cover. The published model is {model} of this training: no evaluation chose "
    "it among its steps"
)
_SHARED = (
    ". The operator allowed units of privacy to be in both the training and the test set: for "
    "those the published accuracy is a further release, and it is not an accuracy on new ones"
)
_CLOSED_FORM = "a linear head in closed form, solved from second moments that were released once"
_WHO_SEES_WHAT = {
    "the operator, who trains": "the data, and everything in the run folder: trusted",
    "everyone else": "the files that may be published, and what is computed from them; they may "
    "know the code, every setting, and everything else about the world",
    "observers of the machine, its logs and its network": "more than this promise covers: see "
    "what it does not cover",
}
_OUTSIDE = (
    "The operator, and those who see the operator's machine, logs, network, data or unpublished "
    "files: they learn more, also from the times and batch sizes of steps.",
    "Software that did not work as described, and settings that are not stated honestly.",
    "The test records: accuracy on them is computed without noise.",
    "Other releases from the same data: each one adds to this epsilon.",
    "Tuning: choices made by looking at the data, unless epsilon is said to cover them below.",
    "The number of {unit}s, the list of classes and the shape of a record, which count as public: "
    "someone who knew all others could count, and a class of one person reveals that person.",
    "Several {unit}s that belong together, such as those of one person or family: for k of them at "
    "once epsilon is up to k times as large, and delta more.",
    "Which records are for training and which for testing: the split is taken as given.",
    "What is true of people in general: a conclusion that the model draws about someone from what "
    "it learned of others is possible without that person's records.",
)
_FLOATS = (
    "Attacks on the last digits of floating-point numbers (rounding): the noise was not made to "
    "withstand them; secure noise is."
)
RATES, PRIORS, SEVERAL = (0.001, 0.01, 0.1), (0.1, 0.001, 1e-6), (2, 5, 10)
_PROFILE = (1e-2, 1e-4, 1e-6, 1e-8, 1e-10)


def statement(prepared: Prepared, ledger: Ledger, *, run: str, steps: int, evaluations: int,
              identity: Identity, budget: BudgetState | None = None) -> Statement:  # fmt: skip
    """Return the statement.

    Args:
        prepared: the run.
        ledger: what was spent.
        run: its identifier.
        steps: steps that reached the model.
        evaluations: of the test data.
        identity: of the files (:func:`dpbam.app.runs.identity.identity`).
        budget: how the data set's budget stands, if there is one.
    """
    plan, config = prepared.plan, prepared.config
    return Statement(
        run=run,
        dpbam=__version__,
        identity=identity,
        epsilon=ledger.epsilon(),
        trade_off=attacks(ledger.charges(), plan.accountant),
        accountant=accounting.accountant_version(plan.accountant),
        steps=steps,
        charged_steps=len(ledger),
        evaluated_on=evaluated_on(config, plan.unit, test_facts(prepared), evaluations),
        budget=budget,
        **dict(settled(config, plan, prepared.public_weights)),
    )


def settled(config: RunConfig, plan: PrivacyPlan, public_weights: PublicWeights | None) -> Settled:
    """Return what the settings alone determine; ``dpbam audit`` computes it again."""
    outside = [*_OUTSIDE, *([] if config.noise == "secure" else [_FLOATS])]
    return Settled(
        format=4,
        operator=config.operator,
        curator=config.curator,
        purpose=config.purpose,
        private=plan.private,
        delta=plan.delta,
        unit=_unit(plan.unit, plan.max_records),
        unit_name=plan.unit,
        unit_reason=config.unit_reason,
        beyond_max_records=_beyond(plan),
        units=plan.n,
        neighbouring_relation=f"{RELATION} of privacy",
        method=_CLOSED_FORM if config.in_closed_form else config.method,
        sampling="Poisson: at each step every unit enters on its own with probability q",
        sampling_rate=plan.sampling_rate,
        expected_batch_size=plan.batch_size,
        noise_multiplier=plan.noise_multiplier,
        charged_noise_multiplier=plan.charged_noise_multiplier,
        released_beside_the_gradients=_beside(config),
        noise_multiplier_before=config.released_before,
        class_weights=_weights(config),
        clip_norm=plan.clip_norm,
        clipping=plan.clipping,
        filter=config.filter,
        own_code=_own_code(config),
        seeded=config.seed is not None,
        noise=config.noise,
        noise_mode=_noise_mode(config),
        initial_weights=_initial(config, public_weights),
        public_weights=public_weights,
        tuned_on=(
            "this software does not know how often settings were tried on these data: ask the "
            "operator. If they were, it is not counted, and the true epsilon is larger"
        ),
        chosen_by_rule=_chosen(config),
        who_sees_what=_WHO_SEES_WHAT,
        outside_the_promise=[line.format(unit=unit_noun(plan.unit)) for line in outside],
        may_be_published=[*PUBLISHABLE, *released_files(config)] if plan.private else [],
        may_be_published_if_the_test_records_are_not_sensitive=(
            ["metrics.jsonl"] if plan.private else []
        ),
        must_not_be_published=["non-private/", "checkpoints/", "ledger.jsonl", "config.toml"],
    )


def evaluated_on(config: RunConfig, unit: str, test: TestFacts, times: int) -> EvaluatedOn:
    """Return what was evaluated: ``test`` is from :func:`dpbam.app.runs.facts.test_facts`."""
    note = _EVALUATION.format(model=_handed_out(config))
    return EvaluatedOn(
        set=test.set,
        public=is_public(config.data),
        records=test.records,
        times=times,
        trained_on=_trained_on(config, unit, test.names_units),
        shared_units_allowed=config.allow_shared_units,
        note=note + (_SHARED if config.allow_shared_units else ""),
    )


def write_statement(folder: RunFolder, statement: Statement) -> None:
    """Write the statement for machines and for people, and the model card with it in short.

    In a folder that is marked as not for release nothing may be published, by any command: the
    epsilon of a search's trial does not cover the choice between trials.
    """
    if (folder.path / MARK).exists():
        statement = withheld(statement)
    text = to_markdown(statement)
    statement.write(folder.statement_json)
    write_atomic(folder.statement, text)
    write_atomic(folder.statement_html, to_html(text))
    if folder.model.exists():
        evaluations = read_rows(folder.metrics, EvaluationReport)
        last = evaluations[-1] if evaluations else None
        write_atomic(folder.card, model_card(statement, ModelFacts.read(folder.model), last))


def withheld(statement: Statement) -> Statement:
    """Return the same statement with nothing that may be published."""
    perhaps = statement.may_be_published_if_the_test_records_are_not_sensitive
    secret = [*statement.may_be_published, *perhaps, *statement.must_not_be_published]
    return statement.model_copy(
        update={
            "may_be_published": [],
            "may_be_published_if_the_test_records_are_not_sensitive": [],
            "must_not_be_published": list(dict.fromkeys(secret)),
        }
    )


def attacks(charges: Sequence[accounting.Charge], accountant: str) -> Attacks | NotGiven:
    """Return what the best attack achieves, rounded against the operator; or why that is unknown.

    Args:
        charges: what the ledger holds.
        accountant: the run's.
    """
    if any(not charge.noise_multiplier for charge in charges):
        return NotGiven(not_given="without noise an attack may always be right")
    if accountant != "pld":
        return NotGiven(
            not_given="the accountant was RDP, which bounds epsilon and has no distribution of the "
            "privacy loss to take more from; the PLD accountant has"
        )
    curve = trade_off(charges)
    if curve is None:
        return NotGiven(
            not_given="no privacy loss distribution was computed: no step was taken, epsilon is "
            "above 500, or there are more than a million steps"
        )
    mu, regret = curve.gaussian
    return Attacks(
        true_positive_rates={f"{rate:g}": _up(curve.power(rate)) for rate in RATES},
        advantage=_up(curve.advantage),
        advantage_of_several={str(k): _up(curve.advantage_of(k)) for k in SEVERAL},
        reconstruction={f"{prior:g}": _up(curve.power(prior)) for prior in PRIORS},
        gaussian_mu=_up(mu),
        gaussian_regret=_up(regret),
        gaussian_least_error=LEAST_ERROR,
        profile=[AtDelta(delta=d, epsilon=_up(curve.epsilon(d))) for d in _PROFILE],
    )


def _up(value: float) -> float:
    return float(up(value, 6))


def _unit(unit: str, max_records: int) -> str:
    if unit == "record":
        return "record (one image and its label)"
    same = f"all records with the same {unit}, at most {max_records} of them per step"
    return f"{unit_noun(unit)} ({same})"


def _beyond(plan: PrivacyPlan) -> str:
    if plan.unit == "record":
        return "There is no limit per person: all records are used, each protected by itself"
    return (
        f"of a {unit_noun(plan.unit)} with more than {plan.max_records} records, "
        f"{plan.max_records} are drawn anew at each step; the others may enter at other steps. The "
        "promise is for all of them together, however many there are"
    )


def _trained_on(config: RunConfig, unit: str, named: bool) -> str:
    """Whether test units were trained on: a fact of the columns and the code, not of the data."""
    if unit == "record":
        return (
            "Not excluded: the unit is a record, and one person may have records in the training "
            "and in the test set"
        )
    if config.allow_shared_units:
        return f"Not excluded: the operator allowed a {unit_noun(unit)} to be in both sets"
    if named:
        return f"No: a run whose two sets share a {unit_noun(unit)} is refused"
    return f"Not known: the test records do not name their {unit_noun(unit)}"


def _handed_out(config: RunConfig) -> str:
    """Say which weights of the training are published: a fact of the settings alone."""
    if config.ema is not None:
        return f"an exponential moving average (decay {config.ema:g}) of the weights of all steps"
    if config.swa is not None:
        return f"the mean of the weights after {100 * config.swa:g}% of the planned steps"
    return "the last one"


def _initial(config: RunConfig, public: PublicWeights | None) -> str:
    """Describe the initial weights; "independent of the data" only where that is known."""
    if public is not None:
        files = ", ".join(f"SHA-256 of {name}: {value}" for name, value in public.files.items())
        return (
            f"from {public.source}, taken to be public: if they were trained on sensitive data, "
            f"that training's privacy has to be added ({files})"
        )
    if config.fixed_features:
        return "zero: the head of fixed features, which no data was used to make, begins there"
    if MODELS.is_own_code(config.model):
        return (
            f"made by {_origin(MODELS, config.model)}, code of the user's own, who has to know "
            "that they do not depend on the training data: if they do, that dependence is not "
            "covered by this epsilon"
        )
    return "random, independent of the data: drawn by a built-in model under a seed of its own"


def _beside(config: RunConfig) -> str:
    counts = "" if config.release_counts is None else "class counts (see Class weights)"
    if config.release_centre is not None:
        counts += (
            f"{counts and '; '}the mean of the features, with noise of sigma "
            f"{config.release_centre:g}, once before the first step: a Gaussian event on all "
            "units, covered by the epsilon above"
        )
    if config.release_norms is None:
        return counts or "none"
    return (
        f"{counts}{counts and '; '}how many units have norms in which range: with noise of "
        f"sigma {config.release_norms:g}, one Gaussian event with each step's gradient, and "
        "covered by the epsilon above"
    )


def released_files(config: RunConfig) -> list[str]:
    """Return the files that hold what was released besides the model."""
    counts = ["class-counts.json"] if config.release_counts else []
    counts += ["feature-centre.json"] if config.release_centre else []
    return counts + (["statistics.jsonl"] if config.release_norms else [])


def _noise_mode(config: RunConfig) -> str:
    from dpbam.privacy.noise import BLOCK  # torch

    if config.seed is not None:
        return _SEEDED
    return (
        _SECURE
        if config.noise == "secure"
        else _FRESH.format(bits=NOISE_KEY_BITS, coordinates=BLOCK)
    )


def _weights(config: RunConfig) -> str:
    weights = ", ".join(f"{name} {weight:g}" for name, weight in config.class_weights.items())
    if config.release_counts is None:
        return f"given by the user as public facts: {weights}" if weights else "none"
    source = (
        f"from class counts, released once with noise of sigma {config.release_counts:g} before "
        "the first step: a Gaussian event on all units, covered by the epsilon above"
    )
    if config.balance:
        return f"none; {config.balance:g} of the log frequencies is out of the decision, {source}"
    return source


def _chosen(config: RunConfig) -> ChosenByRule | None:
    """Return which settings a rule chose, and from which public facts; None: it chose none."""
    if not config.auto_facts:
        return None
    return ChosenByRule(
        settings=list(config.auto_settings),
        facts=dict(config.auto_facts),
        note="these settings follow from these facts by a fixed rule that reads no record; nothing "
        "else was used to choose them",
    )


def _origin(kind: Kind[Any], name: str) -> str:
    """Return a name, and of a plug-in's the class behind it."""
    return name if ":" in name else f"{name} ({kind[name].target})"


def _own_code(config: RunConfig) -> str:
    """Name the parts that are the user's own code, and what is known of them."""
    kinds: dict[str, Kind[Any]] = {"method": METHODS, "clipping": CLIPPINGS, "filter": FILTERS}
    parts = [f"{name} {_origin(kind, getattr(config, name))}" for name, kind in kinds.items()
           if kind.is_own_code(getattr(config, name))]  # fmt: skip
    if not parts:
        return "none"
    return (
        f"{', '.join(parts)}: code of the user's own. Every unit's contribution was checked at "
        "every step against the sensitivity to which the noise is calibrated; that the code lets "
        "no unit depend on another, and keeps nothing of the data, is for the user to know"
    )
