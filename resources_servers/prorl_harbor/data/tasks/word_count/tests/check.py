# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Compare /app/counts.csv with the expected counts."""

from pathlib import Path


EXPECTED = "before,1\nis,2\nlamp,2\nno,1\noff,1\non,3\nor,1\nstorm,3\nthe,3\nwas,1\n"

found = Path("/app/counts.csv").read_text()
assert found == EXPECTED, f"wrong counts: {found!r}"
print("all counts are right")
