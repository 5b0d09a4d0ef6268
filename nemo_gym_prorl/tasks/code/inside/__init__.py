# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What runs inside the grading sandbox, bundled into one program (:mod:`..trials`). Python 3.8 and its library."""
