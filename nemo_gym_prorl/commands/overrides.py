# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Overrides of ``prorl serve`` that can be known wrong before any server starts.

Gym takes any key, and hands it to a server whose own class judges it, or ignores it, a minute later. Known before are
the servers that the environments bring, of which type and implementation they are, the options of our sandbox
provider, and the fields of an agent's stages and budgets. A server's other fields are known to its own class only; a
first word that is like none of those may be one of Gym's own, or a server that is to be added.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nemo_gym_prorl.commands.environments import blocks_of
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.handlers.service_config import StagesConfig
from nemo_gym_prorl.rollout.schemas import BudgetsModel
from nemo_gym_prorl.sandbox.gym import options as gym_options


_KEY = re.compile(r"(?:\+\+|\+|~)?([^=/@]+)=")
_KINDS = ("responses_api_agents", "responses_api_models", "resources_servers")
_BELOW_AGENT: Mapping[str, Iterable[str]] = {
    "stages": StagesConfig.model_fields,
    "budgets": BudgetsModel.model_fields,
}


def check_overrides(overrides: Sequence[str], environments: Sequence[str], model_type: str) -> None:
    """Refuse what no server of these environments can take.

    Raises:
        CallerError: a key is unknown; names it, and the nearest that there is.
    """
    known = blocks_of(environments)
    if not known:
        # Gym says what is wrong with them.
        return
    known["policy_model"] = {"responses_api_models": {model_type.partition("/")[0]: {}}}
    for override in overrides:
        if found := _KEY.match(override):
            _check(found[1].split("."), known)


def _check(path: list[str], known: Mapping[str, Any]) -> None:
    head = path[0]
    if len(path) < 2:
        return
    if path[:2] == ["head_server", "port"]:  # else it is waited for where nobody listens
        raise CallerError("say where it listens by --head-port", field=".".join(path))
    if head not in known:
        if difflib.get_close_matches(head, known):
            _refuse(path, 0, known)
        return
    server = known[head]
    if "singularity" in server:
        if len(path) > 2 and path[1] == "singularity":
            _require(path, 2, gym_options.OPTIONS)
        return
    kind = next((kind for kind in _KINDS if kind in server), None)
    if kind is None:
        return
    _require(path, 1, [kind])
    if len(path) > 2:
        _require(path, 2, server[kind])
        if path[2] == "prorl_agent" and len(path) > 4 and path[3] in _BELOW_AGENT:
            _require(path, 4, _BELOW_AGENT[path[3]])


def _require(path: list[str], place: int, known: Iterable[str]) -> None:
    if path[place] not in known:
        _refuse(path, place, known)


def _refuse(path: list[str], place: int, known: Iterable[str]) -> None:
    above = ".".join([*path[:place], ""])
    near = difflib.get_close_matches(path[place], known, 1, 0.0)
    nearest = f"; the nearest that there is: {above}{near[0]}" if near else ""
    raise CallerError(f"there is no {above}{path[place]}{nearest}", field=".".join(path))
