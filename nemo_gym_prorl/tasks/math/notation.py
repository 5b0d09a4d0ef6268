# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""What ``math-verify``'s parser leaves out of an answer, as names that it keeps: primes, accents, fonts of letters.

To it ``y''`` and :math:`\vec y` are ``y``, and a bold i is a unit. Here they are symbols of their own. Pure.
"""

from __future__ import annotations

import re


_GREEK = r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|xi|rho|sigma|tau|phi|psi|omega|Omega|ell)"
_LETTER = rf"(?:[a-zA-Z]|{_GREEK}(?![a-zA-Z]))"
_WORDY = r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt)|mbox|operatorname|boldsymbol|bm)\*?"
_ACCENT = re.compile(
    r"\\(?P<accent>vec|hat|widehat|bar|overline|tilde|widetilde|d?dot|overrightarrow|math(?:bf|bb|cal|frak)|boldsymbol|bm"
    rf"|textbf)(?![a-zA-Z])\s*(?:\{{\s*(?P<inner>{_LETTER})\s*\}}|(?P<bare>{_LETTER}))"
    r"(?:\s*_\s*(?:\{(?P<long>\w+)\}|(?P<short>\w)))?"
)
_PRIMES = re.compile(
    rf"(?P<letter>{_LETTER})(?:\s*_\s*(?:\{{(?P<long>\w+)\}}|(?P<short>\w)))?\s*"
    r"(?P<primes>'+|\^\s*\{\s*(?:\\prime\s*)+\}|\^\s*\\prime(?![a-z])|\^\s*\{\s*'+\s*\})"
)
_SPELLED_NUMBER = re.compile(rf"{_WORDY}\s*\{{\s*(-?\d+(?:\.\d+)?)\s*\}}")
_SPELLED_LETTER = re.compile(rf"{_WORDY}\s*\{{\s*([a-zA-Z])\s*\}}")
_BELOW = re.compile(rf"_\s*(?:\{{\s*{_WORDY}\s*\{{\s*(\w+)\s*\}}\s*\}}|{_WORDY}\s*\{{\s*(\w+)\s*\}})")
_FUNCTION = re.compile(
    rf"{_WORDY}\s*\{{\s*((?:arc)?(?:sin|cos|tan|cot|sec|csc)|sinh|cosh|tanh|ln|log|exp|gcd|lcm|max|min|det|lim)\s*\}}"
)
_KEPT = frozenset(("mathbb", "mathcal", "mathfrak"))
_VECTOR = r"(?:\\?[a-zA-Z]+_\{(?:vec|hat|widehat|overrightarrow|bold)\w*\}|\\nabla(?![a-zA-Z]))"
_PRODUCT = re.compile(rf"{_VECTOR}\s*(?:\\(?:times|cdot|wedge|otimes)(?![a-zA-Z])|[*×⋅])?\s*(?={_VECTOR})")
_OF_PRODUCTS = re.compile(rf"{_VECTOR}|\\(?:times|cdot|wedge|otimes)(?![a-zA-Z])")


def symbols(text: str) -> str:
    """A text with a name for each symbol that has primes, an accent or a font; numbers and functions in plain ones."""
    text = _SPELLED_NUMBER.sub(r"{\1}", text)
    text = _BELOW.sub(lambda found: f"_{{{found[1] or found[2]}}}", text)
    text = _FUNCTION.sub(r"\\\1 ", text)
    text = _ACCENT.sub(_accented, text)
    text = _SPELLED_LETTER.sub(r" \1 ", text)
    return _PRIMES.sub(_primed, text)


def another_order(expected: str, said: str) -> bool:
    """Whether products of vectors or operators, which do not commute, are not written in the same way."""
    one, other = symbols(expected), symbols(said)
    if not (_PRODUCT.search(one) or _PRODUCT.search(other)):
        return False
    return _OF_PRODUCTS.findall(one) != _OF_PRODUCTS.findall(other)


def _accented(found: re.Match[str]) -> str:
    accent = found["accent"]
    if accent in _KEPT:
        return found[0]
    accent = "bold" if accent in ("mathbf", "boldsymbol", "bm", "textbf") else accent
    return f"{found['inner'] or found['bare']}_{{{accent}{found['long'] or found['short'] or ''}}}"


def _primed(found: re.Match[str]) -> str:
    primes = found["primes"].count("'") + found["primes"].count(r"\prime")
    return f"{found['letter']}_{{{found['long'] or found['short'] or ''}d{primes}}}"
