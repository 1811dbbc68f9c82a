"""The documentation as a reader meets it: no dead link, no missing picture, nothing in the console.

``make site`` builds what is read here.
"""

import functools
import html.parser
import http.server
import os
import pathlib
import shutil
import threading
import urllib.parse

import pytest

import fuel_jax

ROOT = pathlib.Path(__file__).parents[1]
SITE = ROOT / "out/site"
PAGES = sorted(SITE.rglob("*.html"))
WIDTHS = {"desktop": 1440, "phone": 390}

pytestmark = pytest.mark.skipif(not PAGES, reason="no site in out/site: `make site` builds it")


class Links(html.parser.HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    def __init__(self, page):
        super().__init__()
        self.targets, self.anchors = [], set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and not value.startswith("data:"):
                self.targets.append(value)


@functools.cache
def links(page):
    return Links(page)


def test_every_link_and_picture_is_there():
    broken = []
    for page in PAGES:
        if page.name == "404.html":  # served from anywhere, so its links begin at the root
            continue
        for target in links(page).targets:
            url = urllib.parse.urlsplit(target)
            if url.scheme or url.netloc:
                continue
            path = page.parent / urllib.parse.unquote(url.path) if url.path else page
            path = path / "index.html" if path.is_dir() else path
            fragment = urllib.parse.unquote(url.fragment)
            is_page = path.is_file() and path.suffix == ".html"
            known = links(path.resolve()).anchors if is_page else set()
            if not path.is_file() or (fragment not in ("", "__skip") and fragment not in known):
                broken.append((str(page.relative_to(SITE)), target))
    assert broken == []


def test_nothing_is_fetched_from_elsewhere():
    loaded = [t for page in PAGES for t in links(page).targets if t.endswith((".js", ".css"))]
    assert loaded
    assert [t for t in loaded if "://" in t] == []


def test_the_reference_has_every_op():
    text = "".join(page.read_text() for page in (SITE / "reference").rglob("*.html"))
    ops = {op.name for op in [*fuel_jax.OPS.values(), *fuel_jax.FUSED.values()] if op}
    assert [name for name in sorted(ops) if f'id="{name}"' not in text] == []


@pytest.fixture(scope="module")
def address():
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    driver = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    found = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    if (path := next(found, None)) is None:
        pytest.skip("no chromium on this machine")
    with driver.sync_playwright() as playwright:
        options = {"args": ["--no-sandbox"]} if os.getuid() == 0 else {}
        yield playwright.chromium.launch(executable_path=path, **options)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_loads(browser, address, width, scheme):
    """And none is wider than the window.  All pages are read once: each by one of the four."""
    turn = 2 * list(WIDTHS).index(width) + (scheme == "dark")
    said = []
    page = browser.new_page(viewport={"width": WIDTHS[width], "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: said.append((page.url, message.type, message.text)))
    page.on("pageerror", lambda error: said.append((page.url, "error", str(error))))
    page.on(
        "response",
        lambda r: said.append((page.url, r.status, r.url)) if r.status >= 400 else None,
    )
    for path in PAGES[turn::4]:
        page.goto(f"{address}{path.relative_to(SITE)}", wait_until="load")
        over = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        if over > 0:
            said.append((page.url, "wider than the window", over))
        broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
        said += [(page.url, "picture", src) for src in page.evaluate(broken)]
    page.close()
    assert said == []
