"""Greedy generation with a cached state: each new token costs one step, the prefix is never read again."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from prism.architectures import Architecture
from prism.config import LONGEST
from prism.data import Vocabulary
from prism.errors import UserError

END = "."


@torch.no_grad()
def stream_tokens(
    model: Architecture, prompts: Int[Tensor, "batch time"], limit: int
) -> Iterator[Int[Tensor, " batch"]]:
    """The most likely next token of each prompt, `limit` times, each fed back. All prompts have one length."""
    cache = model.new_cache(prompts.shape[1] + limit)
    tokens = prompts
    for _ in range(limit):
        following = model(tokens, cache)[:, -1].argmax(-1)
        yield following
        tokens = following[:, None]


def generate(model: Architecture, words: Vocabulary, prompts: Sequence[str], limit: int) -> list[str]:
    """The completion of each prompt, up to and including the end token, or `limit` tokens if none comes."""
    if not 1 <= limit <= LONGEST:
        raise UserError(f"the number of tokens to generate (limit) must be from 1 to {LONGEST:,}, got {limit}")
    device = next(model.parameters()).device
    ids = [torch.from_numpy(words.encode(prompt)).to(device) for prompt in prompts]
    completions = [""] * len(prompts)
    was_training = model.training
    model.eval()
    for length in sorted({len(one) for one in ids}):
        rows = [row for row, one in enumerate(ids) if len(one) == length]
        made = _until_all_end(model, words, torch.stack([ids[row] for row in rows]), limit)
        for row, tokens in zip(rows, made, strict=True):
            completions[row] = words.decode(tokens)
    model.train(was_training)
    return completions


def _until_all_end(
    model: Architecture, words: Vocabulary, prompts: Int[Tensor, "batch time"], limit: int
) -> list[list[int]]:
    end = int(words.encode(END)[0])
    made: list[list[int]] = [[] for _ in range(len(prompts))]
    for following in stream_tokens(model, prompts, limit):
        for tokens, token in zip(made, following.tolist(), strict=True):
            if not tokens or tokens[-1] != end:
                tokens.append(token)
        if all(tokens[-1] == end for tokens in made):
            break
    return made
