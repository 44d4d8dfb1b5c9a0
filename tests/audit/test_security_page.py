"""The table of attacks names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "security.md").read_text(encoding="utf-8")
TABLE = PAGE.split("## Attacks, what stops them, and the test")[1].split("\n## ")[0]
NAMED = re.findall(r"`([\w/]+\.py)(?:::…?(\w+)…?)?`", TABLE)


def test_every_attack_has_a_test_and_every_named_test_exists():
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| attack")]
    assert len(rows) > 12
    assert all(re.search(r"`[\w/]+\.py", row) for row in rows)
    for file, name in NAMED:
        text = (TESTS / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"def \w*{name}", text), f"{file}::{name}"


def test_every_target_of_the_fuzzers_is_on_the_page():
    from tests.fuzz.test_fuzz import TARGETS

    assert all(name in PAGE for name in TARGETS)
