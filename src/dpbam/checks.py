"""Check the oracle's inputs against the plan, before a step is charged.

The accountant composes T steps, each on a Poisson sample of rate q, each clipped to C. Batches and
clipping may be the user's own, so both are checked at every step.

======================  ============================================================
input                   refused if
======================  ============================================================
a step                  the plan's T steps are taken, or a release that the plan has before
                        them is not on the ledger (:func:`check_before`)
a batch, q < 1          Poisson sampling cannot give its size (:class:`BatchSizes`)
a batch, q = 1          its size is none of n - 1, n, n + 1
a run of equal sizes    Poisson sampling cannot give it (:class:`BatchSizes`)
clipping factors        a unit would exceed the sensitivity (:func:`check_factors`)
a clipping's own        its groups leave a parameter out (:func:`check_groups`), or its
                        sensitivity changes with the units (:func:`check_fixed`)
======================  ============================================================

A check refuses what cannot be right, and proves nothing else: batches of plausible sizes may still
be drawn wrongly. :meth:`dpbam.oracle.PrivateGradientOracle.batches` draws correctly.

Whether a check refuses depends on the data without noise; the exception is for the operator only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from dpbam.errors import ArgumentError, DPBAMError
from dpbam.methods import Method, check_declared
from dpbam.params import digest, trainable
from dpbam.privacy.clipping import Clipping
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dpbam.distributed import Ranks
    from dpbam.observers import JointRelease

LEAST_TAIL = 1e-20
LEAST_RUN = 1e-12
ROUNDING = 1e-6  # what a clipped norm may exceed the sensitivity by, relative

_WAY_OUT = (
    "draw with oracle.batches(dataset), or make the oracle with sampling='unchecked', which "
    "charges each step without amplification by sampling"
)


class PlanViolationError(DPBAMError, ValueError):
    """The plan does not account for an input of the oracle; nothing was charged."""


class BatchSizes:
    """Refuses batch sizes that Poisson sampling cannot give. One object per oracle.

    The number of units in a Poisson batch is X ~ Binomial(m, q). The data set has m = n units, its
    neighbours n - 1 and n + 1; a size is refused only if it is impossible under all three, so that
    a refusal does not distinguish them.

    1. *Size.* A size k is refused if 2 min(P[X <= k], P[X >= k]) < 1e-20 under each m. False-alarm
       rate: at most 1e-20 per step.
    2. *Run.* With p_k = max over m of P[X = k], the r-th batch in a row with the same size k is
       refused if p_k^(r - 1) < 1e-12. False-alarm rate: a run that starts at step t has a first
       batch of some size k, and r - 1 further independent ones that equal it,

           sum_k P[X = k] P[X = k]^(r_k - 1) <= sum_k P[X = k] 1e-12 = 1e-12,

       so at most 1e-12 per step, and T 1e-12 in a training of T steps. A loader with batches of
       one size is refused at its 41st step at the latest (p_k <= 1/2), at 4096 of 50,000 units
       at its 7th.
    3. At q = 1 the size is one of n - 1, n, n + 1; runs are not checked.

    The run is kept in memory and starts again when a training is resumed: a realised batch size is
    not protected by privacy, so it is not in a checkpoint.

    Guarantee: sizes that are refused could not come, within the false-alarm rates above, from
    Poisson sampling of the plan or of a neighbour; a refusal charges nothing.

    Assumptions: refusals are seen by the operator only. Plausible sizes that were drawn wrongly
    pass.

    Proof: the two displayed inequalities.

    Example:
        >>> plan = PrivacyPlan(n=100, batch_size=10, steps=50, noise_multiplier=1.0, delta=1e-3)
        >>> sizes = BatchSizes(plan)
        >>> sizes.check(14)
        >>> sizes.check(80)
        Traceback (most recent call last):
        ...
        dpbam.checks.PlanViolationError: the batch has 80 units, but Poisson sampling gives 10...
    """

    def __init__(self, plan: PrivacyPlan) -> None:
        self._n, self._q, self._expected = plan.n, plan.sampling_rate, plan.batch_size
        self._size, self._length = -1, 0  # of the present run

    def check(self, size: int) -> None:
        """Refuse a next batch of ``size`` units, over all ranks, if it is impossible."""
        if self._q == 1.0:
            self._check_whole(size)
            return
        if self._tail(size) < LEAST_TAIL:
            deviation = math.sqrt(self._expected * (1 - self._q))
            raise PlanViolationError(
                f"the batch has {size} units, but Poisson sampling gives {self._expected} +- "
                f"{deviation:.2g} of n = {self._n}, and this size with probability below "
                f"{LEAST_TAIL:g}: {_WAY_OUT}"
            )
        length = self._length_with(size)
        if self._most_likely(size) ** (length - 1) < LEAST_RUN:
            raise PlanViolationError(
                f"{length} batches in a row have {size} units, which Poisson sampling gives with "
                f"probability below {LEAST_RUN:g}, and a loader with batches of one size always: "
                f"{_WAY_OUT}"
            )

    def count(self, size: int) -> None:
        self._size, self._length = size, self._length_with(size)

    def _length_with(self, size: int) -> int:
        return self._length + 1 if size == self._size else 1

    def _check_whole(self, size: int) -> None:
        if abs(size - self._n) > 1:
            raise PlanViolationError(
                f"the batch has {size} units, but the plan's batch is the whole data set, n = "
                f"{self._n}: {_WAY_OUT}"
            )

    def _tail(self, size: int) -> float:
        return max(two_sided_tail(size, m, self._q) for m in self._units())

    def _most_likely(self, size: int) -> float:
        """Return p_k, the largest probability of ``size`` over m."""
        return max(probability(size, m, self._q) for m in self._units())

    def _units(self) -> tuple[int, int, int]:
        return self._n - 1, self._n, self._n + 1


class GivenBatches:
    """Refuses a batch that ``backward`` was given before. One object per ledger.

    A plan accounts for a new Poisson sample per step. An optimiser that evaluates its closure
    several times per step, such as LBFGS, or several oracles with one ledger could be given the
    same sample again, which costs more: k releases of one sample are one at sigma / sqrt(k).

    Guarantee: the tensors of a released step, the same objects and not changed in place since, are
    refused in another step: all of the inputs together, or units alone.

    Assumptions: copies and views of a whole batch are not recognised; drawing a new one for each
    step is the caller's part. At q = 1 every batch is the whole data set, and may be the same.

    Proof: identity of the tensors, by weak references, and torch's count of in-place changes.
    """

    def __init__(self) -> None:
        self._versions: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> its version

    @classmethod
    def of(cls, ledger: Ledger) -> GivenBatches:
        """Return the object of a ledger; several ledgers on one file are one."""
        if ledger.path is not None:
            return _GIVEN_BY_FILE.setdefault(ledger.path.resolve(), cls())
        return _GIVEN.setdefault(ledger, cls())

    def has(self, inputs: object, units: Tensor | None) -> bool:
        """Whether a step was given these records, or these owners, as the same tensors."""
        return self._know(inputs) or self._know(units)

    def add(self, *given: object) -> None:
        for tensor in _tensors(given):
            self._versions[tensor] = _version(tensor)

    def _know(self, given: object) -> bool:
        tensors, known = _tensors(given), self._versions
        return bool(tensors) and all(t in known and known[t] == _version(t) for t in tensors)


_GIVEN: WeakKeyDictionary[Ledger, GivenBatches] = WeakKeyDictionary()
_GIVEN_BY_FILE: dict[Path, GivenBatches] = {}  # of weak references alone: a name per ledger file


def _tensors(given: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.numel()]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def check_new(repeats: int) -> None:
    """Refuse a batch that was given before, on this rank or another.

    Guarantee: no charge is made for a sample that a step with the same ledger has used.

    Assumptions: those of :class:`GivenBatches`, whose findings on all ranks are added up.

    Proof: it is called before the step is charged.
    """
    if repeats:
        raise PlanViolationError(
            "this batch was part of a step before, and the plan accounts for a new Poisson sample "
            "per step: call backward once per batch; an optimiser that evaluates its closure "
            "several times per step, such as LBFGS, cannot be used (if these tensors were filled "
            "anew through numpy or .data, pass clones)"
        )


def two_sided_tail(k: int, m: int, q: float) -> float:
    """Return 2 min(P[X <= k], P[X >= k]), at most 1, for X ~ Binomial(m, q) with 0 < q < 1."""
    from scipy.special import betainc

    below = float(betainc(m - k, k + 1, 1 - q)) if k < m else 1.0  # P[X <= k]
    above = float(betainc(k, m - k + 1, q)) if 0 < k <= m else float(k <= 0)  # P[X >= k]
    return min(1.0, 2 * min(below, above))


def probability(k: int, m: int, q: float) -> float:
    """Return P[X = k] for X ~ Binomial(m, q) with 0 < q < 1."""
    if not 0 <= k <= m:
        return 0.0
    ways = math.lgamma(m + 1) - math.lgamma(k + 1) - math.lgamma(m - k + 1)
    return math.exp(ways + k * math.log(q) + (m - k) * math.log1p(-q))


def check_step(plan: PrivacyPlan, step: int) -> None:
    """Refuse a step beyond the plan, whose epsilon would be exceeded.

    Guarantee: no training takes more steps than its plan's epsilon counts.

    Assumptions: the ledger's steps are the oracle's.

    Proof: epsilon grows with the number of steps.
    """
    if step >= plan.steps:
        raise PlanViolationError(
            f"all {plan.steps} steps of the plan are taken: another one would cost more than the "
            "plan's epsilon; make a plan with more steps"
        )


def check_resumed(plan: PrivacyPlan, ledger: Ledger, step: int) -> None:
    """Refuse a ledger without the steps before ``step``.

    Guarantee: a training resumes only on a ledger with at least as many steps as its parameters
    have seen, so its epsilon covers them.

    Assumptions: the entries are those of this training.

    Proof: every step is charged before it changes the parameters.
    """
    if plan.private and len(ledger) < step:
        raise PlanViolationError(
            f"the state is at step {step}, but its ledger has {len(ledger)} steps: give the oracle "
            "the ledger of that run (ledger=plan.ledger(path), or ledger.merge(entries) of a "
            "checkpoint) before its state"
        )


def check_before(plan: PrivacyPlan, ledger: Ledger, stream: str) -> None:
    """Refuse a step until the release that the plan has before it is on the ledger, in ``stream``.

    Guarantee: the ledger's epsilon includes the release before the first step, once for each
    oracle that has one, also where several share the ledger.

    Assumptions: the release was made with the plan's sigma, on all units; an oracle that resumes
    another's state continues its training.

    Proof: no step is taken while the ledger has no entry under the oracle's own name, at the plan's
    sigma or less and q = 1.
    """
    sigma = plan.released_before
    if not plan.private or sigma is None:
        return
    entry = ledger.entry(stream, 0)
    if entry is None or entry["noise_multiplier"] > sigma or entry["sampling_rate"] < 1:
        raise PlanViolationError(
            f"the plan's release before the first step (sigma {sigma:g}) is not on the ledger: "
            f"charge it with oracle.ledger.charge(oracle.before, 0, noise_multiplier={sigma:g}, "
            "sampling_rate=1.0, unit=oracle.plan.unit), or leave released_before out of the plan"
        )


def check_unchanged(names: list[str], parameters: Iterable[str]) -> None:
    """Refuse a model whose trainable parameters are not ``names`` any more."""
    if list(parameters) != names:
        raise ArgumentError(
            "the model's trainable parameters are not those that the oracle was made for: "
            "make a new oracle after freezing or unfreezing, with the same ledger"
        )


def check_interceptable(model: nn.Module, loss: object) -> None:
    """Refuse compiled and scripted code, and trained parameters that are complex.

    Guarantee: no module of the model or the loss hides its operations from the engines, or keeps
    tensors of records in compiled code.

    Assumptions: a function under ``torch.compile`` that forward calls is not seen here; what it
    keeps is refused after the pass.

    Proof: every module is looked at, before anything runs.

    Example:
        >>> check_interceptable(torch.jit.script(nn.Linear(2, 2)), None)
        Traceback (most recent call last):
        ...
        dpbam.errors.ArgumentError: the model is TorchScript (RecursiveScriptModule), whose ...
    """
    roots = {"the model": model} | ({"the loss": loss} if isinstance(loss, nn.Module) else {})
    for root, tree in roots.items():
        for path, module in tree.named_modules():
            where = f"layer {path!r} of {root}" if path else root
            if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
                raise ArgumentError(
                    f"{where} is compiled, which hides its operations from the engines and is no "
                    "faster there: compile nothing (of compiled = torch.compile(model) pass "
                    "model, or compiled._orig_mod)"
                )
            if isinstance(module, torch.jit.ScriptModule):
                raise ArgumentError(
                    f"{where} is TorchScript ({type(module).__name__}), whose operations cannot be "
                    "intercepted: pass the module that torch.jit.script or torch.jit.trace was "
                    "given"
                )
    if isinstance(loss, torch.jit.ScriptFunction):
        raise ArgumentError(
            "the loss is TorchScript, whose operations cannot be intercepted: pass the function "
            "that torch.jit.script was given"
        )
    for name, parameter in trainable(model).items():
        if parameter.is_complex():
            raise ArgumentError(
                f"parameter {name} is complex, and clipping and noise are for real numbers: keep "
                "real and imaginary part in a real parameter, and use torch.view_as_complex of it"
            )


def check_ascent(plan: PrivacyPlan, method: Method) -> None:
    """Refuse an ascent along the batch gradient under a private plan."""
    if plan.private:
        raise ArgumentError(
            f"{method.name} asks for the batch gradient, which has no noise: ascend along the "
            "previous private gradient, or use PrivacyPlan.non_private(...)"
        )


def check_units(plan: PrivacyPlan, units: Tensor | None, ranks: Ranks) -> None:
    """Refuse rows without units where the unit is not the record, and units of another rank.

    Guarantee: a unit's rows are on one rank, and are counted as one unit.

    Assumptions: owners are named rightly.

    Proof: ``UnitShare``'s shares are a partition of the units.
    """
    if units is None and plan.unit != "record":
        raise ArgumentError(
            f"the plan's unit is the {plan.unit}: pass units, the {plan.unit} of each row, or "
            "every row would count as one"
        )
    if ranks.world == 1:
        return
    if units is None or not ranks.share.owns(torch.as_tensor(units).cpu().numpy()).all():
        raise ArgumentError(
            f"rank {ranks.rank} of {ranks.world} takes its own units only, or one could count "
            "twice: draw with oracle.batches(dataset), and pass its units"
        )


def check_alike(ranks: Ranks, observers: int, releases: int) -> None:
    """Refuse an observer, or statistics, that only some of the ranks have."""
    if {observers, releases} - {0, ranks.world}:
        raise ArgumentError(
            f"of {ranks.world} ranks {observers} have an observer and {releases} have statistics: "
            "make the oracle with the same ones on every rank"
        )


def check_made(ranks: Ranks, plan: PrivacyPlan, **parts: object) -> None:
    """Refuse an oracle that was made of other parts, or with other options, on some rank.

    Guarantee: every slice of the gradient has the noise that rank 0 charges.

    Assumptions: a class of the user's own has the same code on every rank, and its options are
    attributes of plain values or tensors (``_described``).

    Proof: plan, noise, clipping, method and filter of each rank are compared with those of rank 0,
    with their options, at construction.
    """
    own = {"plan": repr(plan), **{kind: _described(part) for kind, part in parts.items()}}
    leaders, *others = ranks.collected(own)
    for rank, other in enumerate(others, 1):
        for kind in own:
            if other[kind] != leaders[kind]:
                raise ArgumentError(
                    f"rank {rank} has another {kind} than rank 0, which charges the steps: make "
                    "the oracle with the same one, and the same options, on every rank"
                )


def check_deviations(ranks: Ranks, deviations: Mapping[str, float]) -> None:
    """Refuse statistics with other noise on some rank, such as that of a smaller bound.

    Guarantee: every slice of the statistics has the noise that rank 0 charges.

    Assumptions: what a unit adds to a statistic is bounded by its deviation over its sigma.

    Proof: the deviations of each rank are compared with those of rank 0 at every step, before it is
    charged; their sigmas are the plan's (:func:`check_parts`).
    """
    leaders, *others = ranks.collected(dict(deviations))
    for rank, other in enumerate(others, 1):
        if other != leaders:
            raise ArgumentError(
                f"rank {rank} adds noise of deviations {other} to the statistics, rank 0 of "
                f"{leaders}: make the statistics with the same options on every rank"
            )


def _described(part: object) -> str:
    """Name the class of a part of an oracle, and its attributes, for a comparison between ranks.

    Objects among the attributes count by their class, so that randomness, which ranks must not
    share, is not compared.

    Example:
        >>> from dpbam.privacy.clipping import FlatClipping
        >>> _described(FlatClipping(0.5))
        "dpbam.privacy.clipping.FlatClipping({'clip_norm': '0.5'})"
    """
    options = {name: _plain(value) for name, value in sorted(getattr(part, "__dict__", {}).items())}
    return f"{type(part).__module__}.{type(part).__qualname__}({options})"


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, dict):
        return {repr(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Tensor):
        return digest({"": value})
    if isinstance(value, Method):  # inside another
        return _described(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def check_factors(clipping: Clipping, measured: list[Tensor]) -> None:
    """Refuse factors that let a unit move the sum by more than the clipping's sensitivity.

    For each unit i, over the groups g and the extra coordinates k:

        sqrt(sum_g (f_gi |d_gi|)^2 + sum_k e_ki^2) <= sensitivity (1 + 1e-6),

    every f finite and not negative, and 0 where the norm is not finite. It synchronises with the
    device once for all physical batches of a step. It cannot detect factors that depend on other
    units of the batch.

    Guarantee: with these norms every unit's contribution is within the sensitivity, up to the
    stated rounding; else nothing is charged or released.

    Assumptions: the engine's norms are right (tests compare engines), and a factor depends on its
    own unit; it is called before the step's sum is released or charged.

    Proof: it is the inequality itself.

    Args:
        clipping: what computed the factors.
        measured: what :func:`contributions` returned for each physical batch.

    Example:
        >>> from dpbam.privacy.clipping import FlatClipping
        >>> flat, norms = FlatClipping(1.0), torch.tensor([[4.0]])
        >>> check_factors(flat, [contributions(flat, norms, torch.tensor([[0.25]]))])
        >>> check_factors(flat, [contributions(flat, norms, torch.tensor([[1.0]]))])
        Traceback (most recent call last):
        ...
        dpbam.checks.PlanViolationError: FlatClipping lets a unit through with norm 4, ...
    """
    if not measured:
        return
    unsound, exceeding, largest = torch.stack(measured).amax(0).tolist()
    name = type(clipping).__name__
    if unsound:
        raise PlanViolationError(
            f"{name} returned a factor that is negative, not finite, or not 0 for a norm that is "
            "not finite: a factor is a finite number from 0 on, and a unit with NaN or infinity "
            "in it contributes nothing"
        )
    if exceeding:
        raise PlanViolationError(
            f"{name} lets a unit through with norm {largest:.6g}, above its sensitivity "
            f"{clipping.sensitivity:g}, to which the noise is calibrated: factor times norm, over "
            "all groups and extra coordinates together, must be at most the sensitivity"
        )


def contributions(
    clipping: Clipping, norms: Tensor, factors: Tensor, extra: Tensor | None = None
) -> Tensor:
    """Return what :func:`check_factors` decides by, on the device, without waiting for it: [3].

    Whether a factor is unsound, whether a unit exceeds the sensitivity, and the largest norm that a
    unit contributes.

    Guarantee: none by itself; :func:`check_factors` decides by it.

    Assumptions: as for :func:`check_factors`.

    Proof: that of :func:`check_factors`; the maximum over physical batches loses no violation.

    Args:
        clipping: what computed the factors.
        norms: [G, U] of G clipping groups and U units. Not to be shared.
        factors: [G, U].
        extra: [K, U], the clipping's extra coordinates; None: it has none.
    """
    name = type(clipping).__name__
    if factors.shape != norms.shape:
        raise PlanViolationError(
            f"{name} returned factors of shape {tuple(factors.shape)} for norms of shape "
            f"{tuple(norms.shape)}: return one factor per group and unit"
        )
    wide = torch.float32 if norms.device.type == "mps" else torch.float64  # mps has no float64
    finite = norms.isfinite()
    joint = factors.to(wide) * torch.where(finite, norms, 0.0).to(wide)  # [G, U]
    if extra is not None:
        if extra.shape != (clipping.coordinates, norms.shape[1]):
            raise PlanViolationError(
                f"{name} returned extra coordinates of shape {tuple(extra.shape)}, not "
                f"({clipping.coordinates}, {norms.shape[1]}): return one row per coordinate"
            )
        joint = torch.cat([joint, extra.to(wide)])  # [G + K, U]
    if not norms.shape[1]:
        return torch.zeros(3, dtype=wide, device=norms.device)
    lengths = joint.norm(dim=0)  # [U]
    sound = factors.isfinite() & (factors >= 0) & (finite | (factors == 0))
    within = lengths <= clipping.sensitivity * (1 + ROUNDING)  # False for NaN
    return torch.stack([(~sound.all()).to(wide), (~within.all()).to(wide), lengths.max()])


def check_groups(groups: Mapping[str, int], names: list[str]) -> None:
    """Refuse clipping groups that are not 0 .. G - 1, with every trained parameter in one of them.

    Guarantee: every trained parameter is part of the norm that bounds it.

    Assumptions: the engine's norms have a row for each of the groups 0 .. G - 1.

    Proof: the groups are a partition of the names.
    """
    found = set(groups.values())
    if set(groups) != set(names) or found != set(range(len(found))):
        raise ArgumentError(
            "the clipping's groups must give each of the trained parameters one of the numbers "
            f"0 .. G - 1, and leave none of these numbers out; got {dict(groups)}"
        )


def check_coordinates(clipping: Clipping) -> None:
    """Refuse a clipping whose ``extra`` or ``update`` would never be called.

    Guarantee: a clipping that adapts by released coordinates has them, or is refused before a step.

    Assumptions: the number of coordinates is known when the oracle is made.

    Proof: the oracle calls both where ``coordinates`` is positive, which is compared with what is
    overridden.
    """
    for part in ("extra", "update"):
        function = getattr(getattr(clipping, part), "__func__", None)
        if not clipping.coordinates and function is not getattr(Clipping, part):
            raise ArgumentError(
                f"{type(clipping).__name__} overrides {part} and has no extra coordinates, so that "
                "it would never be called: set coordinates to their number"
            )


def check_fixed(clipping: Clipping, sensitivity: float) -> None:
    """Refuse a sensitivity that is not what it was before the units of this step were seen.

    Guarantee: the noise of a step, which is public, does not follow from that step's norms.

    Assumptions: :meth:`Clipping.update`, which adapts, is given only what was released.

    Proof: the noise's deviation is sigma times the value that was there before the units were.
    """
    if clipping.sensitivity != sensitivity:
        raise PlanViolationError(
            f"the sensitivity of {type(clipping).__name__} was {sensitivity:g} before this step's "
            f"units were clipped and is {clipping.sensitivity:g} after: a norm that follows the "
            "units without noise reveals them; adapt it in update, to extra coordinates"
        )


def check_parts(
    plan: PrivacyPlan,
    method: Method,
    clipping: Clipping,
    release: JointRelease | None,
    *,
    filtered: bool = False,
) -> None:
    """Refuse parts of an oracle that do not fit together; ``filtered``: a filter was given."""
    check_declared(method)
    check_coordinates(clipping)
    if filtered and method.filter() is not None:
        raise ArgumentError(f"{method.name} has a filter of its own: leave filter out")
    if plan.private and not method.private:
        raise ArgumentError(
            f"{method.name} uses the batch without noise, so it cannot be private: "
            "use it with PrivacyPlan.non_private(...)"
        )
    joint = () if release is None else release.noise_multipliers
    if joint != plan.joint_noise_multipliers:
        raise ArgumentError(
            f"the plan has joint_noise_multipliers={plan.joint_noise_multipliers} but the "
            f"release adds {joint}: make the plan with joint_noise_multipliers="
            "release.noise_multipliers"
        )
    if clipping.sensitivity != plan.clip_norm:
        raise ArgumentError(
            f"the clipping's sensitivity {clipping.sensitivity:g} is not the plan's "
            f"clip_norm {plan.clip_norm:g}: make both the same"
        )
