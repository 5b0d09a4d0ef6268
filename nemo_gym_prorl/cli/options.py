# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer


Url = Annotated[
    str | None,
    typer.Option(
        envvar="PRORL_URL",
        show_envvar=False,
        help="URL of the rollout service. Default: PRORL_URL, else the prorl_agent listed by Gym's head server.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="PRORL_TOKEN",
        show_envvar=False,
        help="Key of the service. Prefer PRORL_TOKEN: other users can read command lines.",
    ),
]
