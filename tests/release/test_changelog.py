"""Sections by version, notes of one of them, and what is refused."""

from __future__ import annotations

import pytest

from tests.release.changelog import Refused, Section, notes, section_of, sections

TEXT = """# Changelog

A word before.

## Unreleased

### New

- Something.

## 0.2.0 (2026-12-01)

- A step.

## 0.1.0

First.
"""


def test_sections_have_a_name_a_date_and_their_own_text():
    assert sections(TEXT) == [
        Section("Unreleased", None, "### New\n\n- Something."),
        Section("0.2.0", "2026-12-01", "- A step."),
        Section("0.1.0", None, "First."),
    ]


def test_a_version_has_its_own_section():
    assert section_of("0.2.0", TEXT, rehearsal=False).text == "- A step."


@pytest.mark.parametrize("version", ["0.3.0", "0.1.0", "0.2"])
def test_a_version_without_a_dated_section_is_refused_with_what_to_write(version):
    with pytest.raises(Refused, match=rf"'## {version} \(YYYY-MM-DD\)'.*DRY=1"):
        section_of(version, TEXT, rehearsal=False)


def test_an_empty_section_is_refused():
    with pytest.raises(Refused):
        section_of("0.2.0", TEXT.replace("- A step.", ""), rehearsal=False)


def test_a_rehearsal_takes_what_is_unreleased():
    assert section_of("0.3.0.dev0", TEXT, rehearsal=True).name == "Unreleased"


def test_notes_say_whether_it_is_a_release():
    commit = "0123456789abcdef"
    released = notes(section_of("0.2.0", TEXT, rehearsal=False), "0.2.0", commit)
    assert "Released 2026-12-01, from commit 0123456789abcdef." in released
    assert "- A step." in released
    assert "A rehearsal, not a release" in notes(section_of("0.3.0", TEXT, rehearsal=True), "0.3.0", commit)
