"""465 kB of text about the Python language, which comes with Python, and a small transformer that learns it."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.torch_ranks import Ranks

WIDTH, HEADS, LAYERS, CONTEXT = 32, 4, 2, 64
WINDOWS = 16  # of CONTEXT characters each, in the batch of all ranks: 1024 characters
VALIDATION_BATCHES = 8


def load_text() -> tuple[Tensor, Tensor, str]:
    """Return characters to train on and to validate on, as their places in the alphabet, and that."""
    manual = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    alphabet = "".join(sorted(set(manual)))
    numbers = {character: number for number, character in enumerate(alphabet)}
    characters = torch.tensor([numbers[character] for character in manual])
    cut = len(characters) * 9 // 10
    return characters[:cut], characters[cut:], alphabet


def draw_windows(text: Tensor, batches: torch.Generator, ranks: Ranks, count: int = WINDOWS) -> Tensor:
    """Return this rank's part of a batch, which every rank draws alike: windows, characters."""
    starts = torch.randint(len(text) - CONTEXT, (count,), generator=batches)
    mine = starts[ranks.rank :: ranks.size][: count // ranks.size]
    return text[mine[:, None] + torch.arange(CONTEXT + 1)].to(ranks.device)


@torch.no_grad()
def validation_loss(model: nn.Module, text: Tensor, batches: torch.Generator, ranks: Ranks) -> float:
    """Return the mean loss of all ranks on text that the model has not learnt."""
    loss: float = sum(model(draw_windows(text, batches, ranks)).item() for _ in range(VALIDATION_BATCHES))
    total: float = sum(ranks.all_gather_objects(loss))
    return total / (ranks.size * VALIDATION_BATCHES)


class Block(nn.Module):
    """Causal self-attention, then a perceptron, each on the normalised input and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next block works on, in the shape of ``x``: windows, characters, width."""
        parts = self.inputs(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outputs(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + added


class Transformer(nn.Module):
    """A language model of characters, started as GPT-2 is: weights of standard deviation 0.02, biases of zero."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, windows: Tensor, reduction: str = "mean") -> Tensor:
        """Return the float32 loss, in nats, of the windows' characters but the first: the mean, or "none": each."""
        x = self.characters(windows[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits, targets = self.output(self.norm(x)).float().flatten(0, 1), windows[:, 1:].flatten()
        return functional.cross_entropy(logits, targets, reduction=reduction)
