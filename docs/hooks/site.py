"""What the site adds to its pages: files of the repository that they link to, the list of tutorials, and equations as MathML."""

from __future__ import annotations

import html
import os
import posixpath
import re
from pathlib import Path

from blocks import failures
from latex2mathml.converter import convert
from mkdocs.plugins import event_priority, get_plugin_logger
from mkdocs.structure.files import File
from names import wrong_names

log = get_plugin_logger("site")

ROOT = Path(__file__).parents[2]
REPOSITORY = "repository/"
"""Where files from outside docs/ are on the site."""
AT_HOME = {"README.md": "index.md"}
"""Files of the repository that have a page of their own on the site."""
HISTORY = {"repository/CHANGELOG.md"}
"""Pages that name what is no more."""
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
EQUATION = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.S)
TAGS = re.compile(r"(<(?:a|img)\b[^>]*?\b(?:href|src)=\")([^\"#:]+)")


def in_repository(src_uri: str) -> str:
    """The path in the repository of a page of the site."""
    return src_uri.removeprefix(REPOSITORY) if src_uri.startswith(REPOSITORY) else f"docs/{src_uri}"


def site_uri(path: str) -> str:
    """The page or file of the site that a file of the repository is."""
    return AT_HOME.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else REPOSITORY + path)


def target(link: str, src_uri: str) -> str | None:
    """The path in the repository that a link of a page leads to; None where it leads to no file outside docs/ or to one in it."""
    if ":" in link or link.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(src_uri)), link))
    outside = src_uri.startswith(REPOSITORY) or not path.startswith("docs/")
    return path if outside and not path.startswith("..") and (ROOT / path).is_file() else None


def rewritten(markdown: str, src_uri: str) -> str:
    """The same page with links that lead to where a file is on the site."""

    def one(match: re.Match[str]) -> str:
        path = target(match[2], src_uri)
        return match[0] if path is None else match[1] + relative(site_uri(path), src_uri) + match[3]

    return LINK.sub(one, markdown)


def relative(uri: str, src_uri: str) -> str:
    return posixpath.relpath(uri, posixpath.dirname(src_uri) or ".")


@event_priority(-50)
def on_files(files, config):
    """Adds what the nav and the pages ask for from outside docs/, and writes the lists of tutorials and packages into the nav."""
    wanted = [entry for entry in listed(config.nav) if entry.startswith(REPOSITORY)]
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    while wanted:
        uri = wanted.pop()
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / uri.removeprefix(REPOSITORY))))
            if uri.endswith(".md"):
                pages[uri] = (ROOT / uri.removeprefix(REPOSITORY)).read_text(encoding="utf-8")
        for src_uri, text in pages.items():
            found = (target(match[2], src_uri) for match in LINK.finditer(text))
            wanted += [site_uri(path) for path in found if path and not (ROOT / path).is_relative_to(ROOT / "docs")]
        pages = {}
    config.nav = expanded(config.nav, sorted(file.src_uri for file in files.documentation_pages()))
    return files


def listed(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [entry for inner in (nav.values() if isinstance(nav, dict) else nav) for entry in listed(inner)]


def expanded(nav, uris: list[str]):
    """The nav with every `folder/*` replaced by the pages of that folder, its index first."""
    if isinstance(nav, str):
        if not nav.endswith("/*"):
            return nav
        inside = [uri for uri in uris if posixpath.dirname(uri) == nav[:-2]]
        return sorted(inside, key=lambda uri: (not uri.endswith("/index.md"), uri.removesuffix(".md")))
    if isinstance(nav, dict):
        return {title: expanded(inner, uris) for title, inner in nav.items()}
    return [expanded(inner, uris) for inner in nav]


def on_pre_build(config):
    """Runs the code blocks of all pages; a warning ends a strict build. `BLOCKS=skip make docs` is for a quick look."""
    for problem in wrong_names((ROOT / "README.md").read_text(encoding="utf-8")):
        log.warning("README.md: %s", problem)
    if os.environ.get("BLOCKS") == "skip":
        return
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for problem in failures(page.read_text(encoding="utf-8"), regression=page.name == "losses.md"):
            log.warning("%s: %s", page.relative_to(ROOT), problem)


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri not in HISTORY:
        for problem in wrong_names(markdown):
            log.warning("%s: %s", page.file.src_uri, problem)
    return rewritten(markdown, page.file.src_uri)


def on_page_content(content, page, config, files):
    def mathml(match: re.Match[str]) -> str:
        return convert(html.unescape(match[2]).strip(), display="block" if match[1] == "div" else "inline")

    return EQUATION.sub(mathml, content)
