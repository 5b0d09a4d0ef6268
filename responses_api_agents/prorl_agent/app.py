# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Entry point of the agent server; :mod:`nemo_gym_prorl.servers.agent_server` is the server."""

from nemo_gym_prorl.servers.agent_server import ProRLAgent


if __name__ == "__main__":
    ProRLAgent.run_webserver()
