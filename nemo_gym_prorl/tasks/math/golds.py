# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Refuses rows at conversion whose expected answer can't be read, as a server would when such a rollout starts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nemo_gym_prorl.failures import CallerError, TaskError
from nemo_gym_prorl.tasks.math.checker import MathChecker
from nemo_gym_prorl.tasks.math.rows import expected_answer


RowOf = Callable[[Mapping[str, Any]], dict[str, Any]]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_COSTLY = re.compile(r"\^\s*\{?[^{}]*\^|\)\s*\^|\^\s*\{?\s*-?\d{3}|!|\\(?:sum|prod|int|lim|binom)|.{300}", re.DOTALL)
"""What sympy may work on for long is read in a bounded process, which takes 30 ms, and all else here, in 1 ms."""


@contextmanager
def requiring_readable(row_of: RowOf) -> Iterator[RowOf]:
    """A function from a record to its row, which raises :class:`CallerError` if the expected answer can't be read."""
    from nemo_gym_prorl.tasks.math.comparison import unread  # imports sympy

    with asyncio.Runner() as runner:
        checker = MathChecker()

        def checked(record: Mapping[str, Any]) -> dict[str, Any]:
            row = row_of(record)
            answer = expected_answer(row)
            if not _NUMBER.fullmatch(answer) and (_COSTLY.search(answer) or unread(answer)):
                try:
                    runner.run(checker.require_gradeable(answer))
                except TaskError as error:
                    raise CallerError(error.reason, field="expected_answer") from error
            return row

        try:
            yield checked
        finally:
            runner.run(checker.aclose())
