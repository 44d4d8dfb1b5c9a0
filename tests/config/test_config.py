import importlib
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from dpfedexp import AdamW, CosineRate, InputError, Sgd
from dpfedexp.algorithms.round import FixedSize, Poisson
from dpfedexp.cli.train import SCHEMA, TEMPLATE
from dpfedexp.config import Settings, load, parse, problem
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.local_optimizer import OPTIMIZERS
from tests.optimizers import HeavyBall

sys.path.append(str(Path(__file__).parents[2] / "docs" / "hooks"))  # modules beside the pages, not a package
settings_schema = importlib.import_module("settings_schema")


def write(folder, text):
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_a_file_becomes_settings_and_its_own_toml_again(tmp_path):
    settings = load(
        write(tmp_path, '[algorithm]\nname = "dp_fedavg"\nclip = 2\nnoise_multiplier = 3\n[run]\nrounds = 7')
    )
    assert settings.run.rounds == 7
    assert settings.build_algorithm().noise_multiplier == 3.0
    assert load(write(tmp_path, settings.to_toml())) == settings


def test_overrides_are_read_as_toml_values_and_win(tmp_path):
    path = write(tmp_path, "[run]\nrounds = 7")
    settings = load(path, ["run.rounds=3", "algorithm.clip=0.5", "data.kind=mnist", 'algorithm.adjacency="add-remove"'])
    assert (settings.run.rounds, settings.algorithm.clip, settings.data.kind) == (3, 0.5, "mnist")
    assert settings.algorithm.adjacency == "add-remove"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"algoritm": {}}, "algoritm is not a setting. Did you mean 'algorithm'"),
        ({"algorithm": {"adaptive": {"initail": 1}}}, "Did you mean 'initial'"),
        ({"run": {"rounds": 0}}, "run.rounds is 0"),
        ({"data": {"kind": "imagenet"}}, "data.kind is 'imagenet', which does not exist. Known: cifar10, "),
        ({"run": {"secure": "Strict"}}, "run.secure is 'Strict'; it must be a valid boolean or 'strict'."),
        ({"algorithm": {"clip": "adaptiv"}}, "algorithm.clip is 'adaptiv'; it must be a valid number or 'adaptive'."),
        ({"local": {"max_examples": True}}, "local.max_examples is True; it must be a valid integer."),
        ({"local": {"max_examples": 2.5}}, "local.max_examples is 2.5; it must be a valid integer."),
        ({"local": {"optimizer": "sdg"}}, "local.optimizer is 'sdg', which does not exist. Did you mean 'sgd'?"),
        ({"local": {"optimzer": "sgd"}}, "local.optimzer is not a setting of 'sgd'. Did you mean 'optimizer'?"),
        ({"local": {"stepz": 3}}, "local.stepz is not a setting of 'sgd'. Did you mean 'steps'?"),
        ({"local": {"lr": "aut"}}, "local.lr is 'aut'; it must be a valid number or 'auto'."),
        ({"algorithm": {"adaptive": {"quantile": "median"}}}, "'median'; it must be a valid number or 'auto'."),
        ({"local": {"schedule": "cosine"}}, "local.schedule is 'cosine'; it must name its kind"),
        (
            {"local": {"schedule": {"kind": "cosin"}}},
            "local.schedule.kind is 'cosin', which does not exist. Did you mean 'cosine'?",
        ),
        (
            {"local": {"schedule": {"kind": "step", "evry": 2}}},
            "local.schedule.evry is not a setting of 'step'. Did you mean 'every'?",
        ),
        ({"local": {"schedule": {"kind": "step", "every": 0}}}, "schedule every is 0"),
        ({"data": {"alpha": -1}}, "data.alpha is -1"),
        ({"data": 3}, "data is 3"),
        ({"algorithm": {"name": "cdp_fedex"}}, "Did you mean 'cdp_fedexp'"),
        ({"algorithm": {"name": "cdp_fedexp"}}, "clip is missing"),
        (
            {"algorithm": {"name": "cdp_fedexp", "clip": 1.0, "server_rate": 2.0}},
            "server_rate is not a setting of cdp_fedexp",
        ),
        ({"algorithm": {"name": "fedavg", "clip": 1.0}}, "clip is not a setting of fedavg"),
    ],
)
def test_a_wrong_setting_is_one_sentence_that_names_it(tree, words):
    with pytest.raises(InputError) as caught:
        parse(tree).build_algorithm()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_local_optimizer_with_settings_of_its_own_needs_a_line_in_the_registry_and_no_more(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "heavy-ball", HeavyBall)
    given = {"optimizer": "heavy-ball", "momentum": 0.5, "nesterov": True, "epochs": 2, "lr": 0.3}
    settings = parse({"local": given})
    assert settings.build_local() == HeavyBall(lr=0.3, epochs=2, momentum=0.5, nesterov=True)
    assert parse(tomllib.loads(settings.to_toml())) == settings
    for wrong, words in (
        ({"momentm": 0.5}, "local.momentm is not a setting of 'heavy-ball'. Did you mean 'momentum'?"),
        ({"momentum": "much"}, "local.momentum is 'much'; it must be a valid number."),
        ({"nesterov": 1}, "local.nesterov is 1; it must be a valid boolean."),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            parse({"local": given | wrong})
    with pytest.raises(InputError, match=r"local\.momentum is not a setting of 'adamw'"):
        parse({"local": {"optimizer": "adamw", "momentum": 0.5}})


def test_a_file_names_momentum_adamw_bounds_and_schedules():
    given = {"lr": 0.2, "steps": 4, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "clip_gradient": 2.0}
    settings = parse({"local": {**given, "schedule": {"kind": "cosine", "rounds": 9, "warm_up": 1}}})
    assert settings.build_local() == Sgd(**given, schedule=CosineRate(rounds=9, warm_up=1))
    assert parse(tomllib.loads(settings.to_toml())) == settings
    assert parse({"local": {"optimizer": "adamw", "beta2": 0.99}}).build_local() == AdamW(lr=0.1, steps=10, beta2=0.99)
    assert "momentum" not in parse({"local": {"lr": 0.1}}).to_toml(), "what a file does not say is not written"


@pytest.mark.parametrize(
    ("given", "clip"),
    [
        ({"adaptive": {"initial": 3.0}}, AdaptiveClip(initial=3.0)),
        ({}, AdaptiveClip(quantile="auto")),
        ({"adaptive": {"quantile": "auto"}}, AdaptiveClip(quantile="auto")),
    ],
)
def test_an_adaptive_clip_is_built(given, clip):
    settings = parse({"algorithm": {"clip": "adaptive", "noise_multiplier": 1.0} | given, "local": {"lr": "auto"}})
    assert settings.build_algorithm().clip == clip
    assert settings.build_local().automatic


@pytest.mark.parametrize(
    ("given", "built"),
    [({"kind": "poisson", "rate": 0.2}, Poisson(0.2)), ({"kind": "fixed", "count": 5}, FixedSize(5))],
)
def test_participation_is_built_or_says_what_is_missing(given, built):
    assert parse({"participation": given}).build_participation() == built
    with pytest.raises(InputError, match="missing"):
        parse({"participation": {"kind": given["kind"]}}).build_participation()


def test_npz_data_with_and_without_an_assignment(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"inputs": rng.normal(size=(40, 3)).astype(np.float32), "targets": rng.integers(2, size=40)}
    model = {"name": "mlp", "options": {"inputs": 3, "hidden": 4, "classes": 2}}
    test = {f"test_{name}": values for name, values in arrays.items()}
    np.savez(tmp_path / "a.npz", **arrays, **test, client=np.arange(40) % 5)
    np.savez(tmp_path / "b.npz", **arrays)
    held = problem.build(parse({"data": {"kind": "npz", "path": str(tmp_path / "a.npz")}, "model": model}))
    assert (len(held.federation), len(held.test[0])) == (5, 40)
    split = {"kind": "npz", "path": str(tmp_path / "b.npz"), "clients": 4, "partition": "iid"}
    assert len(problem.build(parse({"data": split, "model": model})).federation) == 4


def test_npz_files_that_are_missing_broken_or_incomplete_are_sentences(tmp_path):
    (tmp_path / "broken.npz").write_bytes(b"no zip")
    np.savez(tmp_path / "other.npz", inputz=np.zeros(3))
    np.savez(tmp_path / "pickled.npz", inputs=np.array([{}], dtype=object), targets=np.zeros(1))
    for name in ("missing.npz", "broken.npz", "other.npz", "pickled.npz"):
        with pytest.raises(InputError, match=r"data\.path"):
            problem.build(parse({"data": {"kind": "npz", "path": str(tmp_path / name)}}))


def test_factories_of_the_users_are_imported_by_name():
    settings = parse({"model": {"factory": "dpfedexp.models:linear_regression", "options": {"dimension": 500}}})
    assert sum(p.numel() for p in problem.build(settings).model.parameters()) == 500
    for wrong in ("nomodule:x", "dpfedexp.models:nothing", "dpfedexp.models"):
        with pytest.raises(InputError, match=r"model\.factory"):
            problem.build(parse({"model": {"factory": wrong}}))


def test_the_seed_of_a_run_decides_data_model_and_noise():
    settings = Settings()
    a, b = (problem.build(settings.with_seed(s)).federation.inputs for s in (0, 1))
    assert not torch.equal(a, b)
    assert settings.with_seed(3).run.seed == 3


def test_how_many_clients_an_array_has_does_not_depend_on_whether_the_last_one_holds_rows(tmp_path):
    rows = {"inputs": np.zeros((6, 4), dtype=np.float32), "targets": np.zeros(6, dtype=np.int64)}
    given = {"data": {"kind": "npz", "path": str(tmp_path / "a.npz")}, "participation": {"population": 3}}
    given |= {"model": {"name": "mlp", "options": {"inputs": 4, "hidden": 2, "classes": 2}}}
    given |= {"algorithm": {"name": "dp_fedavg", "clip": 1.0, "noise_multiplier": 1.0}, "run": {"secure": True}}
    given |= {"local": {"lr": 0.1, "steps": 1}}
    sizes = []
    for client in ([0, 0, 1, 1, 2, 2], [0, 0, 1, 1, -1, -1]):
        np.savez(tmp_path / "a.npz", client=np.array(client), **rows)
        sizes.append(problem.build(parse(given)).federation.sizes.tolist())
    assert sizes == [[2, 2, 2], [2, 2, 0]]
    with pytest.raises(InputError, match=r"participation\.population is missing"):
        problem.build(parse({key: value for key, value in given.items() if key != "participation"}))


def test_the_schema_for_editors_is_that_of_the_settings():
    assert SCHEMA.read_text(encoding="utf-8") == settings_schema.text(), (
        "it is old; run: python docs/hooks/settings_schema.py"
    )


def test_the_template_of_init_has_only_settings_that_the_schema_knows():
    tree = tomllib.loads(re.sub(r"^# (?=[a-z_]+ = |\[)", "", TEMPLATE.read_text(encoding="utf-8"), flags=re.M))
    known = settings_schema.schema()
    for name, section in tree.items():
        kind = known["properties"][name]["$ref"].rpartition("/")[2]
        assert set(section) <= set(known["$defs"][kind]["properties"])


@pytest.mark.parametrize("name", ["cdp_fedexp", "ldp_fedexp", "dp_fedavg", "dp_fedadam", "dp_scaffold"])
def test_every_private_algorithm_takes_its_options_from_a_file(name):
    built = parse({"algorithm": {"name": name, "clip": 0.5, "target_epsilon": 8.0, "delta": 1e-6}}).build_algorithm()
    assert (built.target_epsilon, built.delta) == (8.0, 1e-6)
