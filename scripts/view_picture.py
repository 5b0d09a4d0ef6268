# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Take a picture of a rollout in the viewer that ``prorl view`` opens, in a real browser.

    python scripts/view_picture.py out/first.jsonl docs/view.png

Needs Playwright (``pip install playwright``) and a Chromium on PATH, or Playwright's own. It fails if the page asks
for anything from elsewhere.
"""

import argparse
import functools
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    """Make the site, serve it on loopback, open a rollout that called tools, save what is seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = f"{folder}/site"
        command = (sys.executable, "-c", "from nemo_gym_prorl.cli import main; main()")
        subprocess.run([*command, "view", str(given.results), "--bundle", site], check=True)
        handler = functools.partial(_Quiet, directory=site)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            asked = _take(f"http://127.0.0.1:{server.server_port}", given.picture)
            server.shutdown()
    assert all(url.startswith(("http://127.0.0.1:", "blob:", "data:")) for url in asked), asked


def _take(url: str, picture: Path) -> list[str]:
    """Save the picture; gives what the page asked for."""
    asked: list[str] = []
    with sync_playwright() as playwright:
        # As root Chromium has no sandbox of its own; the page is ours.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 1300})
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        page.get_by_role("gridcell", name="HumanEval/").first.click()
        page.get_by_text("TOOL:").first.scroll_into_view_if_needed()
        page.wait_for_timeout(1000)  # it fades in
        page.screenshot(path=picture)
        browser.close()
    return asked


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    main()
