# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a policy is told of a bug: what fails, and how; not where, and not why. Pure."""

from __future__ import annotations

from collections.abc import Mapping


SHOWN = 8
"""So many failures are told."""

WIDTH = 300
"""Longest line of a failure, in characters."""


def statement(package: str, version: str, broken: Mapping[str, str]) -> str:
    """The problem statement.

    Args:
        package: its name.
        version: its version.
        broken: test that the bug breaks to what it says.
    """
    lines = [f"{package} {version} does not do what it should. These checks of its behaviour fail:", ""]
    for test in sorted(broken)[:SHOWN]:
        lines.append(f"- {test.partition('::')[2].replace('::', ', ')}"[:WIDTH])
        if message := broken[test].strip():
            lines.append(f"      {message[:WIDTH]}")
    if len(broken) > SHOWN:
        lines.append(f"- and {len(broken) - SHOWN} more")
    lines += ["", "All others pass. Find what is wrong in the package and mend it there."]
    return "\n".join(lines)
