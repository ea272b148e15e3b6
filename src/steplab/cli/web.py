"""Serve one page to browsers of this machine."""

import contextlib
import hmac
import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from steplab.cli.output import emit, say

_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def serve(page: str) -> None:
    """Serve the page on the loopback interface until Ctrl-C; its address goes to standard output."""
    with PageServer(page) as server:
        emit(server.address)
        say("serving to this machine alone; Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


class PageServer(ThreadingHTTPServer):
    """A server of one page on a free port of the loopback interface.

    Other users of the machine can connect to that port, and so can a web page that is open in a browser. So the address
    has a random token, and a request by another name of the host is refused: scripts of a page whose name resolves to
    127.0.0.1 could else read the answer.
    """

    daemon_threads = True

    def __init__(self, page: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.page = page.encode()
        self.path = f"/{secrets.token_urlsafe(24)}/"
        self.hosts = (f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}")

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{self.hosts[0]}{self.path}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "steplab"
    sys_version = ""
    timeout = 30.0

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif not hmac.compare_digest(self.path.encode(), self.server.path.encode()):
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self.send_response(HTTPStatus.OK)
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(self.server.page)))
            self.end_headers()
            self.wfile.write(self.server.page)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing; the token would be in it."""
