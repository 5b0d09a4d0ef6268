# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts as a service for NeMo Gym: INIT → READY → RUN → EVAL on independent pools, in rootless sandboxes."""
