"""Whose a record is, where a data set says so: by columns, folder names or file names.

A promise per record is the weaker one where a person has several records, so it is never assumed:
a set that names owners is refused until the unit of privacy is named (``--unit``, also as
``--unit record``).

===================  =============================================================================
recognised           by
===================  =============================================================================
a person's column    a word of its name, in any case and spelling ("Patient ID", "patient_no",
                     "PatientID", "subjects", "MRN"), unless another word makes it an attribute
                     ("patient age"); one record per person or several
an identifier's      likewise ("study", "case id", "StudyInstanceUID", "exam"), if a value occurs
column               twice, unless another word names what many persons share ("site id")
a folder level       a person's word and a number (``patient_001``, ``sub-01``); or numbered
                     folders with several images each, unless named after a year or what is shared
class folders        most of them named by a person's word and a number
file names           a person's word and the same number in two of them (``person7_1.png``)
===================  =============================================================================

Not recognised: columns of other names, whatever their values (an age repeats too), and file names
that begin alike without such a word (``00012_003.png``). Their unit has to be named by who knows.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


_PERSONS = _set_of(
    """
    patient pacient paciente pazient paziente pasient subject participant person individual
    volunteer donor proband respondent client customer user owner member employee student resident
    speaker writer mrn ssn pid ptid patid subid usubjid subj ptno
    """
)
_SHORT = frozenset({"sub", "pat", "pt"})  # too short to mean a person without a number or an "id"
_NUMBERED_PERSONS = _PERSONS | _SHORT
_IDENTIFIERS = _set_of(
    """
    id ids uid uuid guid identifier pseudonym accession case study series exam examination visit
    encounter admission episode stay session specimen biopsy lesion slide scan volume video clip
    recording name key hash
    """
)
_ATTRIBUTES = _set_of(
    """
    age sex gender race ethnicity weight height size bmi position orientation history status birth
    dob date year country city smoker type group count
    """
)
_SHARED = _set_of(
    """
    site center centre hospital clinic institution department ward scanner device machine camera
    vendor manufacturer model class label category target finding split subset fold batch version
    dataset source modality view protocol region annotator reader rater radiologist doctor physician
    lab file image part set
    """
)
_SUFFIXES = ("id", "ids", "uid", "no", "nr", "num", "number", "key", "code", "name", "hash")
SINGLE = "--unit record to protect single records, which is weaker for owners of several"
_FOLDER = re.compile(r"folder\d+")
_YEAR = re.compile(r"(19|20)\d\d")


class Owner(NamedTuple):
    """What says whose a record is.

    Attributes:
        sign: it, in words that follow "the data set has".
        column: the column of the owners; None if there is none.
    """

    sign: str
    column: str | None


def find_owner(
    columns: Mapping[str, NDArray[Any]], class_names: Sequence[str], paths: Sequence[str]
) -> Owner | None:
    """Return the first sign of owners, persons before identifiers; None without one.

    Example:
        >>> find_owner({"Patient ID": np.array(["a", "b"])}, (), ()).column
        'Patient ID'
        >>> find_owner({"age": np.array([30, 30])}, ("ill", "well"), ("ill/1.png",)) is None
        True
    """
    for name in [*person_columns(columns), *filter(None, [_identifier(columns)])]:
        what = "the folder level" if _FOLDER.fullmatch(name) else "the column"
        return Owner(f"{what} {name!r}, which says whose each record is", name)
    numbered = [name for name in class_names if _is_numbered_person(name)]
    if 2 * len(numbered) > len(class_names):
        return Owner(f"classes that are named like persons, such as {numbered[0]!r}", None)
    stems = (PurePosixPath(path).stem for path in paths)
    repeated = Counter(filter(None, map(_person_in, stems))).most_common(1)
    if repeated and repeated[0][1] > 1:
        word = repeated[0][0][0]  # without the number: a message names no person
        return Owner(f"files whose names have {word!r} with the same number", None)
    return None


def person_columns(columns: Mapping[str, NDArray[Any]]) -> list[str]:
    """Return the columns that hold persons, by their names; of folder levels, by their values."""
    return [
        name
        for name, values in columns.items()
        if names_person(name)
        or (_FOLDER.fullmatch(name) and any(map(_is_numbered_person, set(values.tolist()))))
    ]


def names_person(name: str) -> bool:
    """Whether a column's name is a person's.

    Example:
        >>> [names_person(n) for n in ("Patient ID", "patientID", "PATIENTNO", "Patient Age")]
        [True, True, True, False]
    """
    words = _words(name)
    short = any(a in _SHORT and b in _SUFFIXES for a, b in pairwise(words))
    person = short or any(_means(word, _PERSONS) for word in words)
    return person and not _ATTRIBUTES.intersection(words)


def _identifier(columns: Mapping[str, NDArray[Any]]) -> str | None:
    """The first column of identifiers, or of numbered folders, in which a value occurs twice."""
    for name, values in columns.items():
        words = _words(name)
        named = any(_means(w, _IDENTIFIERS) for w in words) and not _names_shared(words)
        if (named or _are_numbered(name, values)) and len(np.unique(values)) < len(values):
            return name
    return None


def _are_numbered(name: str, values: NDArray[Any]) -> bool:
    if not _FOLDER.fullmatch(name):
        return False
    levels = {str(value) for value in values.tolist()} - {""}
    numbered = [level for level in levels if any(map(str.isdigit, level))]
    owned = [x for x in numbered if not _YEAR.fullmatch(x) and not _names_shared(_words(x))]
    return 2 * len(owned) > len(levels)


def _names_shared(words: Iterable[str]) -> bool:
    return any(_means(word, _SHARED) for word in words)


def _words(name: str) -> list[str]:
    """The words of a name in lower case: "StudyInstanceUID" has three, "p_12" has two."""
    plain = unicodedata.normalize("NFKC", name)
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", plain)
    return re.findall(r"[^\W\d_]+|\d+", apart.casefold())


def _means(word: str, words: frozenset[str] | set[str]) -> bool:
    """Whether a word is one of these, its plural, or one with "id" or "number" attached."""
    if word in words or (word.endswith("s") and word[:-1] in words):
        return True
    return any(word.endswith(end) and word[: -len(end)] in words for end in _SUFFIXES)


def _is_numbered_person(value: object) -> bool:
    return _person_in(str(value)) is not None


def _person_in(name: str) -> tuple[str, str] | None:
    """The person's word and the number after it, in the name of a folder or file."""
    words = _words(name)
    for word, number in pairwise(words):
        if number.isdigit() and _means(word, _NUMBERED_PERSONS):
            return word, number
    return None
