"""A thing is added by one entry: the toys here are registered, and nothing else is changed."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dpbam import catalogue
from dpbam.app.cli import main
from dpbam.app.report.records import read_run
from dpbam.app.runs import ConfigError, RunConfig, execute
from dpbam.app.search.search import Search, parse_space
from dpbam.catalogue import CLIPPINGS, COMMANDS, ENCODERS, FILTERS, METHODS, MODELS, TASKS, Kind
from dpbam.errors import ArgumentError
from dpbam.filters import Filter
from dpbam.methods import DPSGD, Method
from dpbam.nn.encoders import _family
from dpbam.privacy.clipping import FlatClipping
from dpbam.tasks.scores import Compared, metric_label
from dpbam.tasks.single_label import SingleLabel

KINDS = [kind for kind in vars(catalogue).values() if isinstance(kind, Kind)]
TINY: dict[str, Any] = {
    "data": "digits", "epsilon": 3.0, "epochs": 0.2, "batch_size": 64, "seed": 0, "model": "mlp",
    "num_workers": 0, "device": "cpu",
}  # fmt: skip


class ToyMethod(DPSGD):
    name = "toy"


class ToyClipping(FlatClipping):
    name = "toy"


class ToyFilter(Filter):
    name = "toy"

    def apply(self, gradient: Any) -> Any:
        return {name: 0.5 * g for name, g in gradient.items()}


class ToyNet(nn.Module):
    def __init__(self, in_channels: int, num_classes: int, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).mean(dim=(2, 3)))


def target(cls: type) -> str:
    return f"{__name__}:{cls.__name__}"


@contextmanager
def added(kind: Kind[Any], entry: Any) -> Iterator[None]:
    kind.register(entry)
    try:
        yield
    finally:
        kind.remove(entry.name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_every_target_exists(kind: Kind[Any]) -> None:
    for entry in kind.values():
        if entry.target:
            assert entry.load() is not None


def test_entries_of_methods_agree_with_their_classes() -> None:
    for name, entry in METHODS.items():
        cls = entry.load()
        assert issubclass(cls, Method)
        assert (cls.name, cls.private) == (name, entry.private)
        assert (entry.lam is not None) == ("lam" in inspect.signature(cls).parameters)


def help_all(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["train", "--help-all"]) == 0
    return " ".join(capsys.readouterr().out.split())


PARTS = {
    "method": (METHODS, catalogue.Method("toy", target(ToyMethod), "tests", label="TOY")),
    "clipping": (CLIPPINGS, catalogue.Part("toy", target(ToyClipping), "tests")),
    "filter": (FILTERS, catalogue.Part("toy", target(ToyFilter), "tests")),
}


@pytest.mark.parametrize("what", PARTS)
def test_a_part_is_added_by_one_entry(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, entry = PARTS[what]
    with pytest.raises(ConfigError, match=f"{what} 'toy' is unknown"):
        RunConfig(**TINY, **{what: "toy"})
    with added(kind, entry):
        assert "or toy" in help_all(capsys)
        assert main(["methods"]) == 0
        assert "toy" in capsys.readouterr().out
        run = execute(RunConfig(**TINY, **{what: "toy"}), tmp_path / "run").out
        statement = json.loads((run / "privacy-statement.json").read_text())
        assert statement[what] == "toy"
        # a plug-in is code that dpbam does not vouch for, whatever its name
        assert f"{what} toy ({entry.target})" in statement["own_code"]
        found = read_run(run)
        assert found.config[what] == "toy"
        if what == "method":
            assert found.method == "TOY"
    assert "toy" not in kind


def test_a_search_takes_a_method_that_was_added() -> None:
    kind, entry = PARTS["method"]
    space = parse_space(["lr=1e-3..1e-1:log"])
    with added(kind, entry):
        search = Search(settings={**TINY, "method": "toy"}, space=space, pay="public", trials=2)
        assert search.end_config(0).method == "toy"


def test_a_model_is_added_by_one_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with added(MODELS, catalogue.Model("toy", target(ToyNet))):
        assert "toy" in help_all(capsys)
        config = RunConfig(**{**TINY, "model": "toy", "model_options": {"width": 3}})
        run = execute(config, tmp_path / "run").out
        statement = json.loads((run / "privacy-statement.json").read_text())
        assert f"made by toy ({target(ToyNet)})" in statement["initial_weights"]
        assert read_run(run).config["model"] == "toy"
        assert main(["evaluate", str(run), "--json"]) == 0
        assert "accuracy" in json.loads(capsys.readouterr().out)["scores"]


class ToyTask(SingleLabel):
    """Classes in an order: a record also scores how far its prediction is off."""

    name, metric = "toy-order", "closeness"
    words = replace(SingleLabel.words, gives="a grade among {names}")

    def scores(self, summaries: Any, targets: Any) -> dict[str, float]:
        off = abs(summaries.argmax(1) - targets).mean()
        return {"closeness": 1 - float(off) / len(self.class_names)}

    def compared(self, summaries: Any, targets: Any) -> dict[str, Compared]:
        return {"closeness": Compared(self.scores(summaries, targets)["closeness"], 0.5, 0.0)}


def test_a_task_is_added_by_one_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = catalogue.Task("toy-order", target(ToyTask), metric_labels=(("closeness", "Close"),))
    with added(TASKS, entry):
        assert "toy-order" in help_all(capsys)
        run = execute(RunConfig(**TINY, task="toy-order"), tmp_path / "run").out
        assert "a grade among 0, 1, 2" in (run / "README.md").read_text()
        found = read_run(run)
        assert (found.metric, found.config["task"]) == ("closeness", "toy-order")
        assert metric_label("closeness") == "Close"
        assert main(["evaluate", str(run), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["task"], report["metric"]) == ("toy-order", "closeness")
        assert main(["evaluate", str(run)]) == 0
        assert "Close" in capsys.readouterr().out


def toy_command(name: str = "world") -> None:
    """Say hello.

    Examples:
        $ dpbam hello
    """
    print(f"hello {name}")


def test_a_command_is_added_by_one_entry(capsys: pytest.CaptureFixture[str]) -> None:
    entry = catalogue.Entry("hello", f"{__name__}:toy_command", "Say hello.")
    with added(COMMANDS, entry):
        assert main(["--help"]) == 0
        assert "Say hello." in capsys.readouterr().out
        assert main(["hello", "--name", "you"]) == 0
        assert capsys.readouterr().out == "hello you\n"
    assert main(["hello"]) == 2


def test_a_family_of_encoders_is_added_by_one_entry() -> None:
    entry = catalogue.Encoder("toy", "transformers:AutoModel", origin="tests")
    with pytest.raises(ArgumentError, match="toy"):
        _family({"model_type": "toy"}, "hf:toy")
    with added(ENCODERS, entry):
        assert _family({"model_type": "toy"}, "hf:toy") == entry


def test_a_name_is_given_once() -> None:
    with pytest.raises(ArgumentError, match="there is a method 'bam' already"):
        METHODS.register(catalogue.Method("bam", target(ToyMethod)))
    with pytest.raises(ArgumentError, match="built in and cannot be removed"):
        METHODS.remove("bam")


def fake_points(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> Kind[Any]:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    return Kind("method", "toy.methods")


PLUG_IN = catalogue.Method("plugged", target(ToyMethod))


def test_entry_points_are_loaded_as_others_code(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("plugged", f"{__name__}:PLUG_IN", "toy.methods")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    kind = fake_points(monkeypatch, point)
    assert list(kind) == ["plugged"]
    assert kind.is_own_code("plugged")
    assert kind.load("plugged") is ToyMethod


def test_a_plug_in_that_cannot_be_loaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = fake_points(monkeypatch, EntryPoint("x", "no_such_module:X", "toy.methods"))
    with pytest.raises(ArgumentError, match=r"plug-in no_such_module:X of toy\.methods cannot"):
        list(kind)
