"""Fine-tuning a small language model by adapters alone: what that saves in parameters, noise and memory.

    python examples/lora_language_model.py

With `pip install ".[language]"` the model is a Llama of `transformers`, built from a configuration, and the adapters are
`peft`'s; without, both are a few lines of torch.
"""

import sys

import torch
from torch import nn

from dpfedexp import AdamW, Execution, Federation, cdp_fedexp, train
from dpfedexp.accounting import noise

try:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    LlamaForCausalLM = None

WORDS, LENGTH, WIDTH, RANK = 30, 8, 32, 2


class Lora(nn.Module):
    """W x + B(A x) with W frozen (Hu et al. 2022); B begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Language(nn.Module):
    """A decoder of one block: causal attention, a feed-forward layer, and the words again."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, text):
        x = self.words(text) + self.places.weight[: text.shape[1]]
        q, k, v = self.qkv(self.first(x)).chunk(3, dim=-1)
        x = x + self.mix(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return {"logits": self.out(x + self.down(torch.relu(self.up(self.second(x)))))}


def language_model() -> nn.Module:
    if LlamaForCausalLM is None:
        return Language()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0, **sizes)
    )


def with_adapters(model: nn.Module) -> nn.Module:
    """The same model, in which nothing but adapters trains."""
    if LlamaForCausalLM is not None:
        return get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.requires_grad_(False)
    model.qkv, model.mix, model.up, model.down = (Lora(part) for part in (model.qkv, model.mix, model.up, model.down))
    return model


def sentences(rows: int, jumps: list[int], generator: torch.Generator):
    """The next word is a jump away from the one before; which jumps there are is the language."""
    text = torch.randint(0, WORDS, (rows, 1), generator=generator)
    for _ in range(LENGTH):
        jump = torch.tensor(jumps)[torch.randint(0, len(jumps), (rows, 1), generator=generator)]
        text = torch.cat([text, (text[:, -1:] + jump) % WORDS], dim=1)
    return text[:, :-1], text[:, 1:]


def main(small: bool = False) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = language_model()
    # Stands for a download: trained on public sentences, in which every word has four that may follow.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(50 if small else 300):
        x, y = sentences(64, [1, 2, 3, 4], generator)
        loss = nn.functional.cross_entropy(model(x)["logits"].movedim(-1, 1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    whole = sum(p.numel() for p in model.parameters())
    model = with_adapters(model)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)

    users, rounds = (100, 3) if small else (1000, 20)
    run = train(
        model,
        Federation.from_clients([sentences(2, [3], generator) for _ in range(users)]),
        cdp_fedexp(clip="adaptive", target_epsilon=8.0),
        local=AdamW(lr=0.01, steps=4),
        rounds=rounds,
        loss="cross-entropy",
        evaluate=sentences(200, [3], generator),
        execution=Execution(progress=not small),
    )
    z = noise(8.0, rounds=rounds, delta=1e-5)
    print(f"Trained: {adapters:,} adapter parameters beside {whole:,} frozen ones.")
    for what, d in (("adapters", adapters), ("all parameters", whole)):
        print(
            f"{what}: noise over clip z√d/M = {z * d**0.5 / users:.2f}, {4e-6 * users * d:.1f} MB for {users} clients"
        )
    before, after = run.history[0]["test_accuracy"], run.history[-1]["test_accuracy"]
    print(
        f"Next words right: {before:.1%} after one round, {after:.1%} at the end; ε = {run.privacy.epsilon_total:.3f}."
    )
    return adapters / whole, after


if __name__ == "__main__":
    main(small="--small" in sys.argv)
