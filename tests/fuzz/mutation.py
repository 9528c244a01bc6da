"""Mutations of valid files: of bytes, and of the numbers and words in text."""

from __future__ import annotations

import re
from typing import NamedTuple

#: what readers have stumbled over
NASTY = (
    b"", b"0", b"-1", b"1e999", b"-1e999", b"NaN", b"Infinity", b"9" * 400, b"9" * 5000, b"null",
    b"true", b"[]", b"{}", b'""', b'"\\u0000"', b'"\\ud800"', b"[" * 100_000, b'{"a":' * 20_000,
    b"../../../etc/passwd", b"/etc/passwd", b"\x00", b"\xff\xfe", b"1e-320", b"0.5", b"1",
    b"<script>alert(1)</script>", b"2147483648", b"9223372036854775808", b"inf", b"nan",
    b"'''", b"[[a]]\n", b"= 3\n",
)  # fmt: skip
_TOKEN = re.compile(rb"-?\d[\d.e+-]*|\"[^\"]*\"|true|false|null|[A-Za-z_]\w*")


class Mutation(NamedTuple):
    """One change: which kind, where (a fraction of 2^32), with what."""

    kind: int
    place: int
    value: int


KINDS = 8


def mutate(content: bytes, mutations: list[Mutation]) -> bytes:
    """``content`` with the changes, one after the other."""
    for mutation in mutations:
        content = _KINDS[mutation.kind % KINDS](content, mutation.place, mutation.value)
    return content[: 2**22]


def _at(content: bytes, place: int) -> int:
    return place * (len(content) + 1) >> 32


def _flip(content: bytes, place: int, value: int) -> bytes:
    k = _at(content, place)
    return (
        content[:k] + bytes([content[k] ^ (1 << value % 8)]) + content[k + 1 :]
        if k < len(content)
        else content
    )


def _set(content: bytes, place: int, value: int) -> bytes:
    k = _at(content, place)
    return content[:k] + bytes([value % 256]) + content[k + 1 :]


def _cut(content: bytes, place: int, value: int) -> bytes:
    return content[: _at(content, place)]


def _drop(content: bytes, place: int, value: int) -> bytes:
    k = _at(content, place)
    return content[:k] + content[k + 1 + value % 16 :]


def _double(content: bytes, place: int, value: int) -> bytes:
    k = _at(content, place)
    return content[:k] + content[k : k + value % 64] + content[k:]


def _insert(content: bytes, place: int, value: int) -> bytes:
    k = _at(content, place)
    return content[:k] + NASTY[value % len(NASTY)] + content[k:]


def _token(content: bytes, place: int, value: int) -> bytes:
    """One number or word replaced by something nasty."""
    found = list(_TOKEN.finditer(content[:100_000]))
    if not found:
        return _insert(content, place, value)
    token = found[place * len(found) >> 32]
    return content[: token.start()] + NASTY[value % len(NASTY)] + content[token.end() :]


def _number(content: bytes, place: int, value: int) -> bytes:
    """Four bytes that may be a length or a shape."""
    k = _at(content, place)
    sizes = (0, 1, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, value % 2**32)
    return content[:k] + sizes[value % 7].to_bytes(4, "little") + content[k + 4 :]


_KINDS = (_flip, _set, _cut, _drop, _double, _insert, _token, _number)
