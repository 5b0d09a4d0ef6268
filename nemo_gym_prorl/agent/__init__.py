# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym agent server: runs the rollouts of any Gym environment through the stages INIT, RUN and EVAL."""
