# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Plugins of test runners, which run in the image's Python: 3.5 or later, with the standard library and the runner."""
