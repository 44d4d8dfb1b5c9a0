"""Models of `transformers` built from a configuration, and adapters of `peft`: nothing is downloaded."""

import pytest
import torch
from torch import nn

from dpfedexp import AdamW, Federation, InputError, Sgd, dp_fedavg, fedavg, train
from tests.trainers.shared import simulated, updates

MISSING = "needs pip install dpfedexp[language]"
transformers = pytest.importorskip("transformers", reason=MISSING)
WORDS, LENGTH, CLIENTS = 40, 9, 6
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    common = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_positions=LENGTH, n_embd=16, n_layer=2, n_head=4, **common)
        return transformers.GPT2LMHeadModel(config).train()
    if kind == "llama":
        config = transformers.LlamaConfig(num_key_value_heads=2, max_position_embeddings=LENGTH, **SIZES, **common)
        return transformers.LlamaForCausalLM(config).train()
    config = transformers.BertConfig(max_position_embeddings=LENGTH, **SIZES, **common)
    return transformers.BertForSequenceClassification(config).train()


def federation(kind: str, masked: bool) -> Federation:
    """Clients of three sentences each, of which some begin with padding."""
    generator = torch.Generator().manual_seed(1)
    rows = 3 * CLIENTS
    text = torch.randint(0, WORDS, (rows, LENGTH + 1), generator=generator)
    mask = (torch.arange(LENGTH) >= torch.arange(rows)[:, None] % 4).long()
    targets = text[:, 0] % 2 if kind == "bert" else text[:, 1:].masked_fill(mask == 0, -100)
    inputs = {"input_ids": text[:, :-1], "attention_mask": mask} if masked else text[:, :-1]
    return Federation.from_arrays(inputs, targets, client_ids=[row // 3 for row in range(rows)])


def learned(model: nn.Module, clients: Federation, trainer: str) -> torch.Tensor:
    return updates(simulated(model, clients, Sgd(lr=0.5, steps=2), trainer, loss="cross-entropy"))


@pytest.mark.parametrize(("kind", "masked"), [("gpt2", False), ("llama", True), ("bert", True)])
def test_a_model_from_a_configuration_trains_many_clients_at_once(kind, masked):
    """Dropout included: GPT-2 and BERT have it by default. 2e-5 is float32 rounding of two layers, twice."""
    model, clients = model_of(kind), federation(kind, masked)
    together = learned(model, clients, "vectorized")
    assert float(together.abs().max()) > 1e-3
    torch.testing.assert_close(together, learned(model, clients, "loop"), rtol=0.0, atol=2e-5)
    assert model.config._attn_implementation == "sdpa"


def test_logits_are_measured_and_other_parts_are_not_guessed():
    clients = federation("llama", masked=True)
    options = {"local": AdamW(lr=0.01, steps=2), "rounds": 1, "execution": "cpu"}
    run = train(model_of("llama"), clients, fedavg(), loss="ce", evaluate=clients.client(0), **options)
    assert run.trainer == "vectorized"
    assert 0.0 <= run.history[-1]["test_accuracy"] <= 1.0
    encoder = transformers.LlamaModel(model_of("llama").config)
    with pytest.raises(InputError, match=r"returns \{last_hidden_state: .*'logits'.* give loss a function"):
        train(encoder, clients, fedavg(), loss="ce", **options)


def test_adapters_of_peft_are_all_that_trains_counts_and_is_noised():
    peft = pytest.importorskip("peft", reason=MISSING)
    base = model_of("llama")
    whole = sum(p.numel() for p in base.parameters())
    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    adapters, _ = model.get_nb_trainable_parameters()
    options = {"local": AdamW(lr=0.01, steps=2), "rounds": 2, "loss": "cross-entropy", "execution": "cpu"}
    run = train(model, federation("llama", masked=True), dp_fedavg(clip=1.0, noise_multiplier=1.0), **options)
    assert run.trainer == "vectorized"
    assert run.facts.parameters == adapters < whole / 10
    before, after = model.state_dict(), run.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name}
