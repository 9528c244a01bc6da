r"""Formulas: LaTeX in the page, MathML on the site.

Every current browser shows MathML by itself, so a formula needs no script, no font file and no
network. ``$...$`` stands in a line, ``$$...$$`` on its own; GitHub shows both as well.
"""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def render(page: str) -> str:
    r"""The page with each formula as MathML.

    Example:
        >>> "<mi>C</mi>" in render(r'<span class="arithmatex">\(C\)</span>')
        True
    """
    page = _INLINE.sub(lambda m: _mathml(m[1], "inline"), page)
    return _DISPLAY.sub(lambda m: f'<div class="formula">{_mathml(m[1], "block")}</div>', page)


def _mathml(latex: str, display: str) -> str:
    return str(convert(html.unescape(latex).strip(), display=display))
