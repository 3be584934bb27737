"""The live page's server: on loopback, to its own address, whole lines from a byte on, and no other file."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8compile.extras.watching.lines import SCHEMA, line_of_step, text_of
from fp8compile.extras.watching.server import Server, whole_lines

HEADER = text_of({"schema": SCHEMA})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "rank0.jsonl").write_text(HEADER + line_of_step({"step": 1}) + '{"step":2')
    (tmp_path / "secret.txt").write_text("secret")
    with Server(tmp_path) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server: Server, path: str, host: str | None = None) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, answer.headers


def test_it_listens_on_loopback_only(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_the_page_and_the_list_of_runs(server: Server) -> None:
    status, page, headers = ask(server, "/")
    assert status == 200 and page.startswith("<!doctype html>") and "connect-src 'self'" in page
    assert headers["X-Content-Type-Options"] == "nosniff" and "Access-Control-Allow-Origin" not in headers
    size = (server.folder / "rank0.jsonl").stat().st_size
    assert json.loads(ask(server, "/runs")[1]) == [{"name": "rank0", "size": size}]


def test_whole_lines_from_a_byte_on(server: Server) -> None:
    begin = len(HEADER)
    assert ask(server, f"/lines?run=rank0&from={begin}")[:2] == (200, line_of_step({"step": 1}))
    with (server.folder / "rank0.jsonl").open("a") as file:
        file.write(',"loss":1}\n')
    begin += len(line_of_step({"step": 1}))
    assert ask(server, f"/lines?run=rank0&from={begin}")[1] == '{"step":2,"loss":1}\n'
    assert ask(server, "/lines?run=rank0&from=999999")[:2] == (200, "")


@pytest.mark.parametrize("host", ["evil.example:80", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example"])
def test_another_name_of_the_machine_is_refused(server: Server, host: str) -> None:
    for path in ("/", "/runs", "/lines?run=rank0"):
        status, body, _ = ask(server, path, host)
        assert status == 403 and "step" not in body


def test_its_names_are_answered(server: Server) -> None:
    assert [ask(server, "/runs", host)[0] for host in server.hosts] == [200, 200]


@pytest.mark.parametrize(
    "path",
    [
        "/secret.txt",
        "/../secret.txt",
        "/lines?run=../secret",
        "/lines?run=secret.txt",
        "/lines?run=/etc/passwd",
        "/lines",
        "/rank0.jsonl",
    ],
)
def test_no_other_file_can_be_asked_for(server: Server, path: str) -> None:
    status, body, _ = ask(server, path)
    assert status == 404 and "secret" not in body.replace("secret.txt", "")


@pytest.mark.parametrize("begin", ["-1", "x", "1e3", "²", ""])
def test_a_place_that_is_no_number_of_bytes(server: Server, begin: str) -> None:
    status, body, _ = ask(server, "/lines?run=rank0&from=" + begin.replace("²", "%C2%B2"))
    assert (status, body) == ((400, "from= is a number of bytes") if begin else (200, HEADER + '{"step":1}\n'))


def test_a_folder_that_goes_away_and_comes_back(server: Server) -> None:
    moved = server.folder.rename(server.folder.with_name("moved"))
    status, body, _ = ask(server, "/runs")
    assert status == 404 and "there is no folder" in body
    moved.rename(server.folder)
    assert ask(server, "/runs")[0] == 200


@pytest.mark.parametrize("most", [1, 5, 9, 10, 11, 1000])
def test_lines_in_parts_are_the_file(tmp_path: Path, most: int) -> None:
    path, text = tmp_path / "rank0.jsonl", b"one\nnumber two\n\nthree\nno end"
    path.write_bytes(text)
    parts, begin = list[bytes](), 0
    while part := whole_lines(path, begin, most):
        assert part.endswith(b"\n") and (len(part) <= most or part.count(b"\n") == 1)
        parts.append(part)
        begin += len(part)
    assert b"".join(parts) == text[: -len(b"no end")]


def _takes_interrupts() -> None:
    """A shell starts what runs in its background with interrupts ignored, and a process inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text(HEADER)
    command = [sys.executable, "-m", "fp8compile", "watch", str(tmp_path), "--serve", "--port"]
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        started = subprocess.Popen([*command, "0"], stdout=pipe, stderr=pipe, text=True, preexec_fn=_takes_interrupts)
        serving = stack.enter_context(started)
        stack.callback(serving.kill)  # before it is waited for
        assert serving.stdout is not None and serving.stderr is not None
        said = serving.stdout.readline()
        address = said.split()[0]
        assert said == f"{address}  (Ctrl-C ends it)\n" and address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{address}runs", timeout=10) as answer:
            assert json.loads(answer.read()) == [{"name": "rank0", "size": len(HEADER)}]
        port = address.rstrip("/").rpartition(":")[2]
        second = subprocess.run([*command, port], capture_output=True, text=True, timeout=60)
        assert second.returncode == 1
        assert f"error: port {port} of 127.0.0.1" in second.stderr and "--port 0" in second.stderr
        serving.send_signal(signal.SIGINT)
        assert serving.wait(30) == 130 and "Traceback" not in serving.stderr.read()
