# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripts for the scripted policy, for machines without a model: correct solutions, null solutions and cheats."""
