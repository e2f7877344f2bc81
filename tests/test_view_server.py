"""The page's server as strangers meet it: a real one on a real port, asked byte by byte; and the one-file page."""

import base64
import contextlib
import hashlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest
from starlette.applications import Starlette

import prism.view.command
import prism.view.server
from prism.errors import RunError, UserError
from prism.trained import open_run
from prism.view import view
from prism.view.bundle import Bundle
from prism.view.protection import HEADERS, Guard, is_loopback
from prism.view.server import listen, uvicorn_server
from prism.view.trace import LiveModel

MODELS = Path(__file__).parent.parent / "models"
KEY = "a-key-of-this-start"
INDEX = """<!doctype html>
<html><head class="x"><title>PRISM</title>
<link rel="stylesheet" href="style.css"><script src="app.js" defer></script></head>
<body><header>a page</header></body></html>"""
SCRIPT = 'const s = "</script><b>"; const t = "<!--"; const r = "\\\\1";\r\nconsole.log(s, t, r);\n'
STYLE = "body { color: red }\n/* </style> */\n"
HOSTILE = "</script ><script>alert('1')</script><!-- \" & \u2028 \\u003c"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def sentence(self) -> str:
        """The one sentence of a refusal."""
        assert 400 <= self.status < 600
        assert self.headers["content-type"] == "application/json"
        (said,) = self.json.values()
        assert list(self.json) == ["error"]
        assert "\n" not in said
        assert "Traceback" not in said
        assert len(said) < 500
        return said


class Client:
    """Asks one server; every header can be chosen."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, body: object = None, **headers: str | None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        given = {"Host": f"127.0.0.1:{self.port}", "X-Prism-Token": KEY, "Content-Length": str(len(data or b""))}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in given.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(data)
        return self._answer(connection)

    def post(self, name: str, body: object, **headers: str | None) -> Answer:
        return self.ask("POST", f"/api/{name}", body, **headers)

    def raw(self, data: bytes) -> bytes:
        """What comes back for these bytes, whether or not all of them were taken."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as wire:
            with contextlib.suppress(ConnectionError):
                wire.sendall(data)
            found = b""
            with contextlib.suppress(ConnectionError):
                while part := wire.recv(65536):
                    found += part
        return found

    @staticmethod
    def _answer(connection: http.client.HTTPConnection) -> Answer:
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        answer = Answer(response.status, headers, response.read())
        connection.close()
        return answer


@contextlib.contextmanager
def running(live: LiveModel, bundle: Bundle, **more: str) -> Iterator[Client]:
    """A server in a thread of this process."""
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        server = uvicorn_server(live, bundle, more.pop("host", "127.0.0.1"), port, KEY, **more)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield Client(port)
        finally:
            server.should_exit = True
            thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def live() -> LiveModel:
    return LiveModel(open_run(MODELS / "copy-10"))


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle(INDEX, SCRIPT, STYLE)


@pytest.fixture(scope="module")
def client(live, bundle) -> Iterator[Client]:
    with running(live, bundle, prompt='1"2=') as asking:
        yield asking


@pytest.fixture
def quiet(monkeypatch):
    """No line in the log: nothing went wrong that was not foreseen."""
    lines = []
    monkeypatch.setattr(prism.view.server.log, "error", lambda *a, **k: lines.append(a))
    yield lines
    assert not lines


# --- What it answers ---


def test_the_page_and_its_files(client, live):
    page = client.ask("GET", f"/?key={KEY}")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    metas = Tags(page.body.decode()).metas
    assert metas["prism-token"] == KEY
    assert json.loads(metas["prism-run"]) == live.facts()
    assert metas["prism-prompt"] == '1"2='
    script, style = client.ask("GET", "/app.js"), client.ask("GET", "/style.css")
    assert (script.body.decode(), script.headers["content-type"]) == (SCRIPT, "text/javascript; charset=utf-8")
    assert (style.body.decode(), style.headers["content-type"]) == (STYLE, "text/css; charset=utf-8")
    assert KEY.encode() not in script.body + style.body


@pytest.mark.parametrize("path", ["/", "/?key=", "/?key=wrong", f"/?key={KEY[:-1]}", f"/?key={KEY}x", "/?kéy=%ff"])
def test_without_the_key_there_is_no_page_to_take_it_from(client, path):
    refused = client.ask("GET", path.encode("utf-8").decode("latin-1") if path.isascii() else "/?k%c3%a9y=%ff")
    assert refused.status == 403
    assert KEY.encode() not in refused.body
    assert b"<" not in refused.body


def test_the_run(client, live, quiet):
    said = client.post("run", {}).json
    assert said["run"] == live.facts()
    assert said["symbols"] == [*"0123456789=."]
    assert said["longest"] == live.longest
    assert said["examples"] == live.examples()


def test_a_trace(client, live, quiet):
    trace, own = client.post("trace", {"prompt": "907=", "limit": None}).json, live.complete("907=")
    assert {**trace, "seconds": 0} == {**own, "seconds": 0}
    assert client.post("trace", {"prompt": "907=", "limit": 2}).json["tokens"] == list("907=90")


def test_tokens_stream_one_by_one_as_they_are_written(client, live, monkeypatch):
    """Every token must have arrived before the next one is made."""
    arrived, write, own = threading.Semaphore(0), live.write, live.complete("907=")

    def waiting(question):
        for token in write(question):
            yield token
            assert arrived.acquire(timeout=60)

    monkeypatch.setattr(live, "write", waiting)
    body = json.dumps({"prompt": "907="}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
    connection.request("POST", "/api/stream", body, {"X-Prism-Token": KEY})
    response, lines = connection.getresponse(), []
    while line := response.readline():
        lines.append(json.loads(line))
        arrived.release()
    connection.close()
    assert [line["token"] for line in lines[:-1]] == list("907.")
    assert all(line["top"][0][0] == line["token"] and len(line["top"]) == 5 for line in lines[:-1])
    assert {**lines[-1]["trace"], "seconds": 0} == {**own, "seconds": 0}
    assert lines[-1]["trace"]["predictions"][3][0][0] == "9"


def test_cursors_and_exports(client, live, quiet):
    tokens = list("907=907.")
    more = client.post("cursors", {"prompt_tokens": tokens, "cursors": [5, 2]})
    assert more.json == live.cursors(tokens, [5, 2])
    for asked in ({"tokens": tokens}, {"tokens": tokens, "prompt": 4, "cursors": [5]}, {"prompt": "907="}):
        page = client.post("export", asked)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-disposition"] == 'attachment; filename="prism-copy-copy-10.html"'
        trace = Tags(page.body.decode()).trace
        assert trace["tokens"] == tokens
        assert trace["verdict"] == "right"
        if "cursors" in asked:
            assert trace["shown"] == [5]


# --- Whom it refuses ---


@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:PORT", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:PORT", "",
    "127.0.0.1:PORT.", "10.0.0.1:PORT", "[::2]:PORT", "::1:PORT", "user@127.0.0.1:PORT", None,
])
@pytest.mark.parametrize("path", ["/", "/app.js", "/api/run"])
def test_a_foreign_host(client, host, path):
    given = host and host.replace("PORT", str(client.port))
    refused = client.ask("GET" if path != "/api/run" else "POST", path, {}, Host=given)
    if given is None:  # HTTP itself asks for one
        assert refused.status == 400
    else:
        assert refused.status == 403
        assert "open it under the address it printed" in refused.sentence


def test_two_hosts(client):
    lines = f"GET /?key={KEY} HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nHost: evil.example\r\n\r\n"
    assert client.raw(lines.encode()).startswith(b"HTTP/1.1 400")  # h11 itself refuses it
    old = f"GET /?key={KEY} HTTP/1.0\r\nConnection: close\r\n\r\n"
    assert client.raw(old.encode()).startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LocalHost", "[::1]"])
def test_the_names_of_this_machine(client, host):
    name = f"{host}:{client.port}"
    assert client.post("run", {}, Host=name).status == 200
    assert client.post("run", {}, Host=name, Origin=f"http://{name.lower()}").status == 200


@pytest.mark.parametrize("origin", [
    "http://evil.example", "null", "https://127.0.0.1:PORT", "http://127.0.0.1", "http://127.0.0.1:1",
    "http://localhost:PORT", "http://127.0.0.1:PORT.evil.example", "",
])
@pytest.mark.parametrize("path", ["/", "/api/trace"])
def test_a_foreign_origin(client, origin, path):
    given = origin.replace("PORT", str(client.port))
    refused = client.ask("POST" if "api" in path else "GET", path, {"prompt": "1="}, Origin=given)
    assert refused.status == 403
    assert "only those of this server's page" in refused.sentence
    assert not any(name.startswith("access-control") for name in refused.headers)


def test_a_preflight_gets_no_permission(client):
    refused = client.ask(
        "OPTIONS", "/api/trace", Origin="http://evil.example", Access_Control_Request_Method="POST",
        Access_Control_Request_Headers="x-prism-token", X_Prism_Token=None,
    )
    assert refused.status == 403
    assert not any(name.startswith("access-control") for name in refused.headers)


@pytest.mark.parametrize("token", [None, "", "wrong", KEY[:-1], KEY + "x", KEY.upper(), "é", "\xff"])
@pytest.mark.parametrize("name", ["run", "trace", "stream", "cursors", "export", "unknown"])
def test_a_missing_or_wrong_token(client, name, token, monkeypatch, live):
    monkeypatch.setattr(live, "_record", None)  # nothing may be computed
    given = token if token is None else token.encode("latin-1")
    refused = client.post(name, {"prompt": "1="}, X_Prism_Token=given)
    assert refused.status == 403
    assert "token" in refused.sentence


def test_tokens_are_compared_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(prism.view.protection.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or False)
    assert not prism.view.protection.same_key("x", "x")
    assert compared == [(b"x", b"x")]


@pytest.mark.parametrize("path", [
    "/../config.json", "/..%2f..%2fconfig.json", "/%2e%2e/%2e%2e/etc/passwd", "/app.js/../../trace.py", "/..\\app.js",
    "/page/app.js", "/app.js%00", "/app.js/", "//app.js", "/index.html", "/api", "/api/", "/api/run/", "/api/../app.js",
    "/api/unknown", "/static/../../../etc/passwd", "/favicon.ico",
])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_unknown_paths_and_ways_up(client, path, method):
    refused = client.ask(method, path)
    assert refused.status == 404
    assert refused.sentence == "there is no such page"


@pytest.mark.parametrize(("method", "path"), [
    ("GET", "/api/run"), ("PUT", "/api/trace"), ("DELETE", "/"), ("POST", "/app.js"), ("TRACE", "/api/run"),
])
def test_other_methods(client, method, path):
    refused = client.ask(method, path)
    assert refused.status == 405
    assert refused.sentence == "there is no such method here"


@pytest.mark.parametrize(("name", "body", "status", "sentence"), [
    ("trace", {"prompt": ""}, 422, "the prompt is empty"),
    ("trace", {"prompt": "   "}, 422, "the prompt is empty"),
    ("trace", {}, 422, "prompt must be text"),
    ("trace", {"prompt": 3}, 422, "prompt must be text"),
    ("trace", {"prompt": "12a="}, 422, "'a' at position 3 of '12a=' is not a symbol of copy"),
    ("trace", {"prompt": "1\n2\r\n="}, 422, "is not a symbol of copy"),
    ("trace", {"prompt": "\ud800="}, 422, "is not a symbol of copy"),
    ("trace", {"prompt": "1" * 1700 + "x"}, 422, "is not a symbol of copy"),
    ("trace", {"prompt": "1" * 60_000}, 422, "is too long to show: prompt and completion may have 1,744 tokens"),
    ("trace", {"prompt": "1=", "limit": -1}, 422, "limit must be a whole number"),
    ("trace", {"prompt": "1=", "limit": "9"}, 422, "limit must be a whole number"),
    ("stream", {"prompt": "1x="}, 422, "is not a symbol of copy"),
    ("stream", {"prompt": "1=", "limit": 10**6}, 422, "too long to show"),
    ("cursors", {"prompt_tokens": ["1"], "cursors": [99]}, 422, "the model has cursors 0 to 15"),
    ("cursors", {"prompt_tokens": "1", "cursors": [0]}, 422, "tokens must be a list"),
    ("cursors", {}, 422, "tokens must be a list"),
    ("export", {}, 422, "prompt must be text"),
    ("export", {"tokens": []}, 422, "tokens must be 1 to"),
    ("export", {"tokens": ["1"], "cursors": [99]}, 422, "the model has cursors"),
    ("trace", b"", 400, "must be JSON"),
    ("trace", b"{", 400, "must be JSON"),
    ("trace", b"\xff\xfe", 400, "must be JSON"),
    ("trace", b"[" * 60_000, 400, "must be JSON"),
    ("trace", b'{"prompt": "1=", "limit": ' + b"9" * 5000 + b"}", 400, "must be JSON"),
    ("trace", [1], 400, "must be a JSON object"),
    ("trace", "1=", 400, "must be a JSON object"),
    ("trace", b"NaN", 400, "must be a JSON object"),
    ("trace", {"prompt": "1" * (1 << 16)}, 413, "at most 64 KiB"),
])
def test_bad_requests_are_answered_in_a_sentence(client, name, body, status, sentence, quiet):
    refused = client.post(name, body)
    assert refused.status == status
    assert sentence in refused.sentence


def test_ten_megabytes_are_not_read(client, live, monkeypatch):
    """Neither where the length is said, nor where it is not, nor where it is a lie."""
    monkeypatch.setattr(live, "complete", None)
    head = f"POST /api/trace HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nX-Prism-Token: {KEY}\r\n"
    said = client.raw(f"{head}Content-Length: 10485760\r\n\r\n".encode() + b"1" * 1000)  # refused before the rest comes
    assert said.startswith(b"HTTP/1.1 413")
    chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"10000\r\n" + b"1" * 65536 + b"\r\n1\r\n1\r\n"
    assert client.raw(chunked).startswith(b"HTTP/1.1 413")  # one byte more, though the end never comes
    for length in ("-1", "1e9", "9" * 30):
        said = client.raw(f"{head}Content-Length: {length}\r\n\r\n".encode())
        assert said.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))


def test_a_request_that_never_ends(client, monkeypatch):
    monkeypatch.setattr(prism.view.server, "BODY_PATIENCE", 0.1)
    head = f"POST /api/run HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nX-Prism-Token: {KEY}\r\n"
    assert client.raw(f"{head}Content-Length: 9\r\n\r\n{{".encode()).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(("method", "path", "headers"), [
    ("GET", f"/?key={KEY}", {}), ("GET", "/", {}), ("GET", "/app.js", {}), ("GET", "/nowhere", {}),
    ("POST", "/api/run", {}), ("POST", "/api/run", {"X_Prism_Token": "wrong"}), ("POST", "/api/trace", {}),
    ("GET", "/", {"Host": "evil.example"}), ("PUT", "/api/run", {}),
])
def test_every_answer_carries_the_protective_headers(client, method, path, headers):
    answer = client.ask(method, path, {}, **headers)
    assert answer.headers["content-security-policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
    )
    for name, value in HEADERS.items():
        assert answer.headers[name.lower()] == value
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert "server" not in answer.headers
    assert not any(name.startswith("access-control") for name in answer.headers)


# --- When something goes wrong, and when there is much to do ---


def test_what_nobody_foresaw_stays_in_the_terminal(client, live, monkeypatch, caplog):
    def broken(*arguments):
        raise KeyError("secret")

    monkeypatch.setattr(live, "_record", broken)
    refused = client.post("trace", {"prompt": "1="})
    assert refused.status == 500
    assert refused.sentence == "something went wrong inside prism view: its terminal says what"
    assert "secret" in caplog.text
    monkeypatch.setattr(live, "facts", broken)
    for answer in (client.ask("GET", f"/?key={KEY}"), client.post("run", {})):
        assert answer.status == 500
        assert answer.sentence.startswith("something went wrong")
        assert "content-security-policy" in answer.headers
    lines = client.post("stream", {"prompt": "1="}).body.splitlines()
    assert json.loads(lines[-1]) == {"error": "something went wrong inside prism view: its terminal says what"}
    assert b"secret" not in b"".join(lines)


@pytest.mark.parametrize(("error", "status", "sentence"), [
    (MemoryError(), 503, "out of memory"), (RunError("recording would take\n9 GiB"), 422, "would take 9 GiB"),
    (UserError("x" * 5000), 422, " … "),
])
def test_what_was_foreseen(client, live, monkeypatch, quiet, error, status, sentence):
    def fails(*arguments):
        raise error

    monkeypatch.setattr(live, "complete", fails)
    refused = client.post("trace", {"prompt": "1="})
    assert refused.status == status
    assert sentence in refused.sentence


def test_two_compute_and_others_wait_their_turn_or_hear_that_it_is_busy(client, live, monkeypatch, quiet):
    inside, most, gate, lock = 0, 0, threading.Event(), threading.Lock()

    def slow(prompt, limit=None):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        gate.wait(60)
        with lock:
            inside -= 1
        return {"tokens": []}

    monkeypatch.setattr(live, "complete", slow)
    answers: list[int] = []
    askers = [
        threading.Thread(target=lambda: answers.append(client.post("trace", {"prompt": "1="}).status)) for _ in range(6)
    ]
    try:
        for asker in askers[:2]:
            asker.start()
        while inside < 2:
            time.sleep(0.01)
        monkeypatch.setattr(prism.view.server, "PATIENCE", 0.05)  # for the next two, and only for them
        for asker in askers[2:4]:
            asker.start()
        for asker in askers[2:4]:
            asker.join(60)
        assert answers == [503, 503]
        monkeypatch.setattr(prism.view.server, "PATIENCE", 60.0)
        for asker in askers[4:]:
            asker.start()
        assert client.post("run", {}).status == 200  # what computes nothing need not wait
    finally:
        gate.set()  # else the server would stay busy for the tests that follow
    for asker in (*askers[:2], *askers[4:]):
        asker.join(60)
    assert sorted(answers) == [200] * 4 + [503] * 2
    assert most == 2


def test_who_leaves_early_leaves_no_work_behind(client, live, quiet):
    """More half-read streams than there are turns: the next request is answered all the same."""
    body = json.dumps({"prompt": "1" * 300 + "="}).encode()
    head = f"POST /api/stream HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nX-Prism-Token: {KEY}\r\n"
    wires = []
    for _ in range(4):
        wire = socket.create_connection(("127.0.0.1", client.port))
        wire.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wire.recv(100)
        wires.append(wire)
    assert client.post("trace", {"prompt": "12="}).json["verdict"] == "right"  # though nobody reads the others
    for wire in wires:
        wire.close()
    assert client.post("trace", {"prompt": "12="}).json["verdict"] == "right"


# --- Where it listens ---


def test_a_port_that_is_taken(live, bundle, monkeypatch, capsys):
    monkeypatch.setattr(prism.view.server.uvicorn.Server, "run", lambda self, sockets: None)
    opened: list[str] = []
    monkeypatch.setattr(prism.view.server.webbrowser, "open", opened.append)
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        prism.view.server.serve(live, bundle, "127.0.0.1", port, open_browser=False)
        out, err = capsys.readouterr()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?key=([\w-]{32})\nCtrl-C ends it\n", out)
        assert found
        assert port < int(found[1]) <= port + 20
        assert err == f"port {port} is taken: using {found[1]}\n"
        assert opened == []
        prism.view.server.serve(live, bundle, "127.0.0.1", 0)
        again = re.match(r"http://127\.0\.0\.1:\d+/\?key=([\w-]{32})", capsys.readouterr().out)
        assert again
        assert again[1] != found[2]  # a key of its own for every start
        deadline = time.monotonic() + 60
        while not opened and time.monotonic() < deadline:
            time.sleep(0.01)
        assert opened == [again[0]]


def test_other_machines_only_with_a_warning(live, bundle, monkeypatch, capsys):
    monkeypatch.setattr(prism.view.server.uvicorn.Server, "run", lambda self, sockets: None)
    prism.view.server.serve(live, bundle, "0.0.0.0", 0, open_browser=False)
    out, err = capsys.readouterr()
    assert err.startswith("prism: warning: with --host 0.0.0.0 others on the network can reach this page")
    assert err.count("\n") == 1
    assert out.startswith(f"http://{socket.gethostname()}:")
    prism.view.server.serve(live, bundle, "localhost", 0, open_browser=False)
    assert capsys.readouterr().err == ""


def test_all_addresses_are_numbers_or_this_machines_name(live, bundle):
    with running(live, bundle, host="0.0.0.0") as client:
        for host in ("192.168.7.7", "127.0.0.1", "[fe80::1]", socket.gethostname()):
            assert client.post("run", {}, Host=f"{host}:{client.port}").status == 200
        for host in ("evil.example", "1.2.3.4.evil.example", "192.168.7.7.", "0x7f.1"):
            assert client.post("run", {}, Host=f"{host}:{client.port}").status == 403
        assert client.post("run", {}, Host="192.168.7.7:1").status == 403


@pytest.mark.parametrize(("host", "alone"), [
    ("127.0.0.1", True), ("127.0.1.9", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False),
    ("192.168.0.1", False), ("mine.example", False),
])
def test_what_is_only_this_machine(host, alone):
    assert is_loopback(host) is alone


def test_a_browser_says_no_port_where_it_is_80():
    guard = Guard(Starlette(), "127.0.0.1", 80, KEY)
    assert guard._is_ours("127.0.0.1")
    assert not guard._is_ours("evil.example")


def test_places_it_cannot_listen_at():
    with pytest.raises(UserError, match="--port must be from 0"):
        listen("127.0.0.1", 70_000)
    with pytest.raises(UserError, match="--host must be an address or a name of this machine, got 'no such host'"):
        listen("no such host", 8765)
    with pytest.raises(UserError, match=r"cannot serve at 192\.0\.2\.1:8765"):
        listen("192.0.2.1", 8765)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(prism.view.server, "PORTS", 1)
        port = stack.enter_context(listen("127.0.0.1", 0)).getsockname()[1]
        with pytest.raises(RunError, match="are all taken"):
            listen("127.0.0.1", port)


def test_ctrl_c_ends_it_quietly():
    """In a process of its own, from the first byte to the last, with a stream half read."""
    program = (
        f"from prism.view import view\nview({str(MODELS / 'copy-10')!r}, port=0, open_browser=False)\nprint('after')"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            port, key = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?key=(.+)", url).groups()
            assert Client(int(port)).ask("GET", f"/?key={key}").status == 200
            body = json.dumps({"prompt": "1" * 800 + "="}).encode()
            head = f"POST /api/stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-Prism-Token: {key}\r\n"
            with socket.create_connection(("127.0.0.1", int(port))) as half_read:
                half_read.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                assert half_read.recv(12) == b"HTTP/1.1 200"
                process.send_signal(signal.SIGINT)
                out, err = process.stdout.read(), process.stderr.read()
            assert (process.wait(60), out, err) == (0, "Ctrl-C ends it\nafter\n", "")
        finally:
            process.kill()


# --- The page as one file ---


class Tags(HTMLParser):
    """Elements of a page as a browser finds them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.found.append(("", {}, ""))  # what follows is no longer inside

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, text) for name, attributes, text in self.found if name == tag]

    @property
    def metas(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for attributes, _ in self.of("meta"):
            name = attributes.get("name") or attributes.get("http-equiv") or ""
            found.setdefault(name, attributes.get("content") or "")
        return found

    @property
    def trace(self) -> dict:
        (text,) = [text for attributes, text in self.of("script") if attributes.get("id") == "trace"]
        return json.loads(text)


def sha(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


FETCHED = ("src", "href", "xlink:href", "action", "formaction", "data", "srcset", "poster", "background", "ping")
NAMES = r"/?www\.w3\.org/|/?www\.apache\.org/licenses/"  # of XML namespaces, and in the text of a licence


def references(page: str) -> list[str]:
    """Whatever in a page could be fetched from elsewhere."""
    found = [
        value or "" for _, attributes, _ in Tags(page).found for name, value in attributes.items() if name in FETCHED
    ]
    found = [value for value in found if not value.startswith(("data:", "#"))]
    without_trace = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    found += re.findall(rf"(?:https?|wss?|ftp):/{{1,2}}(?!{NAMES})[^\s\"'`)]*", without_trace)
    found += re.findall(r"[\"'`(]//[\w.-]+", without_trace)
    return found + re.findall(r"@import[^;]*|url\((?!\s*[\"']?(?:data:|#))[^)]*\)", without_trace)


def check_alone(page: str) -> Tags:
    """One file: nothing is fetched, and its policy lets run exactly the script and style that stand in it."""
    tags = Tags(page)
    assert references(page) == []
    (style,), scripts = tags.of("style"), tags.of("script")
    data, (code, script) = scripts
    assert data[0] == {"type": "application/json", "id": "trace"}
    assert "src" not in code
    assert tags.metas["Content-Security-Policy"] == (
        f"default-src 'none'; script-src {sha(script)}; style-src {sha(style[1])}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    order = [name for name, _, _ in tags.found]
    policy = next(place for place, found in enumerate(tags.found) if "http-equiv" in found[1])
    assert policy < min(order.index("script"), order.index("style"))
    assert re.search(r'id="trace">[^<>&]*</script>', page)  # nothing in it that a browser could take for markup
    assert KEY not in page
    return tags


def test_the_export_is_one_file(live, bundle):
    page = bundle.alone(live.complete("907=")).decode()
    tags = check_alone(page)
    assert tags.trace["tokens"] == list("907=907.")
    (style,) = tags.of("style")
    assert style[1] == STYLE.replace("</style>", "<\\/style>")
    script = tags.of("script")[1][1]
    assert script == SCRIPT.replace("</script>", "<\\/script>").replace("<!--", "\\x3c!--").replace("\r\n", "\n")
    assert "<header>a page" in page
    assert page.count("</body>") == 1


def test_a_hostile_name_or_prompt_stays_text(live, bundle):
    trace = {**live.complete("907="), "note": HOSTILE, "tokens": [HOSTILE, "\ud800"]}
    trace["run"] = {**trace["run"], "name": HOSTILE}
    tags = check_alone(bundle.alone(trace).decode())
    assert tags.trace["run"]["name"] == tags.trace["note"] == tags.trace["tokens"][0] == HOSTILE
    assert tags.trace["tokens"][1] == "\ud800"
    assert len(tags.of("script")) == 2
    served = Tags(bundle.served({"prism-token": KEY, "prism-run": HOSTILE, "prism-prompt": '"><script>\ud800'}))
    assert served.metas["prism-run"] == HOSTILE
    assert served.metas["prism-prompt"] == '"><script>?'
    assert len(served.of("script")) == 1


def test_a_hostile_folder(tmp_path, live, bundle):
    """The name of a run is a folder's, and a folder may be called almost anything."""
    folder = tmp_path / "</script><img src=x onerror=alert(1)>\n\udcff"
    try:
        folder.mkdir(parents=True)
    except OSError:
        pytest.skip("this file system refuses such names")
    for each in (MODELS / "copy-10").iterdir():
        (folder.parent / folder.name / each.name).symlink_to(each)
    hostile = LiveModel(open_run(folder))
    assert hostile.facts()["name"] == folder.name
    assert check_alone(bundle.alone(hostile.complete("907=")).decode()).trace["run"]["name"] == folder.name
    with running(hostile, bundle) as client:
        disposition = client.post("export", {"prompt": "907="}).headers["content-disposition"]
        assert re.fullmatch(r'attachment; filename="[\w.-]+"', disposition)
        assert len(Tags(client.ask("GET", f"/?key={KEY}").body.decode()).of("img")) == 0


def test_an_export_from_the_command(tmp_path, bundle, monkeypatch, capsys):
    monkeypatch.setattr(prism.view.command.Bundle, "read", lambda: bundle)
    file = tmp_path / "new" / "page.html"
    view(str(MODELS / "copy-10"), export=str(file), prompt="907=")
    assert capsys.readouterr().out == f"{file}: 8 tokens, right, {file.stat().st_size / 1e6:.1f} MB\n"
    assert check_alone(file.read_text("utf-8")).trace["tokens"] == list("907=907.")
    view(str(MODELS / "reverse-10"), export=str(file))
    trace = check_alone(file.read_text("utf-8")).trace
    assert (trace["run"]["task"], trace["prompt"]) == ("reverse", 12)
    with pytest.raises(UserError, match="is not a symbol of copy"):
        view(str(MODELS / "copy-10"), export=str(file), prompt="x")
    with pytest.raises(UserError, match="is a folder"):
        view(str(MODELS / "copy-10"), export=str(tmp_path))
    with pytest.raises(UserError, match="is not a symbol of copy"):
        view(str(MODELS / "copy-10"), prompt="x")
    with pytest.raises(UserError, match="--encoding is nope"):
        view(str(MODELS / "copy-10"), encoding="nope")


def test_a_server_that_is_not_installed(bundle, monkeypatch):
    monkeypatch.setattr(prism.view.command.Bundle, "read", lambda: bundle)
    monkeypatch.delitem(sys.modules, "prism.view.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(RunError, match=r"needs uvicorn: pip install 'prism-positions\[train,view\]'"):
        view(str(MODELS / "copy-10"), port=0, open_browser=False)


def test_a_page_that_is_not_built(tmp_path):
    with pytest.raises(RunError, match=r"the page is not built: .*index\.html is missing"):
        Bundle.read(tmp_path)
    for name, text in (("index.html", "<html></html>"), ("app.js", ""), ("style.css", "")):
        (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match="must have one head, body, script src and stylesheet each"):
        Bundle.read(tmp_path)


def test_the_built_page_is_one_file_too(live):
    built = Bundle.read()
    page = built.alone(live.complete("907=")).decode()
    tags = check_alone(page)
    assert not tags.metas.get("prism-token")
    assert references(built.index) == ["style.css", "app.js"]
    served = Tags(built.served({"prism-token": KEY}))
    assert served.metas["prism-token"] == KEY
    assert not any(name == "style" or name.startswith("on") for _, attributes, _ in served.found for name in attributes)
