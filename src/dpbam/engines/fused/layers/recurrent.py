"""What recurrent layers compute entry by entry, for all rows at once."""

from __future__ import annotations

from typing import Any

from dpbam.engines.decomposed.recurrent import lstm_gates
from dpbam.engines.fused.rules import Call, rule
from dpbam.engines.fused.tape import Capture


@rule(lstm_gates, always=True)
def _lstm_gates(capture: Capture, call: Call) -> Any:
    return capture.all_rows(lstm_gates, *call.args)
