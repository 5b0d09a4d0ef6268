# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Code shared by the Gym resources servers: task server, sandboxes and models for tasks, verifier fixture."""
