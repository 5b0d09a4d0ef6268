# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Harnesses: existing agent programs that run in a rollout's sandbox; their descriptions and installed bundles."""
