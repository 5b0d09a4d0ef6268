# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Software-engineering tasks without a registry: bugs put into well-known packages, whose own tests tell them."""
