# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Score /srv/report.json: the share of right sizes, and whether nothing else is listed."""

import json
from pathlib import Path


EXPECTED = {"alpha.txt": 6, "beta.txt": 12}

try:
    found = json.loads(Path("/srv/report.json").read_text())
except (OSError, ValueError):
    found = {}
right = sum(found.get(name) == size for name, size in EXPECTED.items()) / len(EXPECTED)
rewards = {"reward": right, "only_files": float(set(found) <= set(EXPECTED))}
Path("/logs/verifier/reward.json").write_text(json.dumps(rewards))
print(found)
