"""The bias lens: measures the bias of clipping within the training step itself.

While the oracle clips and sums, the lens computes from the same handles, per physical batch,

    own        sum_i d_i           the method's own unclipped gradient
    plain      sum_i g_i           where the directions are not the g_i themselves
    ascent     sum_i g_i / |g_i|   BAM only: mean_i cos(g_i, g_hat) = <ascent, g_hat> / (U |g_hat|)

The plain gradients are those at theta. Where theta is shifted for the step (DP-SAT, DiSK), the same
pass has them at the shifted theta only, so that g_hat takes a pass of its own.

It keeps a few vectors shaped like theta and one norm per unit; never batch x parameters. What it
sees is not protected by privacy: do not share it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dpbam import _validate
from dpbam.bias.record import BiasRecord, as_columns
from dpbam.bias.tally import Tally
from dpbam.methods import Penalised, form_of
from dpbam.observers import Observation, StepFacts
from dpbam.params import Params

Sink = Callable[[BiasRecord], None]


class BiasLens:
    """Measures the bias of clipping; one of an oracle's ``observers``.

    Args:
        sink: called with each record, for example to append it to a file; None appends it to
            :attr:`records`.
        every: N, to measure the steps 0, N, 2N, ...
        eta: compute a from the eta_i where the logical batch is one physical batch, at the cost of
            a forward pass of the layers; else a = <g_clip, r> / |r|^2.
        plain: for methods that shift theta (DP-SAT, SAM, DiSK), compute g_hat at the unshifted
            theta by a pass of its own, which costs about as much as a step of DP-SGD. Without it
            there is neither a reading against g_hat nor an alignment. Other methods get g_hat from
            the same pass.
        layers: measure norms and bias of each layer, too.

    Example:
        >>> import torch
        >>> from dpbam import BAM, PrivacyPlan, PrivateGradientOracle
        >>> model, lens = torch.nn.Linear(2, 2), BiasLens()
        >>> plan = PrivacyPlan(n=100, batch_size=9, steps=1, noise_multiplier=1.0, delta=1e-3,
        ...                    clip_norm=0.1)
        >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
        >>> oracle = PrivateGradientOracle(model, loss, plan, BAM(0.02), observers=lens, seed=0)
        >>> data = (torch.randn(100, 2), torch.zeros(100, dtype=torch.long))
        >>> for batch in oracle.batches(data):
        ...     oracle.backward(*batch)
        >>> [record] = lens.records
        >>> record.non_private_against_own.bias <= record.non_private_lemma2_bound
        True
    """

    def __init__(
        self,
        sink: Sink | None = None,
        *,
        every: int = 1,
        eta: bool = False,
        plain: bool = False,
        layers: bool = True,
    ) -> None:
        self.every = _validate.count("every", every)
        self.eta, self.plain, self.layers = eta, plain, layers
        self.records: list[BiasRecord] = []
        self.wants_plain = False
        self._sink = sink or self.records.append
        self._tally: Tally | None = None

    def to_frame(self) -> Any:
        """Return :attr:`records` as columns, one row per measured step: **not to be shared**.

        A ``pandas.DataFrame`` where pandas is installed, else a dict of lists. Nested fields have
        their names joined by a slash, for example ``non_private_against_own/bias``.
        """
        columns = as_columns(self.records)
        if find_spec("pandas") is None:
            return columns
        return import_module("pandas").DataFrame(columns)

    def begin(self, facts: StepFacts) -> bool:
        if facts.step % self.every:
            return False
        form = form_of(facts.method, facts.lam)
        own_is_plain = form == Penalised(0.0) and facts.shift is None  # d_i = g_i(theta)
        # a shifted pass has no gradient at theta to offer
        self.wants_plain = facts.shift is None and not own_is_plain
        self._tally = Tally(facts, form, own_is_plain=own_is_plain)
        if facts.shift is not None and self.plain:
            self._tally.plain = facts.batch_gradient()
        return True

    def observe(self, batch: Observation) -> None:
        assert self._tally is not None
        self._tally.add(batch, eta=self.eta, layers=self.layers)

    def finish(self, clipped: Params, released: Params) -> None:
        assert self._tally is not None
        record = self._tally.record(clipped, released)
        self._tally = None
        self._sink(record)
