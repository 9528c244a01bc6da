"""The fused engine: per-sample clipping and exact BAM with shared weights.

One forward pass, one backward pass for the plain gradients, one more for BAM, all batched: no
sample gets weights of its own. ``docs/engine.md`` has the mathematics; in short, with p = lambda:

1. forward, under :class:`~dpbam.engines.capture.Capture`: x and y of every use of a parameter;
2. backward of L: b = dL/dy, and for BAM h = dL/dx, still attached to the graph;
3. |g_u| from the pairs (x, b), differentiably; L_BAO = sum_u (L_u + p |g_u|);
4. backward of L_BAO: ybar at every y, hbar at every h;
5. d_u is a sum over uses of outer products, from (x, ybar) and (hbar, b); its norm without it;
6. the clipped sum: the ordinary weight gradients, with rows scaled by the clip factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from dpbam.engines import attention, conv_rules  # they register their rules
from dpbam.engines.ascent import Ascent
from dpbam.engines.base import CannotServe, Loss, PhysicalBatch, call_model, per_row_loss
from dpbam.engines.capture import Capture, Plan, Tape
from dpbam.engines.dropout import KeyedDropout
from dpbam.engines.layer_rules import RULES
from dpbam.engines.parameters import Plain, stores_for
from dpbam.engines.probe import Probed, probe
from dpbam.engines.sites import Flow, Fold, RecordSite, Site
from dpbam.engines.stores import Store
from dpbam.methods import BAM, DPSGD, Method
from dpbam.trees import Params, accumulation_dtype

__all__ = ["FusedEngine"]
_ = attention, conv_rules
_ANY_KERNEL = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class FusedEngine:
    """Directions without per-sample weights.

    Args:
        model: any module; only parameters that require a gradient are trained, the others are
            constants and cost nothing.
        loss: (output, targets) -> one value a row.
        groups: the clipping group of each trainable parameter; None puts all in one.
        memory_limit: bytes that one layer's norm may take, for Gram matrices or for per-unit
            gradients; above it the other way is taken, or some units at a time. None: 256 MiB.

    Example:
        >>> from dpbam.methods import BAM
        >>> model = nn.Linear(3, 2)
        >>> engine = FusedEngine(model, nn.CrossEntropyLoss(reduction="none"))
        >>> batch = PhysicalBatch(
        ...     torch.randn(4, 3), torch.tensor([0, 1, 0, 1]), torch.arange(4), 4, torch.ones(4),
        ...     torch.arange(4))
        >>> engine.directions(batch, BAM(0.1, exact=True), 0.1).norms().shape
        torch.Size([1, 4])
    """

    name = "fused"

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        groups: Mapping[str, int] | None = None,
        *,
        memory_limit: int | None = None,
    ) -> None:
        self._model, self._loss, self._given = model, loss, groups
        self._limit = 2**28 if memory_limit is None else memory_limit
        self._probed: Probed | None = None

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> FusedDirections:
        """The directions of every unit, unformed.

        Raises:
            CannotServe: for a method that is no gradient of L + p |g|, and for models that it
                cannot see through; the message says where.
        """
        penalty = method.norm_penalty(lam)
        if penalty is None:
            return self._ascended(batch, method, lam, plain=plain)
        tape, losses = self._captured(batch, twice=penalty > 0)
        total = (losses * batch.weights.to(losses.dtype)).sum()
        first = _backward(tape, total, self._plan, Fold(batch), twice=penalty > 0)
        first.flow.limit = self._limit
        if penalty == 0:
            own = self._made(stores_for(tape.sites, first.flow.detached(), None), batch)
            own.plain = own if plain else None
            return own
        below, bam, third = first.again(tape.sites, penalty)
        with torch.no_grad():
            made = self._made(stores_for(tape.sites, bam, third), batch)
        if plain:
            made.plain = self._made(below, batch)
            made.plain.know_squares([square.detach() for square in first.squares])
        return made

    def _ascended(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool
    ) -> FusedDirections:
        """g_u at theta + lam g_u / |g_u|: the paper's BAM."""
        if type(method) is not BAM:
            raise CannotServe(
                f"{method!r} is neither a gradient of L + p |g| nor BAM's ascent step"
            )
        below = self.directions(batch, DPSGD(), 0.0)
        with torch.no_grad():
            total = below.norms().square().sum(0)  # over the clipping groups
            steps = lam * _safe_root(total)[1]
            plan, fold = self._plan, Fold(batch)
            ascent = Ascent(below.stores, steps, fold, plan.inputs, plan.outputs)
        tape, losses = self._run(batch, plan, ascent=ascent)
        tape.check_untouched()
        loss = (losses * batch.weights.to(losses.dtype)).sum()
        second = _backward(tape, loss, plan, fold, twice=False)
        second.flow.limit = self._limit
        made = self._made(stores_for(tape.sites, second.flow.detached(), None), batch)
        made.plain = below if plain else None
        return made

    def _made(self, stores: list[Store], batch: PhysicalBatch) -> FusedDirections:
        return FusedDirections(stores, self._groups, batch.units, self._parameters)

    # --- the forward pass

    @property
    def _parameters(self) -> dict[str, Tensor]:
        return {n: p for n, p in self._model.named_parameters() if p.requires_grad}

    @property
    def _groups(self) -> Mapping[str, int]:
        return self._given or dict.fromkeys(self._parameters, 0)

    @property
    def _plan(self) -> Plan:
        assert self._probed is not None
        return self._probed.plan

    def _captured(self, batch: PhysicalBatch, *, twice: bool) -> tuple[Tape, Tensor]:
        """A forward pass whose plan is known, looking at the model first if it is new."""
        many = batch.unit.shape[0] > 1
        if self._probed is None or (many and not self._probed.thorough):
            self._probed = probe(self._run, batch)
        tape, losses = self._run(batch, self._plan, twice)
        if tape.signature != self._probed.signature:  # the model takes another path: look again
            self._probed = probe(self._run, batch)
            tape, losses = self._run(batch, self._plan, twice)
            if tape.signature != self._probed.signature:
                raise CannotServe("the forward pass takes other steps for other samples")
        tape.check_untouched()
        return tape, losses

    def _run(
        self,
        batch: PhysicalBatch,
        plan: Plan,
        twice: bool = False,
        ascent: Ascent | None = None,
    ) -> tuple[Tape, Tensor]:
        n = batch.unit.shape[0]
        leaves = [t for t in tree_leaves((batch.inputs, batch.targets)) if isinstance(t, Tensor)]
        capture = Capture(self._parameters, leaves, n, RULES, plan, twice=twice, ascent=ascent)
        kernels = [SDPBackend.MATH] if twice else _ANY_KERNEL
        with torch.enable_grad(), sdpa_kernel(kernels), KeyedDropout(batch.keys), capture:
            output = call_model(self._model, batch.inputs)
            losses = per_row_loss(self._loss, output, batch.targets, n)
        _check_captured(losses, self._parameters)
        return capture.tape, losses


class FusedDirections:
    """Directions d_1 .. d_U held as stores: see :mod:`dpbam.engines.stores`."""

    def __init__(
        self,
        stores: list[Store],
        groups: Mapping[str, int],
        units: int,
        parameters: Mapping[str, Tensor],
    ) -> None:
        self.stores, self._groups, self._units = stores, groups, units
        self._like = {
            n: p.detach().new_zeros((), dtype=accumulation_dtype(p.dtype)).expand(p.shape)
            for n, p in parameters.items()
        }
        self._zeros = next(iter(self._like.values())).new_zeros(units)
        self._squares: list[Tensor] | None = None  # |d_u|^2 by store: [U] each
        self.plain: FusedDirections | None = None

    @torch.no_grad()
    def norms(self) -> Tensor:
        """|d_u| by group: [G, U]."""
        squares = self._zeros.repeat(max(self._groups.values()) + 1, 1)
        for store, square in zip(self.stores, self._squared(), strict=True):
            squares[self._groups[store.name]] += square
        return squares.clamp_min(0).sqrt()

    def parameter_norms(self) -> dict[str, Tensor]:
        """The norm of d_u's entries by parameter: [U] each."""
        squares = dict.fromkeys(self._like, self._zeros)
        for store, square in zip(self.stores, self._squared(), strict=True):
            squares[store.name] = squares[store.name] + square
        return {name: square.clamp_min(0).sqrt() for name, square in squares.items()}

    def know_squares(self, squares: list[Tensor]) -> None:
        """Take |d_u|^2 by store, [U] each, from where they were needed before."""
        self._squares = squares

    @torch.no_grad()
    def _squared(self) -> list[Tensor]:
        """Once: measuring asks for norms again."""
        if self._squares is None:
            self._squares = [store.squared_norm() for store in self.stores]
        return self._squares

    @torch.no_grad()
    def weighted_sum(self, factors: Tensor) -> Params:
        """sum_u factors[g, u] d_u; a factor of 0 removes even a NaN."""
        total: Params = {}
        for store in self.stores:
            for name, part in store.weighted_sum(factors[self._groups[store.name]]).items():
                total[name] = total[name] + part if name in total else part
        return {n: total.get(n, like.clone()) for n, like in self._like.items()}

    @torch.no_grad()
    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """<d_u, vector>: [U]."""
        total = self._zeros
        for store in self.stores:
            total = total + store.inner(vector)
        return total


def _backward(tape: Tape, total: Tensor, plan: Plan, fold: Fold, *, twice: bool) -> _Backward:
    """Step 2: b at every y; for BAM also h at every x, all attached to the graph."""
    asked = [j for j, node in enumerate(tape.outputs) if not node.told]
    ys: list[Any] = [tape.outputs[j].edge for j in asked]
    moving = [k for k, node in enumerate(tape.inputs) if node.edge is not None] if twice else []
    xs: list[Any] = [tape.inputs[k].edge for k in moving]
    found = torch.autograd.grad(total, [*ys, *xs], create_graph=twice, allow_unused=True)
    flow = Flow(
        fold,
        plan.inputs,
        plan.outputs,
        [len(node.shape) for node in tape.outputs],
        x=[node.tensor for node in tape.inputs],  # type: ignore[misc]
        b=_spread(found[: len(ys)], asked, len(tape.outputs)),
    )
    h = {k: t for k, t in zip(moving, found[len(ys) :], strict=True) if t is not None}
    return _Backward(total, ys, asked, flow, h)


@dataclass
class _Backward:
    """What the first backward pass found, and the second one needs."""

    total: Tensor
    ys: list[Any]
    asked: list[int]  # their places on the tape
    flow: Flow
    h: dict[int, Tensor]
    squares: list[Tensor] = field(default_factory=list)  # |g_u|^2 by plain store, once known

    def again(self, sites: list[Site], penalty: float) -> tuple[list[Store], Flow, Plain]:
        """Steps 3 and 4: the plain stores, the BAM flow, and p / |g_u|."""
        below = stores_for(sites, self.flow, None)
        self.squares = [store.squared_norm() for store in below]  # [U] each
        squared = torch.stack(self.squares).sum(0)
        norm, inverse = _safe_root(squared)
        objective = self.total + penalty * norm.sum()  # sum_u L_u + p |g_u|
        moving = [k for k, h in self.h.items() if h.requires_grad]
        wanted = self.ys + [self.h[k] for k in moving]
        for site in sites:
            if isinstance(site, RecordSite):
                site.second = []
        found = torch.autograd.grad(objective, wanted, allow_unused=True)
        for site in sites:  # a layer that holds on to its own graph would never be freed
            if isinstance(site, RecordSite):
                site.plain = [told.detach() for told in site.plain]
        hbar = _spread(found[len(self.ys) :], moving, len(self.flow.x))
        ybar = _spread(found[: len(self.ys)], self.asked, len(self.flow.b))
        bam = replace(self.flow, ybar=ybar, hbar=hbar).detached()
        below = [store.detached() for store in below]
        return below, bam, Plain(below, penalty * inverse.detach())


def _spread(values: Sequence[Tensor | None], places: list[int], size: int) -> list[Tensor | None]:
    spread: list[Tensor | None] = [None] * size
    for place, value in zip(places, values, strict=True):
        spread[place] = value
    return spread


def _safe_root(squared: Tensor) -> tuple[Tensor, Tensor]:
    """(n, 1 / n), both 0 where n = 0: there the norm's subgradient is 0, never NaN."""
    positive = squared > 0
    root = torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)
    finite = squared.isnan() | positive
    return root + torch.where(finite, 0.0, squared * 0), torch.where(positive, 1 / root, 0.0)


def _check_captured(losses: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Refuse if a parameter reaches the loss on a way that no torch function showed."""
    if not losses.requires_grad:
        raise CannotServe("the loss depends on no trainable parameter")
    wanted = list(parameters.values())
    found = torch.autograd.grad(losses.sum(), wanted, allow_unused=True, retain_graph=True)
    for name, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            raise CannotServe(f"{name} is used by a function that torch cannot show (a custom one)")
