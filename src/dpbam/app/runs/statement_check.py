"""Whether a run's statement is what the run's other files say; asked before it is shown or copied.

``dpbam audit`` makes these checks and more, such as those of a second accountant.
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
import warnings
from typing import TYPE_CHECKING

from dpbam._version import __version__
from dpbam.app.runs.card import listed, model_card
from dpbam.app.runs.config import RunConfig, read_file
from dpbam.app.runs.documents import ModelFacts
from dpbam.app.runs.files import FORMAT
from dpbam.app.runs.folder import MARK
from dpbam.app.runs.run import RunError
from dpbam.app.runs.statement import attacks, evaluated_on, settled
from dpbam.app.runs.statement_text import to_html, to_markdown
from dpbam.privacy import accounting
from dpbam.privacy.ledger import Ledger

if TYPE_CHECKING:
    from pathlib import Path

    from dpbam.app.runs.documents import RunFacts, Statement
    from dpbam.app.runs.folder import RunFolder

#: Of steps on a ledger: a run has one, and a few more if its settings were changed. Each kind takes
#: an accountant seconds, which a folder from elsewhere may not ask for without end.
MOST_KINDS = 20
_OF_A_SEARCH = {"tuned_on", "may_be_published", "must_not_be_published"}  # in a trial's statement
_PRIVACY = "\n## Privacy\n"  # the card's last part; before it an operator may add figures
# a promise with a figure in one line or near by in the next ones, or the beginning of a comment,
# which could hide the part on privacy
_FIGURE = re.compile(
    r"(epsilon|\beps\b|\u03b5|privacy loss|privacy budget)(.*\d|\D{0,60}\d)"
    r"|\d\s*\)\s*-?\s*(differential|dp\b)|<!--",
    re.IGNORECASE,
)
_MODEL = ModelFacts(  # any: that part does not depend on it
    format=FORMAT, dpbam="", model="", model_options={}, image_shape=[1, 1, 1], task="single-label",
    class_names=[], input="", method="",
)  # fmt: skip


def check_statement(folder: RunFolder, statement: Statement) -> None:
    """Refuse a statement that the run's ledger, settings, texts or model card contradict.

    A folder without a ledger (what was published of a run, or the best of a search) has only the
    texts and the card to compare with.

    Raises:
        RunError: naming what differs.
    """
    odd = []
    if folder.ledger.exists() and folder.facts.exists():
        odd = _fields_unlike_the_run(folder, statement)
    if statement.dpbam == __version__:  # the texts of another have other words
        agreement = text_agreement(folder, statement)
        odd += [path.name for path, agrees in agreement.items() if path.exists() and not agrees]
    if odd:
        raise RunError(
            f"{folder.statement_json} disagrees with the other files of the run about "
            f"{', '.join(odd)}, so one of them was changed: restore it from a backup, or let dpbam "
            "train --resume write the statement again; dpbam audit shows every check"
        )


def _fields_unlike_the_run(folder: RunFolder, statement: Statement) -> list[str]:
    """Return the names of the statement's fields that do not follow from ledger and settings.

    Of a statement that another version wrote, whose words may differ, only numbers count.
    """
    facts = folder.read_facts()
    config = RunConfig.from_mapping(read_file(folder.config))
    ledger = Ledger(facts.delta, config.accountant, folder.ledger)
    charges = ledger.charges()
    if len(charges) > MOST_KINDS:
        raise RunError(
            f"{folder.ledger} has {len(charges)} kinds of steps (sigma, q), which no run has: "
            "restore it from a backup"
        )
    odd = fields_unlike_the_settings(folder, statement, config, facts)
    if statement.dpbam == __version__:
        times = folder.count_evaluations(seeded=config.seed is not None)
        if statement.evaluated_on != evaluated_on(config, facts.unit, facts.test, times):
            odd.append("evaluated_on")
    else:
        odd = [name for name in odd if isinstance(getattr(statement, name), int | float)]
    if statement.run != facts.run:
        odd.append("run")
    if not math.isclose(statement.epsilon, ledger.epsilon(), rel_tol=1e-6):
        odd.append("epsilon")
    if statement.charged_steps != len(ledger):
        odd.append("charged_steps")
    same_accountant = statement.accountant == accounting.accountant_version(config.accountant)
    if same_accountant and statement.trade_off != attacks(charges, config.accountant):
        odd.append("trade_off")
    return odd


def fields_unlike_the_settings(
    folder: RunFolder, statement: Statement, config: RunConfig, facts: RunFacts
) -> list[str]:
    """Return the names of the fields that are not as the settings determine them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about delta: it was said when the run began
        plan = config.plan(facts.n, noise_multiplier=facts.noise_multiplier, unit=facts.unit)
    expected = dict(settled(config, plan, facts.public_weights))
    if (folder.path / MARK).exists():
        expected = {k: v for k, v in expected.items() if k not in _OF_A_SEARCH}
        expected["may_be_published"] = []
        expected["may_be_published_if_the_test_records_are_not_sensitive"] = []
    odd = [name for name, value in expected.items() if getattr(statement, name) != value]
    if not statement.accountant.endswith(f", {config.accountant.upper()}"):
        odd.append("accountant")
    return sorted(odd)


def text_agreement(folder: RunFolder, statement: Statement) -> dict[Path, bool]:
    """Return whether Markdown, HTML and model card have the content of the JSON file."""
    text = _read(folder.statement)
    before, _, privacy = _read(folder.card).partition(_PRIVACY)
    expected = model_card(statement, _MODEL, None).partition(_PRIVACY)[2]
    shown = _as_a_reader_sees(before)
    if folder.model.is_file():
        names = listed(ModelFacts.read(folder.model).class_names)
        if _FIGURE.search(_as_a_reader_sees(names)):  # a class that is named as one
            shown = _as_a_reader_sees(before.replace(names, "", 1))
    return {
        folder.statement: text == to_markdown(statement),
        folder.statement_html: _read(folder.statement_html) == to_html(text),
        folder.card: privacy == expected and not _FIGURE.search(shown),
    }


def _as_a_reader_sees(text: str) -> str:
    """Return the letters of a text, of any width, for its entities too."""
    return unicodedata.normalize("NFKC", html.unescape(text))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
