# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Problems with tests as dataset rows: what a policy is told, and where the tests are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.tasks.code.humaneval import SOLUTION_FILE, params
from nemo_gym_prorl.tasks.code.rows import METADATA


_SYSTEM = """\
You are a careful Python programmer. You work in a sandbox through tools; there is no network. Write {what} in \
`{file}` in your working folder. Try it out with the tools before you trust it. When it is done, call `submit`: \
`{file}` is then tested elsewhere, with tests that you do not see. Only that file counts."""

PROGRAM = _SYSTEM.format(file=SOLUTION_FILE, what="a Python program that reads standard input and prints its answer")
FUNCTION = _SYSTEM.format(file=SOLUTION_FILE, what="the Python function that the problem asks for")


def row_for(
    statement: str,
    metadata: Mapping[str, Any],
    *,
    function: str | None,
    script: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A dataset row.

    Args:
        statement: the problem's text.
        metadata: ``verifier_metadata``, see :mod:`.rows`.
        function: the function that is called; ``None`` for a program.
        script: see :func:`.humaneval.params`.
        more: further fields of the row.
    """
    asked = statement.strip()
    if function is not None:
        asked += f"\n\nImplement the function `{function}` (or a class `Solution` with it) in `{SOLUTION_FILE}`."
    system = FUNCTION if function is not None else PROGRAM
    return {"responses_create_params": params(system, asked, script), METADATA: dict(metadata), **more}
