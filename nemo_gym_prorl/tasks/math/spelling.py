# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Normalization of an answer's spelling. Pure, and linear in the text's length.

``math-verify`` reads ``y''`` and :math:`\vec y` as ``y``, and a bold i as a unit. Therefore :func:`with_named_symbols`
replaces letters with primes, accents or fonts by distinct names.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from nemo_gym_prorl.tasks.final_answer import OPENED_BOX, closed_from, with_braces


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
_SPELLED_FUNCTION = re.compile(
    rf"{_WORDY}\s*\{{\s*((?:arc)?(?:sin|cos|tan|cot|sec|csc)|sinh|cosh|tanh|ln|log|exp|gcd|lcm|max|min|det|lim)\s*\}}"
)
_KEPT = frozenset(("mathbb", "mathcal", "mathfrak"))
_VECTOR = r"(?:\\?[a-zA-Z]+_\{(?:vec|hat|widehat|overrightarrow|bold)\w*\}|\\nabla(?![a-zA-Z]))"
_PRODUCT = re.compile(rf"{_VECTOR}\s*(?:\\(?:times|cdot|wedge|otimes)(?![a-zA-Z])|[*×⋅])?\s*(?={_VECTOR})")
_OF_PRODUCTS = re.compile(rf"{_VECTOR}|\\(?:times|cdot|wedge|otimes)(?![a-zA-Z])")


def with_named_symbols(text: str) -> str:
    """Return a text with a name for each letter with primes, accent or font. Numbers and functions lose fonts."""
    text = _SPELLED_NUMBER.sub(r"{\1}", text)
    text = _BELOW.sub(lambda found: f"_{{{found[1] or found[2]}}}", text)
    text = _SPELLED_FUNCTION.sub(r"\\\1 ", text)
    text = _ACCENT.sub(_accented, text)
    text = _SPELLED_LETTER.sub(r" \1 ", text)
    return _PRIMES.sub(_primed, text)


def order_differs(expected: str, said: str) -> bool:
    """Return whether two texts differ in the order of vectors or operators in products, which do not commute."""
    one, other = with_named_symbols(expected), with_named_symbols(said)
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


_WRAPPED = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "°": r"^\circ ", "√": r"\sqrt ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "⩾": r"\ge ", "⩽": r"\le ",
    "π": r"\pi ", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "²": "^2", "³": "^3", "¢": r"\text{ cents}", "~": " ", "\u00a0": " ", "\u202f": " ",
    "\u2009": " ", "。": ".",
})  # fmt: skip
_FULL_WIDTH = re.compile(r"[\uff01-\uff5e]+")
_UNICODE_ROOT = re.compile(r"√\s*(\d+)")
_PI = re.compile(r"(?<![a-zA-Z\\{_])(?:\*\s*)?pi(?![a-zA-Z}])")
_DECORATION = re.compile(
    r"\\(?:color|textcolor)\s*\{[a-z]+\}\s*(?:\{\s*([^{}]*)\s*\})?|\\tag\s*\{\w+\}\s*$|(?:\\\\|\\ )\s*$"
    r"|\\(?:large|Large|LARGE|huge|Huge|small|normalsize|bf|rm|it|displaystyle|textstyle)(?![a-zA-Z])\s*"
    r"|\\(?:underline|mathtt|boldsymbol|bm)\s*\{\s*(?=-?[\d.]+\s*\}\s*$)"
)
_RELATIONS = (
    (r"\colon ", ":"),
    ("{:}", ":"),
    ("!=", r"\ne "),
    ("<=", r"\le "),
    (">=", r"\ge "),
    (r"\text{\$}", r"\$"),
    (r"\checkmark", ""),
)
_SPACE = r"\s|~|\\[,;:! ]"
_ROW_END = re.compile(r"\\\\\*?\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in|mu|\\baselineskip)\s*\]")
"""End of a TeX row with an argument for the space below the row."""

_NOUN_IN_BRACKETS = re.compile(
    rf"(?<=\d)(?:\s+|(?:{_SPACE})*{_WORDY}\s*\{{\s*)"
    r"\(\s*((?!mod\b)[A-Za-z]{3,}(?:[ -][A-Za-z]{2,}){0,3})\s*\)(?:\s*\})?$"
)
"""Counted noun in brackets, as in ASDiv's ``5 (apples)``."""

_OTHER_LETTER = "[À-ÖØ-öø-ɏЀ-ӿぁ-ヿ一-鿿가-힣]"
_OTHER_WORDS = re.compile(
    rf"(?<=\d)\s*((?:[a-zA-Z]|{_OTHER_LETTER}|\s)*{_OTHER_LETTER}(?:[a-zA-Z]|{_OTHER_LETTER})*)$"
)
_CURRENCY_BEHIND = re.compile(rf"(-?)(\d[\d.,]*)(?:{_SPACE})*(?:{_WORDY}\s*\{{\s*)?([€£])\s*\}}?")
_FILLING = (
    (re.compile(rf"(?<=\d)((?:{_SPACE})*(?:{_WORDY}\s*\{{)?\s*)more\b(?!\s*(?:than|or)\b)"), r"\1"),
    (re.compile(r"\b(years?)[\s-]+old\b"), r"\1"),
    (re.compile(r"\ba(?=\s+(?:second|minute|hour|day|week|month|year)\b)"), "per"),
    (re.compile(rf"(?<=\d)(?:{_SPACE})*{_WORDY}\s*\{{\s*\}}$"), ""),
)
"""Words beside a number that do not change the value, with their replacements."""

_ALL_IN_TEXT = re.compile(
    rf"{_WORDY}\s*\{{\s*(?:(?P<value>(?:[a-zA-Z]\s*=\s*)?-?(?:\\?\$)?\d[\d.,/]*)(?:{_SPACE})*(?P<words>(?:[a-zA-Z%€£]|{_OTHER_LETTER})[^{{}}=]*)?"
    rf"|\(?(?P<letter>[A-H])[).:]+(?:{_SPACE})*(?!is\b|[^{{}}]*\b[A-Z]\b)(?P<option>[^\s{{}}][^{{}}]*))\}}"
)
"""Number with its words, or letter of an option with its text, in one text command."""

_GROUPED = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?:(?:\{,\}|,?\\[,!;: ]|,\s*\\!| )\s*\d{3})+)(?![\d])")
_ROOT = re.compile(r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)")
_COMBINATIONS = re.compile(
    r"(?<![a-zA-Z\\_])C\s*(?:\(([^(),]+),([^(),]+)\)|_\s*(\{[^{}]*\}|\w)\s*\^\s*(\{[^{}]*\}|\w))"
)
_OF_BASE = re.compile(
    r"(?<=[\dA-F])\s*(?:_\s*\{\s*\\text\s*\{\s*base\s*(\w+)\s*\}\s*\}|\\text\s*\{\s*\(?\s*(?:in\s+)?base\s*[\s}]\s*(\w+)\s*\)?\s*\}?)$"
)
_IN_BRACKETS = re.compile(r"\(\s*(\d[0-9A-F]*)\s*\)\s*_")
_FACTOR = re.compile(r"(?<![\d.,/^_}])(\d+)/(\d+)(?=\s*[a-zA-Z\\(])")
"""Fraction before a factor, as in ``1/2mv^2``; math-verify would put the factor into the denominator."""

_FUNCTION = re.compile(
    r"\\(?:text[a-z]*|math[a-z]+|mbox|operatorname)\*?\s*\{[^{}]*\}"
    r"|(?<![\\a-zA-Z])((?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|cot|csc|ln|log|exp)(?![a-zA-Z])"
)
"""Function name without a backslash, or a text command; ``sec`` is left out because it is also a unit."""

_PERCENT = re.compile(
    r"(?i)\\(?:text[a-z]*|mathrm|mbox)\s*\{\s*(?:\\?%|percent(?:age)?|per cent|pct)\.?\s*\}"
    r"|(?<=[\d\s}$])(?:percent(?:age)?|per\s+cent|pct)(?![a-z])"
)
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})")
_REPEATING = re.compile(r"(\d{1,20})\.(\d{0,20})\\(?:overline|bar|dot)\s*\{?(\d{1,20})\}?")
_MIXED = re.compile(r"(?<![\d./])(\d{1,9})(?:\s|\\[,;: ])+(\d{1,9})/(\d{1,9})(?!\d)")
_DOTS = re.compile(r"\\[lcv]?dots[cbmio]?(?![a-zA-Z])|\.\.\.+|…")
_AROUND = r"\\[,;:! ]|\\(?:q?quad|enspace|enskip|thinspace|space|newline)(?![a-zA-Z])|\\hspace\*?\s*\{[^{}]*\}|~|\s"
_BEFORE = re.compile(rf"(?:{_AROUND})+")
_BEHIND = re.compile(rf"(?:{_AROUND}|(?<![\\.])\.|[,;]|(?<!\\)\\)+$")
"""TeX spaces and punctuation after an answer; stripping a final ``\\ `` may have left its backslash."""

_GAP = (
    r"(?:\\(?:qquad|quad|enspace|enskip|thinspace|space|[,;:! ]|hspace\*?\s*\{[^{}]*\}|h?phantom\s*\{[^{}]*\})"
    r"|\\(?:text|mathrm|textrm|mbox)\s*\{\s*\}|\{\s*\}|\$|\s)"
)
_SPACING = re.compile(rf"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])|{_GAP}")
_BETWEEN_DIGITS = re.compile(rf"(?<=\d)(?:{_GAP})+(?=\d)")
_WORDS = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|mbox|operatorname)\s*\{([^{}\\$]*)\}")
_BASE = re.compile(r"(\\log\s*_\s*(?:\{\s*\d+\s*\}|\d)|\\[dtc]?frac\s*\d)\s+(?=\d)")
_SIDE_BY_SIDE = re.compile(
    r"\d\s+\d|(?<![a-zA-Z_^\d.\]}\\])\d+\s*\{\s*\d|(?<![a-zA-Z_^\]}\\])\{\s*\d+\s*\}\s*\{?\s*\d"
)
OPERATOR = re.compile(r"[+\-*/^!]|\\(?:frac|sqrt|times|cdot|div|binom|sum|int|prod|lim)")


def normalized(answer: str) -> str:
    """Return an answer without delimiters, in the notation that math-verify's parser reads."""
    text = _FULL_WIDTH.sub(lambda found: unicodedata.normalize("NFKC", found[0]), answer)
    text = _UNICODE_ROOT.sub(r"\\sqrt{\1}", text)
    text = unwrapped(_DECORATION.sub(r" \1", text.translate(_CHARACTERS)))
    text = _PI.sub(r"\\pi ", _ROW_END.sub(r"\\\\", text))
    text = _NOUN_IN_BRACKETS.sub(r"\\text{ \1}", text.strip())
    text = _ALL_IN_TEXT.sub(_opened, text) if _ALL_IN_TEXT.fullmatch(text) else text
    text = _CURRENCY_BEHIND.sub(r"\1\3\2", text) if _CURRENCY_BEHIND.fullmatch(text) else text
    text = _OTHER_WORDS.sub(r"\\text{ \1}", text)
    for pattern, replacement in _FILLING:
        text = pattern.sub(replacement, text)
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z(){}])", r"\\", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _DOTS.sub(r"\\ldots ", with_braces(text))
    text = _OF_BASE.sub(lambda found: f"_{{{found[1] or found[2]}}}", _IN_BRACKETS.sub(r"\1_", text))
    text = _PERCENT.sub(r"\\% ", text)
    for written, meant in _RELATIONS:
        text = text.replace(written, meant)
    text = re.sub(r"\\(?:mathrm|textrm|rm)\s*\{([ei])\}", r" \1", text)
    text = _GROUPED.sub(lambda found: found[1] + re.sub(r"\D", "", found[2]), text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _FACTOR.sub(r"\\frac{\1}{\2}", text)
    text = _FUNCTION.sub(lambda found: rf"\{found[1]} " if found[1] else found[0], text)
    text = _REPEATING.sub(_fraction, text)
    if number := _SCIENTIFIC.fullmatch(text):
        text = rf"{number[1]} \times 10^{{{number[2]}}}"
    return text


def with_binomials(answer: str) -> str:
    """Return an answer with ``C(n, k)`` and ``C_n^k`` as TeX binomials."""
    return _COMBINATIONS.sub(
        lambda found: rf"\binom{{{(found[1] or found[3]).strip('{}')}}}{{{(found[2] or found[4]).strip('{}')}}}",
        answer,
    )


def unwrapped(answer: str) -> str:
    """Return an answer without surrounding boxes, mathematics delimiters, TeX spaces and punctuation."""
    text = answer
    while True:
        before = text
        text = _BEHIND.sub("", text)
        text = text[found.end() :] if (found := _BEFORE.match(text)) else text
        for start, end in _WRAPPED:
            inner = text[len(start) : -len(end)]
            around = len(text) > len(start + end) and text.startswith(start) and text.endswith(end)
            if around and start not in inner.replace(r"\$", ""):
                text = inner.strip()
        if (box := OPENED_BOX.search(text)) and (content := closed_from(text, box.end())) is not None:
            text = text[: box.start()] + content + text[box.end() + len(content) + 1 :]
        elif text in ("$$", r"\(\)", r"\[\]"):
            text = ""
        if text == before:
            return text


def canonical(answer: str) -> str:
    """Return one spelling for answers that differ only in spaces, sizes and fonts. Spaces between digits count."""
    text = _BETWEEN_DIGITS.sub("␣", answer)
    text = _WORDS.sub(r"\1", text)
    text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", text)
    return _SPACING.sub("", text)


def has_adjacent_numbers(answer: str) -> bool:
    """Return whether two numbers are adjacent without an operator, which is ambiguous."""
    return _SIDE_BY_SIDE.search(_BASE.sub(r"\1", _BETWEEN_DIGITS.sub(" ", answer))) is not None


def _opened(found: re.Match[str]) -> str:
    if found["letter"]:
        return rf"\text{{({found['letter']})}} \text{{{found['option']}}}"
    value = found["value"].rstrip(".,").replace("$", r"\$").replace(r"\\$", r"\$")
    return rf"{value}\text{{ {found['words']}}}" if found["words"] else value


def _fraction(found: re.Match[str]) -> str:
    whole, fixed, period = found.groups()
    value = Fraction(int(whole + fixed + period) - int(whole + fixed), 10 ** len(fixed) * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
