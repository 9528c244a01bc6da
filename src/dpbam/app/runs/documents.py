"""The files of a run folder as types: what is written is what is read, and everything is checked.

A file that does not fit its type is refused with one sentence that names the file and the field.
JSON has no infinity and no NaN: they are the word "infinite" and null. The schema of the privacy
statement is generated from :class:`Statement` (``tools/statements.py``). The ledger is the
library's own (:mod:`dpbam.privacy.ledger`), and metrics are
:class:`dpbam.training.events.EvaluationReport`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    WithJsonSchema,
    field_serializer,
    model_serializer,
)

from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.files import FORMAT, check_format, plain, read_json, read_number, write_json
from dpbam.app.runs.run import RunError

_ZERO = {"anyOf": [{"type": "number", "minimum": 0}, {"const": "infinite"}]}


Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Perhaps = Annotated[float, BeforeValidator(read_number), Field(ge=0), WithJsonSchema(_ZERO)]
Count = Annotated[int, Field(ge=0)]


class DamagedFileError(RunError):
    """A file that does not have the fields of its type."""


def first_problem(error: ValidationError) -> str:
    """Return the place and the reason of the first field that does not fit."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"])) or "it"
    return f"{place}: {first['msg'].removeprefix('Value error, ')}"


class Part(BaseModel):
    """A part of a file: frozen, with the fields that it has and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())
    #: Fields that are left out of the file where they are None.
    optional: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        values: dict[str, object] = handler(self)
        return {k: v for k, v in values.items() if v is not None or k not in self.optional}

    def to_json(self) -> dict[str, JsonValue]:
        """Return the values as the file has them."""
        values: dict[str, JsonValue] = plain(self.model_dump())
        return values


class Document(Part):
    """A file of a run folder."""

    numbered: ClassVar[bool] = True  # whether it carries a format number

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file; RunError if it is missing, of another format, or not of this type."""
        return cls.parse(read_json(path), path)

    @classmethod
    def parse(cls, values: Mapping[str, JsonValue], path: Path) -> Self:
        """Return the values that the file at ``path`` holds, checked."""
        if cls.numbered:
            check_format(path, values)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise DamagedFileError(
                f"{path} is damaged ({first_problem(error)}): restore it from a backup"
            ) from None

    def write(self, path: Path) -> None:
        write_json(path, self.model_dump())


class PublicWeights(Part):
    """Public weights that training started from."""

    source: str = Field(description="Where they are from.")
    files: dict[str, str] = Field(description="SHA-256 of each file.")


class TestFacts(Part):
    """What a statement has about the test data."""

    __test__: ClassVar[bool] = False  # pytest would collect the name
    set: str
    records: Count
    names_units: bool


class InitialTensors(Part):
    """SHA-256 of every tensor before the model has seen data."""

    trained: dict[str, str]
    fixed: dict[str, str]


class RunFacts(Document):
    """``non-private/run.json``: what a run settles when it begins. Not for publishing."""

    optional = ("physical_batch_size",)

    format: int
    run: str
    config: RunConfig
    n: int
    unit: str
    test: TestFacts
    noise_multiplier: float
    delta: float
    sampling_rate: float
    clip_norm: float | None = None
    device: str
    threads: int
    ranks: int
    versions: dict[str, str]
    public_weights: PublicWeights | None = None
    initial_weights: str
    initial_tensors: InitialTensors
    non_private_fingerprint: str
    non_private_test_fingerprint: str
    non_private_test_records: str
    physical_batch_size: int | None = None

    @field_serializer("config")
    def _as_mapping(self, config: RunConfig) -> dict[str, JsonValue]:
        return config.to_mapping()


class ModelFacts(Document):
    """``model.json``: what a loader needs."""

    optional = ("encoder", "features", "public_weights")

    format: int
    dpbam: str
    model: str
    model_options: dict[str, JsonValue]
    image_shape: Annotated[list[int], Field(min_length=3, max_length=3)]
    dicom_window: list[float] | None = None
    task: str
    class_names: list[str]
    target_range: list[float] | None = None
    input: str
    method: str
    encoder: dict[str, JsonValue] | None = None
    features: dict[str, JsonValue] | None = None
    public_weights: PublicWeights | None = None


class ClassCounts(Document):
    """``class-counts.json``: class counts, released with noise."""

    format: int
    counts: dict[str, float]
    noise: float
    of: str


class FeatureCentre(Document):
    """``feature-centre.json``: the mean of the features, released with noise."""

    format: int
    mean: list[float]
    noise: float
    of: str


class Signature(Document):
    """``privacy-statement.sig``: the operator's signature."""

    numbered = False

    format: Literal[1]
    algorithm: Literal["Ed25519"]
    public_key: str
    signature: str


class Exported(Document):
    """``exported.json`` of an export: SHA-256 of its files, and of the weights it is made of."""

    numbered = False

    format: Literal[1]
    exported_from: dict[str, str]
    files: dict[str, str]


class SavedEvaluation(Document):
    """``non-private/evaluation-SPLIT.json``: what ``dpbam evaluate --save`` recorded."""

    numbered = False
    optional = ("confusion", "roc", "scatter", "value")

    data: str
    split: str
    test_set_of_the_run: bool
    task: str
    metric: str
    scores: dict[str, float | None]
    interval: list[float | None]
    trivial: float | None
    count: Count
    classes: dict[str, dict[str, JsonValue]]
    groups: dict[str, dict[str, JsonValue]]
    confusion: list[list[int]] | None = None
    roc: dict[str, list[list[float]]] | None = None
    scatter: list[list[float]] | None = None
    value: str | None = None
    note: str


class Identity(Part):
    """Which model a statement is about."""

    date: str = Field(
        description="The day on which the statement was written, in UTC.",
        json_schema_extra={"format": "date"},
    )
    files: dict[str, Digest] = Field(description="SHA-256 of each published file of the model.")
    configuration_sha256: Digest = Field(
        description="SHA-256 of the settings as JSON, keys sorted, without seeds and paths."
    )
    versions: dict[str, str] = Field(description="dpbam, Python and what computes.")


class NotGiven(Part):
    """Why the best attack is not known."""

    not_given: str


class AtDelta(Part):
    """Epsilon at another delta."""

    delta: NotNegative
    epsilon: NotNegative


class Attacks(Part):
    """What the best attack achieves, each number rounded against the operator."""

    true_positive_rates: dict[str, Share] = Field(
        description="False positive rate -> largest true positive rate, 1 - f."
    )
    advantage: Share = Field(
        description="Largest true positive rate minus false positive rate: delta at epsilon 0."
    )
    advantage_of_several: dict[str, Share] = Field(
        description="Number of units, all used or all left out -> an upper bound of the advantage."
    )
    reconstruction: dict[str, Share] = Field(
        description="Probability of guessing a unit's data without the release -> largest one with "
        "it."
    )
    gaussian_mu: NotNegative = Field(
        description="The least mu of a Gaussian mechanism that allows at least as much, for "
        "attacks with error rates of at least gaussian_least_error."
    )
    gaussian_regret: Share = Field(description="How much more that mechanism allows.")
    gaussian_least_error: NotNegative = Field(description="See gaussian_mu.")
    profile: list[AtDelta] = Field(description="The same training at other deltas.")


class ChosenByRule(Part):
    """Settings that were left out and follow from public facts by a fixed rule."""

    settings: list[str] = Field(description="The names of the settings that were chosen.")
    facts: dict[str, JsonValue] = Field(
        description="All facts that the rule uses, with their values."
    )
    note: str = Field(description="What the rule does not use, in words.")


class EvaluatedOn(Part):
    """What the accuracy is of."""

    set: str = Field(description="The test set's name.")
    public: bool = Field(
        description="Whether it is of a built-in data set, asked for by its name alone: everyone "
        "has it."
    )
    records: Count = Field(description="Their number.")
    times: Count = Field(description="How often it was evaluated.")
    trained_on: str = Field(description="Whether units of the test set were trained on.")
    shared_units_allowed: bool = Field(
        description="Whether the operator allowed units to be in both sets."
    )
    note: str = Field(description="What that means.")


class OtherRun(Part):
    """Another run with the same budget."""

    run: str
    finished: bool


class BudgetState(Part):
    """How a data set's budget stood when the run ended."""

    file: str = Field(description="Its name.")
    epsilon: NotNegative = Field(description="Of the whole budget.")
    delta: NotNegative = Field(description="Of the whole budget.")
    taken: Perhaps = Field(description="Epsilon of all runs when this one ended.")
    other_runs: list[OtherRun] = Field(
        description="Runs with the same budget; those not finished have reserved their cost."
    )


class Settled(Document):
    """What of a statement the settings alone determine; an audit computes it again."""

    format: Literal[4] = Field(
        description="The number of the format: see CONTRIBUTING.md, Formats of files."
    )
    operator: str | None = Field(description="Who trained the model, if named.")
    curator: str | None = Field(description="Who is responsible for the data, if named.")
    purpose: str | None = Field(description="What the model is for, if stated.")
    private: bool = Field(
        description="False for a reference without noise, which promises nothing."
    )
    delta: float = Field(gt=0, lt=1, description="Of (epsilon, delta).")
    unit: str = Field(description="The unit of privacy, in words.")
    unit_name: str = Field(
        description='"record", or the column that names the owner of several records.'
    )
    unit_reason: str | None = Field(description="Why this unit, if stated.")
    beyond_max_records: str = Field(
        description="What happens to records of a unit beyond max_records."
    )
    units: int = Field(ge=1, description="n, the number of units in the training set; public.")
    neighbouring_relation: str = Field(description="Between which data sets the promise holds.")
    method: str = Field(description="dp-sgd, dp-sat, bam; sgd and sam are references.")
    sampling: str = Field(description="How a step's units are drawn.")
    sampling_rate: float = Field(gt=0, le=1, description="q.")
    expected_batch_size: int = Field(ge=1, description="l = q n.")
    noise_multiplier: NotNegative = Field(description="sigma.")
    charged_noise_multiplier: NotNegative = Field(
        description="The sigma that a step is charged at, joint with released statistics."
    )
    released_beside_the_gradients: str = Field(
        description="Quantities other than gradients released from the data with noise, in words; "
        "none if there are none."
    )
    noise_multiplier_before: Annotated[float, Field(gt=0)] | None = Field(
        description="Joint sigma of what was released once, before the first step, from all units "
        "(q = 1): class counts, the features' centre; null if nothing was."
    )
    class_weights: str = Field(
        description="Where the weights of classes in the loss come from, in words; none if there "
        "are none."
    )
    clip_norm: Perhaps = Field(description="C.")
    clipping: str = Field(description="flat, automatic or per-layer.")
    filter: str = Field(
        description="What is done to released gradients before the optimiser, at no cost."
    )
    own_code: str = Field(
        description="Parts of the mechanism that are the user's own code, and what is known of "
        "them."
    )
    seeded: bool = Field(
        description="Whether the noise came from a seed: then the model is for research only."
    )
    noise: Literal["standard", "secure"] = Field(description="Where random bits come from.")
    noise_mode: str = Field(description="The same in words.")
    initial_weights: str = Field(description="Where training started, in words.")
    public_weights: PublicWeights | None = Field(
        description="Public weights that training started from; null if there were none."
    )
    tuned_on: str = Field(description="Whether epsilon covers the choice of settings.")
    chosen_by_rule: ChosenByRule | None = Field(
        description="Settings that were left out and follow from public facts by a fixed rule; "
        "null if there are none."
    )
    who_sees_what: dict[str, str] = Field(description="The trust model: party -> what it sees.")
    outside_the_promise: list[str] = Field(description="What epsilon does not cover.")
    may_be_published: list[str] = Field(description="Files.")
    may_be_published_if_the_test_records_are_not_sensitive: list[str] = Field(description="Files.")
    must_not_be_published: list[str] = Field(description="Files and folders.")


class Statement(Settled):
    """``privacy-statement.json`` of a run folder. Infinity is the word "infinite"."""

    run: str = Field(description="The run's random identifier.")
    dpbam: str = Field(description="The version that wrote the statement.")
    identity: Identity = Field(description="Which model this is about.")
    epsilon: Perhaps = Field(description="Of everything charged, at delta.")
    trade_off: Attacks | NotGiven = Field(
        description="What the best attack achieves, each number rounded against the operator; or "
        "why that is not given."
    )
    accountant: str = Field(description="Name and version.")
    steps: Count = Field(description="Steps that reached the model.")
    charged_steps: Count = Field(
        description="Steps on the ledger; more, if steps were lost in a crash."
    )
    evaluated_on: EvaluatedOn = Field(description="What the accuracy is of.")
    budget: BudgetState | None = Field(
        description="The data set's budget, with its other runs; null if none was kept."
    )


assert FORMAT == 4  # as in Settled
