"""`steplab show --web`: the page is served to whoever has its address, on this machine alone."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.runs import make_run

from steplab.cli.app import main
from steplab.cli.web import PageServer
from steplab.store.database import Store


@contextmanager
def served(page: str = "<!doctype html><p>größer</p>") -> Iterator[PageServer]:
    with PageServer(page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def answer(server: PageServer, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def test_the_address_gives_the_page() -> None:
    with served() as server:
        found = answer(server, server.path)
        assert (found.status, found.read().decode()) == (200, "<!doctype html><p>größer</p>")
        assert found.headers["Referrer-Policy"] == "no-referrer"
        assert found.headers["Cache-Control"] == "no-store"
        assert answer(server, server.path, Host=f"localhost:{server.server_port}").status == 200
        assert server.address == f"http://127.0.0.1:{server.server_port}{server.path}"


def test_without_the_token_or_by_another_name_there_is_nothing() -> None:
    with served() as server, served() as other:
        assert server.path != other.path
        assert len(server.path) >= 32
        for path in ("/", other.path, server.path[:-2] + "/", "/%F0", server.path + "x"):
            assert answer(server, path).status == 404
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", ""):
            found = answer(server, server.path, Host=host)
            assert found.status == 403
            assert "größer" not in found.read().decode()
        assert answer(server, server.path, method="POST").status == 501


def test_only_loopback_is_listened_on() -> None:
    with served() as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        assert server.socket.family == socket.AF_INET


def test_the_command_serves_the_page_until_it_is_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    with Store.open(tmp_path / "store.db", write=True) as opened:
        opened.add(run)
    pages: list[str] = []

    def interrupted(server: PageServer) -> None:
        pages.append(server.page.decode())
        raise KeyboardInterrupt

    command = ["show", run.id, "--web", "--store", str(tmp_path / "store.db")]
    with patch.object(PageServer, "serve_forever", interrupted):
        assert main(command) == 0
    said = capsys.readouterr()
    assert said.out.startswith("http://127.0.0.1:")
    assert "Ctrl-C" in said.err
    assert pages[0].startswith("<!doctype html>")
    assert run.id in pages[0]
    assert main([*command, "--format", "json"]) == 2
