"""Who may talk to the page's server: whoever has this start's key, from the page itself, under a name of this machine.

Against another site open in the same browser: it can reach 127.0.0.1, but says so in `Origin`, cannot read the page
and has no key; a name of its own that points to 127.0.0.1 (DNS rebinding) is a foreign `Host`. Against others on this
machine, or on the network: the page, which hands the key to its script, is itself given out for the key alone.
"""

import hmac
import ipaddress
import json
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
TOKEN_HEADER = "X-Prism-Token"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Refusal(Exception):
    """A request that is not answered, with its HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Guard:
    """Stands before everything else: refuses who may not ask, and puts the protective headers on every answer."""

    def __init__(self, app: ASGIApp, host: str, port: int, key: str) -> None:
        self.app, self.key = app, key
        self.everywhere = is_everywhere(host)
        names = (*LOOPBACK, host, *((socket.gethostname(), socket.getfqdn()) if self.everywhere else ()))
        self.port, self.hosts = port, {written(name, port).lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websocket is served: it closes unanswered

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        try:
            self.check(Headers(scope=scope), scope["path"])
        except Refusal as refusal:
            await _refuse(refusal, send_protected)
            return
        await self.app(scope, receive, send_protected)

    def check(self, headers: Headers, path: str) -> None:
        """Refuses a foreign Host, a foreign Origin, and a call without the key."""
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_ours(hosts[0].lower()):
            asked = hosts[0] if len(hosts) == 1 else "no host, or several"
            raise Refusal(403, f"this server is not {asked!r:.80}: open it under the address it printed, port included")
        if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins):
            raise Refusal(403, f"requests from {origins[0]!r:.80} are not answered, only those of this server's page")
        if path.startswith("/api/") and not same_key(headers.get(TOKEN_HEADER), self.key):
            raise Refusal(403, "the request lacks this start's token: reload the page from the address printed last")

    def _is_ours(self, host: str) -> bool:
        if host in self.hosts or (self.port == 80 and f"{host}:80" in self.hosts):
            return True
        # Bound to all addresses, it may be asked for under any of them; a number, unlike a name, cannot be rebound.
        name, colon, port = host.rpartition(":")
        return self.everywhere and colon == ":" and port == str(self.port) and _address(name) is not None


def same_key(given: str | None, key: str) -> bool:
    """Whether somebody has the key, in a time that does not tell how much of it was right."""
    return hmac.compare_digest((given or "").encode("utf-8", "replace"), key.encode())


def written(host: str, port: int) -> str:
    """`host:port` as it stands in an address.

    >>> written("::1", 8765)
    '[::1]:8765'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it there."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_everywhere(host: str) -> bool:
    """Whether it stands for all addresses of this machine."""
    address = _address(host)
    return address is not None and address.is_unspecified


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


async def _refuse(refusal: Refusal, send: Send) -> None:
    body = json.dumps({"error": str(refusal)}).encode()
    headers: Iterable[tuple[bytes, bytes]] = [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
