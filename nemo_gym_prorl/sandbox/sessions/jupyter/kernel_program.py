# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Program of a kernel process: starts faster than ``-m ipykernel_launcher``.

The image's own Python runs the text of this module (``python3 -c``); nothing of this package is in the image.
"""

from __future__ import annotations

import sys


# The working folder is the agent's: a ``random.py`` there is for its cells alone, which look for it there again.
sys.path[:] = filter(None, sys.path)

# Nobody debugs here, and it is a quarter of all that is imported. A cell can import it.
if "debugpy" not in sys.modules:
    sys.modules["debugpy"] = None  # type: ignore[assignment]
try:
    import ipykernel.debugger  # noqa: F401
    from ipykernel.kernelapp import IPKernelApp
    from traitlets.config import Config
except ImportError as error:
    sys.exit(str(error))
if not sys.modules["debugpy"]:
    del sys.modules["debugpy"]


def launch(connection_file: str) -> None:
    """Serve as a kernel until a client shuts the kernel down."""
    sys.argv = ["ipykernel_launcher.py", "-f", connection_file]
    config = Config(
        # A database on disk that is written for each cell takes longer than the cell.
        HistoryManager={"enabled": False},
        IPKernelApp={"connection_file": connection_file},
    )
    app = IPKernelApp.instance()
    # To make its parser of arguments takes a tenth of the start.
    app.parse_command_line = lambda _argv=None: app.update_config(config)
    # The end of the process says all that it would, and it has three threads.
    app.init_heartbeat = lambda: None
    app.initialize()
    app.start()


if __name__ == "__main__":
    launch(sys.argv[1])
