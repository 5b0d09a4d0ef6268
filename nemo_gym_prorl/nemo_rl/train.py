# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Trains by a recipe, after a look at everything that can be known before anything heavy starts.

    python -m nemo_gym_prorl.nemo_rl.train --config dapo-swe-qwen3-4b data.train.data_path=rows.jsonl

Everything that is wrong is told at once, with exit code 2; then Ray, engines and servers have not been started.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from nemo_gym_prorl.deployment.config_files import ROOTS_VARIABLE
from nemo_gym_prorl.deployment.venvs import running_installation, shared_venvs
from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.nemo_rl import upstream
from nemo_gym_prorl.nemo_rl.checks import Finding, at, check, of_validation
from nemo_gym_prorl.nemo_rl.configuration import ROOT_VARIABLE, checkout, names_of, read
from nemo_gym_prorl.nemo_rl.services import already_running
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, settings_of


REFUSED = 2
"""Exit code of a configuration that was not even tried."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives its exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    try:
        _require_nemo_rl()
        upstream.check(upstream.RECIPES)
        config = read(given.config, given.variants, overrides)
    except CallerError as error:
        return _tell([_refused(error)])
    complete(config)
    findings = find(config)
    code = _tell(findings)
    if code or given.check:
        print("" if code else "Nothing stands against a start.", flush=True)
        return code
    return _run(config)


def find(config: Mapping[str, Any]) -> list[Finding]:
    """Every finding there is: ours, those of NeMo RL's models, and what of ours runs elsewhere already.

    Args:
        config: as it would be started.
    """
    try:
        settings = settings_of(config)
    except ValidationError as error:
        # What the others look for depends on it.
        return [*of_validation("prorl", error)]
    try:
        upstream.check(upstream.TRAINING)
    except CallerError as error:
        # Whatever else were found would be of a NeMo RL that is not known.
        return [_refused(error)]
    from nemo_rl.algorithms.single_controller_utils import MasterConfig

    findings = check(config, settings)
    try:
        validated = MasterConfig(**config)
    except ValidationError as error:
        return [*findings, *of_validation("", error)]
    return [*(findings or _cross_check(validated)), *_running(settings)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nemo_gym_prorl.nemo_rl.train",
        description="Train by a recipe. Settings are changed by Hydra's overrides, e.g. grpo.max_num_steps=10.",
        epilog=f"Recipes: {', '.join(names_of())}. Variants: {', '.join(names_of('variants'))}.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="a recipe's name, or a file")
    parser.add_argument(
        "--with",
        dest="variants",
        action="append",
        default=[],
        metavar="VARIANT",
        help="a variant's name, or a file whose settings go over the recipe's; may be given several times",
    )
    parser.add_argument("--check", action="store_true", help="look whether it could start, and start nothing")
    return parser


def _require_nemo_rl() -> None:
    """Refuse to go on without NeMo RL.

    Raises:
        CallerError: its checkout is not named, or not importable.
    """
    root = checkout()
    if root is None:
        said = os.environ.get(ROOT_VARIABLE)
        what = f"there is no NeMo RL in {said}" if said else "it is not set"
        raise CallerError(f"{what}; export the folder of the NeMo RL checkout", field=ROOT_VARIABLE)
    if importlib.util.find_spec("nemo_rl") is None:
        raise CallerError(
            f"nemo_rl can't be imported by {sys.executable}; use the Python of NeMo RL's environment, or put "
            f"{root} on PYTHONPATH",
            field=ROOT_VARIABLE,
        )


def complete(config: dict[str, Any]) -> None:
    """What follows from where this is installed: servers' environments, and where Gym finds our servers."""
    gym = at(config, "env.nemo_gym")
    if not isinstance(gym, dict):
        return
    if gym.get("uv_venv_dir") is None:
        gym["uv_venv_dir"] = str(shared_venvs())
        gym["skip_venv_if_present"] = True
    if (ours := running_installation().checkout) is not None:
        roots = [root for root in os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep) if root]
        if str(ours) not in roots:
            os.environ[ROOTS_VARIABLE] = os.pathsep.join([*roots, str(ours)])


def _cross_check(validated: Any) -> list[Finding]:
    from nemo_rl.algorithms.single_controller_utils.config import validate_single_controller_config

    try:
        validate_single_controller_config(validated)
    except ValueError as error:
        return [Finding("NeMo RL", str(error).rstrip("."), "Change what it names")]
    return []


def _running(settings: ProrlSettings) -> list[Finding]:
    """The servers' key is there, and services that run elsewhere answer to it."""
    try:
        already_running(settings)
    except RolloutError as error:
        return [Finding(error.field or "prorl.services", error.reason, "Start it, or correct this")]
    return []


def _refused(error: CallerError) -> Finding:
    return Finding(error.field or "--config", error.complaint.rstrip("."), "Correct it")


def _tell(findings: Sequence[Finding]) -> int:
    for finding in findings:
        print(f"error: {finding}", file=sys.stderr)
    if findings:
        print(f"Not started: {len(findings)} {'error' if len(findings) == 1 else 'errors'}.", file=sys.stderr)
    return REFUSED if findings else 0


def _run(config: dict[str, Any]) -> int:
    from nemo_gym_prorl.nemo_rl import single_controller

    try:
        single_controller.run(config)
    except RolloutError as error:
        print(f"error: {error.reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
