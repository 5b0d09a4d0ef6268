# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Making a row of ``prorl_swe``: what the policy is told, and what it may call, around an instance. Pure."""

from __future__ import annotations

from typing import Any

from nemo_gym_prorl.tasks.swe.instance import SweInstance
from nemo_gym_prorl.tasks.workbench.workbench import workbench_schemas


TOOLS = ("bash", "str_replace_editor", "submit")
"""What the policy may call."""

HANDING_IN = "Hand in the repository as it is now and end the task."
"""What it is told of ``submit``."""

SYSTEM_PROMPT = """\
You are a software engineer. The repository is in {folder}. Look at it, find what the issue below is about, and \
change the code so that it is solved. Tests that you do not see decide; changes to tests do not count. There is no \
one to ask. When you are done, call `submit`."""


def tool_schemas() -> list[dict[str, Any]]:
    """The tools as the Responses API describes functions."""
    return workbench_schemas(TOOLS, HANDING_IN)


def make_row(instance_id: str, image: str, instance: SweInstance) -> dict[str, Any]:
    """A row.

    Args:
        instance_id: the task's name.
        image: the task's image.
        instance: the task; of its fields, those that are not as by default are written.
    """
    return {
        "responses_create_params": {
            "input": [
                {"role": "system", "content": SYSTEM_PROMPT.format(folder=instance.repo_folder)},
                {"role": "user", "content": instance.problem_statement},
            ],
            "tools": tool_schemas(),
            "parallel_tool_calls": False,
        },
        "data_source": instance.dataset,
        "instance_id": instance_id,
        "image": image,
        "swe": instance.model_dump(mode="json", exclude_defaults=True),
    }
