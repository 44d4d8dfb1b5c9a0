"""CHANGELOG.md by its versions, and a release's notes from the section of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNRELEASED = "Unreleased"
_TITLE = re.compile(r"^## (?P<name>\S+)(?: \((?P<date>\d{4}-\d{2}-\d{2})\))?$", re.MULTILINE)


class Refused(Exception):
    """There is nothing to release yet; the message says what is missing."""


@dataclass(frozen=True)
class Section:
    """What a version changed: its name or "Unreleased", its day as YYYY-MM-DD where the title has one, and the text below."""

    name: str
    date: str | None
    text: str


def sections(changelog: str) -> list[Section]:
    """The sections of the changelog, the newest first."""
    titles = list(_TITLE.finditer(changelog))
    ends = [title.start() for title in titles[1:]] + [len(changelog)]
    return [
        Section(t["name"], t["date"], changelog[t.end() : end].strip()) for t, end in zip(titles, ends, strict=True)
    ]


def section_of(version: str, changelog: str, rehearsal: bool) -> Section:
    """The section of a version; in a rehearsal, "Unreleased" where the version has none.

    Raises:
        Refused: it has none, or one without a date or text.
    """
    by_name = {section.name: section for section in sections(changelog)}
    own = by_name.get(version)
    if own is not None and own.date is not None and own.text:
        return own
    if rehearsal:
        return own or by_name[UNRELEASED]
    raise Refused(
        f"CHANGELOG.md has no section '## {version} (YYYY-MM-DD)' with text; give '{UNRELEASED}' that title and begin a new "
        f"one, or rehearse with `make release DRY=1`."
    )


def notes(section: Section, version: str, commit: str) -> str:
    """The page that goes with a release."""
    state = f"Released {section.date}" if section.name == version and section.date else "A rehearsal, not a release"
    return (
        f"# dpfedexp {version}\n\n{state}, from commit {commit}.\n\n{section.text}\n\n### The files\n\n"
        "`SHA256SUMS` holds the checksums (`sha256sum --check SHA256SUMS`), the `.cdx.json` file the software bill of materials "
        "(CycloneDX), and `CHECKED.md` in which environments the wheel and the source distribution were installed and run, and "
        f"in which they were not. `git checkout {commit[:12]} && make release` builds the same bytes.\n"
    )
