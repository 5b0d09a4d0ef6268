# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's own client, with the keys of our servers.

Our servers read each other's keys from the configuration of their deployment. Gym's client does not: a driver that
collects rollouts, or NeMo RL's actor, is refused by a server that has a key. :func:`send_keys` mends that for the
process in which it is called::

    ray.get(actor.__ray_call__.remote(send_keys))
"""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import urlsplit

from omegaconf import OmegaConf

from nemo_gym_prorl.agent.gym_http import addresses
from nemo_gym_prorl.http.keys import authorization


def send_keys(caller: object = None) -> None:
    """From now on Gym's client shows each of our servers its key, and only to that server.

    The keys are those of the process's Gym configuration, as it is now: call it once that has been read.

    Args:
        caller: not used; Ray gives the actor to what it calls in it.
    """
    from nemo_gym import server_utils
    from nemo_gym.global_config import get_global_config_dict

    config = cast("dict[str, Any]", OmegaConf.to_container(get_global_config_dict(), resolve=True))
    keys = {urlsplit(known.url).netloc: authorization(known.key) for known in addresses(config).values()}
    plain = server_utils.request

    async def request(method: str, url: str, _internal: bool = False, **options: Any) -> Any:
        headers = {**(options.pop("headers", None) or {}), **keys.get(urlsplit(url).netloc, {})}
        return await plain(method, url, _internal, headers=headers, **options)

    server_utils.request = request
