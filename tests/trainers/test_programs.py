"""Random programs of secure runs let no client reach another, and find a wall that is missing."""

from itertools import islice

from dpfedexp.trainers.recording import Recorded
from tests.fuzz.programs import check
from tests.sizes import sized

PROGRAMS = sized(range(5, 11), range(200))


def test_programs_are_refused_or_keep_clients_apart():
    found = [check(seed) for seed in PROGRAMS]
    assert [str(one) for one in found if one.verdict == "failed"] == []
    isolated = [one.learned for one in found if one.verdict == "isolated"]
    assert len(isolated) > 0.15 * len(PROGRAMS)
    assert isolated.count(False) < 0.1 * len(PROGRAMS)


def without_recordings(monkeypatch):
    """The caller's code runs on the clients' rows, and none of the trials comes before."""
    monkeypatch.setattr(Recorded, "__call__", lambda self, *inputs: self.program(*inputs))
    monkeypatch.setattr("dpfedexp.trainers.isolation.check_recordings", lambda *rest: None)
    monkeypatch.setattr("dpfedexp.trainers.isolation.make_state_check", lambda *rest, **options: None)
    monkeypatch.setattr("dpfedexp.trainers.select.passes_isolation", lambda *rest: True)


def test_a_run_without_walls_is_found_out(monkeypatch):
    """Of the first 60 programs 11 show it, from seed 1 on; threads decide about some of them."""
    without_recordings(monkeypatch)
    moved = (seed for seed in range(14) if "rows move" in check(seed).why)
    assert len(list(islice(moved, 2))) == 2
