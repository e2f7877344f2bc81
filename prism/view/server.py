"""The page's server: answers its own page on this machine, one model, chosen at the start.

    GET  /?key=...       the page; the key is in the address that is printed
    GET  /app.js, /style.css
    POST /api/run        what is shown, some prompts, and the most tokens a prompt and its completion may have
    POST /api/trace      {"prompt": text, "limit": number or null}: a trace
    POST /api/stream     the same, line by line: tokens as the model writes them, then {"trace": ...}
    POST /api/cursors    {"prompt_tokens": [...], "cursors": [...]}: more of a trace's cursors
    POST /api/export     {"prompt": text} or {"tokens": [...]}: one file that plays the trace by itself

Whoever asks without standing is refused by protection.py before anything here runs. No request names a path or a
checkpoint. What goes wrong is said as {"error": sentence}; where it went wrong is said in the terminal only.
"""

import asyncio
import contextlib
import errno
import json
import logging
import re
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from prism.errors import RunError, UserError, is_out_of_memory
from prism.view.bundle import Bundle, as_json
from prism.view.protection import Guard, Refusal, is_everywhere, is_loopback, same_key, written
from prism.view.trace import MOST_BODY, LiveModel

AT_ONCE = 2  # requests that compute
PATIENCE = 30.0  # seconds that others wait for their turn
BODY_PATIENCE = 10.0  # seconds a request may take to arrive
CONNECTIONS = 64  # in all
PORTS = 20  # that are tried one after the other
LONGEST_SENTENCE = 400

log = logging.getLogger("prism.view")
Answer = TypeVar("Answer")


class Server:
    """What the routes share: the model, the page, the key of this start, and whose turn it is."""

    def __init__(self, live: LiveModel, bundle: Bundle, key: str, prompt: str | None = None) -> None:
        self.live, self.bundle, self.key, self.prompt = live, bundle, key, prompt
        self._turns = asyncio.Semaphore(AT_ONCE)

    def app(self) -> Starlette:
        routes = [Route("/", self.page), Route("/app.js", self.script), Route("/style.css", self.style)]
        for name in ("run", "trace", "stream", "cursors", "export"):
            routes.append(Route(f"/api/{name}", self._api(getattr(self, name)), methods=["POST"]))
        app = Starlette(routes=routes, exception_handlers={HTTPException: _unrouted, Exception: _failed})
        app.router.redirect_slashes = False
        return app

    async def page(self, request: Request) -> Response:
        if not same_key(request.query_params.get("key"), self.key):
            return PlainTextResponse("prism view: open the whole address that it printed, key included.\n", 403)
        metas = {"prism-token": self.key, "prism-run": as_json(self.live.facts()).decode()}
        if self.prompt is not None:
            metas["prism-prompt"] = self.prompt
        return Response(self.bundle.served(metas), media_type="text/html")

    async def script(self, request: Request) -> Response:
        return Response(self.bundle.script, media_type="text/javascript")

    async def style(self, request: Request) -> Response:
        return Response(self.bundle.style, media_type="text/css")

    async def run(self, asked: Mapping[str, Any]) -> Response:
        live = self.live
        return _json(as_json({
            "run": live.facts(), "examples": live.examples(), "symbols": list(live.words.tokens),
            "longest": live.longest,
        }))

    async def trace(self, asked: Mapping[str, Any]) -> Response:
        return _json(await self._compute(lambda: as_json(self.live.complete(asked.get("prompt"), asked.get("limit")))))

    async def stream(self, asked: Mapping[str, Any]) -> Response:
        question = self.live.asked(asked.get("prompt"), asked.get("limit"))  # refused before anything is sent

        async def lines() -> AsyncIterator[bytes]:
            writing, made = self.live.write(question), []
            try:
                # A turn for each token: who reads slowly keeps nobody waiting.
                while (token := await self._compute(lambda: next(writing, None))) is not None:
                    made.append(token)
                    yield as_json({"token": token.token, "top": token.top}) + b"\n"
                yield await self._compute(lambda: as_json({"trace": self.live.trace(question, made)}) + b"\n")
            except Exception as error:
                yield as_json({"error": _said(error)[1]}) + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def cursors(self, asked: Mapping[str, Any]) -> Response:
        tokens, wanted = asked.get("prompt_tokens"), asked.get("cursors")
        return _json(await self._compute(lambda: as_json(self.live.cursors(tokens, wanted))))

    async def export(self, asked: Mapping[str, Any]) -> Response:
        def made() -> bytes:
            tokens, prompt, live = asked.get("tokens"), asked.get("prompt"), self.live
            again = tokens is not None
            trace = live.again(tokens, prompt, asked.get("cursors")) if again else live.complete(prompt)
            return self.bundle.alone(trace)

        name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{self.live.task.name}-{self.live.facts()['name']}")
        disposition = {"Content-Disposition": f'attachment; filename="prism-{name[:100]}.html"'}
        return Response(await self._compute(made), media_type="text/html", headers=disposition)

    async def _compute(self, work: Callable[[], Answer]) -> Answer:
        """Runs `work` in a thread when it is its turn."""
        try:
            async with asyncio.timeout(PATIENCE):
                await self._turns.acquire()
        except TimeoutError:
            raise Refusal(503, "the model is busy with other requests: ask again in a moment") from None
        try:
            return await run_in_threadpool(work)
        finally:
            self._turns.release()

    @staticmethod
    def _api(answer: Callable[[Mapping[str, Any]], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """A route for `answer`, which gets the request's JSON; whatever goes wrong is one sentence."""

        async def endpoint(request: Request) -> Response:
            try:
                return await answer(await _body(request))
            except ClientDisconnect:  # nobody is there to be told
                return Response(status_code=400)
            except Exception as error:
                response = await _failed(request, error)
                if response.status_code in (408, 413):  # the rest of the body is not read
                    response.headers["Connection"] = "close"
                return response

        return endpoint


def serve(
    live: LiveModel, bundle: Bundle, host: str, port: int, open_browser: bool = True, prompt: str | None = None
) -> None:
    """Serves until Ctrl-C. Says where, and warns if it is not this machine alone."""
    listening = listen(host, port)
    bound = listening.getsockname()[1]
    if bound != port and port:
        print(f"port {port} is taken: using {bound}", file=sys.stderr)
    if not is_loopback(host):
        print(f"prism: warning: with --host {host} others on the network can reach this page; whoever has its address, "
              "key included, can use the model, and nothing is encrypted", file=sys.stderr)
    key = secrets.token_urlsafe(24)
    shown = socket.gethostname() if is_everywhere(host) else host
    url = f"http://{written(shown, bound)}/?key={key}"
    print(f"{url}\nCtrl-C ends it", flush=True)
    if open_browser:
        # Some browsers block until they are closed; the server is listening already.
        threading.Thread(target=_open, args=(url,), daemon=True).start()
    with listening, contextlib.suppress(KeyboardInterrupt):
        uvicorn_server(live, bundle, host, bound, key, prompt).run(sockets=[listening])


def uvicorn_server(
    live: LiveModel, bundle: Bundle, host: str, port: int, key: str, prompt: str | None = None
) -> uvicorn.Server:
    """The server, guarded, for a socket bound to this host and port."""
    guarded = Guard(Server(live, bundle, key, prompt).app(), host, port, key)
    # Failures are logged here already, and that a stream was cut off by Ctrl-C is no news.
    return uvicorn.Server(uvicorn.Config(
        guarded, http="h11", ws="none", lifespan="off", interface="asgi3", log_level="critical", access_log=False,
        server_header=False, proxy_headers=False, limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=2,
    ))


def listen(host: str, port: int) -> socket.socket:
    """A socket at this port, or at the next free one."""
    if not 0 <= port <= 65_535:
        raise UserError(f"--port must be from 0 (any free one) to 65535, got {port}")
    try:
        family, kind, _, _, _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise UserError(f"--host must be an address or a name of this machine, got {host!r}") from None
    for attempt in range(port, min(port + PORTS, 65_536)):
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, attempt))
            listening.listen(128)
            return listening
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise UserError(f"cannot serve at {written(host, attempt)}: {error.strerror or error}") from None
    raise RunError(f"ports {port} to {min(port + PORTS, 65_536) - 1} are all taken: name another with --port")


def _open(url: str) -> None:
    try:
        webbrowser.open(url)
    except Exception:  # there is the address in the terminal
        log.debug("no browser", exc_info=True)


async def _body(request: Request) -> Mapping[str, Any]:
    """The JSON object of a request, of which no more is read than one may have."""
    too_long = Refusal(413, f"a request has at most {MOST_BODY // 1024} KiB")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 15 or int(length) > MOST_BODY:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_PATIENCE):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BODY:
                    raise too_long
    except TimeoutError:
        raise Refusal(408, "the request did not arrive in time") from None
    try:
        asked = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise Refusal(400, "a request must be JSON") from None
    if not isinstance(asked, dict):
        raise Refusal(400, "a request must be a JSON object")
    return asked


def _said(error: Exception) -> tuple[int, str]:
    """HTTP status and sentence for what went wrong; details stay in the terminal."""
    if isinstance(error, Refusal):
        return error.status, str(error)
    if isinstance(error, UserError | RunError):
        return 422, _shortened(str(error))
    if is_out_of_memory(error):
        return 503, "out of memory: a shorter prompt is the cure"
    log.error("a request failed", exc_info=error)
    return 500, "something went wrong inside prism view: its terminal says what"


def _shortened(sentence: str) -> str:
    """One line that is quick to read, whatever it repeats of what was given."""
    sentence = " ".join(sentence.split())
    half = LONGEST_SENTENCE // 2
    return sentence if len(sentence) <= LONGEST_SENTENCE else f"{sentence[:half]} … {sentence[-half:]}"


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


async def _failed(request: Request, error: Exception) -> Response:
    status, sentence = _said(error)
    return _json(as_json({"error": sentence}), status)


async def _unrouted(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    sentence = {404: "there is no such page", 405: "there is no such method here"}.get(status, "the request is wrong")
    return _json(as_json({"error": sentence}), status)
