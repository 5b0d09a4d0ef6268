# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Command that trains with a recipe, after all checks that need no Ray, engines or servers.

    python -m nemo_gym_prorl.nemo_rl.train --config dapo-swe-qwen3-4b data.train.data_path=rows.jsonl

The command reports all errors of a configuration at once, with exit code 2, before it starts Ray, engines or servers.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from nemo_gym_prorl.deployment.gym_cli import ROOTS_VARIABLE
from nemo_gym_prorl.deployment.venvs import running_installation, shared_venvs
from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.nemo_rl.checks import Finding, check, findings_of_validation, value_at
from nemo_gym_prorl.nemo_rl.configuration import (
    RECIPE_NAMES,
    ROOT_VARIABLE,
    TRAINING_NAMES,
    ProrlSettings,
    check_nemo_rl,
    checkout,
    missing_names,
    names_of,
    read,
    settings_of,
)
from nemo_gym_prorl.nemo_rl.services import configured_servers


REFUSED = 2
"""Exit code of a configuration that was refused."""


def main(arguments: Sequence[str] | None = None) -> int:
    given, overrides = _parser().parse_known_args(arguments)
    config: dict[str, Any] = {}
    findings = [*_check_nemo_rl()]
    if checkout() is not None and not [*missing_names(RECIPE_NAMES)]:
        try:
            config = read(given.config, given.variants, overrides)
        except CallerError as error:
            findings.append(_refused(error))
        else:
            complete(config)
            findings += find(config, trainable=not findings)
    code = _report(findings)
    if code or given.check:
        print("" if code else "No errors found: training can start.", flush=True)
        return code
    return _run(config)


def find(config: Mapping[str, Any], *, trainable: bool = True) -> list[Finding]:
    """Return the findings of this package's checks, NeMo RL's validation, and requests to external servers.

    Args:
        config: complete configuration.
        trainable: whether NeMo RL's own models can be imported.
    """
    try:
        settings = settings_of(config)
    except ValidationError as error:
        # The other checks depend on these settings.
        return [*findings_of_validation("prorl", error)]
    findings = check(config, settings)
    if not trainable:
        return findings
    from nemo_rl.algorithms.single_controller_utils import MasterConfig

    try:
        validated = MasterConfig(**config)
    except ValidationError as error:
        return [*findings, *findings_of_validation("", error)]
    return [*(findings or _cross_check(validated)), *_check_servers(settings)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nemo_gym_prorl.nemo_rl.train",
        description="Train with a recipe. Change settings by Hydra overrides, e.g. grpo.max_num_steps=10.",
        epilog=f"Recipes: {', '.join(names_of())}. Variants: {', '.join(names_of('variants'))}.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="name of a recipe, or path of a file")
    parser.add_argument(
        "--with",
        dest="variants",
        action="append",
        default=[],
        metavar="VARIANT",
        help="name of a variant, or path of a file, that overrides the recipe; may be repeated",
    )
    parser.add_argument("--check", action="store_true", help="check the configuration without starting anything")
    return parser


def _check_nemo_rl() -> Iterator[Finding]:
    """Yield a finding for each reason why NeMo RL cannot be imported, or for names that it lacks."""
    root = checkout()
    if root is None:
        named = os.environ.get(ROOT_VARIABLE)
        what = f"there is no NeMo RL in {named}" if named else "the environment variable is not set"
        yield Finding(ROOT_VARIABLE, what, "Export the folder of the NeMo RL checkout")
    if importlib.util.find_spec("nemo_rl") is None:
        what = f"{sys.executable} cannot import nemo_rl"
        yield Finding("PYTHONPATH", what, f"Use the Python of NeMo RL's environment, or add {root or 'the checkout'}")
        if root is None:
            return
        sys.path.append(str(root))  # the remaining checks import NeMo RL
    try:
        check_nemo_rl({**RECIPE_NAMES, **TRAINING_NAMES})
    except CallerError as error:
        yield _refused(error)


def complete(config: dict[str, Any]) -> None:
    """Set the folder of Gym's virtual environments, and add a clone of this package to :data:`ROOTS_VARIABLE`."""
    gym = value_at(config, "env.nemo_gym")
    if not isinstance(gym, dict):
        return
    if gym.get("uv_venv_dir") is None:
        gym["uv_venv_dir"] = str(shared_venvs())
        gym["skip_venv_if_present"] = True
    if (own := running_installation().checkout) is not None:
        roots = [root for root in os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep) if root]
        if str(own) not in roots:
            os.environ[ROOTS_VARIABLE] = os.pathsep.join([*roots, str(own)])


def _cross_check(validated: Any) -> list[Finding]:
    from nemo_rl.algorithms.single_controller_utils.config import validate_single_controller_config

    try:
        validate_single_controller_config(validated)
    except ValueError as error:
        return [Finding("NeMo RL", str(error).rstrip("."), "Change the setting that the message names")]
    return []


def _check_servers(settings: ProrlSettings) -> list[Finding]:
    """Check that the servers' key is set and that external servers accept the key."""
    try:
        configured_servers(settings)
    except RolloutError as error:
        return [Finding(error.field or "prorl.services", error.reason, "Start the server, or correct the setting")]
    return []


def _refused(error: CallerError) -> Finding:
    return Finding(error.field or "--config", error.complaint.rstrip("."), "Correct the setting")


def _report(findings: Sequence[Finding]) -> int:
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
