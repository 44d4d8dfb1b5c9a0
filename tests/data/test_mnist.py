from __future__ import annotations

import gzip
import hashlib
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from idx_files import idx_bytes
from serving import mirror, send

from dpfedexp.data import Standardise, load_mnist, mnist_federation
from dpfedexp.data import data_sets as module
from dpfedexp.data.data_sets import MNIST_FILES, cache_folder
from dpfedexp.errors import InputError

RNG = np.random.default_rng(0)
SMALL = {
    "train-images-idx3-ubyte": RNG.integers(0, 256, (40, 5, 5), dtype=np.uint8),
    "train-labels-idx1-ubyte": RNG.integers(0, 4, 40, dtype=np.uint8),
    "t10k-images-idx3-ubyte": RNG.integers(0, 256, (8, 5, 5), dtype=np.uint8),
    "t10k-labels-idx1-ubyte": RNG.integers(0, 4, 8, dtype=np.uint8),
}
SERVED = {f"{name}.gz": gzip.compress(idx_bytes(array)) for name, array in SMALL.items()}


@pytest.fixture(autouse=True)
def nowhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data, an empty cache and no public mirrors, except where a test uses the real files."""
    if "mnist_folder" in request.fixturenames:
        return
    monkeypatch.delenv("DPFEDEXP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DPFEDEXP_MIRRORS", "http://127.0.0.1:9/")


@pytest.fixture
def small_is_genuine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, array in SMALL.items():
        monkeypatch.setitem(module.MNIST_FILES, name, hashlib.md5(idx_bytes(array)).hexdigest())


def put(folder: Path, packed: bool = True, **replaced: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in SMALL.items():
        content = idx_bytes(replaced.get(name.replace("-", "_"), array))
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return folder


def assert_small(data: module.ImageData) -> None:
    assert np.array_equal(data.train_images, SMALL["train-images-idx3-ubyte"])
    assert np.array_equal(data.train_labels, SMALL["train-labels-idx1-ubyte"])
    assert np.array_equal(data.test_images, SMALL["t10k-images-idx3-ubyte"])
    assert np.array_equal(data.test_labels, SMALL["t10k-labels-idx1-ubyte"])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("inside", [".", "mnist"])
def test_the_files_are_found_in_the_folder_or_in_mnist_inside_it(tmp_path: Path, packed: bool, inside: str) -> None:
    put(tmp_path / "fashion" / inside, packed)
    data = load_mnist(tmp_path / "fashion")
    assert_small(data)
    assert data.name == ("mnist" if inside == "mnist" else "fashion")


def test_the_argument_goes_before_the_variable_and_that_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache_folder("mnist"))
    assert load_mnist().name == "mnist"
    put(tmp_path / "variable")
    monkeypatch.setenv("DPFEDEXP_DATA", str(tmp_path / "variable"))
    assert load_mnist().name == "variable"
    put(tmp_path / "argument")
    assert load_mnist(tmp_path / "argument").name == "argument"


def test_a_named_folder_without_the_files_says_which_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache_folder("mnist"))
    folder = put(tmp_path / "half")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError, match=r"data is .*half lacks t10k-labels-idx1-ubyte \(each plain or with .gz\)"):
        load_mnist(folder)
    monkeypatch.setenv("DPFEDEXP_DATA", str(tmp_path / "absent"))
    with pytest.raises(InputError, match=r"DPFEDEXP_DATA is .*absent lacks train-images-idx3-ubyte, train-labels"):
        load_mnist()


def test_without_data_and_download_one_sentence_says_which_files_go_where() -> None:
    with pytest.raises(InputError, match="MNIST was not found; put") as caught:
        load_mnist(download=False)
    for part in (*MNIST_FILES, str(cache_folder("mnist")), "DPFEDEXP_DATA"):
        assert part in str(caught.value)


def test_without_data_and_network_one_sentence_says_why_and_which_files_go_where() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/"
    with pytest.raises(InputError, match=r"could not be downloaded.*refused.* Otherwise put") as caught:
        load_mnist(mirrors=[address])
    for part in (*MNIST_FILES, str(cache_folder("mnist")), "DPFEDEXP_DATA"):
        assert part in str(caught.value)


@pytest.mark.usefixtures("small_is_genuine")
def test_what_is_missing_is_downloaded_once_into_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    with mirror(SERVED) as served:
        monkeypatch.setenv("DPFEDEXP_MIRRORS", f"http://127.0.0.1:9/ {served.url}")
        assert_small(load_mnist())
        assert sorted(served.asked) == sorted(SERVED)
        assert sorted(path.name for path in cache_folder("mnist").iterdir()) == sorted(SERVED)
        assert_small(load_mnist())
        assert len(served.asked) == 4


@pytest.mark.usefixtures("small_is_genuine")
def test_an_interrupted_download_goes_on_with_the_files_that_are_missing() -> None:
    def cut_labels(handler) -> None:
        name = handler.path.rsplit("/", 1)[-1]
        send(handler, SERVED[name][: 20 if "labels" in name else None], claimed=len(SERVED[name]))

    with mirror(SERVED, cut_labels) as served:
        with pytest.raises(InputError, match=r"train-labels-idx1-ubyte.gz could not be downloaded.*cut the connection"):
            load_mnist(mirrors=[served.url])
        assert [path.name for path in cache_folder("mnist").iterdir()] == ["train-images-idx3-ubyte.gz"]
        served.misbehave = None
        served.asked.clear()
        assert_small(load_mnist(mirrors=[served.url]))
        assert "train-images-idx3-ubyte.gz" not in served.asked


def test_a_download_that_is_not_mnist_is_refused_and_leaves_nothing() -> None:
    with mirror(SERVED) as served, pytest.raises(InputError, match=r"sent another file.*expected 6bbc9ace898e44ae"):
        load_mnist(mirrors=[served.url])
    assert not cache_folder("mnist").exists()


def test_the_cache_is_in_the_home_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("mnist") == tmp_path / ".cache" / "dpfedexp" / "mnist"


@pytest.mark.parametrize(
    ("replaced", "sentence"),
    [
        ({"train_labels_idx1_ubyte": np.zeros(39, np.uint8)}, "40 train images and 39 train labels"),
        (
            {"t10k_images_idx3_ubyte": np.zeros((8, 4, 5), np.uint8)},
            r"shape \(5, 5\) and t10k images of shape \(4, 5\)",
        ),
        ({"t10k_labels_idx1_ubyte": np.zeros((8, 1), np.uint8)}, "t10k-labels.*2 dimension"),
        ({"train_images_idx3_ubyte": np.zeros((40, 5, 5), np.float32)}, "images and labels must be bytes"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, replaced: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_mnist(put(tmp_path / "odd", **replaced))


def test_standardised_inputs_have_the_constants_taken_off(tmp_path: Path) -> None:
    data = load_mnist(put(tmp_path / "small"))
    federation = mnist_federation(data, clients=4, seed=1, transform=Standardise(0.5, 0.25))
    plain = mnist_federation(data, clients=4, seed=1)
    assert torch.equal(federation.client(2)[0], (plain.client(2)[0] - 0.5) / 0.25)


def test_real_mnist_is_what_it_should_be(mnist_folder: Path) -> None:
    data = load_mnist(mnist_folder)
    assert data.train_images.shape == (60_000, 28, 28)
    assert data.test_images.shape == (10_000, 28, 28)
    assert data.train_images.dtype == data.train_labels.dtype == torch.uint8
    arrays = (data.train_images, data.train_labels, data.test_images, data.test_labels)
    for array, (name, md5) in zip(arrays, MNIST_FILES.items(), strict=True):
        assert hashlib.md5(idx_bytes(array.numpy())).hexdigest() == md5, name
    # The constants of Standardise are the training images' own.
    scaled = data.train_images.double() / 255
    assert scaled.mean().item() == pytest.approx(Standardise().mean, abs=1e-4)
    assert scaled.std().item() == pytest.approx(Standardise().std, abs=1e-4)


def test_the_papers_federation_has_a_thousand_clients_of_sixty_images(mnist_folder: Path) -> None:
    federation = mnist_federation(load_mnist(mnist_folder))
    assert federation.summary() | {"classes_per_client": None} == {
        "clients": 1000,
        "examples": 60_000,
        "size_min": 60,
        "size_median": 60.0,
        "size_max": 60,
        "classes": 10,
        "classes_per_client": None,
    }
    # Dirichlet(0.3) over 10 classes leaves a client of 60 images with about 6 of them.
    assert 5.5 < federation.summary()["classes_per_client"] < 6.5
    inputs, labels = federation.gather(torch.tensor([0, 999]), torch.arange(60).expand(2, 60))
    assert inputs.shape == (2, 60, 1, 28, 28)
    assert (inputs.min(), inputs.max()) == (0.0, 1.0)
    assert labels.dtype == torch.int64
