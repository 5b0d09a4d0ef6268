# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Entry point of the model server; :mod:`nemo_gym_prorl.servers.model_server` is the server."""

from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint

from nemo_gym_prorl.servers.model_server import ProrlModel


if __name__ == "__main__":
    ProrlModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = ProrlModel.run_webserver()
