"""What is learnt by reinforcement: a language model, the pass that samples from it, and the reward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from shared.report import progress_bar
from shared.text import CONTEXT, HEADS, LAYERS, WIDTH, Transformer, draw_windows
from shared.torch_ranks import Ranks
from shared.torch_runs import full_weights

PROMPTS = 8  # in the batch of all ranks
PROMPT = 17  # characters of the text; the policy writes the 48 after them
SAMPLES = 4  # continuations of each prompt, which are compared with each other
VOWELS = "aeiou"


def learn_text(text: tuple[Tensor, Tensor, str], steps: int, seed: int, ranks: Ranks) -> dict[str, Tensor]:
    """Return the weights of a language model that has learnt the text in float32."""
    training, _, alphabet = text
    torch.manual_seed(seed)
    model = DistributedDataParallel(Transformer(len(alphabet)).to(ranks.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = torch.Generator().manual_seed(seed)
    with progress_bar("language model, fp32", steps, 22, ranks.rank) as progress:
        for _ in range(steps):
            model(draw_windows(training, batches, ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.update()
    weights: dict[str, Tensor] = model.module.state_dict()
    return weights


def draw_prompts(text: tuple[Tensor, Tensor, str], batches: torch.Generator, ranks: Ranks) -> Tensor:
    """Return this rank's part of the beginnings that are to be continued: prompts, characters."""
    return draw_windows(text[0], batches, ranks, PROMPTS)[:, :PROMPT]


def log_probabilities(actor: nn.Module, windows: Tensor) -> Tensor:
    """Return the float32 log probabilities of what was written after the prompts, by the pass that trains."""
    losses: Tensor = actor(windows, "none").view(len(windows), CONTEXT)
    return -losses[:, PROMPT - 1 :]


def share_of_vowels(windows: Tensor, alphabet: str) -> Tensor:
    """Return the reward of each window: which share of the characters after the prompt are vowels."""
    vowels = torch.tensor([alphabet.index(vowel) for vowel in VOWELS], device=windows.device)
    return torch.isin(windows[:, PROMPT:], vowels).float().mean(dim=1)


def advantages_of(rewards: Tensor) -> Tensor:
    """Return how much better a continuation is than the others of its prompt, in standard deviations, as GRPO does."""
    groups = rewards.view(-1, SAMPLES)
    spread = groups.std(dim=1, keepdim=True) + 1e-6
    return ((groups - groups.mean(dim=1, keepdim=True)) / spread).flatten()


class Sampler:
    """The policy as an inference engine has it: whole, in half precision, with a cache, one character at a time."""

    def __init__(self, alphabet: str, dtype: torch.dtype, seed: int, ranks: Ranks) -> None:
        self.model = Transformer(len(alphabet)).to(ranks.device, dtype)
        self.dice = torch.Generator(ranks.device).manual_seed(seed * ranks.size + ranks.rank)

    def load(self, actor: nn.Module) -> None:
        """Take the weights of the actor, gathered from all shards and rounded to the sampler's dtype."""
        self.model.load_state_dict(full_weights(actor))

    @torch.no_grad()
    def continue_(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return windows that go on from the prompts, and the float32 log probability of each character drawn."""
        windows = prompts.repeat_interleave(SAMPLES, dim=0)
        shape = LAYERS, 2, len(windows), HEADS, CONTEXT, WIDTH // HEADS
        cache = torch.empty(shape, dtype=next(self.model.parameters()).dtype, device=windows.device)
        found = []
        for place in range(CONTEXT):
            x = self.model.characters(windows[:, place]) + self.model.positions.weight[place]
            for block, (keys, values) in zip(self.model.blocks, cache, strict=True):
                x = advance(block, x, keys[:, :, : place + 1], values[:, :, : place + 1])
            if place >= PROMPT - 1:
                log_p = self.model.output(self.model.norm(x)).float().log_softmax(dim=-1)
                drawn = torch.multinomial(log_p.exp(), 1, generator=self.dice)
                windows = torch.cat([windows, drawn], dim=1)
                found.append(log_p.gather(1, drawn))
        return windows, torch.cat(found, dim=1)


def advance(block: Any, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return what a block makes of one character of each window, whose key and value end the cache from then on."""
    parts = block.inputs(block.attention_norm(x)).chunk(3, dim=-1)
    query, keys[:, :, -1], values[:, :, -1] = (part.unflatten(-1, (HEADS, -1)) for part in parts)
    scores = query.unsqueeze(2) @ keys.mT / math.sqrt(query.shape[-1])
    x = x + block.outputs((scores.softmax(dim=-1) @ values).flatten(1))
    added: Tensor = block.down(functional.gelu(block.up(block.norm(x))))
    return x + added
