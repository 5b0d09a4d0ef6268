# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Agent server: runs any Gym environment through INIT, RUN and EVAL."""
