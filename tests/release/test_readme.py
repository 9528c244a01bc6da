"""The first page is short, and what it states is what the pages behind it and the libraries do."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import nn

from dpbam import PrivacyPlan, PrivateGradientOracle
from reproduce.defaults_page import by_present_rule

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
PICTURES = ("report.png", "statement.png")


def words(text: str) -> int:
    """The words of a page, without code, tags and addresses."""
    text = re.sub(r"```.*?```|<[^>]*>", "", text, flags=re.DOTALL)
    return len(re.findall(r"\w[\w.,%'-]*", re.sub(r"\]\([^)]*\)", "]", text)))


def test_the_page_is_read_in_two_minutes() -> None:
    assert words("one `two` [three](docs/four.md), five") == 4
    assert 300 < words(README) < 500


def test_its_pictures_are_there_and_small() -> None:
    for name in PICTURES:
        assert f'src="docs/assets/{name}"' in README
        picture = (ROOT / "docs" / "assets" / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < 100_000


def test_its_speed_is_the_recorded_one_over_all_nets() -> None:
    """Range, median and the count of nets on either side: none can be chosen."""
    records = json.loads((ROOT / "benchmarks/results/step.json").read_text())["rows"]
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    for row in records:
        if row["method"] != "dp-sgd" or row["ratio"] is None:
            continue
        if row["engine"] == "fused":
            ours[row["net"]] = row["ratio"]
        elif row["engine"].startswith("opacus-"):
            theirs[row["net"]] = min(row["ratio"], theirs.get(row["net"], math.inf))
    assert ours.keys() == theirs.keys()
    assert f"[over {len(ours)} nets]" in README
    assert f"| {spread(ours)} | {spread(theirs)} |" in README
    ahead = {net: theirs[net] / ours[net] for net in ours}
    lead = [ratio for ratio in ahead.values() if ratio > 1.1]
    behind = {net: 1 / ratio for net, ratio in ahead.items() if 1 / ratio > 1.1}
    names = ", ".join(f"`{net}`" for net in behind)
    assert (
        f"| on {len(lead)} of the {len(ours)}, by up to {max(lead):.1f} times "
        f"| on {len(behind)}, by up to {max(behind.values()):.1f} times: {names} |"
    ) in README


def spread(ratios: dict[str, float]) -> str:
    """Return the least and the largest ratio and the median, to three digits."""
    least, largest, median = (
        min(ratios.values()),
        max(ratios.values()),
        statistics.median(ratios.values()),
    )
    return f"{least:.3g} to {largest:.3g}, median {median:.3g}"


def test_its_accuracies_are_those_of_the_command_by_the_present_rule() -> None:
    lines = (ROOT / "reproduce" / "results" / "defaults-final.jsonl").read_text().splitlines()
    found: dict[tuple[str, float], list[float]] = {}
    for record in map(json.loads, lines):
        if record["data"] == "cifar10" and by_present_rule(record):
            place = record["model"], record["facts"]["epsilon"]
            found.setdefault(place, []).append(record["accuracy"])
    mean = {place: f"{fmean(accuracies):.1f}%" for place, accuracies in found.items()}
    plain = [mean["scattering", epsilon] for epsilon in (1.0, 8.0)]
    encoder = [mean["mobilenet_v3_small.onnx", epsilon] for epsilon in (1.0, 8.0)]
    text = " ".join(README.split())
    assert f"CIFAR-10 reached {plain[0]} at epsilon 1 and {plain[1]} at epsilon 8" in text
    assert f"with a small public ImageNet encoder, {' and '.join(encoder)} (" in text


def test_its_figures_of_bam_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    for figure in re.findall(r"[+-]\d\.\d\d\s\[[^]]*\]", README):
        assert " ".join(figure.split()) in page
    assert len(re.findall(r"[+-]\d\.\d\d\s\[", README)) == 2


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x - x.mean(0))


def test_a_layer_that_mixes_samples_sees_one_here_and_is_not_detected_there() -> None:
    opacus = pytest.importorskip("opacus", reason="opacus is in an extra")
    from opacus.validators import ModuleValidator

    torch.manual_seed(0)
    model, loss = Mixing(), nn.CrossEntropyLoss(reduction="none")
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 0])
    other = x.clone()
    other[2] += 5  # another record than the one that is looked at
    plan = PrivacyPlan(n=3, batch_size=3, steps=1, delta=1e-2, noise_multiplier=1.0, clip_norm=1.0)
    oracle = PrivateGradientOracle(model, loss, plan)
    ours = [oracle.per_sample(each, y).non_private_gradients for each in (x, other)]
    assert all(torch.equal(ours[0][name][0], ours[1][name][0]) for name in ours[0])

    assert ModuleValidator.validate(model) == []
    theirs = []
    for each in (x, other):
        wrapped = opacus.GradSampleModule(Mixing())
        wrapped._module.load_state_dict(model.state_dict())
        loss(wrapped(each), y).sum().backward()
        theirs.append(wrapped._module.layer.weight.grad_sample[0])
    assert not torch.allclose(*theirs)
