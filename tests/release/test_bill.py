"""A bill of materials is completed with the wheel's version and hash, and one that lacks a dependency is refused."""

from __future__ import annotations

import pytest

from tests.installed.check import CONSTRAINTS, Failure
from tests.release.bill import TOOL, completed
from tests.release.build import digest

FIXED = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)


def bill(**versions: str) -> dict:
    named = {name: FIXED[name] for name in ("numpy", "scipy", "dp-accounting", "flwr")}
    named |= {"torch": f"{FIXED['torch']}+cpu"} | versions
    components = [{"name": name, "version": version} for name, version in named.items()]
    return {"metadata": {"component": {"name": "dpfedexp"}}, "components": components}


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "dpfedexp-1.2.0-py3-none-any.whl"
    path.write_bytes(b"wheel")
    return path


def test_the_subject_is_the_wheel(wheel):
    assert completed(bill(), wheel)["metadata"]["component"] == {
        "name": "dpfedexp",
        "version": "1.2.0",
        "purl": "pkg:pypi/dpfedexp@1.2.0",
        "hashes": [{"alg": "SHA-256", "content": digest(wheel)}],
    }


def test_a_bill_of_another_environment_is_refused(wheel):
    with pytest.raises(Failure, match=r"says torch 2\.0, not"):
        completed(bill(torch="2.0"), wheel)
    with pytest.raises(Failure, match="says torch nothing"):
        completed(bill() | {"components": bill()["components"][:3]}, wheel)


def test_the_tool_has_a_fixed_version():
    assert TOOL in FIXED
