"""The best private model without tuning: settings from public facts alone.

Tuning on private data costs privacy, so the defaults decide what a user gets. They follow from
facts that are public anyway, by a rule that was fitted on public data sets and judged on others
(``reproduce/defaults.py``). Nothing here reads a record, and nothing imports torch.

**Features.** The encoder that the user names, who thereby declares it public; scattering if none is
named.

**The descent's path.** With features of norm 10, sigma_1 the noise multiplier of a single release
within the budget, n units and K classes, the noise in a weight after a path of length L is about
L sigma_1 / n, for any number of steps. A longer path is worth more noise where there is more to
learn (more classes), and less where the head is nearly fitted:

    L = PATH (n / sigma_1)^0.88 (K / 10)^(1/3),   within bounds,      lr = L / (C T)

**The centre.** Features of all records of a data set have much in common, which teaches a head
nothing and takes its share of every clipped gradient. So their mean is released once and subtracted
(:mod:`dpbam.app.runs.first_release`). Its noise takes 8% of the budget of few units, and of many
only as much as the centre needs.

**The decision.** A head that is trained with few units or little epsilon prefers frequent classes
beyond their share, up to the constant. So the class counts are released once, with noise that takes
2% of the budget or less, and a part of their logarithms is taken out of the decision.

**The head.** Descent, except where the task is a regression, which the closed form serves. On
validation records, descent was ahead in 30 of the study's 31 cells. A head that the user names is
taken.

**Low-rank updates and norm layers** of a public encoder, where the user asks for them: NAdam, whose
steps have one length whatever the gradient's, so that the path per weight is lr T. A tenth of the
units per step, and the mean of the second half. On the one encoder of
``reproduce/defaults_lora.py``, validation records chose the same rate at epsilon 1, 3 and 8, and
with 7,205 and 1,205 trained numbers. The factor A is a constant with orthonormal rows
(:meth:`dpbam.nn.encoders.PublicEncoder.add_lora`), so that clipping does not depend on how the
product is split.

**Nets** that learn their features are never chosen: in every cell that was run on two cores, a head
on scattering was ahead (``reproduce/defaults_nets.py`` and docs/how-good.md).

**Findings.** The loss is the mean over L findings, so gradients are shorter by sqrt(L) than those
of one decision; C is shorter by as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.privacy.plan import default_delta
from dpbam.privacy.rounding import up

SCATTERING = "scattering"

# The descent, L = lr C T, from the grid of reproduce/defaults_fit.py (500 records of four sources,
# scored on validation records): C = 1 did better than 3, and L that grows with the classes and
# more slowly than n / sigma_1. The grid is flat: half or twice L costs about a point.
PATH = 0.033
BY_SIGNAL = 0.88  # exponent of n / sigma_1
BY_CLASSES = 1 / 3  # exponent of K / 10
SHORTEST, LONGEST = 0.5, 1500.0
CLIP_NORM = 1.0  # below all but a few gradient norms, which begin near 10: records weigh the same
STEPS = 100  # the noise in the weights does not depend on it
MOMENTUM = 0.9
AVERAGE = 0.3

# Before the first step, as multiples of the sigma of a single release within the budget.
COUNTS = 7.0  # class counts: 2% of the budget
CENTRE = 3.5  # mean of the features: 8% of the budget; 5 to 10% do as well
# More precision than this gains nothing, and what it would cost is noise in every step.
COUNTS_PRECISION = 0.02  # deviation of a count, as a share of n / K
CENTRE_PRECISION = 0.05  # length of the noise in the centre of features of norm 1 and this width
WIDTH = 1024

# The share of the classes' log frequencies that is taken out of the decision. With two classes it
# was chosen on PneumoniaMNIST, where accuracy was equal and balanced accuracy better; with more,
# on digits, icons and letters: of 0, 1/4, 1/2 and 1 the best in the mean, and half cost icons,
# whose classes are unequal, two points.
BALANCE_OF_TWO = 0.5
BALANCE = 0.25

FINDINGS_CLIP = 0.5  # C sqrt(L) of L findings: a tenth of a gradient's norm at the start, as above
GRAM_WEIGHT = 0.5  # a of the closed form: of 0.2, 0.5 and 1 the best or within a point of it
MOMENT_BOUND = math.hypot(GRAM_WEIGHT, 1.0)  # the norm of one record's moments, at most

# Low-rank updates and norm layers next to the head, from reproduce/defaults_lora.py.
UPDATES_STEPS = 40
UPDATES_BATCHES = 10  # n over the expected batch
UPDATES_LR = 0.03
UPDATES_AVERAGE = 0.5

TASKS = ("single-label", "multi-label", "regression")
TRAINED = ("head", "lora", "norms")
HEADS = ("descent", "closed-form")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Public facts about a training; the choice uses nothing else.

    Attributes:
        n: the number of units of privacy.
        epsilon: the budget.
        delta: None takes :func:`~dpbam.privacy.plan.default_delta`.
        image_shape: (C, H, W).
        task: one of :data:`TASKS`.
        classes: the number of classes or findings; 1 for a regression.
        encoder: ``hf:...`` or ``onnx:FILE`` that the user declares public; None: none.
        gradients: whether the user asks for gradients (a method, or the measurement of bias), which
            the closed form does not have.
        head: one of :data:`HEADS` that the user asks for; None: the rule chooses.
        trained: one of :data:`TRAINED` that the user asks for; the last two come with the head.
    """

    n: int
    epsilon: float
    image_shape: tuple[int, int, int]
    classes: int
    delta: float | None = None
    task: str = "single-label"
    encoder: str | None = None
    gradients: bool = False
    head: str | None = None
    trained: str = "head"

    def __post_init__(self) -> None:
        _validate.count("n", self.n)
        _validate.positive("epsilon", self.epsilon)
        _validate.one_of("task", self.task, TASKS)
        _validate.count("classes", self.classes)
        _validate.one_of("trained", self.trained, TRAINED)
        for side in self.image_shape:
            _validate.count("each of image_shape", side)
        if self.delta is not None:
            _validate.probability("delta", self.delta)
        if self.head is not None:
            _validate.one_of("head", self.head, HEADS)
        if self.trained != "head" and self.encoder is None:
            raise ArgumentError(f"{self.trained} is a part of a public encoder, and none is named")
        if self.gradients and self.head == "closed-form":
            raise ArgumentError(
                "the head in closed form has no gradients: leave out the method and the "
                "measurement of bias, or take the head by descent"
            )
        if self.task == "regression" and (self.gradients or self.head == "descent"):
            raise ArgumentError(
                "the rule serves a regression by the closed form, which has no gradients: leave "
                "out the method, the measurement of bias and the head, or name a model"
            )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        features: a name for :func:`dpbam.features.make_features`.
        head: one of :data:`HEADS`.
        batch_size: all n units.
        steps: T; 1 in closed form.
        clip_norm: C; the bound of the moments in closed form.
        lr: the learning rate; 1 in closed form.
        momentum: of SGD; 0 in closed form.
        optimizer: ``sgd``, or ``nadam`` for a part of the encoder.
        average: the share of the steps whose weights are averaged; None in closed form.
        release_counts: sigma of the released class counts; None: none are released.
        release_centre: sigma of the released mean of the features; None: it is not released.
        balance: the share of the classes' log frequencies that is taken out of the decision.
        delta: as given, or the default.
        reason: two lines for the user.
    """

    features: str
    head: str
    batch_size: int
    steps: int
    clip_norm: float
    lr: float
    momentum: float
    average: float | None
    release_counts: float | None
    release_centre: float | None
    balance: float
    delta: float
    reason: tuple[str, str]
    optimizer: str = "sgd"


@dataclass(frozen=True)
class FirstRelease:
    """Noise multipliers of what is released once before the first step.

    Attributes:
        counts: of the class counts.
        centre: of the mean of the features.
    """

    counts: float
    centre: float


def first_release(n: int, classes: int, sigma: float) -> FirstRelease:
    """Return the noise of class counts and centre: a share of the budget, or less where n is large.

    Args:
        n: the number of units.
        classes: the number of classes.
        sigma: the noise multiplier of a single release within the budget.

    Example:
        >>> first_release(500, 10, sigma=2.0)
        FirstRelease(counts=14.0, centre=7.0)
        >>> first_release(50_000, 10, sigma=2.0)
        FirstRelease(counts=100.0, centre=78.1)
    """
    counts = max(COUNTS * sigma, COUNTS_PRECISION * n / classes)
    centre = max(CENTRE * sigma, CENTRE_PRECISION * n / math.sqrt(WIDTH))
    return FirstRelease(float(f"{counts:.3g}"), float(f"{centre:.3g}"))


def choose(facts: Facts) -> Choice:
    """Choose features, head and settings for any number of units, however small.

    Example:
        >>> facts = Facts(n=50_000, epsilon=1, image_shape=(3, 32, 32), classes=10)
        >>> choice = choose(facts)
        >>> choice.features, choice.head, choice.steps
        ('scattering', 'descent', 100)
        >>> print(choice.reason[1])
        a linear head by 100 full-batch steps, as far as the rule goes with 50000 units at epsilon 1
    """
    delta = default_delta(facts.n) if facts.delta is None else facts.delta
    features = facts.encoder or SCATTERING
    if facts.trained != "head":
        return _choose_updates(facts, delta)
    balance = BALANCE_OF_TWO if facts.classes <= 2 else BALANCE
    if facts.task != "single-label":
        balance = 0.0
    if facts.head == "closed-form" or facts.task == "regression":
        # one step of plain descent from zero, which leaves the weights at minus what was released
        return Choice(
            features=features, head="closed-form", batch_size=facts.n, steps=1,
            clip_norm=MOMENT_BOUND, lr=1.0, momentum=0.0, average=None, release_counts=None,
            release_centre=None, balance=balance, delta=delta,
            reason=(_about_features(facts), _about_closed_form(facts)),
        )  # fmt: skip
    sigma, clip_norm = single_release_sigma(facts.epsilon, delta), CLIP_NORM
    if facts.task == "multi-label":
        clip_norm = float(f"{FINDINGS_CLIP / math.sqrt(facts.classes):.3g}")
    length = path_length(facts.n, facts.epsilon, delta, facts.classes)
    release = first_release(facts.n, facts.classes, sigma)
    return Choice(
        features=features, head="descent", batch_size=facts.n, steps=STEPS, clip_norm=clip_norm,
        lr=float(f"{length / (clip_norm * STEPS):.3g}"), momentum=MOMENTUM, average=AVERAGE,
        release_counts=release.counts if balance else None, release_centre=release.centre,
        balance=balance, delta=delta,
        reason=(_about_features(facts), about_descent(facts)),
    )  # fmt: skip


def _choose_updates(facts: Facts, delta: float) -> Choice:
    """Choose settings for low-rank updates or norm layers of an encoder, next to the head."""
    what = "low-rank updates" if facts.trained == "lora" else "scales and shifts of norm layers"
    batch_size = max(1, round(facts.n / UPDATES_BATCHES))
    return Choice(
        features=facts.encoder or "", head="descent", batch_size=batch_size, steps=UPDATES_STEPS,
        clip_norm=CLIP_NORM, lr=UPDATES_LR, momentum=MOMENTUM, average=UPDATES_AVERAGE,
        release_counts=None, release_centre=None, balance=0.0, delta=delta, optimizer="nadam",
        reason=(
            f"{facts.encoder}, which you declare public: its head and {what} are trained; in the "
            "study the head alone (--encoder) came within a point",
            f"NAdam, {UPDATES_STEPS} steps of {batch_size} units, the mean of the last half",
        ),
    )  # fmt: skip


def path_length(n: int, epsilon: float, delta: float, classes: int) -> float:
    """Return L = lr C T: longer with more units, epsilon and classes, within bounds.

    Example:
        >>> round(path_length(2000, 1.0, 1e-5, classes=10), 1)
        8.3
    """
    signal = n / single_release_sigma(epsilon, delta)
    length = PATH * math.pow(signal, BY_SIGNAL) * math.pow(classes / 10, BY_CLASSES)
    return min(LONGEST, max(SHORTEST, length))


def single_release_sigma(epsilon: float, delta: float) -> float:
    """Return the noise multiplier of one Gaussian release within (epsilon, delta), to 1e-3.

    By the exact formula (Balle and Wang 2018). It decides on a learning rate, not on privacy: the
    noise itself is calibrated by the accountant.

    Example:
        >>> round(single_release_sigma(1.0, 1e-5), 2)
        3.73
    """
    low, high = 1e-3, 1e6
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _delta_of(middle, epsilon) <= delta else (middle, high)
    return high


def _delta_of(sigma: float, epsilon: float) -> float:
    """Return Phi(1/2s - e s) - exp(e) Phi(-1/2s - e s), without overflow at large epsilon."""
    a, b = 0.5 / sigma, epsilon * sigma
    tail = math.erfc((a + b) / math.sqrt(2)) / 2
    second = math.exp(epsilon + math.log(tail)) if tail > 0 else 0.0
    return math.erfc((b - a) / math.sqrt(2)) / 2 - second


def _about_features(facts: Facts) -> str:
    if facts.encoder:
        return f"features of {facts.encoder}, which you declare public, scaled within the record"
    return (
        "scattering features: fixed, nothing downloaded; on photographs a public encoder "
        "(--encoder) gained most"
    )


def about_descent(
    facts: Facts, *, steps: int = STEPS, batch_size: int | None = None, by_rule: bool = True
) -> str:
    """Return the line about the head, with the number of steps and the batch that are taken.

    Args:
        facts: the public facts.
        steps: T, which the user may have set.
        batch_size: the expected units per step; None: all n.
        by_rule: whether the learning rate, and so the length of the path, is the rule's.

    Example:
        >>> facts = Facts(n=1438, epsilon=3, image_shape=(1, 8, 8), classes=10)
        >>> about_descent(facts, steps=84, batch_size=512, by_rule=False)
        'a linear head by 84 steps of 512 units'
    """
    full = batch_size is None or batch_size == facts.n
    head = f"{steps} full-batch steps" if full else f"{steps} steps of {batch_size} units"
    path = f", as far as the rule goes with {facts.n} units at epsilon {up(facts.epsilon)}"
    return f"a linear head by {head}{path if by_rule else ''}"


def _about_closed_form(facts: Facts) -> str:
    return f"a head in closed form, released once: nothing to tune with {facts.n} units"
