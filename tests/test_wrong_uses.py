"""What new users type by mistake, and the words that the one sentence they get must hold: what is wrong, and the fix."""

import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpfedexp as dp
from dpfedexp.accounting import epsilon, noise
from dpfedexp.cli import main
from dpfedexp.mechanisms import privatize
from tests.arguments import arguments
from tests.engine.small import crash_after

RAW = ("Traceback", "pydantic", "mat1", "torch.Size", "Error:", "vmap", "object has no", "positional argument")
"""Words of other people's software, which no answer may hold."""
X, LABELS, NUMBERS, BITS = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), torch.randn(4), torch.tensor([0, 1, 1, 0])


def clients(targets=LABELS, inputs=X) -> dp.Federation:
    return dp.Federation.from_clients([(inputs, targets)] * 6)


def trained(model=None, federation=None, algorithm=None, **options):
    settings = {"local": dp.Sgd(lr=0.1, steps=2), "rounds": 1, "execution": "cpu", **options}
    algorithm = dp.cdp_fedexp(clip=0.3, noise_multiplier=1.0) if algorithm is None else algorithm
    model = nn.Linear(3, 3) if model is None else model
    return dp.train(model, federation or clients(), algorithm, **arguments(settings))


def measured(**options):
    return trained(test=(X, LABELS), **options)


def table(**options) -> dp.Federation:
    rows = {"user": ["a", "b", "b"], "age": [1.0, 2.0, np.nan], "city": ["x", "y", "z"], "y": [0, 1, 0]}
    return dp.Federation.from_pandas(rows, **{"by": "user", "target": "y", "features": ["age"], **options})


class Forgetful(nn.Linear):
    def forward(self, x):
        super().forward(x)


class Gambling(nn.Linear):
    def forward(self, x):
        return super().forward(x * float(np.random.rand()))


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(-x if x.mean().item() > 0 else x)


WORDS = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(9, 3))
IMAGES = torch.randn(4, 28, 28)
BATCH_NORM = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

MODELS = {
    "a class": (lambda: trained(nn.Linear), "model is the class Linear; pass an instance, Linear(…)"),
    "nothing to train": (lambda: trained(nn.Flatten()), "no trainable parameters", "requires_grad=True"),
    "lazy": (lambda: trained(nn.LazyLinear(3)), "has no shape yet; run one batch through the model"),
    "half precision": (lambda: trained(nn.Linear(3, 3).half()), "parameters in float16", "model.float()"),
    "batch norm": (lambda: trained(BATCH_NORM), "running_mean", "Freeze it with", "or use GroupNorm"),
    "too many features": (lambda: trained(nn.Linear(5, 3)), "takes 5 features", "build it with in_features=3"),
    "no channels": (lambda: trained(nn.Conv2d(1, 4, 3), clients(inputs=IMAGES)), "rows of 1 channels", "x[:, None]"),
    "unknown word": (
        lambda: trained(WORDS, dp.Federation.from_clients([(torch.full((4, 3), n), LABELS) for n in range(8)])),
        "layer '0' (Embedding) knows the numbers from 0 to 4 and was given numbers from 0 to 7",
        "num_embeddings=8",
    ),
    "words as floats": (lambda: trained(WORDS, clients()), "whole numbers and was given float32", "int64"),
    "numbers as integers": (lambda: trained(federation=clients(inputs=X.long())), "was given int64", "x.float()"),
    "no return": (lambda: trained(Forgetful(3, 3)), "the model returns None; its forward must return"),
    "draws of NumPy": (lambda: trained(Gambling(3, 3)), "from NumPy or Python's random", "draw with torch.rand"),
    "in a wrapper": (lambda: trained(nn.DataParallel(nn.Linear(3, 3))), "model is a DataParallel", "pass model.module"),
    "without numbers": (lambda: trained(nn.Linear(3, 3, device="meta")), "'meta'", "build it on the CPU"),
    "one output": (lambda: trained(nn.Linear(3, 1)), "one output for each label", "choose loss='bce'"),
}
DATA = {
    "a list of clients": (lambda: trained(federation=[(X, LABELS)]), "clients is a list", "Federation.from_clients(…)"),
    "no owners": (lambda: dp.Federation.from_arrays(X, LABELS), "pass exactly one of assignment and client_ids"),
    "too few owners": (lambda: dp.Federation.from_arrays(X, LABELS, client_ids=[0, 1]), "2 ids and there are 4 rows"),
    "too few targets": (lambda: dp.Federation.from_arrays(X, LABELS[:3], [0] * 4), "4 rows and targets has 3"),
    "inputs alone": (lambda: dp.Federation.from_clients([X, X]), "clients[0] is a Tensor", "a pair (inputs, targets)"),
    "ragged": (lambda: dp.Federation.from_clients([([[1, 2], [3]], [0, 1])]), "is ragged; pass one array"),
    "other shapes": (lambda: dp.Federation.from_clients([(X, LABELS), (X[:, :2], LABELS)]), "all clients must agree"),
    "not a number": (lambda: clients(inputs=X * torch.nan), "not finite", "remove or repair"),
    "misspelt column": (lambda: table(by="usr"), "by names the column 'usr'", "Did you mean 'user'?"),
    "missing value": (lambda: table(), "column 'age' has no value in 1 of 3 rows", "drop those rows"),
    "text column": (lambda: table(features=["city"]), "holds text; give its public list, categories={'city': [...]}"),
    "text target": (lambda: table(features=["y"], target="city"), "a target becomes its place in the list"),
    "unlisted category": (lambda: table(features=["city"], categories={"city": ["x"]}), "holds 'y' in row 1", "add it"),
    "no folder": (lambda: dp.Federation.from_folder("nowhere", target="y"), "no folder; give the folder that"),
    "a table as a list of clients": (
        lambda: dp.Federation.from_clients(pytest.importorskip("pandas").DataFrame({"user": [1]})),
        "clients is a DataFrame",
        "Federation.from_pandas(df, by='user', target='y')",
    ),
    "user of a table": (lambda: table(user="user"), "no argument 'user'. Write by='user'"),
    "label of a table": (lambda: table(label="y"), "no argument 'label'. Write target='label'"),
    "text targets": (lambda: dp.Federation.from_arrays(X, list("abca"), [0] * 4), "dtype <U1", "number the classes"),
    "too many clients": (lambda: dp.Federation.iid(X, LABELS, clients=10), "clients is 10", "4 rows"),
}
LOSSES = {
    "misspelt": (lambda: trained(loss="mes"), "loss is 'mes', which does not exist", "Did you mean 'mse'?"),
    "a class": (lambda: trained(loss=nn.MSELoss), "loss is the class MSELoss; pass an instance, MSELoss()"),
    "a mean over the batch": (
        lambda: trained(loss=lambda o, y: nn.functional.cross_entropy(o, y)),
        "one number per example, for example with reduction='none'",
    ),
    "labels from 1": (lambda: trained(federation=clients(LABELS.flip(0) + 1)), "from 1 to 3", "number them from 0"),
    "labels of ±1": (lambda: trained(nn.Linear(3, 1), clients(2 * BITS - 1), loss="bce"), "(targets + 1) / 2"),
    "half a test set": (lambda: trained(evaluate=(X,)), "is a tuple of 1; it must be a pair (inputs, targets)"),
    "a loader as test set": (lambda: trained(evaluate=DataLoader(TensorDataset(X))), "is a DataLoader", "a pair"),
    "a metric by name": (lambda: measured(metrics="f1"), "metrics is a str; it must be a dict such as"),
    "metrics of nothing": (lambda: dp.Evaluation("clients", metrics={"o": max}), "Evaluation((inputs, targets)"),
    "an evaluation that is no dict": (lambda: trained(evaluate=lambda m: 0.3), "returned a float", "a dict of numbers"),
}
OPTIMIZERS = {
    "torch's own": (
        lambda: trained(local=torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)),
        "local is torch's SGD",
        "give local=Sgd(lr=0.1, steps=10)",
    ),
    "learning_rate": (lambda: dp.Sgd(learning_rate=0.1, steps=2), "no argument 'learning_rate'. Write lr=0.1"),
    "betas": (lambda: dp.AdamW(lr=0.1, steps=2, betas=(0.9, 0.99)), "no argument 'betas'. Write beta1=0.9"),
    "steps and epochs": (lambda: dp.Sgd(lr=0.1, steps=2, epochs=1), "pass exactly one of them"),
    "nesterov alone": (lambda: dp.Sgd(lr=0.1, steps=2, nesterov=True), "without momentum; give momentum too"),
    "schedule by name": (lambda: dp.Sgd(lr=0.1, steps=2, schedule="cosine"), "such as CosineRate(rounds=50)"),
}
PRIVACY = {
    "the function itself": (lambda: trained(algorithm=dp.cdp_fedexp), "is a function", "such as cdp_fedexp(…)"),
    "no noise": (lambda: dp.cdp_fedexp(clip=1.0), "target_epsilon is None; pass exactly one"),
    "two noises": (lambda: dp.cdp_fedexp(clip=1.0, noise_multiplier=1.0, target_epsilon=8.0), "pass exactly one of"),
    "epsilon": (lambda: dp.cdp_fedexp(clip=1.0, epsilon=8.0), "no argument 'epsilon'. Write target_epsilon=8.0"),
    "epsilon of train": (lambda: trained(epsilon=8.0), "Write algorithm=cdp_fedexp(clip=…, target_epsilon=8.0)"),
    "negative clip": (lambda: dp.cdp_fedexp(clip=-1.0, noise_multiplier=1.0), "clip is -1.0; it must be a positive"),
    "delta": (lambda: dp.cdp_fedexp(clip=1.0, target_epsilon=8.0, delta=1.0), "delta is 1.0; it must be between 0"),
    "no noise to account": (lambda: epsilon(0.0, rounds=5, delta=1e-5), "noise_multiplier is 0.0", "positive number"),
    "negative epsilon": (lambda: noise(-1.0, rounds=5, delta=1e-5), "target_epsilon is -1.0", "above 0"),
    "no clip": (lambda: privatize(torch.ones(3)), "privatize needs the argument 'clip'"),
    "everybody twice": (lambda: dp.Poisson(2.0), "participation rate is 2.0; it must be above 0 and at most 1"),
    "a share as a number": (lambda: trained(participation=0.1), "it must be Full(), Poisson(rate) or FixedSize(count)"),
    "too large a cohort": (lambda: trained(participation=dp.FixedSize(100)), "cohort is 100", "at most 6"),
}
RUNS = {
    "learning rate of train": (lambda: trained(lr=0.1), "no argument 'lr'. Write local=Sgd(lr=0.1, steps=10)"),
    "half a round": (lambda: trained(rounds=2.5), "rounds is 2.5; it must be a positive whole number"),
    "gpu": (lambda: trained(device="gpu"), "device is 'gpu'; it must be a torch device such as 'cpu' or 'cuda'"),
    "misspelled trainer": (lambda: trained(execution=dp.Execution(trainer="vectorize")), "Did you mean 'vectorized'?"),
    "nearly secure": (lambda: trained(secure="yes"), "secure is 'yes'; it must be True, False or 'strict'"),
    "no callback": (lambda: trained(on_round="print"), "on_round is 'print'; it must be a function of one record"),
    "misspelt watch": (lambda: measured(on_round=dp.EarlyStopping("test_los")), "not measured", "Did you mean"),
    "a file as folder": (lambda: trained(out=__file__), "is a file; name a new folder with out"),
    "resume": (lambda: trained(resume=True), "train has no argument 'resume'. Write the same out"),
    "nothing to load": (lambda: dp.Run.load("nowhere"), "'nowhere' does not exist; pass the folder of a run"),
    "fit with a class": (lambda: dp.fit(nn.Linear, clients()), "model is the class Linear", "pass an instance"),
    "fit with rows": (lambda: dp.fit(nn.Linear(3, 3), [(X, LABELS)]), "clients is a list", "from_clients(…)"),
    "fit with target_epsilon": (lambda: dp.fit(nn.Linear(3, 3), clients(), target_epsilon=8.0), "Write epsilon=8.0"),
    "validation_data": (lambda: trained(validation_data=(X, LABELS)), "Write evaluate=(inputs, targets)"),
    "test_data": (lambda: dp.fit(nn.Linear(3, 3), clients(), test_data=(X, LABELS)), "Write evaluate=(inputs"),
    "random_state": (lambda: trained(random_state=0), "Write execution=Execution(seed=1)"),
    "verbose": (lambda: dp.fit(nn.Linear(3, 3), clients(), verbose=1), "Write on_round=print to see every round"),
    "optimizer": (lambda: trained(optimizer="sgd"), "Write local=Sgd(lr=0.1, steps=10)"),
    "local_steps of fit": (lambda: dp.fit(nn.Linear(3, 3), clients(), local_steps=5), "fit chooses it", "use train("),
    "n_rounds": (lambda: dp.fit(nn.Linear(3, 3), clients(), n_rounds=5), "Write rounds"),
    "a plot of one metric": (lambda: measured().plot("test_loss"), "plot takes 0 arguments"),
}
ROOMS = {"model": MODELS, "data": DATA, "loss": LOSSES, "optimizer": OPTIMIZERS, "privacy": PRIVACY, "run": RUNS}
USES = {f"{room}: {name}": use for room, uses in ROOMS.items() for name, use in uses.items()}


def check_sentence(text: str, words: tuple[str, ...]) -> None:
    assert [word for word in words if word not in text] == [], text
    assert [raw for raw in RAW if raw in text] == [], text
    assert "\n" not in text.strip()
    assert text.rstrip().endswith((".", "?")), text


@pytest.mark.parametrize("name", USES)
def test_a_wrong_use_is_answered_by_a_sentence_with_the_fix(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    act, *words = USES[name]
    warnings.simplefilter("ignore")
    with pytest.raises(dp.InputError) as caught:
        act()
    check_sentence(str(caught.value), tuple(words))


def test_a_constructor_that_does_not_exist_gets_the_right_call():
    with pytest.raises(AttributeError, match=r"Write Federation\.from_pandas\(pandas\.read_csv\("):
        _ = dp.Federation.from_csv


def test_a_model_unlike_the_trained_one_is_named_by_its_first_difference(tmp_path):
    trained(out=tmp_path / "run")
    with pytest.raises(dp.InputError) as caught:
        dp.Run.load(tmp_path / "run", nn.Linear(3, 4))
    check_sentence(str(caught.value), ("'bias' is of shape (4,) in the model and of shape (3,)",))


def test_a_callback_that_fails_keeps_its_error_and_says_where_the_rounds_are(tmp_path):
    model = nn.Linear(3, 3)
    full = crash_after(2, OSError("the disk is full"))
    with pytest.raises(OSError, match="the disk is full") as caught:
        trained(model, rounds=3, out=tmp_path / "run", on_round=full)
    place = str(tmp_path / "run")
    assert caught.value.__notes__ == [f"The rounds so far are in {place!r}; make the same call again to resume."]
    assert len(trained(model, rounds=3, out=tmp_path / "run").history) == 3


DOUBTS = {
    "sigmoid": (
        lambda: trained(nn.Sequential(nn.Linear(3, 1), nn.Sigmoid(), nn.Flatten(0)), clients(BITS), loss="bce"),
        ("ends with a sigmoid", "leave the model's out", "nn.BCELoss()"),
    ),
    "softmax": (lambda: trained(nn.Sequential(nn.Linear(3, 3), nn.Softmax(1))), ("ends with a softmax", "leave the")),
    "nll of logits": (
        lambda: trained(nn.Sequential(nn.Linear(3, 3), nn.Softplus()), loss="nll"),
        ("takes log-probabilities", "nn.LogSoftmax(dim=-1)", "loss='cross-entropy'"),
    ),
    "item": (lambda: trained(Branching(3, 3)), ("can't be vectorized", ".item()", "one after the other")),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_what_works_but_was_hardly_meant_is_said(name):
    act, words = DOUBTS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    (said,) = [str(one.message) for one in caught if one.category is UserWarning]
    check_sentence(said, words)


@pytest.mark.parametrize(
    ("model", "loss", "targets"),
    [
        (nn.Sequential(nn.Linear(3, 1), nn.Sigmoid()), nn.BCELoss(), BITS),
        (nn.Linear(3, 1), "bce", BITS),
        (nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(1)), "nll", LABELS),
        (nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(1)), "cross-entropy", LABELS),
    ],
)
def test_what_was_meant_is_not_doubted(model, loss, targets):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", dp.errors.AdviceWarning)
        trained(model, clients(targets), loss=loss)


FILE = '[algorithm]\nname = "cdp_fedexp"\nclip = 0.3\nnoise_multiplier = 1.0\n[local]\nlr = 0.1\nsteps = 2\n[run]\nrounds = 1\n'
TYPED = {
    "trian run.toml": ("No such command 'trian'", "Did you mean 'train'?"),
    "train nowhere.toml": ("'nowhere.toml' does not exist; `dpfedexp init` writes one",),
    "train run.toml --rounds 3": ("train has no option --rounds; write --set run.rounds=…",),
    "sweep run.toml --clip 3": ("sweep has no option --clip; write --set algorithm.clip=…",),
    "train run.toml --set clip=3": ("clip is not a setting", "Did you mean 'algorithm.clip'?"),
    "train run.toml --set algorithm.clipp=3": ("algorithm.clipp is not a setting. Did you mean 'clip'?",),
    "train run.toml --set nonsense": ("--set is 'nonsense'; it must look like algorithm.clip=0.3",),
    "train run.toml --set run.rounds.x=1": ("'rounds' is a value and not a section",),
    "train run.toml --set run.rounds=ten": ("run.rounds is 'ten'; it must be a valid integer",),
    "train run.toml --set run.loss=mes": ("'mes', which does not exist. Did you mean 'mse'?",),
    "train run.toml --set algorithm.clip=0": ("clip is 0",),
    "train run.toml --set data.kind=npz": ("data.path is missing",),
    "init run.toml": ("exists",),
    "train broken.toml": ("'broken.toml' is not valid TOML", "Expected ']'"),
    "sweep run.toml --grid algorithm.clip=": ("it must look like algorithm.clip=0.1,0.3,1",),
    "sweep run.toml --grid algorithm.clip=a,b": ("algorithm.clip is 'a'; it must be a valid number or 'adaptive'",),
    "report nowhere": ("'nowhere' does not exist; name one that a run",),
    "audit --confidence 1.5": ("--confidence is 1.5; it must be between 0 and 1",),
    "audit --samples 10": ("10 is not in the range x>=1000",),
    "privacy verify nowhere": ("'nowhere' is not a folder; give the folder that a run wrote",),
}


@pytest.mark.parametrize("line", TYPED)
def test_a_wrong_command_is_answered_by_a_sentence_and_exit_code_2(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(FILE)
    (tmp_path / "broken.toml").write_text("[run")
    monkeypatch.setattr(sys, "argv", ["dpfedexp", *line.split()])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert [word for word in TYPED[line] if word not in text] == [], text
    assert [raw for raw in ("Traceback", "pydantic", "unable to parse") if raw in text] == []
