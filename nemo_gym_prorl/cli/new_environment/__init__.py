# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl init``: a new environment of the user's own, which serves and scores at once.

The other files of this folder are that environment, under the name ``my_environment``. They are a working server, so
that the linter, the type checker and the tests see them as a user gets them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from nemo_gym_prorl.cli.new_environment import rows
from nemo_gym_prorl.deployment import config_files
from nemo_gym_prorl.failures import CallerError, InfrastructureError


_TEMPLATE = Path(__file__).parent
_NAME = "my_environment"


def create(name: str, folder: Path) -> list[Path]:
    """Write an environment below ``folder``, where `prorl serve` looks for it.

    Returns:
        the files, as they lie below ``folder``.

    Raises:
        CallerError: the name cannot be one, or an environment or server of that name exists.
        InfrastructureError: a file cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,60}", name):
        raise CallerError(f"{name!r} must begin with a letter and have only a-z, 0-9 and _", field="NAME")
    if name in sys.stdlib_module_names:
        raise CallerError(f"{name!r} is a module of Python; choose another name", field="NAME")
    server = Path("resources_servers", name)
    taken = name in config_files.environment_names() or (folder / server).exists()
    if taken or (folder / "environments" / name).exists():
        raise CallerError(f"there is an environment {name} already; choose another name", field="NAME")
    files = {Path("environments", name, "config.yaml"): (_TEMPLATE / "config.yaml").read_text()}
    for file in ("app.py", "rows.py", "test_app.py", "pyproject.toml", "README.md"):
        files[server / file] = (_TEMPLATE / file).read_text()
    files[server / "data" / "example.jsonl"] = "".join(f"{row}\n" for row in rows.example())
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text.replace(_NAME, name))
    except OSError as error:
        raise InfrastructureError(f"{error.filename} cannot be written: {error.strerror}") from error
    return [*files]
