from __future__ import annotations

import errno
import gzip
import hashlib
import os
import socket
import time
from pathlib import Path

import pytest
from serving import mirror, send

from dpfedexp.data.data_sets import fetch
from dpfedexp.errors import InputError

CONTENT = bytes(range(256)) * 2000
PACKED = gzip.compress(CONTENT)
MD5 = hashlib.md5(CONTENT).hexdigest()
FILES = {"a.gz": PACKED, "a": CONTENT}


def cut(handler) -> None:
    send(handler, PACKED[: len(PACKED) // 2], claimed=len(PACKED))


def cut_without_length(handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(PACKED[: len(PACKED) // 2])


def another_file(handler) -> None:
    send(handler, gzip.compress(CONTENT + b"!"))


def web_page(handler) -> None:
    send(handler, b"<html>please log in</html>")


def unavailable(handler) -> None:
    handler.send_error(503)


def bomb(handler) -> None:
    send(handler, gzip.compress(bytes(1 << 20)))


FAULTS = {
    cut: "cut the connection after",
    cut_without_length: "sent a damaged file",
    another_file: "sent another file than the one asked for",
    web_page: "sent another file than the one asked for",
    unavailable: "answered 503",
}


def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


@pytest.mark.parametrize("name", list(FILES))
def test_the_right_file_arrives_as_it_was_sent(tmp_path: Path, name: str) -> None:
    with mirror(FILES) as good:
        path = fetch(name, MD5, [good.url], tmp_path / "new")
    assert path == tmp_path / "new" / name
    assert path.read_bytes() == FILES[name]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fault", list(FAULTS), ids=lambda fault: fault.__name__)
def test_after_a_bad_mirror_the_next_one_is_asked(tmp_path: Path, fault) -> None:
    with mirror(FILES, fault) as bad, mirror(FILES) as good:
        path = fetch("a.gz", MD5, [bad.url, good.url], tmp_path)
        assert bad.asked == good.asked == ["a.gz"]
    assert path.read_bytes() == PACKED
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fault", list(FAULTS), ids=lambda fault: fault.__name__)
def test_when_every_mirror_is_bad_one_sentence_says_why_and_nothing_is_left(tmp_path: Path, fault) -> None:
    with mirror(FILES, fault) as bad, pytest.raises(InputError, match=FAULTS[fault]) as caught:
        fetch("a.gz", MD5, [bad.url], tmp_path)
    assert str(caught.value).startswith(f"a.gz could not be downloaded: {bad.url}")
    assert list(tmp_path.iterdir()) == []


def test_nobody_listening_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a.gz could not be downloaded: http://127.0.0.1.*refused"):
        fetch("a.gz", MD5, [nobody()], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_that_stalls_is_given_up(tmp_path: Path) -> None:
    def stall(handler) -> None:
        send(handler, PACKED[:10], claimed=len(PACKED))
        time.sleep(1.0)

    with mirror(FILES, stall) as slow, pytest.raises(InputError, match="timed out"):
        fetch("a.gz", MD5, [slow.url], tmp_path, timeout=0.2)
    assert list(tmp_path.iterdir()) == []


def test_too_much_is_refused_before_it_fills_the_disk_or_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpfedexp.data.data_sets._LARGEST_DOWNLOAD", 100_000)
    with mirror(FILES) as large, pytest.raises(InputError, match="sent more than 100000 bytes"):
        fetch("a", MD5, [large.url], tmp_path)
    with mirror(FILES, bomb) as bombing, pytest.raises(InputError, match="unpacks to too much"):
        fetch("a.gz", MD5, [bombing.url], tmp_path)
    assert list(tmp_path.iterdir()) == []


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_ends_the_search_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfedexp.files.Path.write_bytes", full)
    with (
        mirror(FILES) as first,
        mirror(FILES) as second,
        pytest.raises(InputError, match="cannot be written: No space left on device; free space"),
    ):
        fetch("a.gz", MD5, [first.url, second.url], tmp_path)
    assert second.asked == []
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_found_full_only_at_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpfedexp.files.os.fsync", full)
    with mirror(FILES) as good, pytest.raises(InputError, match="No space left on device"):
        fetch("a.gz", MD5, [good.url], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_process_brought_meanwhile_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(PACKED)
    with mirror(FILES) as good:
        assert fetch("a.gz", MD5, [good.url], tmp_path).read_bytes() == PACKED
    assert [path.name for path in tmp_path.iterdir()] == ["a.gz"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with mirror(FILES) as good, pytest.raises(InputError, match="file/cache cannot be written: Not a directory"):
        fetch("a.gz", MD5, [good.url], tmp_path / "file" / "cache")


@pytest.mark.parametrize("address", ["file:///etc/", "ftp://example.org/", "example.org"])
def test_only_web_addresses_are_mirrors(tmp_path: Path, address: str) -> None:
    with pytest.raises(InputError, match="an address begins with https://"):
        fetch("a.gz", MD5, [address], tmp_path)


def test_at_least_one_mirror_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mirrors is empty"):
        fetch("a.gz", MD5, [], tmp_path)
