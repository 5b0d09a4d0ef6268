# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Build images from Dockerfiles: instructions, stages, build context, and the build itself."""
