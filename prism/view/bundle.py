"""The prebuilt page (prism/view/page/): as a server hands it out, and as one file that plays a trace by itself.

The one file holds page, script, style and trace, and a policy that lets nothing else in: it opens from a disk, without
a network. What comes from outside (a prompt, a run's name) only ever stands in it as JSON in which no tag can begin.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from prism.errors import RunError

PAGE = Path(__file__).parent / "page"
_HEAD = re.compile(r"<head(\s[^>]*)?>", re.IGNORECASE)
_BODY_END = re.compile(r"</body\s*>", re.IGNORECASE)
_SCRIPT = re.compile(r"<script\b[^>]*\bsrc\s*=[^>]*>\s*</script\s*>", re.IGNORECASE)
_STYLE = re.compile(r"<link\b[^>]*\bstylesheet\b[^>]*>", re.IGNORECASE)


@dataclass(frozen=True)
class Bundle:
    """The page's three files."""

    index: str
    script: str
    style: str

    @classmethod
    def read(cls, folder: Path = PAGE) -> Self:
        try:
            files = [(folder / name).read_text("utf-8") for name in ("index.html", "app.js", "style.css")]
        except FileNotFoundError as error:
            raise RunError(f"the page is not built: {error.filename} is missing (CONTRIBUTING.md says how)") from None
        for pattern in (_HEAD, _BODY_END, _SCRIPT, _STYLE):
            if len(pattern.findall(files[0])) != 1:
                raise RunError(f"{folder / 'index.html'} must have one head, body, script src and stylesheet each")
        return cls(*files)

    def served(self, metas: Mapping[str, str]) -> str:
        """The page with what its script is to know, in <meta> tags that come before any of its own."""
        tags = "".join(f'<meta name="{_quoted(name)}" content="{_quoted(text)}">' for name, text in metas.items())
        return _HEAD.sub(lambda head: head[0] + tags, self.index)

    def alone(self, trace: Mapping[str, Any]) -> bytes:
        """One file that plays a trace, and asks nobody for anything."""
        script, style = _inside(self.script, "script"), _inside(self.style, "style")
        policy = (
            f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        )
        head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_quoted(policy)}">'
        kind = ' type="module"' if 'type="module"' in self.index else ""
        # A script that stands in the text runs where it stands: at the end, where all it looks for is there.
        body = f'<script type="application/json" id="trace">{_harmless(trace)}</script><script{kind}>{script}</script>'
        page = _SCRIPT.sub("", self.index)
        page = _STYLE.sub(lambda _: f"<style>{style}</style>", page)
        page = _HEAD.sub(lambda found: found[0] + head, page)
        return _BODY_END.sub(lambda found: body + found[0], page).encode()


def as_json(value: object) -> bytes:
    """JSON in ASCII, as short as it gets."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _harmless(value: object) -> str:
    """JSON that cannot end the element it stands in, nor begin another."""
    text = as_json(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _inside(text: str, element: str) -> str:
    """Script or style as it may stand inside its element: the same to its reader, but it never ends the element."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # as a browser reads it, before it takes the hash
    text = re.sub(f"</(?={element})", r"<\\/", text, flags=re.IGNORECASE)
    return text.replace("<!--", r"\x3c!--") if element == "script" else text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _quoted(text: str) -> str:
    """Text for an attribute; what is no text at all (half a surrogate pair, in a folder's name) becomes a '?'."""
    return html.escape(text.encode("utf-8", "replace").decode(), quote=True)
