# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A container registry on loopback that speaks the real protocol (OCI distribution), with images made of root folders.

It asks for a token first, as public registries do of anonymous clients, and can be told to fail.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"

_GO_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}


def layer(root: Path, change: Callable[[tarfile.TarInfo], tarfile.TarInfo | None] | None = None) -> bytes:
    """A root folder as an uncompressed layer; all root's, unless ``change`` says otherwise."""

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return change(entry) if change else entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(root, arcname=".", filter=owned)
    return buffer.getvalue()


@dataclass
class Registry:
    """See the module. ``requests`` are the paths asked for, ``credentials`` every authorization header but our own
    anonymous token's; ``failures`` answers are 503 before it works. While ``hold`` is clear,
    blobs are held back, which sets ``reached``."""

    port: int = 0
    failures: int = 0
    requests: list[str] = field(default_factory=list)
    credentials: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, str] = field(default_factory=dict)
    hold: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.hold.set()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def add(self, name: str, layers: list[bytes], machine: str, **config: Any) -> str:
        """Serve an image; returns its ``docker://`` address."""
        compressed = [gzip.compress(data, 1, mtime=0) for data in layers]
        described = {
            "architecture": _GO_NAMES.get(machine, machine),
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [_digest(data) for data in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self._describe(CONFIG, json.dumps(described).encode()),
            "layers": [self._describe(LAYER, data) for data in compressed],
        }
        repository, _, tag = name.partition(":")
        self.manifests[f"{repository}:{tag or 'latest'}"] = self._describe(MANIFEST, json.dumps(manifest).encode())[
            "digest"
        ]
        return f"docker://{self.host}/{name}"

    def _describe(self, kind: str, data: bytes) -> dict[str, Any]:
        digest = _digest(data)
        self.blobs[digest] = data
        return {"mediaType": kind, "size": len(data), "digest": digest}


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@contextmanager
def serve() -> Iterator[Registry]:
    """A registry for the length of a block."""
    registry = Registry()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._serve(body=False)

        def do_GET(self) -> None:
            self._serve(body=True)

        def log_message(self, *_args: object) -> None:
            pass

        def _serve(self, body: bool) -> None:
            registry.requests.append(self.path)
            sent = self.headers.get("Authorization")
            if sent and sent != "Bearer anonymous":
                registry.credentials.append(sent)
            if self.path.startswith("/token"):
                self._answer(200, b'{"token": "anonymous"}', "application/json", body)
            elif registry.failures > 0:
                registry.failures -= 1
                self._answer(503, b"{}", "application/json", body)
            elif not sent:
                self._answer(401, b"{}", "application/json", body)
            else:
                self._content(body)

        def _content(self, body: bool) -> None:
            kind, _, reference = self.path.removeprefix("/v2/").rpartition("/")
            repository, _, what = kind.rpartition("/")
            if self.path == "/v2/":
                self._answer(200, b"{}", "application/json", body)
                return
            digest = registry.manifests.get(f"{repository}:{reference}", reference)
            data = registry.blobs.get(digest)
            if what == "blobs" and not registry.hold.is_set():
                registry.reached.set()
                registry.hold.wait()
            if data is None:
                missing = json.dumps({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]})
                self._answer(404, missing.encode(), "application/json", body)
                return
            self._answer(200, data, MANIFEST if what == "manifests" else "application/octet-stream", body, digest)

        def _answer(self, status: int, data: bytes, kind: str, body: bool, digest: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            if digest:
                self.send_header("Docker-Content-Digest", digest)
            if status == 401:
                realm = f'Bearer realm="http://{registry.host}/token",service="test"'
                self.send_header("WWW-Authenticate", realm)
            self.end_headers()
            if body:
                # Whoever asked may have been killed meanwhile.
                with suppress(ConnectionError):
                    self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        registry.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()
