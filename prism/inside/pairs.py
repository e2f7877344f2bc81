"""Query cursors, each with the key cursor it is read against: where they stand, how sharply, and which tell most.

Dimensions: batch; cursors = of a PRISM layer; time = tokens; bins = 2P + 1 offsets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prism.architectures import Architecture
from prism.config import RunConfig
from prism.data import collate, draw, vocabulary
from prism.encodings.prism import Prism
from prism.evaluate import TEST_SEED
from prism.inside.reading import MOST_TOKENS, tokens_of, within
from prism.inside.recording import recording
from prism.ops.histogram import edge_mass
from prism.transformer import Transformer

AT_ONCE = 1 << 25  # numbers of the histograms looked at together: 128 MiB
IN_ALL = 1 << 29  # numbers of those looked at for one length: a minute or two, on a CPU
USED = 0.1  # of the largest |alpha|, from which on a pair has a say


@dataclass(frozen=True)
class Pair:
    """A query cursor and its key cursor: number `cursor` of a head, the `slot`th of the PRISM layer before `depth`."""

    layer: int
    head: int
    cursor: int
    depth: int
    slot: int

    def __str__(self) -> str:
        return f"layer {self.layer}, head {self.head}, cursor {self.cursor}"

    def of(self, seen: Mapping[str, Tensor], what: str, side: str) -> Float[Tensor, "*rest"]:
        """This cursor's histograms or gates in the first sequence, or its gamma."""
        whole = seen[f"prism.{self.depth}.{what}.{side}"]
        return whole[self.slot] if what == "gamma" else whole[0, self.slot]

    def alpha(self, seen: Mapping[str, Tensor], first: int) -> float:
        return float(seen["prism.alpha"][self.layer - first, self.head, self.cursor])


def pairs_of(encoding: Prism) -> list[Pair]:
    """All pairs, in the order of a recording's cursors, PRISM layer by PRISM layer."""
    heads, each = encoding.heads, encoding.config.cursors
    return [
        Pair(layer, head, cursor, depth, ((layer - depth) * heads + head) * each + cursor)
        for depth, served in encoding.served.items()
        for layer in served for head in range(heads) for cursor in range(each)
    ]


def modes(histograms: Float[Tensor, "*chains bins"]) -> Int[Tensor, "*chains"]:
    """The likeliest offset."""
    return histograms.argmax(-1) - histograms.shape[-1] // 2


def movement(histograms: Float[Tensor, "time bins"]) -> float:
    """The share of tokens at which the mode moves."""
    mode = modes(histograms)
    return float((mode.diff() != 0).double().mean()) if len(mode) > 1 else 0.0


def by_say(encoding: Prism, seen: Mapping[str, Tensor]) -> list[Pair]:
    """The most telling pair first: |alpha| x sharpness x movement, these two of the query and of the key cursor.

    A cursor that is read weakly, that is blurred, or that always stands in the same place, tells attention nothing.
    """

    def say(pair: Pair) -> float:
        product = pair.alpha(seen, encoding.config.depths[0])
        for side in ("query", "key"):
            histograms = pair.of(seen, "histograms", side)
            product *= float(histograms.amax(-1).mean()) * movement(histograms)
        return product

    return sorted(pairs_of(encoding), key=say, reverse=True)


class Spread(NamedTuple):
    """Of a number, over tokens and examples: the mean, and the worst."""

    mean: float
    worst: float


class Sharpness(NamedTuple):
    """One cursor at one length: its largest bin, its entropy in bits, and its mass at the edges of the support."""

    peak: Spread
    entropy: Spread
    edge: Spread


class Steadiness(NamedTuple):
    """One length: (pair, side) -> how sharp it is; and how many of the examples the model has right."""

    cursors: dict[tuple[Pair, str], Sharpness]
    right: int
    examples: int


def lengths_for(config: RunConfig) -> list[int]:
    """From the training length to ten times that: the task's own test lengths, as far as they are short enough."""
    lengths = sorted({within(config), *config.task.sweep(config.max_length)})
    fit = [one for one in lengths if one >= within(config) and tokens_of(config, one) <= 2 * MOST_TOKENS]
    return fit or [within(config)]


@torch.no_grad()
def steadiness(model: Transformer, config: RunConfig, length: int, pairs: Sequence[Pair], examples: int) -> Steadiness:
    """Query cursors are measured where the answer is written, key cursors wherever there is a token.

    Of a large model's long sequences there may be fewer `examples`.
    """
    tokens = tokens_of(config, length)
    examples = max(1, min(examples, IN_ALL // (tokens * max(1, model.encoding.footprint(tokens)))))
    batch = collate(vocabulary(config.task), draw(
        config.task, seed=TEST_SEED, stream="test", step=0, size=examples, length=length)).to(model.device)
    time, opens = batch.tokens.shape[1], model.config.start_token
    ends = torch.where(batch.mask, torch.arange(time, device=model.device), -1).amax(1)
    there = torch.arange(time, device=model.device) <= ends[:, None]
    measured, logits = _measured(model, batch.tokens)
    wrong = (logits.argmax(-1) != batch.targets) & batch.mask
    found = {}
    for pair in pairs:
        for side, where in (("query", batch.mask), ("key", there)):
            peak, entropy, edge = (
                one[:, pair.slot, int(opens) :][where.cpu()] for one in measured[pair.depth, side].unbind(-1)
            )
            found[pair, side] = Sharpness(
                Spread(float(peak.mean()), float(peak.min())), Spread(float(entropy.mean()), float(entropy.max())),
                Spread(float(edge.mean()), float(edge.max())),
            )
    return Steadiness(found, int((~wrong.any(1)).sum()), examples)


def _measured(
    model: Transformer, tokens: Int[Tensor, "batch time"]
) -> tuple[dict[tuple[int, str], Tensor], Float[Tensor, "batch time vocabulary"]]:
    """(depth, side) -> [batch, cursors, time, 3], and logits; chunk by chunk, as histograms of all take too much."""
    encoding = model.encoding
    assert isinstance(encoding, Prism)
    batch, time = tokens.shape
    capacity = time + model.config.start_token
    chunk = max(1, AT_ONCE // (batch * max(1, encoding.footprint(capacity))))
    cache, logits = model.eval().new_cache(time), []
    parts: dict[tuple[int, str], list[Tensor]] = {
        (depth, side): [] for depth in encoding.served for side in ("query", "key")
    }
    for some in tokens.split(chunk, dim=1):
        with recording(model, "prism.*.histograms.*", most=1 << 40) as seen:
            logits.append(model(some, cache))
        for (depth, side), kept in parts.items():
            histograms = seen[f"prism.{depth}.histograms.{side}"]
            entropy = torch.special.entr(histograms).sum(-1) / torch.log(torch.tensor(2.0))
            kept.append(torch.stack((histograms.amax(-1), entropy, edge_mass(histograms)), dim=-1))
    return {key: torch.cat(kept, dim=2) for key, kept in parts.items()}, torch.cat(logits, dim=1)


def is_prism(model: Architecture) -> bool:
    """Whether there are cursors in it."""
    return isinstance(model, Transformer) and isinstance(model.encoding, Prism)
