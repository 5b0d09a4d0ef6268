# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Fleet: many rollout services (nodes) behind one address. Placement, forwarding, and the gateway."""
