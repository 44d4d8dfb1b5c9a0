"""The grammar of `tests.fuzz.programs`: parts of modules, losses, transforms, optimizers and federations.

A part that remembers is composed of where it keeps a value (`_MEMORIES`), what it reads of a tensor (`_READINGS`), when it acts
(`_TRIGGERS`) and in which moment of a pass (`_MOMENTS`). Other parts write, draw, branch, or are layers of torch.
"""

import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from dpfedexp import AdamW, Federation, LocalOptimizer, Sgd
from tests.generated import GeneratedClients

COUNT, WIDTH, WORDS, LABELS = 5, 6, 9, 3
GLOBAL: dict[Any, Any] = {}


def forget() -> None:
    """Puts everything that programs share in this process back to its beginning."""
    GLOBAL.clear()
    RemembersGradients.kept = None


class Chance(random.Random):
    """Choices that follow from a seed, with a list of them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed, self.features = seed, []

    def pick(self, name: str, *options: Any) -> Any:
        found = self.choice(options)
        self.features.append(f"{name} {found}")
        return found

    def part(self, name: str, options: dict[str, Callable[..., Any]], *, usual: int = 0) -> Callable[..., Any]:
        """One of the options; the first has `usual` further chances."""
        return options[self.pick(name, *[next(iter(options))] * usual, *options)]


# Where a value is kept. Each makes put(owner, value) and get(owner), of which the owner is the module that acts.

Put, Get = Callable[[Any, Any], None], Callable[[Any], Any]


def _number(value: Any) -> float:
    return float(value.mean()) if isinstance(value, Tensor) else float(value)


def _in_list() -> tuple[Put, Get]:
    kept: list[Any] = []
    return lambda owner, value: kept.append(value), lambda owner: kept[-1] if kept else None


def _in_thread() -> tuple[Put, Get]:
    own = threading.local()
    return lambda owner, value: setattr(own, "kept", value), lambda owner: getattr(own, "kept", None)


def _in_tensor() -> tuple[Put, Get]:
    kept = torch.zeros(1)
    return lambda owner, value: kept.copy_(torch.as_tensor(value).detach().mean()), lambda owner: kept


def _in_buffer() -> tuple[Put, Get]:
    def put(owner: Any, value: Any) -> None:
        owner.held = 0.5 * owner.held + torch.as_tensor(value).detach().mean().reshape(1)

    return put, lambda owner: owner.held


def _in_parameter(name: str, of_data: bool = False) -> Callable[[], tuple[Put, Get]]:
    def put(owner: Any, value: Any) -> None:
        with contextlib.nullcontext() if of_data else torch.no_grad():
            held = getattr(owner, name)
            (held.data if of_data else held).add_(torch.as_tensor(value).detach().mean().tanh())

    return lambda: (put, lambda owner: getattr(owner, name))


def _in_seed(seed: Callable[[int], Any], draw: Callable[[], Any]) -> Callable[[], tuple[Put, Get]]:
    return lambda: (lambda owner, value: seed(int(1000 * abs(_number(value))) % 2**31), lambda owner: draw())


_MEMORIES: dict[str, Callable[[], tuple[Put, Get]]] = {
    "list": _in_list,
    "global": lambda: (lambda owner, value: GLOBAL.update(kept=value), lambda owner: GLOBAL.get("kept")),
    "attribute": lambda: (lambda owner, value: owner.__dict__.update(seen=value), lambda o: o.__dict__.get("seen")),
    "thread": _in_thread,
    "tensor": _in_tensor,
    "torch's seed": _in_seed(torch.manual_seed, lambda: torch.rand(())),
    "numpy's seed": _in_seed(np.random.seed, np.random.rand),
    "python's seed": _in_seed(random.seed, random.random),
}
_OWNED = {
    "buffer": _in_buffer,
    "parameter": _in_parameter("own"),
    "frozen parameter": _in_parameter("frozen"),
    "frozen .data": _in_parameter("frozen", of_data=True),
}

_READINGS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda h: h.detach().mean(),
    "attached": lambda h: h.mean(),
    "rows": lambda h: h.detach().clone(),
    "largest": lambda h: h.detach().abs().amax(),
    "item": lambda h: h.mean().item(),
    "list": lambda h: sum(h.detach().flatten().tolist()),
    "numpy": lambda h: torch.from_numpy(np.array(h.detach().numpy().mean())),
    "nonzero": lambda h: float(len(torch.nonzero(h > 1))),
    "mask": lambda h: h[h > 0].sum().detach(),
    "count of rows": lambda h: float(len(h)),
    "bool": lambda h: 1.0 if bool((h > 1).any()) else 0.0,
}


def _after(calls: int) -> Callable[[], Callable[[Tensor], bool]]:
    def make() -> Callable[[Tensor], bool]:
        seen: list[None] = []

        def trigger(h: Tensor) -> bool:
            seen.append(None)
            return len(seen) > calls

        return trigger

    return make


_TRIGGERS: dict[str, Callable[[], Callable[[Tensor], bool]]] = {
    "always": lambda: lambda h: True,
    "after 3 calls": _after(3),
    "after 60 calls": _after(60),
    "exactly 1 row": lambda: lambda h: len(h) == 1,
    "above 4 rows": lambda: lambda h: len(h) > 4,
    "above 8 rows": lambda: lambda h: len(h) > 8,
    "rare value": lambda: lambda h: bool((h.detach().abs() > 30).any()),
    "with gradients": lambda: lambda h: h.requires_grad,
}


_HOOKS = ("pre-hook", "forward hook", "full backward hook", "full backward pre-hook", "tensor hook")
_MOMENTS = ("forward", "forward", *_HOOKS)


class Remembers(nn.Module):
    """Adds to what passes what it saw before."""

    def __init__(self, chance: Chance, place: str) -> None:
        super().__init__()
        inside = place == "module"
        self.put, self.get = chance.part(f"{place}: memory", {**_MEMORIES, **(_OWNED if inside else {})})()
        self.read = chance.part(f"{place}: reading", _READINGS, usual=9)
        self.trigger = chance.part(f"{place}: trigger", _TRIGGERS, usual=7)()
        self.moment = chance.pick(
            f"{place}: moment",
            *(_MOMENTS if inside else ("forward",) if place == "transform" else ("forward", "tensor hook")),
        )
        self.register_buffer("held", torch.zeros(1))
        self.own, self.frozen = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1), requires_grad=False)
        self.inner = nn.Identity()
        if self.moment == "pre-hook":
            self.inner.register_forward_pre_hook(lambda part, given: (self.act(given[0]),))
        if self.moment == "forward hook":
            self.inner.register_forward_hook(lambda part, given, out: self.act(out))
        if self.moment == "full backward hook":
            self.inner.register_full_backward_hook(lambda part, given, out: (self.act(out[0]),))
        if self.moment == "full backward pre-hook":
            self.inner.register_full_backward_pre_hook(lambda part, out: (self.act(out[0]),))

    def act(self, h: Tensor) -> Tensor:
        if not self.trigger(h):
            return h
        before = self.get(self)
        self.put(self, self.read(h))
        if isinstance(before, Tensor) and before.dim() > 1:
            before = before.mean(0) if before.shape[1:] == h.shape[1:] else before.mean()
        return h if before is None else h + 0.3 * before

    def forward(self, h: Tensor) -> Tensor:
        if self.moment == "forward":
            return self.act(h)
        if self.moment == "tensor hook":
            h = h.clone()
            if h.requires_grad:
                h.register_hook(self.act)
            return h
        return self.inner(h)


# Autograd functions of the caller's.


class RemembersGradients(torch.autograd.Function):
    """State of the class, and no support of vmap."""

    kept: Any = None

    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        before, RemembersGradients.kept = RemembersGradients.kept, gradient.detach().mean(0)
        return gradient if before is None else gradient + before


class Generic(torch.autograd.Function):
    """Stateless, with a rule that torch makes for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h):
        return h.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        (out,) = ctx.saved_tensors
        return gradient * (1 - out * out)


class Mixing(torch.autograd.Function):
    """A rule for vmap of its own, which mixes whatever is batched."""

    @staticmethod
    def forward(h):
        return h * 1.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.0

    @staticmethod
    def vmap(info, in_dims, h):
        return h + h.mean(in_dims[0] or 0, keepdim=True), in_dims[0]


# Layers and small programs, [s, WIDTH] to [s, WIDTH]; those with a tensor alone serve losses and transforms too.


class Does(nn.Module):
    """A layer and a function of it and of what passes."""

    def __init__(self, function: Callable[..., Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer or nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.function(self.layer, h)


def _draws() -> dict[str, Callable[[Tensor], Tensor]]:
    own, numbers = torch.Generator().manual_seed(1), np.random.default_rng(1)
    return {
        "torch": lambda h: h + 0.1 * torch.randn_like(h),
        "torch method": lambda h: h + 0.1 * torch.empty(h.shape[1:]).exponential_(),
        "torch permutation": lambda h: h[torch.randperm(len(h))],
        "own generator": lambda h: h + 0.1 * torch.rand(h.shape[1:], generator=own),
        "numpy": lambda h: h + 0.1 * torch.from_numpy(np.random.normal(size=h.shape[1:])).float(),
        "own numpy": lambda h: h + 0.1 * float(numbers.normal()),
        "python": lambda h: h + 0.1 * random.random(),
        "python choice": lambda h: h if random.random() < 0.5 else -h,
    }


def _once_seen() -> Callable[[Tensor], Tensor]:
    sizes: set[int] = set()

    def changes(h: Tensor) -> Tensor:
        sizes.add(len(h))
        return h * (1 + 0.1 * len(sizes))

    return changes


_FUNCTIONS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "centered": lambda: lambda h: h - h.mean(0),
    "rarely mixed": lambda: lambda h: h + torch.where((h > 30).any(), h.amax(0), torch.zeros(())),
    "in place": lambda: lambda h: h.mul_(1.5),
    "copy in place": lambda: lambda h: h.clone().add_(1).clamp_(-5, 5),
    "part in place": lambda: lambda h: h.index_fill_(0, torch.tensor([0]), 0.5),
    "out=": lambda: lambda h: torch.mul(h, 2.0, out=torch.empty_like(h)),
    "unfilled memory": lambda: lambda h: h + 0 * torch.nan_to_num(torch.empty_like(h), 0.0, 0.0, 0.0),
    "item": lambda: lambda h: h * 2 if h.mean().item() > 0 else h,
    "boolean mask": lambda: lambda h: h + h[h > 0].sum(),
    "where": lambda: lambda h: torch.where(h > 0, h, 0.1 * h),
    "round trip by numpy": lambda: lambda h: h + torch.from_numpy(np.tanh(h.detach().numpy())),
    "round trip by list": lambda: lambda h: h + torch.tensor(h.detach().tolist()),
    "sorted": lambda: lambda h: h.sort(0).values,
    "cumulative": lambda: lambda h: h.cumsum(0) / len(h),
    "unique": lambda: lambda h: h + float(len(torch.unique(h))),
    "sizes seen": _once_seen,
    "raises on rare values": lambda: lambda h: h if bool((h < 30).all()) else h.view(7, 77),
    "raises above 8 rows": lambda: lambda h: h if len(h) <= 8 else h.view(7, 77),
    "function": lambda: Generic.apply,
    "function that mixes": lambda: Mixing.apply,
    "function with state": lambda: RemembersGradients.apply,
}


def _written(how: Callable[[nn.Parameter, Tensor], Any]) -> Callable[[nn.Linear, Tensor], Tensor]:
    """A layer that writes its weight before it uses it."""

    def forward(layer: nn.Linear, h: Tensor) -> Tensor:
        how(layer.weight, h.detach())
        return layer(h)

    return forward


@torch.no_grad()
def _mean_into_a_row(weight: nn.Parameter, h: Tensor) -> None:
    weight.mul_(0.9)
    weight[0] += h.mean()


def _as_sequence(layer: nn.Module, h: Tensor) -> Tensor:
    x = h.view(len(h), 2, 3)
    out = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
    return (out[0] if isinstance(out, tuple) else out).flatten(1)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Lazy(nn.Module):
    """A parametrization that remembers the weight before."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Tensor] = []

    def forward(self, weight: Tensor) -> Tensor:
        self.before.append(weight.detach())
        return weight + self.before[max(0, len(self.before) - 2)]


def _parametrized(by: nn.Module) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", by)
    return layer


def _words_of(h: Tensor) -> Tensor:
    return (h.detach().abs() * 3).long() % WORDS


def _plain(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h)


def _looked_up(layer: nn.Module, h: Tensor) -> Tensor:
    return h + layer(_words_of(h)).mean(1)


_TORCHS = """LayerNorm(6); GroupNorm(2, 6); BatchNorm1d(6); BatchNorm1d(6, track_running_stats=False); BatchNorm1d(6).eval();
    Dropout(0.3); AlphaDropout(0.3); RReLU(); utils.parametrizations.weight_norm(nn.Linear(6, 6));
    utils.parametrizations.spectral_norm(nn.Linear(6, 6))"""
_SEQUENCES = """InstanceNorm1d(2, affine=True); InstanceNorm1d(2, track_running_stats=True); GRU(3, 3, batch_first=True);
    LSTM(3, 3, num_layers=2, dropout=0.2, batch_first=True); MultiheadAttention(3, 1, dropout=0.1, batch_first=True);
    TransformerEncoderLayer(3, 1, 4, batch_first=True)"""
_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Does(lambda layer, h: layer(h).tanh()),
    "in-place relu": lambda: Does(_plain, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))),
    **{one: lambda one=one: Does(_plain, eval(f"nn.{one}")) for one in map(str.strip, _TORCHS.split(";"))},
    **{one: lambda one=one: Does(_as_sequence, eval(f"nn.{one}")) for one in map(str.strip, _SEQUENCES.split(";"))},
    "parametrized": lambda: Does(_plain, _parametrized(Symmetric())),
    "parametrized with memory": lambda: Does(_plain, _parametrized(Lazy())),
    "used twice": lambda: Does(lambda layer, h: layer(layer(h).tanh())),
    "writes its weight": lambda: Does(_written(_mean_into_a_row)),
    "writes its .data": lambda: Does(_written(lambda weight, h: weight.data.clamp_(-0.1, 0.1))),
    "frozen": lambda: Does(_plain, nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
    "writes a frozen weight": lambda: Does(
        _written(lambda weight, h: weight.add_(h.mean())), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    ),
    "max_norm": lambda: Does(_looked_up, nn.Embedding(WORDS, WIDTH, max_norm=0.5)),
    "sparse": lambda: Does(_looked_up, nn.Embedding(WORDS, WIDTH, sparse=True)),
    "by frequency": lambda: Does(_looked_up, nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True)),
    "bag": lambda: Does(lambda layer, h: h + layer(_words_of(h)), nn.EmbeddingBag(WORDS, WIDTH, max_norm=0.5)),
}


def _odd(chance: Chance, place: str) -> nn.Module:
    """A part that may let clients meet."""
    more = ["layer"] * 2 * (place == "module")
    kind = chance.pick(f"{place}: part", "remembers", "remembers", "draws", "function", *more)
    if kind == "remembers":
        return Remembers(chance, place)
    if kind == "layer":
        return chance.part("module: layer", _LAYERS)()
    if kind == "draws":
        function = chance.part(f"{place}: draws", _draws(), usual=1)
    else:
        function = chance.part(f"{place}: function", _FUNCTIONS)()
    return Does(lambda layer, h: function(h), nn.Identity())


class Network(nn.Module):
    """A stem for the inputs, layers and odd parts in any order, and a head that may be tied to the stem."""

    def __init__(self, chance: Chance, kind: str) -> None:
        super().__init__()
        self.kind, self.tied = kind, False
        if kind in ("words", "both"):
            how = chance.pick("stem", "plain", "max_norm", "sparse", "bag", "tied max_norm")
            self.tied = "tied" in how
            options = {"max_norm": 1.0} if "max_norm" in how else {"sparse": True} if how == "sparse" else {}
            self.words = (nn.EmbeddingBag if how == "bag" else nn.Embedding)(WORDS, WIDTH, **options)
        if kind in ("numbers", "both"):
            self.stem: nn.Module = nn.Linear(5, WIDTH)
        if kind == "sequence":
            self.stem = nn.GRU(3, WIDTH, batch_first=True)
        if kind == "image":
            self.stem = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, WIDTH))
        count = chance.pick("module: odd parts", 0, 1, 1, 1, 2)
        parts: list[nn.Module] = [_LAYERS["linear"]() for _ in range(chance.randrange(2))]
        parts += [_odd(chance, "module") for _ in range(count)]
        chance.shuffle(parts)
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(WIDTH, LABELS)
        if self.tied:
            self.decoder = nn.Linear(WIDTH, WORDS, bias=False)
            self.decoder.weight = self.words.weight
        self.writes_inputs = kind == "numbers" and chance.random() < 0.05
        if self.writes_inputs:
            chance.features.append("module: writes its inputs")

    def forward(self, x: Tensor, words: Tensor | None = None) -> Tensor:
        if self.writes_inputs:
            x.mul_(0.5)
        h = self._began(x, words)
        for part in self.parts:
            h = part(h)
        out = self.head(h)
        return out + self.decoder(h)[:, :LABELS] if self.tied else out

    def _began(self, x: Tensor, words: Tensor | None) -> Tensor:
        if self.kind == "sequence":
            return self.stem(x)[0][:, -1]
        if self.kind in ("words", "both"):
            found = self.words(x if words is None else words)
            h = found.mean(1) if found.dim() == 3 else found
            return h if words is None else h + self.stem(x)
        return self.stem(x)


def model_of(chance: Chance, kind: str) -> nn.Module:
    plain = kind in ("numbers", "image") and chance.random() < 0.25
    if plain:
        chance.features.append("module: plain")
        first = nn.Linear(16 if kind == "image" else 5, WIDTH)
        return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, LABELS))
    return Network(chance, kind)


def loss_of(chance: Chance) -> Callable[[Tensor, Tensor], Tensor] | str | None:
    if (kind := chance.pick("loss", "none", "none", "none", "named", "torch", "own", "odd")) == "none":
        return None
    if kind == "named":
        return "cross_entropy"
    if kind == "torch":
        return nn.CrossEntropyLoss(label_smoothing=0.1)
    if kind == "own":
        return lambda outputs, y: F.cross_entropy(outputs, y, reduction="none") + 0.01 * outputs.square().sum(1)
    part = _odd(chance, "loss")
    return lambda outputs, y: F.cross_entropy(part(outputs), y, reduction="none")


def transform_of(chance: Chance, kind: str) -> Callable[[Any], Any] | None:
    if (how := chance.pick("transform", "none", "none", "plain", "odd")) == "none":
        return None
    if kind == "words":
        return lambda x: (x + 1) % WORDS
    mixed = (
        torch.randn(5, 5) if kind in ("numbers", "both") else torch.randn(3, 3) if kind == "sequence" else torch.eye(4)
    )
    part: Callable[[Tensor], Tensor] = (lambda x: x) if how == "plain" else _odd(chance, "transform")

    def transform(x: Any) -> Any:
        with torch.no_grad():
            return (part(x[0] @ mixed), x[1]) if kind == "both" else part(x @ mixed)

    return transform


@dataclass(frozen=True)
class Own(LocalOptimizer):
    """A caller's own optimizer."""

    how: str = "plain"

    @property
    def moment_names(self) -> tuple[str, ...]:
        return ("m",)

    @property
    def needs_all_gradients(self) -> bool:
        return self.how == "joined"

    def combine_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        total = sum(value.sum() for value in gradients.values())
        return {name: value + 0.01 * total for name, value in gradients.items()}

    def direction(self, w: Tensor, gradient: Tensor, moments: dict[str, Tensor], clock: Any) -> Tensor:
        m = moments["m"].mul_(0.5).add_(gradient)
        if self.how == "remembers":
            before = GLOBAL.get("gradient", 0.0)
            GLOBAL["gradient"] = gradient.detach().mean()
            return m + before
        if self.how == "looks":
            return m * 2 if gradient.mean().item() > 0 else m
        mean = gradient.mean(0, keepdim=True)
        more: dict[str, Callable[[], Any]] = {
            "coupled": lambda: mean,
            "rarely coupled": lambda: torch.where(gradient.abs().max() > 5, mean, 0.0),
            "draws": lambda: 0.1 * torch.randn_like(m),
            "draws from numpy": lambda: 0.1 * float(np.random.normal()),
        }
        return m + more[self.how]() if self.how in more else m


def local_of(chance: Chance) -> LocalOptimizer:
    # Half of the programs have public shapes, in which clients train together.
    how = chance.pick("batches", "bounded", "bounded", "bounded batches", "steps and batches", "whole", "epochs")
    batching: dict[str, Any] = {
        "bounded": {"steps": 2, "max_examples": 4},
        "bounded batches": {"epochs": 1, "batch_size": 2, "max_examples": 4},
        "steps and batches": {"steps": 2, "batch_size": 3},
        "whole": {"steps": 2},
        "epochs": {"epochs": 1, "batch_size": 4},
    }[how]
    batching["lr"] = chance.pick("lr", 0.3, 0.3, 0.3, 0.3, "auto")
    kind = chance.pick("optimizer", "sgd", "sgd", "momentum", "clipped", "adamw", "own")
    if kind == "adamw":
        return AdamW(**batching)
    if kind == "own":
        ways = ["plain"] * 2 + ["coupled"] + ["rarely coupled"] * 2 + ["joined", "remembers", "looks", "draws"]
        return Own(**batching, how=chance.pick("own optimizer", *ways, "draws from numpy"))
    more = {"momentum": {"momentum": 0.9}, "clipped": {"clip_gradient": 1.0, "proximal": 0.1}}.get(kind, {})
    return Sgd(**batching, **more)


def _row_shape(kind: str) -> tuple[int, ...]:
    return {"sequence": (4, 3), "image": (1, 4, 4)}.get(kind, (5,))


def _rows(kind: str, count: int, drawn: torch.Generator) -> tuple[Any, Tensor]:
    x = torch.randn(count, *_row_shape(kind), generator=drawn)
    words = torch.randint(0, WORDS, (count, 4), generator=drawn)
    y = torch.randint(0, LABELS, (count,), generator=drawn)
    return {"words": words, "both": (x, words)}.get(kind, x), y


def _hostile(chance: Chance, rows: tuple[Any, Tensor]) -> tuple[Any, Tensor]:
    """Other rows of the same number: extreme, not finite, of other labels and words."""
    ways = ["huge", "zero", "not a number", "other labels", "unknown labels", "unknown words"]
    how = chance.pick("hostile", *["extreme"] * 3, *ways)

    def changed(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x + 100 if how == "unknown words" else WORDS - 1 - x
        if how == "not a number":
            return torch.where(x > 0, x, torch.nan)
        return x * {"extreme": 50.0, "huge": 1e20, "zero": 0.0}.get(how, 3.0) + (how == "extreme") * 7

    x, y = rows
    y = {"unknown labels": y + 7, "other labels": LABELS - 1 - y}.get(how, y)
    return tuple(map(changed, x)) if isinstance(x, tuple) else changed(x), y


def clients_of(chance: Chance, kind: str, transform: Callable[[Any], Any] | None, hostile: bool) -> tuple[Any, int]:
    """A federation, and which of its clients is the hostile one."""
    drawn = torch.Generator().manual_seed(chance.seed)
    place = chance.randrange(COUNT)
    generated = kind in ("numbers", "image") and chance.random() < 0.15
    sizes = [3 if generated else chance.choice((0, 1, 2, 3, 4, 6)) for _ in range(COUNT)]
    sizes[(place + 1) % COUNT] = max(2, sizes[(place + 1) % COUNT])
    held = [_rows(kind, size, drawn) for size in sizes]
    size = 3 if generated else chance.pick("hostile rows", 0, 1, 3, 6, 9, 20)
    worse = _hostile(chance, _rows(kind, size, drawn))
    if hostile:
        held[place] = worse
    if not generated:
        return Federation.from_clients(held, transform=transform, finite=False), place
    inputs, targets = torch.stack([x for x, _ in held]), torch.stack([y for _, y in held])
    how = chance.pick("generated", "plain", "mixes", "draws", "draws from a generator", "counts")
    numbers, calls = np.random.default_rng(0), []

    def make(ids: Any) -> tuple[Tensor, Tensor]:
        x = inputs[torch.from_numpy(ids)]
        calls.append(None)
        more = {
            "mixes": lambda: x.amax(0).amax(0),
            "draws": lambda: float(np.random.normal()) + torch.randn(()) + random.random(),
            "draws from a generator": lambda: float(numbers.normal()),
            "counts": lambda: 0.01 * len(calls),
        }.get(how, lambda: 0.0)()
        return x + more, targets[torch.from_numpy(ids)]

    return GeneratedClients(COUNT, 3, make, transform=transform), place
