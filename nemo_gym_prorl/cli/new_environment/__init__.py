# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Template of ``prorl init``: a complete environment under the name ``my_environment``."""
