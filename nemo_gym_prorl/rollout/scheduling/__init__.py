# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scheduling of rollouts: fair queues, stage pools, and the circuit breaker of environment servers."""
