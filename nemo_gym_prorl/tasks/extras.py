# SPDX-License-Identifier: Apache-2.0
"""Packages that only some environments need: asked for when a server starts, not when its first row comes."""

from __future__ import annotations

import importlib.util

from nemo_gym_prorl.failures import InfrastructureError


def require_extra(extra: str, *modules: str) -> None:
    """See that the modules of an extra of this package can be imported, without importing them.

    Raises:
        InfrastructureError: some can't; has the pip command.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        names = ", ".join(missing)
        raise InfrastructureError(f"not installed: {names}. pip install 'nemo-gym-prorl[{extra}]'")
