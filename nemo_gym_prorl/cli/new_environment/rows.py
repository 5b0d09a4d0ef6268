# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of my_environment, one JSON object per line: ``python rows.py > data/example.jsonl``."""

import json
from collections.abc import Iterator

from nemo_gym_prorl.tasks.workbench import workbench_schemas


SYSTEM = "You work in a sandbox through tools. When you are done, call `submit`; only the file `answer` counts."


def row(numbers: list[int], written: int) -> dict[str, object]:
    """Return one row: prompt, tools, script and the expected answer.

    Args:
        numbers: the numbers to add.
        written: the sum that the script writes. Only `prorl scripted` reads the script, never a model.
    """
    calls: list[tuple[str, dict[str, str]]] = [("bash", {"command": f"echo {written} > answer"}), ("submit", {})]
    script = {"turns": [{"tool_calls": [{"name": name, "arguments": with_}]} for name, with_ in calls]}
    prompt = f"Write the sum of {', '.join(map(str, numbers))} into the file `answer`."
    return {
        "responses_create_params": {
            "input": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}],
            "tools": workbench_schemas(("bash", "submit")),
            "metadata": {"script": json.dumps(script)},
        },
        "answer": sum(numbers),
    }


def example() -> Iterator[str]:
    """Yield five rows as JSON; the script of the last row is wrong, so that both rewards occur."""
    for numbers in ([1, 2], [17, 25], [3, 5, 8], [100, 11], [2, 2]):
        yield json.dumps(row(numbers, 5 if numbers == [2, 2] else sum(numbers)))


if __name__ == "__main__":
    print(*example(), sep="\n")
