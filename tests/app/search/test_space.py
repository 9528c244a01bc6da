from __future__ import annotations

from pathlib import Path

import pytest

from dpbam.app.runs import ConfigError
from dpbam.app.search.space import Domain, parse_space


def test_whole_numbers_stay_whole() -> None:
    assert Domain.parse("batch_size", "64..256").whole
    assert Domain.parse("augment_multiplicity", "0..4").end(-1) == 4
    assert not Domain.parse("epochs", "5..20").whole


def test_choices_are_read_as_toml_else_as_text() -> None:
    assert Domain.parse("optimizer", "sgd, nadam").choices == ("sgd", "nadam")
    assert Domain.parse("clip_norm", "0.5,1").choices == (0.5, 1)


def test_texts_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text('lr = "1e-4..1e-2:log"\nbatch_size = [64, 128]\n')
    space = parse_space(["lr=0.1..0.2", "clip-norm=1,2"], file)
    assert list(space) == ["lr", "batch_size", "clip_norm"]
    assert space["lr"].low == 0.1
    assert space["batch_size"].choices == (64, 128)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr", "must be like"),
        ("lr=abc..1", "must vary like"),
        ("lr=1..0.1", "must rise"),
        ("lr=0..1:log", "above 0"),
        ("lr=1..2:lin", ":log"),
        ("lr=-1..1", "lr must be"),
        ("optimizer=sdg", "did you mean 'sgd'"),
        ("seed=1,2", "cannot be varied"),
        ("momentm=0..1", "did you mean 'momentum'"),
    ],
)
def test_wrong_texts_are_refused_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_space([text])
