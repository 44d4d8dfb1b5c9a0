"""The next character, a promise to every author: texts of your own, one file or string to an author.

python examples/characters_by_author.py [folder of .txt files]
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dpfedexp import Execution, Federation, Sgd, cdp_fedexp, train

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"
"""A public alphabet; what is not in it is a space."""
LENGTH = 16


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 8)
        self.mix = nn.Conv1d(8, 32, kernel_size=4)
        self.out = nn.Linear(32, len(LETTERS))

    def forward(self, text):
        """Logits for the character after each position: [rows, positions, letters]."""
        seen = nn.functional.pad(self.embed(text).transpose(1, 2), (3, 0))
        return self.out(torch.relu(self.mix(seen)).transpose(1, 2))


def rows(text: str, most: int = 40):
    """Pieces of 16 characters, and the same moved by one."""
    numbers = np.array([max(LETTERS.find(c), LETTERS.find(" ") if c not in LETTERS else 0) for c in text.lower()])
    starts = range(0, len(numbers) - LENGTH - 1, LENGTH)
    pieces = [(numbers[s : s + LENGTH], numbers[s + 1 : s + LENGTH + 1]) for s in starts][:most]
    return np.array([x for x, _ in pieces]), np.array([y for _, y in pieces])


def authors(count: int, seed: int = 0) -> list[str]:
    """Made-up texts of a small vocabulary."""
    rng = np.random.default_rng(seed)
    words = ["the", "rain", "in", "spain", "falls", "on", "a", "plain", "and", "cat", "sat", "there", "with", "hat"]
    return [" ".join(rng.choice(words, 120)) + "." for _ in range(count)]


def main(small: bool = False, folder: str | None = None) -> float:
    texts = (
        [path.read_text() for path in sorted(Path(folder).glob("*.txt"))] if folder else authors(110 if small else 800)
    )
    held_out = max(1, len(texts) // 10)
    clients = Federation.from_clients([rows(text) for text in texts[held_out:]])
    test = [rows(text) for text in texts[:held_out]]
    run = train(
        Writer(),
        clients,
        cdp_fedexp(clip="adaptive", target_epsilon=8.0),
        local=Sgd(lr=1.0, momentum=0.5, steps=5),
        rounds=3 if small else 25,
        loss="cross-entropy",
        evaluate=(np.concatenate([x for x, _ in test]), np.concatenate([y for _, y in test])),
        execution=Execution(progress=not small),
    )
    accuracy = run.history[-1]["test_accuracy"]
    print(f"next characters right: {accuracy:.1%} on authors who took no part, ε = {run.privacy.epsilon_total:.3f}")
    return accuracy


if __name__ == "__main__":
    folders = [text for text in sys.argv[1:] if not text.startswith("--")]
    main(small="--small" in sys.argv, folder=folders[0] if folders else None)
