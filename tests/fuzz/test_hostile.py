"""Hostile input by construction: what a fuzzer would take long to come upon."""

import ast
import contextlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfedexp import config
from dpfedexp.engine import checkpoint
from dpfedexp.engine.outlets import CHECKPOINT
from dpfedexp.errors import InputError
from tests.sizes import sized

SOURCE = Path(__file__).parents[2] / "src" / "dpfedexp"
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
sections = ["data", "model", "algorithm", "local", "participation", "run", "resolved", "other"]
known = ["clip", "name", "kind", "rounds", "seed", "lr", "rate", "count", "options", "delta", "target_epsilon"]
section = st.dictionaries(st.sampled_from(known) | st.text(max_size=6), values, max_size=4) | values


@settings(max_examples=sized(25, 200), deadline=None)
@given(st.dictionaries(st.sampled_from(sections), section))
def test_any_tree_is_settings_or_one_sentence(tree):
    with contextlib.suppress(InputError):
        config.parse(tree).check()


def huge(path):
    shape = {"w": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]}, "__metadata__": {}}
    header = json.dumps(shape).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    "write",
    [huge, lambda path: path.write_bytes((2**62).to_bytes(8, "little") + b"{}"), lambda path: torch.save({}, path)],
    ids=["huge tensors", "huge header", "a pickle"],
)
def test_a_checkpoint_that_claims_too_much_or_is_a_pickle_is_refused(tmp_path, write):
    write(tmp_path / CHECKPOINT)
    with pytest.raises(InputError, match="damaged"):
        checkpoint.load(tmp_path)


def calls(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from ((name.split(".")[0], node) for name in names)
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_nothing_in_the_library_unpickles_evaluates_or_runs_a_shell():
    """Only the names; `literal_eval` reads literals and nothing else."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch.load", "eval"}
    kinds = ("broadcast_object_list", "scatter_object_list", "all_gather_object", "gather_object", "send_object_list")
    forbidden |= {"exec", "os.system", *(f"dist.{kind}" for kind in (*kinds, "recv_object_list"))}
    for path in SOURCE.rglob("*.py"):
        for name, node in calls(ast.parse(path.read_text(encoding="utf-8"))):
            assert name not in forbidden, f"{path.name} line {node.lineno}: {name}"
            if isinstance(node, ast.Call):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("allow_pickle", "False") == "False", f"{path.name} line {node.lineno}"
                assert given.get("shell", "False") == "False", f"{path.name} line {node.lineno}"
                assert name not in ("np.load", "numpy.load") or "allow_pickle" in given, (
                    f"{path.name} line {node.lineno}"
                )
