"""Every page of the built site in Chromium, on a desk and on a phone, light and dark. `make docs` builds the site and runs this."""

import functools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser import DESK, PHONE, cut_off, faint_texts, resize, visit

SITE = os.environ.get("DPFEDEXP_SITE", "")
PAGES = sorted(path.relative_to(SITE).as_posix() for path in Path(SITE).rglob("*.html")) if SITE else []
DARK = "document.querySelector('[data-md-component=palette] input:not(:checked)')?.click()"
SETTLE = "for (const one of document.getAnimations()) { try { one.finish() } catch { one.cancel() } }"
"""What fades or slides after a change of width or colors is looked at where it ends; what never ends is stopped."""
FOUND = "return [...document.querySelectorAll('a.md-search-result__link')].map(one => one.href)"
BAD = """data:text/html,<!doctype html><body style="background:white"><p style="color:%23888">faint</p><p>plain</p>
<div style="overflow:hidden;width:200px"><table style="width:600px"><tr><td>cut</table></div>
<div style="overflow:auto;width:200px"><table style="width:600px"><tr><td>scrolls</table></div>"""


built = pytest.mark.skipif(not SITE, reason="DPFEDEXP_SITE names no built site; `make docs` does")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None: ...


class OneEntry(Quiet):
    """With one entry of the search's index, which every page would build anew in a second of computing."""

    def do_GET(self) -> None:
        if not self.path.endswith("/search_index.json"):
            super().do_GET()
            return
        self.send_response(200)
        self.end_headers()
        index = json.loads((Path(SITE) / "search" / "search_index.json").read_text(encoding="utf-8"))
        self.wfile.write(json.dumps({**index, "docs": index["docs"][:1]}).encode())


@contextmanager
def served(handler: type[Quiet]) -> Iterator[str]:
    """The site as a server gives it out: scripts that fetch do not work from files."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(OneEntry) as address:
        yield address


@built
def test_a_dark_desk_gets_dark_pages(browser, address):
    assert {"index.html", "explorer.html"} <= set(PAGES)
    visit(browser, f"{address}/index.html", DESK, "dark")
    assert "slate" in browser.execute_script("return document.body.dataset.mdColorScheme")


@built
@pytest.mark.parametrize(
    ("words", "page"), [("replace-one adjacency", "decide"), ("AdaptiveClip", "reference"), ("helper seed", "security")]
)
def test_the_search_finds_what_is_asked_for(browser, words, page):
    with served(Quiet) as address:
        visit(browser, f"{address}/index.html")
        box = browser.find_element("css selector", "[data-md-component=search-query]")
        browser.execute_script("document.querySelector('#__search').click()")
        box.send_keys(words)
        deadline = time.monotonic() + 30
        found: list[str] = []
        while not found and time.monotonic() < deadline:
            time.sleep(0.2)
            found = browser.execute_script(FOUND)
    assert any(page in link for link in found), found


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_whole_legible_and_quiet(browser, address, page):
    """Loaded once, for the sake of time, and turned dark by its own switch."""
    visit(browser, "about:blank")
    visit(browser, f"{address}/{page}")
    found = looked_at(browser, "light")
    resize(browser, DESK, "dark")
    browser.execute_script(DARK)
    found += looked_at(browser, "dark")
    browser.execute_script("localStorage.clear()")
    assert browser.get_log("browser") == []
    assert found == [], "\n".join(found)


def looked_at(browser, scheme: str) -> list[str]:
    found = []
    for width in (DESK, PHONE):
        resize(browser, width, scheme)
        browser.execute_script(SETTLE)
        found += [f"{scheme}, {width}: {text}" for text in (*faint_texts(browser), *cut_off(browser))]
    return found


def test_the_checks_notice_what_they_look_for(browser):
    visit(browser, BAD)
    assert [text.split()[-1] for text in faint_texts(browser)] == ["faint"]
    assert cut_off(browser) == ["table cut"]
