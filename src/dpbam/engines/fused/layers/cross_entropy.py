"""Cross entropy of class numbers for all rows at once.

Under vmap torch runs it as a Python decomposition of some ten operations, as long as the rest of a
small model's forward pass. The batched kernel gives each row the same number.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.batching import is_batched
from dpbam.engines.fused.rules import Call, rule
from dpbam.engines.fused.tape import Capture

_NAMES = "input target weight size_average ignore_index reduce reduction label_smoothing"


@rule(F.cross_entropy, always=True)
def _cross_entropy(capture: Capture, call: Call) -> Any:
    arguments = call.bind(_NAMES)
    x, target = arguments["input"], arguments["target"]
    usual = (
        arguments["weight"] is None
        and arguments["size_average"] is arguments["reduce"] is None
        and arguments["reduction"] == "none"
        and not arguments["label_smoothing"]
    )
    # x [1, C, ...] and class numbers [1, ...]: in all other cases torch decides what is meant
    if not (usual and x.ndim >= 2 and x.ndim == target.ndim + 1 and x.shape[0] == 1):
        return call.run()
    if not (is_batched(x) and is_batched(target)) or target.is_floating_point():
        return call.run()
    ignored = -100 if arguments["ignore_index"] is None else arguments["ignore_index"]

    def losses(x: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(
            x.flatten(0, 1), target.flatten(0, 1), ignore_index=ignored, reduction="none"
        )
        return each.unsqueeze(1)

    return capture.all_rows(losses, x, target)
