# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Start, watch and end Gym deployments, on one machine or on each node of a Ray cluster."""
