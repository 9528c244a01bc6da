"""Torch's batching rules against a loop over rows, for every operator of torch's own database.

The engines that use vmap depend on these rules: a rule that mixes rows, or computes something else,
would break them without an error. The rows differ, so that a rule which mixes them is seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

SAMPLES = 3  # inputs of the database per operator
SCALES = (1.0, 0.875, 0.625)  # the rows are these multiples of an input
AGREES, REFUSED = "agrees", "refused"
#: their results are memory that nothing has written to
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
                 "new_empty_strided"}  # fmt: skip
Case = tuple[Callable[..., list[Tensor]], list[Tensor]]


def operators() -> dict[str, Any]:
    """All entries of the database by name, variants included."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    return {f"{op.name} {op.variant_test_name}".strip(): op for op in op_db}


def outcome(op: Any) -> str:
    """``"agrees"``, ``"refused"`` if vmap runs none of the inputs, or the first difference."""
    compared = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call, batched in _cases(op):
            try:
                together = vmap(call, randomness="error")(*(t.clone() for t in batched))
                alone = [call(*(t[i].clone() for t in batched)) for i in range(len(SCALES))]
            except Exception:  # no rule, or not for these values: the engines refuse it as well
                continue
            if difference := _difference(together, alone):
                return difference
            compared += 1
    return AGREES if compared else REFUSED


def _cases(op: Any) -> Iterator[Case]:
    """The operator as a function of rows, with [rows, ...] for all its tensors or for the first."""
    wanted = (torch.float64, torch.float32, torch.complex128, torch.int64)
    dtype = next((t for t in wanted if t in op.supported_dtypes("cpu")), None)
    if dtype is None:
        return
    for _, sample in zip(range(SAMPLES), op.sample_inputs("cpu", dtype), strict=False):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [i for i, t in enumerate(leaves) if _plain(t)]
        for chosen in {tuple(tensors), tuple(tensors[:1])} - {()}:
            yield _called(op.op, leaves, spec, chosen), [_rows(leaves[i]) for i in chosen]


def _called(
    function: Callable[..., Any], leaves: list[Any], spec: Any, chosen: tuple[int, ...]
) -> Callable[..., list[Tensor]]:
    def call(*given: Tensor) -> list[Tensor]:
        filled = dict(enumerate(leaves)) | dict(zip(chosen, given, strict=True))
        first, args, kwargs = tree_unflatten(list(filled.values()), spec)
        return [t for t in tree_flatten(function(first, *args, **kwargs))[0] if _tensor(t)]

    return call


def _tensor(t: Any) -> bool:
    return isinstance(t, Tensor)


def _plain(t: Any) -> bool:
    return _tensor(t) and t.layout == torch.strided and t.dtype.itemsize > 1


def _rows(t: Tensor) -> Tensor:
    """[3, *shape]: multiples of t; whole numbers stay, since they are often indices."""
    t = t.detach()
    scales = SCALES if t.is_floating_point() or t.is_complex() else (1, 1, 1)
    return torch.stack([t * scale for scale in scales])


def _difference(together: list[Tensor], alone: list[list[Tensor]]) -> str | None:
    if len(together) != len(alone[0]):
        return f"{len(together)} results against {len(alone[0])}"
    for k, result in enumerate(together):
        try:
            wanted = torch.stack([row[k] for row in alone])
            torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
        except (AssertionError, RuntimeError) as reason:
            return f"result {k}: {str(reason).splitlines()[0]}"
    return None
