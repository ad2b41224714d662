"""What a page says, read back: its data, its texts, and whether it is well formed."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

VOID = frozenset({"meta", "input", "br", "link", "img", "hr"})


class Page(HTMLParser):
    """A page, read strictly: every element that is opened is closed, in order.

    Attributes:
        text: of the body, scripts and style aside.
        ids: of elements.
        references: values of attributes that could fetch something.
        data: what the script draws.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[tuple[str, str | None]] = []
        self._texts: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.data: Any = None
        self.feed(html)
        self.close()
        assert not self._open, f"left open: {self._open}"
        self.text = " ".join(" ".join(self._texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.ids += [name] if (name := known.get("id")) else []
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data", "poster") and value]
        if tag not in VOID:
            self._open.append((tag, known.get("id")))

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self._open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data: str) -> None:
        tag, name = self._open[-1] if self._open else ("", None)
        if name == "picture":
            self.data = json.loads(data)
        elif tag not in ("script", "style"):
            self._texts.append(data)
