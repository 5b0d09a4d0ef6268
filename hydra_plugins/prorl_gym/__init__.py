# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Lets Gym's own command line run our servers from wherever this package is installed, without an option.

Gym reads its command line with Hydra, and Hydra loads what lies in ``hydra_plugins``. In a process of Gym this sets
two environment variables that our configuration files name for ``uv_venv_dir`` and ``skip_venv_if_present``
(see :mod:`nemo_gym_prorl.deployment.venvs`). They have no effect on configurations without our servers, and options on
the command line win. A third variable names this process to our servers, which end with it
(:mod:`nemo_gym_prorl.http.server_process`).
"""

import os
import sys


def _share_environment() -> None:
    from nemo_gym_prorl.deployment import venvs
    from nemo_gym_prorl.http.server_process import STARTER_VARIABLE

    os.environ[STARTER_VARIABLE] = str(os.getpid())
    try:
        os.environ[venvs.VENVS_VARIABLE] = str(venvs.shared_folder())
    except (OSError, ModuleNotFoundError) as error:
        print(f"nemo-gym-prorl: Gym builds an environment for each server: {error}", file=sys.stderr)
    else:
        os.environ[venvs.REUSE_VARIABLE] = "true"


if "nemo_gym" in sys.modules:
    _share_environment()
