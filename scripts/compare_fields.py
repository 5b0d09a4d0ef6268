# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What becomes of each field of a request, at our model server and at Gym's own: a table, and counts.

python scripts/compare_fields.py                       # the installed Gym's, before an engine that records
python scripts/compare_fields.py --engine URL --model FOLDER   # before a real vLLM that serves "tiny"

Run it with the Python of another environment for another Gym.
"""

import argparse
import asyncio
import contextlib
import io
import json
import logging
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import aiohttp
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
from omegaconf import DictConfig
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig
from tokenizers import Tokenizer


sys.path.insert(0, str(Path(__file__).parents[1]))

from responses_api_models.prorl_model.app import ProrlModel, ProrlModelConfig
from tests.policy.fields import CASES, MODEL, Engine, ask, before, tokenizer_folder
from tests.rollout.serving import serve as serving


def main() -> None:
    """Print the table; with ``--json`` the outcomes go into a file as well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="URL of a vLLM; its answers are handed on")
    parser.add_argument("--model", type=Path, help="folder with that model's tokenizer")
    parser.add_argument("--json", type=Path, help="where outcomes and what the servers said are written")
    given = parser.parse_args()
    logging.disable(logging.ERROR)
    found = asyncio.run(_outcomes(given.engine, given.model))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    print("| request | " + " | ".join(found) + " |\n|---" * 1 + "|---" * len(found) + "|")
    for case in map(str, CASES):
        print(f"| {case} | " + " | ".join(column[case][0] for column in found.values()) + " |")
    for name, column in found.items():
        print(f"\n{name}: {len(column)} requests,", dict(Counter(outcome for outcome, _ in column.values())))


async def _outcomes(upstream: str | None, folder: Path | None) -> dict[str, dict[str, tuple[str, str]]]:
    found = {}
    with tempfile.TemporaryDirectory() as made:
        folder = folder or tokenizer_folder(Path(made))
        engine = Engine(upstream, Tokenizer.from_file(str(folder / "tokenizer.json")))
        async with before(engine) as url, aiohttp.ClientSession() as session:
            for name, model in _models(url, folder).items():
                with contextlib.redirect_stdout(io.StringIO()):  # Gym prints each error
                    app = model.setup_webserver()
                    model.setup_exception_middleware(app)
                    async with serving(app) as address:
                        found[name] = {str(case): await ask(session, address, engine, case) for case in CASES}
    return found


def _models(url: str, folder: Path) -> dict[str, ProrlModel | VLLMModel]:
    settings = {"host": "127.0.0.1", "port": 0, "name": "policy_model", "entrypoint": "app.py"}
    settings |= {"base_url": f"{url}/v1", "api_key": "none", "model": MODEL, "return_token_id_information": True}
    settings |= {"uses_reasoning_parser": True}
    head = BaseServerConfig(host="127.0.0.1", port=1)
    client = ServerClient(head_server_config=head, global_config_dict=DictConfig({}))
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    gym = f"Gym {version('nemo-gym')}"
    models: dict[str, ProrlModel | VLLMModel] = {}
    for engine in ("vllm", "vllm_chat"):
        config = ProrlModelConfig.model_validate(settings | {"policy": {"engine": engine, "tokenizer": str(folder)}})
        models[f"prorl_model, {engine}, {gym}"] = ProrlModel(config=config, server_client=client)
    theirs = VLLMModelConfig.model_validate(settings)
    models[f"vllm_model, {gym}"] = VLLMModel(config=theirs, server_client=client)
    return models


if __name__ == "__main__":
    main()
