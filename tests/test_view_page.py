"""The page of prism view: built from these sources, asking nobody else for anything, and working in a real browser.

The browser tests need Chromium and its driver (Debian: chromium, chromium-driver) and the Python package selenium; they
are skipped where one is missing. A small server stands in for the real one: its policy is as strict, its answers are a
trained model's.
"""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import shutil
import threading
import time
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from prism.trained import open_run
from prism.view.bundle import Bundle
from prism.view.trace import LiveModel

ROOT = Path(__file__).parent.parent
WEB, PAGE = ROOT / "prism" / "view" / "web", ROOT / "prism" / "view" / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
KEY = "a-key-of-this-start"


class Tags(HTMLParser):
    """What a page is made of: its tags with their attributes, and the text inside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.inside = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        if self.tags and self.tags[-1][0] in ("script", "style") and text.strip():
            self.inside.append(text)


def test_the_page_is_built_from_these_sources():
    """The same sum as build.mjs makes, without node."""
    names = ["build.mjs", "index.html", "package-lock.json", "package.json", "style.css", "tsconfig.json"]
    names = sorted(names + [f"src/{path.name}" for path in (WEB / "src").iterdir()])
    digest = hashlib.sha256()
    for name in names:
        content = (WEB / name).read_bytes()
        digest.update(f"{name}\n{len(content)}\n".encode() + content)
    first, _, body = (PAGE / "app.js").read_bytes().partition(b"\n")
    built = re.fullmatch(rb"/\* sources ([0-9a-f]{64}) bundle ([0-9a-f]{64}) \*/", first)
    assert built is not None
    assert built[1].decode() == digest.hexdigest(), "the page is older than its sources: npm ci && npm run build there"
    assert built[2].decode() == hashlib.sha256(body).hexdigest(), "app.js was changed after it was built"
    for name in ("index.html", "style.css"):
        assert (PAGE / name).read_bytes() == (WEB / name).read_bytes(), name
    assert sorted(path.name for path in PAGE.iterdir()) == ["app.js", "index.html", "style.css"]


def test_the_page_has_nothing_inline_and_asks_nobody_else():
    page = Tags((PAGE / "index.html").read_text())
    assert page.inside == []
    references = []
    for tag, attributes in page.tags:
        assert tag != "style"
        for name, value in attributes.items():
            assert name != "style", (tag, value)
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "action", "formaction", "srcset", "data", "poster"):
                references.append(value)
    assert sorted(references) == ["app.js", "data:,", "style.css"]
    style = (PAGE / "style.css").read_text()
    assert "url(" not in style
    assert "@import" not in style
    code, licences, _ = (PAGE / "app.js").read_text().partition("/* With parts of:")
    assert licences
    assert set(re.findall(r"https?://([^/\s\"'`]+)", code)) <= {"www.w3.org"}  # XML's namespaces
    assert not re.search(r"\beval\(|new Function\(|sourceMappingURL", code)
    for source in (WEB / "src").iterdir():  # what a model or a file says becomes text, never markup
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", source.read_text()), source


def test_whoever_hands_the_page_on_hands_the_licences_on():
    text = (PAGE / "app.js").read_text()
    for package in ("@observablehq/plot", "d3-scale", "d3-shape", "d3-scale-chromatic"):
        assert re.search(rf"{package} \d+\.\d+", text), package
    assert text.count("Permission to use, copy, modify") > 3


def test_page_and_style_name_each_other():
    """An id that the script looks for and the page lacks would only show when it is needed."""
    ids = {attributes["id"] for _, attributes in Tags((PAGE / "index.html").read_text()).tags if "id" in attributes}
    wanted = set()
    for path in (WEB / "src").iterdir():
        wanted |= set(re.findall(r'byId(?:<\w+>)?\("([\w-]+)"\)', path.read_text()))
    assert len(wanted) > 20
    assert wanted <= ids
    selectors = re.sub(r":\s*[^;{}]*;", ";", (PAGE / "style.css").read_text())
    assert set(re.findall(r"#([a-z][\w-]*)[\s,.{:>\[]", selectors)) <= ids


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live():
    return LiveModel(open_run(ROOT / "models" / "copy-10"))


def block(values):
    data = np.rint(np.asarray(values) * 255).astype(np.uint8)
    return {"shape": list(data.shape), "scale": 1 / 255, "data": base64.b64encode(data.tobytes()).decode()}


def unblock(given):
    shares = np.frombuffer(base64.b64decode(given["data"]), np.uint8).reshape(given["shape"])
    return shares * given["scale"]


def long_trace(trace, digits=249):
    """A copy of so many digits as a perfect model would make it, in the form of `trace`."""
    text = [str(digit) for digit in np.random.default_rng(0).integers(0, 10, digits)]
    tokens = [*text, "=", *text, "."]
    time_ = len(tokens)
    query, key, attention = np.zeros((time_, time_)), np.zeros((time_, time_)), np.zeros((2, 2, time_, time_))
    for at in range(time_):
        stands = at if at < digits else at - digits
        query[at, time_ - 1 - stands] = 0.9
        key[at, time_ - 1 - at] = 1
        attention[:, :, at, stands] = 0.8
    pairs = {"query": query, "key": key}
    rows = [
        {**next(row for row in trace["cursors"] if row["side"] == side), "index": index, "layer": 0, "head": head,
         "cursor": 0, "importance": 9 - head}
        for index, (side, head) in enumerate((side, head) for side in ("query", "key") for head in (0, 1))
    ]
    gates = np.zeros((4, time_, 5))
    gates[..., 2] = 1
    return {
        **trace, "tokens": tokens, "prompt": digits + 1, "right": "".join(tokens[digits + 1:]),
        "expected": tokens[digits + 1:], "verdict": "right", "attention": block(attention),
        "predictions": [[[token, 0.99], ["0", 0.01]] for token in [*tokens[1:], "."]], "cursors": rows,
        "shown": [0, 2, 1, 3], "offset": 1 - time_, "gates": block(gates),
        "histograms": block([pairs[side] for side in ("query", "key", "query", "key")]),
    }


def without_cursors(trace):
    time_ = len(trace["tokens"])
    return {**trace, "run": {**trace["run"], "label": "rope"}, "cursors": [], "shown": [], "offset": 0,
            "histograms": block(np.zeros((0, time_, 0))), "gates": block(np.zeros((0, time_, 5)))}


def with_mistakes(trace):
    """The last three tokens are not the right ones: two digits, and a digit where the text should have ended."""
    tokens = [*trace["tokens"][:-3], "7", "7", "7"]
    return {**trace, "tokens": tokens, "verdict": "wrong", "note": "stopped after 9 tokens without an end"}


@pytest.fixture(scope="module")
def traces(live):
    """Prompts that the stand-in knows, and what it answers."""
    made = live.complete("31415926=")
    small = live.again(made["tokens"], made["prompt"], made["shown"][:2])  # the others are to be fetched
    hostile = {**small, "tokens": [*small["tokens"][:3], "<img src=x onerror=alert(1)>", *small["tokens"][4:]]}
    return {
        "31415926=": small, "27182818284590452353=": live.complete("27182818284590452353="),
        "1=": with_mistakes(small), "2=": without_cursors(small), "3=": hostile, "4=": long_trace(small),
    }


class Answers(http.server.BaseHTTPRequestHandler):
    """The stand-in. `stand.asked` keeps what was asked of it."""

    stand: "Stand"

    def log_message(self, *_):
        pass

    def answer(self, code, body, kind):
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(body if isinstance(body, bytes) else body.encode())

    def do_GET(self):
        bundle = Bundle.read()
        known = {
            "/": (bundle.served({"prism-token": KEY}), "text/html"),
            "/app.js": (bundle.script, "text/javascript"), "/style.css": (bundle.style, "text/css"),
        }
        if self.path in known:
            self.answer(200, *known[self.path])
        else:
            self.answer(404, "", "text/plain")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.stand.asked.append((self.path, asked))
        if self.headers["X-Prism-Token"] != KEY:
            return self.answer(403, '{"error": "no key"}', "application/json")
        return getattr(self, self.path.removeprefix("/api/"))(asked)

    def run(self, asked):
        examples = [{"prompt": "31415926=", "length": 8}, {"prompt": "27182818284590452353=", "length": 20}]
        facts = self.stand.traces["31415926="]["run"]
        said = {"run": facts, "examples": examples, "symbols": list("0123456789=."), "longest": 900}
        self.answer(200, json.dumps(said), "application/json")

    def stream(self, asked):
        trace = self.stand.traces.get(asked["prompt"])
        if trace is None:
            return self.answer(422, '{"error": "a prompt of copy is <digits> and \'=\'"}', "application/json")
        lines = [{"token": token, "top": []} for token in trace["tokens"][trace["prompt"]:]] + [{"trace": trace}]
        return self.answer(200, "".join(json.dumps(line) + "\n" for line in lines), "application/x-ndjson")

    def cursors(self, asked):
        more = self.stand.live.cursors(asked["prompt_tokens"], asked["cursors"])
        self.answer(200, json.dumps(more), "application/json")

    def export(self, asked):
        trace = self.stand.live.again(asked["tokens"], asked["prompt"], asked["cursors"])
        self.answer(200, Bundle.read().alone(trace), "text/html")


class Stand:
    """The stand-in's address and what it was asked."""

    def __init__(self, live, traces):
        self.live, self.traces, self.asked = live, traces, []
        self.server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Answering", (Answers,), {"stand": self})
        )
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture(scope="module")
def stand(live, traces):
    made = Stand(live, traces)
    yield made
    made.server.shutdown()
    made.server.server_close()


class Browser:
    """A driven Chromium, and what a person would do with it."""

    def __init__(self, driver):
        self.driver, self.js = driver, driver.execute_script
        noted = "window.broken = []; document.addEventListener('securitypolicyviolation', (event) => " \
                "window.broken.push(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`));"
        self.cdp("Page.addScriptToEvaluateOnNewDocument", source=noted)

    def cdp(self, command, **settings):
        return self.driver.execute_cdp_cmd(command, settings)

    def until(self, condition, *arguments, seconds=60.0):
        end = time.monotonic() + seconds
        while not (value := self.js(f"return {condition}", *arguments)):
            assert time.monotonic() < end, f"never came: {condition}; the page says: {self.text('#error')}"
            time.sleep(0.02)
        return value

    def open(self, url, width=1280, height=900, scheme="light"):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)
        self.scheme(scheme)
        self.cdp("Storage.clearDataForOrigin", origin=url, storageTypes="local_storage")  # a theme chosen before
        self.driver.get_log("browser")
        self.driver.get(url)
        self.wait()

    def scheme(self, scheme):
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def wait(self):
        self.until("document.querySelector('#stage:not([hidden]):not([data-busy]):not([aria-busy])')")

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def text(self, selector):
        return self.js("return document.querySelector(arguments[0]).textContent", selector)

    def ask(self, prompt):
        from selenium.webdriver.common.keys import Keys

        field = self.find("#prompt")
        field.clear()
        field.send_keys(prompt, Keys.ENTER)
        time.sleep(0.05)
        self.wait()
        self.js("document.activeElement.blur()")

    def texts(self, selector):
        return self.js("return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector)

    def press(self, *keys):
        """Keys, to whatever has the focus."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def choose_other_head(self):
        """Of the two; its cursors are not there at first."""
        self.js("const head = document.getElementById('head'); head.selectedIndex = 1 - head.selectedIndex;"
                "head.dispatchEvent(new Event('change', {bubbles: true}))")
        self.until("document.querySelectorAll('.card').length === 2")
        self.wait()

    @property
    def at(self):
        return int(self.text("#place").split("/")[0])

    def picture(self, which=0):
        return self.js("return document.querySelectorAll('#figure canvas')[arguments[0]].toDataURL()", which)

    def complaints(self):
        """Everything the browser found wrong, but for answers that the server refused on purpose."""
        logged = [entry["message"] for entry in self.driver.get_log("browser")]
        return self.js("return window.broken") + [line for line in logged if "/api/" not in line]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no Chromium and chromedriver here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        webdriver = pytest.importorskip("selenium.webdriver")
        from selenium.webdriver.chrome.service import Service
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--force-device-scale-factor=1"):
        options.add_argument(argument)
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(driver))
    downloads = tmp_path_factory.mktemp("downloads")
    made.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
    opened = Browser(made)
    opened.downloads = downloads
    yield opened
    made.quit()


@pytest.fixture
def page(browser, stand):
    """The page, open, with its first example."""
    browser.open(stand.url)
    yield browser
    assert browser.complaints() == []


def test_it_opens_with_an_example_and_its_story(page, traces):
    trace = traces["31415926="]
    assert page.texts("#strip span") == trace["tokens"]
    assert page.text("#verdict") == "✓ right"
    assert page.texts(".chip") == ["8", "20"]
    third = trace["prompt"] + (len(trace["tokens"]) - trace["prompt"]) // 3
    assert page.at == third
    # The first view: where the query cursor stands, there is the key of the token whose digit comes next.
    met = re.search(r"where the key of token (\d+) “(\d)” stands", page.text("#told"))
    assert met is not None
    assert trace["tokens"][int(met[1])] == met[2] == trace["tokens"][third + 1]
    assert re.search(rf"The head reads token {met[1]} ", page.text("#told"))


def test_typing_and_enter_run_a_prompt(page, traces, stand):
    page.ask("27182818284590452353=")
    assert stand.asked[-1] == ("/api/stream", {"prompt": "27182818284590452353=", "limit": None})
    assert page.text("#strip") == "".join(traces["27182818284590452353="]["tokens"])
    kinds = page.js("return [...document.querySelectorAll('#strip span')].map((one) => one.classList[0])")
    assert kinds == ["prompt"] * 21 + ["completion"] * 21
    page.find(".chip").click()
    page.until("document.querySelectorAll('#strip span').length === 18")


def test_every_way_to_move_moves_everything(page, traces):
    from selenium.webdriver.common.keys import Keys

    trace = traces["31415926="]
    histograms, gates = unblock(trace["histograms"]), unblock(trace["gates"])
    page.press(Keys.HOME)
    assert page.at == 0
    for expected in range(1, 4):
        page.press(Keys.ARROW_RIGHT)
        assert page.at == expected
    page.press(Keys.ARROW_LEFT)
    assert page.at == 2
    page.press(Keys.END)
    assert page.at == len(trace["tokens"]) - 1
    page.find("[data-step=back]").click()
    page.find("[data-step=back]").click()
    page.js("document.querySelectorAll('#strip span')[11].click()")
    assert page.at == 11
    slider = page.find("#player input")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert page.at == 12
    assert slider.get_attribute("aria-valuetext") == f"token 12 of {len(trace['tokens']) - 1}"
    assert page.texts("#strip [aria-current]") == [trace["tokens"][12]]
    assert page.text("#strip .next") == trace["tokens"][13]
    assert page.texts("#predictions .name") == [name for name, _ in trace["predictions"][12]]
    shares = [float(text.removesuffix("\u00a0%")) for text in page.texts("#gates-query .value")[:4]]
    assert shares == pytest.approx(100 * gates[0, 12, :4], abs=0.6)
    stands = trace["offset"] + int(histograms[0, 12].argmax())
    assert f"The query cursor stands at {'−' if stands < 0 else ''}{abs(stands)}," in page.text("#told")


def test_pointing_at_the_figure_says_what_is_there_and_a_click_goes_there(page, traces):
    trace = traces["31415926="]
    box = page.js("return document.getElementById('figure').getBoundingClientRect().toJSON()")
    rule = "document.querySelector('#confidence-lane g[aria-label=rule] line')"  # as wide as the tokens above it
    lane, right = page.js(f"return ['x1', 'x2'].map((end) => Number({rule}.getAttribute(end)))")
    token = 5
    at = {"x": box["left"] + lane + (token + 0.5) * (right - lane) / len(trace["tokens"]), "y": box["top"] + 200}
    page.cdp("Input.dispatchMouseEvent", type="mouseMoved", **at)
    page.until("document.getElementById('readout').textContent")
    said = re.fullmatch(r"token 5 “9”, offset ([−+]?\d+): query (\d+)\D.*, key (\d+)\D.*", page.text("#readout"))
    assert said is not None
    offset = int(said[1].replace("−", "-")) - trace["offset"]
    shares = unblock(trace["histograms"])[:, token, offset] if 0 <= offset < trace["histograms"]["shape"][2] else (0, 0)
    assert [int(said[2]), int(said[3])] == pytest.approx([100 * share for share in shares], abs=1)
    page.cdp("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **at)
    page.cdp("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **at)
    assert page.at == token


def test_space_plays_and_pauses(page):
    from selenium.webdriver.common.keys import Keys

    page.press(Keys.HOME, " ")
    assert page.js("return document.getElementById('play').ariaLabel") == "Pause"
    page.until("document.getElementById('place').textContent.startsWith('3 ')")
    page.press(" ")
    stopped = page.at
    time.sleep(0.5)
    assert page.at == stopped
    assert page.js("return document.getElementById('play').ariaLabel") == "Play"


def test_other_cursors_are_fetched_once_and_shown(page, traces, stand):
    trace = traces["31415926="]
    before, first = page.picture(), trace["cursors"][trace["shown"][0]]
    other = 1 - first["head"]
    page.choose_other_head()
    path, asked = stand.asked[-1]
    assert path == "/api/cursors"
    wanted = [trace["cursors"][index] for index in asked["cursors"]]
    assert [(one["side"], one["head"], one["layer"]) for one in wanted] == [
        ("query", other, first["layer"]), ("key", other, first["layer"])
    ]
    assert asked["prompt_tokens"] == trace["tokens"]
    assert page.picture() != before
    count = len(stand.asked)
    page.press("c")
    assert page.picture() == before
    assert len(stand.asked) == count
    pictures = {page.picture()}
    for _ in range(3):
        page.press("v")
        pictures.add(page.picture())
    assert len(pictures) == 4


def test_what_the_server_refuses_is_said_and_changes_nothing(page):
    before, place = page.text("#strip"), page.at
    page.ask("12x=")
    assert page.text("[role=alert]") == "a prompt of copy is <digits> and '='"
    assert page.find("#prompt").get_attribute("aria-invalid") == "true"
    assert (page.text("#strip"), page.at) == (before, place)
    page.ask("31415926=")
    assert page.text("[role=alert]") == ""
    assert page.find("#prompt").get_attribute("aria-invalid") == "false"


def test_wrong_tokens_are_marked_with_what_they_should_have_been(page, traces):
    page.ask("1=")
    assert page.text("#verdict") == "✗ wrong"
    assert page.text("#answer") == f"the answer is {traces['1=']['right']}"
    assert "without an end" in page.text("#note")
    wrong = page.js("return [...document.querySelectorAll('#strip .wrong')].map((one) => [one.textContent, one.title])")
    assert wrong == [["7", "should be 2"], ["7", "should be 6"], ["7", "should be ."]]


def test_a_model_without_cursors_shows_what_it_reads_and_says(page):
    from selenium.webdriver.common.keys import Keys

    page.ask("2=")
    assert "rope, has no cursors" in page.text("#no-cursors")
    visible = page.js("return ['#views', '#gates-query', '#suggestions', '#gates-lane', '#predictions', '#figure']"
                      ".map((one) => document.querySelector(one).checkVisibility())")
    assert visible == [False, False, False, False, True, True]
    before = page.picture(1)
    page.press(Keys.ARROW_RIGHT)
    assert page.picture(1) != before
    assert "The head reads" in page.text("#told")


def test_tokens_are_text_whatever_they_say(page):
    page.ask("3=")
    assert "<img src=x" in page.text("#strip")
    assert page.js("return document.querySelectorAll('#strip img').length") == 0


def test_the_policy_is_in_force(browser, stand):
    browser.open(stand.url)
    for tag, text in (("script", "window.ran = true"), ("style", "body {}")):
        browser.js("const one = document.createElement(arguments[0]); one.textContent = arguments[1];"
                   "document.body.append(one)", tag, text)
    browser.until("window.broken.length === 2")
    assert browser.js("return window.ran") is None


def test_the_exported_file_plays_without_a_server(page, stand, browser):
    page.choose_other_head()
    page.find("#export").click()
    end = time.monotonic() + 60
    while not (files := list(browser.downloads.glob("*.html"))):
        assert time.monotonic() < end
        time.sleep(0.05)
    path, asked = stand.asked[-1]
    assert path == "/api/export"
    assert asked["prompt"] == 9
    assert len(asked["cursors"]) == 4
    told = page.text("#told")
    assert page.complaints() == []
    network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.cdp("Network.enable")
    browser.cdp("Network.emulateNetworkConditions", offline=True, **network)
    try:
        browser.driver.get(files[0].as_uri())
        browser.wait()
        assert browser.text("#told") == told  # it opens with the cursor that was seen
        assert not browser.js("return document.getElementById('ask').checkVisibility()")
        assert not browser.js("return document.getElementById('export').checkVisibility()")
        place = browser.at
        browser.press("\ue014")  # arrow to the right
        assert browser.at == place + 1
        assert browser.complaints() == []
    finally:
        browser.cdp("Network.emulateNetworkConditions", offline=False, **network)


def test_the_keyboard_reaches_everything_and_shows_where_it_is(page):
    from selenium.webdriver.common.keys import Keys

    page.js("document.body.focus()")
    reached = []
    for _ in range(40):
        page.press(Keys.TAB)
        here, ring = page.js(
            "const one = document.activeElement, {step, choice, prompt} = one.dataset;"
            "const drawn = one.matches('#views input') ? one.nextElementSibling : one;"
            "const name = one.id || step || choice || prompt || one.ariaLabel || one.value || one.textContent;"
            "return [one === document.body ? 'BODY' : name, getComputedStyle(drawn).outlineStyle]"
        )
        if here == "BODY" or here in reached:
            break
        assert ring != "none", here
        reached.append(here)
    assert reached[:6] == ["export", "theme", "keys", "prompt", "run", "31415926="]
    player = reached.index("first")
    assert reached[player:player + 6] == ["first", "back", "play", "forward", "last", "Token"]
    assert "both" in reached[player:]
    assert reached[-1].startswith('{"layer"')
    page.js("document.activeElement.blur()")
    page.press("?")
    assert page.js("return document.getElementById('help').open")
    page.press(Keys.ENTER)
    assert not page.js("return document.getElementById('help').open")
    page.press("/")
    assert page.js("return document.activeElement.id") == "prompt"


@pytest.mark.parametrize("prompt", ["31415926=", "4="])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_wide_and_narrow_screens(browser, stand, width, prompt):
    browser.open(stand.url, width)
    browser.ask(prompt)
    assert browser.js("return document.documentElement.scrollWidth") <= width
    assert browser.js("return document.getElementById('figure').getBoundingClientRect().right") <= width
    assert browser.complaints() == []


def test_dark_and_light(browser, stand):
    ground = "return getComputedStyle(document.body).backgroundColor"
    browser.open(stand.url, scheme="light")
    light, picture = browser.js(ground), browser.picture()
    browser.scheme("dark")  # the system turns dark while the page is open
    dark = browser.js(ground)
    assert dark != light
    browser.until("document.querySelector('#figure canvas').toDataURL() !== arguments[0]", picture)
    browser.open(stand.url, scheme="dark")
    assert browser.js(ground) == dark
    assert browser.picture() != picture
    browser.press("t")
    assert browser.js(ground) == light
    assert browser.picture() == picture
    browser.find("#theme").click()
    assert browser.js(ground) == dark
    assert browser.complaints() == []


def test_five_hundred_tokens_stay_smooth(page):
    """Script and layout of a step, measured in the browser; the median, as a loaded machine may pause any one."""
    page.ask("4=")
    assert page.js("return document.querySelectorAll('#strip span').length") == 500
    steps = page.driver.execute_async_script("""
        const done = arguments[0], all = [];
        const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
        press("Home");
        requestAnimationFrame(function step() {
            const began = performance.now();
            press("ArrowRight");
            const ran = performance.now();
            document.body.offsetHeight;
            all.push([ran - began, performance.now() - ran]);
            if (all.length < 100) requestAnimationFrame(step); else done(all);
        });
    """)
    assert page.at == 100
    script, laid = np.median(np.array(steps), axis=0)
    assert script < 50
    assert laid < 50


def test_it_works_with_the_real_server(browser, live):
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from prism.view.server import listen, uvicorn_server

    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = uvicorn_server(live, Bundle.read(), "127.0.0.1", port, KEY, prompt="2718=")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        browser.open(f"http://127.0.0.1:{port}/?key={KEY}")
        assert browser.text("#strip") == "2718=2718."
        browser.ask("12x=")
        assert "12x" in browser.text("[role=alert]")
        browser.ask("31=")
        assert browser.text("#strip") == "31=31."
        assert browser.complaints() == []
    finally:
        browser.driver.get("about:blank")
        server.should_exit = True
        thread.join(10)
        listening.close()
