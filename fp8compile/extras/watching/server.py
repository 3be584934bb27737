"""The live page on loopback, by the standard library's server: the page, the list of runs, a run's lines from an offset.

    /                          the page
    /runs                      [{"name": ..., "size": bytes}, ...]
    /lines?run=NAME&from=N     the whole lines of that run from byte N, at most ``MOST`` bytes; no other file can be asked for

A page of another site may send a browser here under a name of its own (DNS rebinding). So a request whose Host header is not
this server's address is refused, and answers carry no header that would let another origin read them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fp8compile.extras.watching.folder import files_of
from fp8compile.extras.watching.page import TAIL, live
from fp8compile.extras.watching.reading import NoRun

LOOPBACK = "127.0.0.1"
MOST = 2**20  # bytes of lines in one answer
Answer = tuple[int, str, bytes]  # status, media type, body


class Server(ThreadingHTTPServer):
    """Serves a folder of runs on loopback alone.

    Args:
        folder: of the runs; it may still be empty.
        port: 0 for any that is free.
        milliseconds: between two questions of a page.
        tail: bytes of a run that a page reads; of a longer one the last.

    Raises:
        OSError: the port is in use.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0, milliseconds: int = 1000, tail: int = TAIL) -> None:
        self.folder = folder
        self.page = live(folder.resolve().name, milliseconds, tail).encode()
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host headers that are answered."""
        return tuple(f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost"))


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "fp8compile", ""

    def do_GET(self) -> None:
        status, kind, body = self._answer()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def _answer(self) -> Answer:
        if self.headers.get("Host") not in self.server.hosts:
            return _refused(403, f"this server answers to {self.server.hosts[0]} only")
        asked = urlsplit(self.path)
        answers: dict[str, Callable[[dict[str, list[str]]], Answer]] = {
            "/": lambda _: (200, "text/html; charset=utf-8", self.server.page),
            "/runs": lambda _: self._runs(),
            "/lines": self._lines,
        }
        if asked.path not in answers:
            return _refused(404, "there is nothing here")
        try:
            return answers[asked.path](parse_qs(asked.query))
        except (NoRun, OSError) as error:
            return _refused(404, str(error))

    def _runs(self) -> Answer:
        found = [{"name": name, "size": path.stat().st_size} for name, path in files_of(self.server.folder).items()]
        return 200, "application/json", json.dumps(found).encode()

    def _lines(self, asked: dict[str, list[str]]) -> Answer:
        name, begin = asked.get("run", [""])[0], asked.get("from", ["0"])[0]
        path = files_of(self.server.folder).get(name)
        if path is None:
            return _refused(404, "there is no such run")
        if not (begin.isascii() and begin.isdigit()):
            return _refused(400, "from= is a number of bytes")
        return 200, "text/plain; charset=utf-8", whole_lines(path, int(begin))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal is the user's."""


def whole_lines(path: Path, begin: int, most: int = MOST) -> bytes:
    """The bytes from ``begin`` to the end of the last whole line, at most ``most`` of them, or one line."""
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read(most)
        if b"\n" not in data and len(data) == most:  # one line that is longer
            data += file.readline()
    return data[: data.rfind(b"\n") + 1]


def _refused(status: int, why: str) -> Answer:
    return status, "text/plain; charset=utf-8", why.encode()
