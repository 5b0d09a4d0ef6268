# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Task families, and the optional dependencies (pip extras) that servers and commands check at their start."""

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
"""Importable modules by pip extra. The server ``prorl_NAME`` needs the extra NAME, if NAME is a key."""


def require_extras(*extras: str) -> None:
    """Check that the modules of pip extras are installed, without importing them. Unknown extras pass.

    Raises:
        InfrastructureError: a module is missing; the message contains the pip command.
    """
    missing = {extra: [module for module in EXTRAS.get(extra, ()) if not _is_installed(module)] for extra in extras}
    if names := list(dict.fromkeys(module for modules in missing.values() for module in modules)):
        wanted = ",".join(extra for extra, modules in missing.items() if modules)
        raise InfrastructureError(f"not installed: {', '.join(names)}. pip install 'nemo-gym-prorl[{wanted}]'")


def exit_unless_installed(extra: str) -> None:
    """Exit with a one-line message if a module that the server ``prorl_EXTRA`` needs is not installed.

    Called before the server's own imports, which take seconds.
    """
    try:
        require_extras(extra)
    except InfrastructureError as error:
        sys.exit(f"prorl_{extra}: {error.reason}")


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
