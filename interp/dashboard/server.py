"""The local server: loopback only unless told otherwise, and deaf to pages of other origins.

A page elsewhere can make a browser send requests here, under a name that its owner points at this machine
(DNS rebinding). Such requests name that host, or come with its origin: both are refused.
"""

import errno
import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from flask import Flask, Response, request
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from interp.dashboard.quotation import quoted
from interp.errors import DetectionError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class QuietHandler(WSGIRequestHandler):
    """One line a request is of no use at a terminal; errors are still logged."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Says nothing."""


def is_loopback(host: str) -> bool:
    """Whether an address or name means this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, *, allow_remote: bool) -> None:
    """Refuse an address that others can reach, unless that is meant.

    Raises:
        DetectionError: it is not loopback and `allow_remote` is false.
    """
    if not is_loopback(host) and not allow_remote:
        raise DetectionError(
            f"host {host!r} can be reached from other machines, which could then read your models; accepted: "
            "127.0.0.1, localhost, ::1, or any with --allow-remote"
        )


def guard(server: Flask, host: str, port: int) -> None:
    """Refuse requests that name another host, or that come from pages of another origin: 403, and why."""
    names = _names(host)

    def check() -> Response | None:
        named = request.headers.get("Host", "")
        if not _is_own(named, names, port):
            return _refused(f"Host {quoted(named)} is not this server; open http://{_quoted(host)}:{port}/")
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{named}":
            return _refused(f"Origin {quoted(origin)} is not this page")
        return None

    # Before all else: what comes from elsewhere is not even read.
    server.before_request_funcs.setdefault(None, []).insert(0, check)


def serve_on(server: Flask, host: str, port: int) -> BaseWSGIServer:
    """A listening server, not yet running; port 0 takes a free one (`.port` says which). Guarded.

    Raises:
        DetectionError: the address cannot be listened on.
    """
    try:
        listening = _bound(host, port)
    except OSError as error:
        taken = "; --port 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
        why = f"{error.strerror or error}{taken}"
        raise DetectionError(f"cannot listen on {host}, port {port}: {why}") from None
    port = listening.getsockname()[1]
    guard(server, host, port)
    return make_server(host, port, server, threaded=True, request_handler=QuietHandler, fd=listening.detach())


def url(host: str, port: int) -> str:
    """Address for a browser on this machine."""
    return f"http://{_quoted('127.0.0.1' if host in ('0.0.0.0', '::') else host)}:{port}/"


def _bound(host: str, port: int) -> socket.socket:
    # Bound here: werkzeug ends the process with advice of its own when it cannot.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except BaseException:
        listening.close()
        raise
    return listening


def _names(host: str) -> frozenset[str]:
    """Names in a Host header that mean this server; None of them can be pointed here by a stranger."""
    own: Iterable[str] = LOOPBACK if is_loopback(host) else (*LOOPBACK, host, socket.gethostname())
    return frozenset(name.lower() for name in own)


def _is_own(header: str, names: frozenset[str], port: int) -> bool:
    try:
        parts = urlsplit(f"//{header}")
        host, named_port = parts.hostname, parts.port
    except ValueError:
        return False
    if host is None or (named_port or 80) != port or parts.username is not None or parts.path:
        return False
    return host in names or (names > frozenset(LOOPBACK) and _is_address(host))


def _is_address(host: str) -> bool:
    # Rebinding needs a name; an address in the Host header was typed or linked as it is.
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _quoted(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _refused(reason: str) -> Response:
    return Response(f"403: {reason}\n", status=403, mimetype="text/plain")
