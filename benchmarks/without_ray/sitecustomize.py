# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Python runs this module first in each Gym server of a benchmark: Gym believes that a Ray cluster runs."""

import ray


ray.is_initialized = lambda: True
