# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How far our comparison of mathematical answers agrees with math-verify's own test cases.

    python scripts/math_verify_cases.py math_verify-0.9.0.tar.gz

The source distribution is had with ``pip download --no-deps --no-binary :all: math-verify``. Cases are read from its
test modules without running them: every tuple or list of two texts and 0 or 1. Its predictions are whole messages, of
which the package searches all and we take the answer, so each is also compared with what the package finds in it put
into a box. Disagreements are printed.
"""

from __future__ import annotations

import ast
import asyncio
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
from sympy import latex

from nemo_gym_prorl.tasks.final_answer import final_answer
from nemo_gym_prorl.tasks.math.checker import CheckLimits, MathChecker


Case = tuple[str, str, str, bool]
"""Module, expected, message, whether it is right."""


def cases(sdist: str) -> Iterator[Case]:
    """All that the test modules say."""
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            name = member.name.rpartition("/")[2]
            if "/tests/test_" not in member.name or not name.endswith(".py"):
                continue
            file = archive.extractfile(member)
            assert file is not None
            for node in ast.walk(ast.parse(file.read())):
                match node:
                    case ast.Tuple(elts=[ast.Constant(str(gold)), ast.Constant(str(said)), ast.Constant(int(right))]):
                        yield name, gold, said, bool(right)


async def main(sdist: str) -> None:
    """Compare and report."""
    checker = MathChecker(CheckLimits(cpu_s=5))
    agreed: Counter[tuple[str, bool]] = Counter()
    total: Counter[tuple[str, bool]] = Counter()
    for name, gold, said, right in cases(sdist):
        answer = final_answer(said)
        message = said if answer is not None else rf"\boxed{{{_found(said)}}}"
        checked = await checker.check(_found(gold), message)
        total[name, right] += 1
        agreed[name, right] += checked.right == right
        if checked.right != right:
            print(f"{name}: {gold!r} {said[-120:]!r}: {right}, here {checked.verdict} ({checked.extracted!r:.80})")
    await checker.aclose()
    for key in sorted(total):
        print(f"{key[0]}, {'right' if key[1] else 'wrong'} ones: {agreed[key]} of {total[key]}")
    print(f"{agreed.total()} of {total.total()} agree")


def _found(text: str) -> str:
    """What is between the delimiters of a text that is nothing else, else what the package finds in it, as LaTeX."""
    bare = text.strip()
    if bare.startswith("$") and bare.endswith("$") and "$" not in bare.strip("$"):
        return bare.strip("$").strip()
    found = parse(text, [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()])
    return (found[-1] if isinstance(found[-1], str) else str(latex(found[0]))) if found else bare


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
