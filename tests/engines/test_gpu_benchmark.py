"""``benchmarks/gpu.py`` runs on the processor, and reports a device that disagrees."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu

ARGUMENTS = ["--device", "cpu", "--nets", "mlp-tiny", "--rounds", "1", "--scale", "1"]


def test_prints_a_row_per_net_with_time_kernels_reads_and_difference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu.main(ARGUMENTS) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("| mlp-tiny")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["mlp-tiny", "64"]
    assert all(re.fullmatch(r"[\d.]+ \([\d.]+, \d\)", cell) for cell in cells[3:6]), cells
    assert float(cells[-1]) == 0  # the same processor


def test_fails_where_the_device_disagrees(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directions, calls = gpu._directions, []

    def off(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        norms, total = directions(*arguments)  # type: ignore[arg-type]
        calls.append(1)
        return norms, total * (1 + 1e-2 * (len(calls) % 2 == 0))  # every second is the device's

    monkeypatch.setattr(gpu, "_directions", off)
    assert gpu.main(ARGUMENTS) == 1
    assert "mlp-tiny differs from the processor by 1.0e-02" in capsys.readouterr().out
