# SPDX-License-Identifier: Apache-2.0
"""Trains by a recipe, after a look at everything that can be known before anything heavy starts.

    python -m nemo_gym_prorl.nemo_rl.train --config dapo-swe-qwen3-4b ++data.train.data_path=rows.jsonl

Everything that is wrong is told at once, with exit code 2; then Ray, engines and servers have not been started.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.gym.venvs import running_installation, shared_folder
from nemo_gym_prorl.nemo_rl.checkout import ROOT_VARIABLE, checkout, mentions
from nemo_gym_prorl.nemo_rl.checks import around, check
from nemo_gym_prorl.nemo_rl.checks.finding import Finding, at, of_validation
from nemo_gym_prorl.nemo_rl.checks.gym_files import ROOTS_VARIABLE, read_gym
from nemo_gym_prorl.nemo_rl.checks.keys import Keys, keys_of_file, keys_of_model, merged
from nemo_gym_prorl.nemo_rl.configuration import Configuration, names_of, read
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, Runtime, settings_of


REFUSED = 2
"""Exit code of a configuration that was not even tried."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives its exit code."""
    given, overrides = _parser().parse_known_args(arguments)
    try:
        root = _nemo_rl()
        configuration = read(given.config, given.variants, overrides)
    except CallerError as error:
        return _tell([Finding(error.field or "--config", error.complaint.rstrip("."), "Correct it")])
    config = configuration.resolved
    complete(config)
    findings = find(configuration, root)
    code = _tell(findings)
    if code or given.check:
        print("" if code else "Nothing stands against a start.", flush=True)
        return code
    return _run(config)


def find(configuration: Configuration, root: Path) -> list[Finding]:
    """Every finding there is.

    Args:
        configuration: as it would be started.
        root: the NeMo RL checkout.
    """
    config = configuration.resolved
    model = model_of(config)
    gym = read_gym(config)
    findings = check(
        config, gym, known_settings(model, configuration), functools.cache(functools.partial(mentions, root))
    )
    try:
        settings = settings_of(config)
    except ValidationError:
        return findings  # told above
    findings += around.check(config, settings)
    try:
        validated = model(**config)
    except ValidationError as error:
        return [*findings, *of_validation("", error)]
    if not any(finding.fatal for finding in findings):
        # Its own comparisons; those that matter here were made above,.
        findings += _cross_check(validated, settings)
    return findings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nemo_gym_prorl.nemo_rl.train",
        description="Train by a recipe. Settings are changed by Hydra's overrides, e.g. ++grpo.max_num_steps=10.",
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


def _nemo_rl() -> Path:
    """The checkout.

    Raises:
        CallerError: it is not named, or not importable.
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
    return root


def complete(config: dict[str, Any]) -> None:
    """What follows from where this is installed: servers' environments, and where Gym finds our servers."""
    gym = at(config, "env.nemo_gym")
    if not isinstance(gym, dict):
        return
    if gym.get("uv_venv_dir") is None:
        gym["uv_venv_dir"] = str(shared_folder())
        gym["skip_venv_if_present"] = True
    if (ours := running_installation().checkout) is not None:
        roots = [root for root in os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep) if root]
        if str(ours) not in roots:
            os.environ[ROOTS_VARIABLE] = os.pathsep.join([*roots, str(ours)])


def model_of(config: dict[str, Any]) -> Any:
    """NeMo RL's model of the configuration for the loop that is meant."""
    if at(config, "prorl.runtime") == Runtime.SYNCHRONOUS:
        from nemo_rl.algorithms.grpo import MasterConfig as Synchronous

        return Synchronous
    from nemo_rl.algorithms.single_controller_utils import MasterConfig

    return MasterConfig


def known_settings(model: Any, configuration: Configuration) -> Keys:
    """The settings that NeMo RL declares, or has in the files that the recipe inherits."""
    from nemo_rl.models.generation.vllm import VllmConfig

    # Its model of a policy declares of generation only what all engines have in common.
    engine = {"policy": {"generation": keys_of_model(VllmConfig)}}
    return merged(merged(keys_of_model(model), engine), keys_of_file(configuration.inherited))


def _cross_check(validated: Any, settings: ProrlSettings) -> list[Finding]:
    if settings.runtime is Runtime.SYNCHRONOUS:
        return []
    from nemo_rl.algorithms.single_controller_utils.config import validate_single_controller_config

    try:
        validate_single_controller_config(validated)
    except ValueError as error:
        return [Finding("NeMo RL", str(error).rstrip("."), "Change what it names")]
    return []


def _tell(findings: Sequence[Finding]) -> int:
    for finding in sorted(findings, key=lambda finding: not finding.fatal):
        print(f"{'error' if finding.fatal else 'note'}: {finding}", file=sys.stderr)
    fatal = sum(finding.fatal for finding in findings)
    if fatal:
        print(f"Not started: {fatal} {'error' if fatal == 1 else 'errors'}.", file=sys.stderr)
    return REFUSED if fatal else 0


def _run(config: dict[str, Any]) -> int:
    from nemo_gym_prorl.nemo_rl import single_controller, synchronous

    settings = settings_of(config)
    run = synchronous.run if settings.runtime is Runtime.SYNCHRONOUS else single_controller.run
    try:
        run(config)
    except RolloutError as error:
        print(f"error: {error.reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
