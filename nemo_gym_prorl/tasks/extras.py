# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Packages that only some environments or commands need: asked for when one starts, not when its first row comes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping

from nemo_gym_prorl.failures import InfrastructureError


EXTRAS: Mapping[str, tuple[str, ...]] = {
    "data": ("pyarrow",),
    "math": ("math_verify",),
    "stem": ("math_verify", "bm25s", "numpy", "pint", "Stemmer"),
    "swe": ("swebench",),
    "view": ("inspect_ai",),
}
"""What is imported of each extra of this package. The server ``prorl_NAME`` needs the extra NAME."""


def require_extras(*extras: str) -> None:
    """See that the modules of extras can be imported, without importing them. Others than those above need none.

    Raises:
        InfrastructureError: some can't; has the pip command.
    """
    missing = {extra: [module for module in EXTRAS.get(extra, ()) if not _is_there(module)] for extra in extras}
    if names := list(dict.fromkeys(module for modules in missing.values() for module in modules)):
        wanted = ",".join(extra for extra, modules in missing.items() if modules)
        raise InfrastructureError(f"not installed: {', '.join(names)}. pip install 'nemo-gym-prorl[{wanted}]'")


def exit_unless_installed(extra: str) -> None:
    """Let the server ``prorl_EXTRA`` end with one line if it can't start: to be called before its own imports, which
    take seconds."""
    try:
        require_extras(extra)
    except InfrastructureError as error:
        sys.exit(f"prorl_{extra}: {error.reason}")


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
