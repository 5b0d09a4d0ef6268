# SPDX-License-Identifier: Apache-2.0
"""``prorl_model`` with workers, started as Gym starts it but without Gym's command line and Ray, which take half a
minute: ``python worker_server.py PORT WORKERS BASE_URL [POLICY AS JSON]``. The workers are this program again. An
empty URL is none."""

from __future__ import annotations

import json
import logging
import sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient
from omegaconf import DictConfig

from nemo_gym_prorl.policy.workers.server import Session, serve
from nemo_gym_prorl.policy.workers.worker import this_worker
from responses_api_models.prorl_model.app import ProrlModel, ProrlModelConfig


def main(port: int, workers: int, base_url: str, policy: str = "{}") -> None:
    logging.basicConfig(level=logging.INFO)
    settings = json.loads(policy)
    config = ProrlModelConfig.model_validate(
        {
            "host": "127.0.0.1",
            "port": port,
            "name": "policy_model",
            "entrypoint": "app.py",
            "base_url": base_url or [],
            "model": settings.pop("model", "tiny"),
            "policy": settings,
        }
    )
    worker = this_worker()
    if worker is None and workers > 1:
        session = Session("ProrlModel___policy_model", SESSION_ID_KEY)
        sys.exit(serve(config.checked_policy(), "127.0.0.1", port, workers, session))
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=DictConfig({})
    )
    app = ProrlModel(config=config, server_client=client).setup_webserver()
    if worker is not None:
        worker.serve(app)
    else:
        uvicorn.run(app, host="127.0.0.1", port=port, timeout_graceful_shutdown=1, timeout_keep_alive=30)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
