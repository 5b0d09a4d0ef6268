# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Hydra plug-in: ``gym`` runs this project's servers in the running Python environment, without options.

Gym reads its command line with Hydra, and Hydra imports the packages in ``hydra_plugins``. In a process of Gym this
plug-in sets two environment variables, which this project's configuration files use for ``uv_venv_dir`` and
``skip_venv_if_present`` (:mod:`nemo_gym_prorl.deployment.venvs`). Other configuration files are not affected, and
options on the command line override both settings. A third variable holds Gym's process id, so that servers exit when
that process has ended (:mod:`nemo_gym_prorl.http.server_process`).
"""

import os
import sys


def _share_environment() -> None:
    from nemo_gym_prorl.deployment import venvs
    from nemo_gym_prorl.http.server_process import STARTER_VARIABLE

    os.environ[STARTER_VARIABLE] = str(os.getpid())
    try:
        os.environ[venvs.VENVS_VARIABLE] = str(venvs.shared_venvs())
    except (OSError, ModuleNotFoundError) as error:
        print(
            f"nemo-gym-prorl: servers cannot share this Python environment, so Gym builds one for each: {error}",
            file=sys.stderr,
        )
    else:
        os.environ[venvs.REUSE_VARIABLE] = "true"


if "nemo_gym" in sys.modules:
    _share_environment()
