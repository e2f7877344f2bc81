"""The looped Transformer (Fan et al., 2024): the same blocks again and again, as often as the example is long.

The model reads the prompt followed by one placeholder for each token of the answer, and writes the whole answer at
once, where the placeholders are. A loop adds the embedded input to the state and passes it through the blocks:

    state_0 = 0        state_t = f(state_{t-1} + input)        answer = state_T, T the number of symbols of the prompt

f is a stack of causal decoder blocks without positional encoding and a layer norm; only the last state is trained,
each example's after its own T loops. For copying, T is the authors' (n for n symbols); reversing is no task of theirs,
and is given the same. What is said here follows the paper: its code could not be compared. Taken from the preset, not
from the paper, so as to be on equal terms: sizes, number of blocks, optimiser, steps and curriculum. Read-out by the
transposed embedding is the Transformer's.

Dimensions: batch; time = tokens of prompt and answer; width = of the residual stream; vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from prism.architectures import count_parameters
from prism.config import ModelConfig, RunConfig
from prism.curriculum import longest_at
from prism.data import Vocabulary, draw, vocabulary
from prism.encodings.nope import NoPE
from prism.errors import RunError
from prism.evaluate import TEST_SEED, Score
from prism.optimizer import schedule
from prism.separate.contract import Method, Report
from prism.tasks import Example
from prism.transformer import Block

SCORES_AT_ONCE = 1 << 24  # attention scores of a pass that tests, in all heads
REPORTS = 10  # while training


class Asked(NamedTuple):
    """Prompts with placeholders for their answers, what belongs there, and how many loops each example is given."""

    tokens: Int64[Tensor, "batch time"]
    targets: Int64[Tensor, "batch time"]
    mask: Bool[Tensor, "batch time"]  # true at the placeholders
    loops: Int64[Tensor, " batch"]

    def to(self, device: str) -> "Asked":
        return Asked(*(part.to(device) for part in self))


class LoopedTransformer(nn.Module):
    """Prompts and placeholders -> logits of the answer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.blank = config, config.vocabulary  # the placeholder's id
        self.nope = NoPE(config.width, config.layers, config.heads, config.head_width)
        self.embedding = nn.Embedding(config.vocabulary + 1, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)

    def forward(
        self, tokens: Int64[Tensor, "batch time"], loops: Int64[Tensor, " batch"], most: int
    ) -> Float[Tensor, "batch time vocabulary"]:
        """Logits after each example's own number of loops, of which `most` is the largest."""
        given = self.embedding(tokens) * math.sqrt(self.config.width)
        state, last = torch.zeros_like(given), torch.zeros_like(given)
        for loop in range(1, most + 1):
            state = self._loop(state + given)
            last = torch.where((loops == loop)[:, None, None], state, last)
        return last @ self.embedding.weight[: self.config.vocabulary].T

    def _loop(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        stream = self.nope.start(x.shape[1])
        stream.time = x.shape[1]
        for block in self.blocks:
            x = block(x, self.nope, stream, None)
        return self.norm(x)  # type: ignore[no-any-return]


class Looped(Method):
    """Answers all at once, after as many loops as the prompt has symbols."""

    name = "looped"
    summary = "a Transformer whose blocks are repeated once for every symbol of the prompt; the answer comes at once"
    citation = "Fan et al., Looped Transformers for Length Generalization, 2024"
    told = ("how many tokens the answer has (a placeholder for each) and how many loops to make (one for each symbol "
            "of the prompt), in training and in testing")
    tasks = ("copy", "reverse")

    def train_and_test(self, terms: RunConfig, device: str, report: Report) -> tuple[Mapping[str, Score], int]:
        assert isinstance(terms.model, ModelConfig)
        torch.manual_seed(terms.seed)
        model = LoopedTransformer(terms.model).to(device)
        train(model, terms, report)
        scores = {}
        for length in terms.test_lengths():
            drawn = draw(terms.task, seed=TEST_SEED, stream="test", step=0, size=terms.evaluation.final_examples,
                         length=length)
            scores[str(length)] = score(model, vocabulary(terms.task), drawn)
            report(f"length {length}: {scores[str(length)].exact:.1%} exact")
        return scores, count_parameters(model)


def ask(model: LoopedTransformer, words: Vocabulary, examples: Sequence[Example]) -> Asked:
    """Padding follows the placeholders, so a causal model never sees it where it matters."""
    prompts = [torch.from_numpy(words.encode(example.prompt)) for example in examples]
    answers = [torch.from_numpy(words.encode(example.completion)) for example in examples]
    time = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens, targets = (torch.zeros(len(examples), time, dtype=torch.int64) for _ in range(2))
    mask = torch.zeros(len(examples), time, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        places = slice(len(prompt), len(prompt) + len(answer))
        tokens[row, : len(prompt)], tokens[row, places] = prompt, model.blank
        targets[row, places], mask[row, places] = answer, True
    loops = torch.tensor([len(prompt) - 1 for prompt in prompts])  # without `=`
    return Asked(tokens, targets, mask, loops)


def train(model: LoopedTransformer, terms: RunConfig, report: Report) -> None:
    """On the batches any other model of these terms would get."""
    chosen, words = terms.optimizer, vocabulary(terms.task)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=chosen.rate, betas=chosen.betas, weight_decay=chosen.weight_decay
    )
    model.train()
    for step in range(terms.steps):
        for group in optimizer.param_groups:
            group["lr"] = chosen.rate * schedule(chosen, step, terms.steps)
        longest = longest_at(step, terms.curriculum, terms.max_length)
        examples = draw(terms.task, seed=terms.seed, stream="train", step=step, size=terms.batch_size,
                        max_length=longest)
        logits, asked = _answer(model, words, examples)
        loss = cross_entropy(logits[asked.mask], asked.targets[asked.mask])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.clip)
        if not math.isfinite(loss.item()) or not math.isfinite(norm.item()):
            raise RunError(f"step {step + 1}: loss {loss.item()}, gradient norm {norm.item()}: training has diverged")
        optimizer.step()
        if (step + 1) % max(1, terms.steps // REPORTS) == 0:
            report(f"step {step + 1:,}/{terms.steps:,}  lengths <= {longest}  loss {loss.item():.4f}")


@torch.no_grad()
def score(model: LoopedTransformer, words: Vocabulary, examples: Sequence[Example]) -> Score:
    """Counts the answers that are right in all their tokens."""
    model.eval()
    correct, tokens, loss = 0, 0, 0.0
    for piece in _pieces(model, words, examples):
        logits, asked = _answer(model, words, piece)
        correct += int(((logits.argmax(-1) == asked.targets) | ~asked.mask).all(-1).sum())
        loss += float(cross_entropy(logits[asked.mask], asked.targets[asked.mask], reduction="sum"))
        tokens += int(asked.mask.sum())
    return Score(len(examples), correct, loss / tokens)


def _answer(
    model: LoopedTransformer, words: Vocabulary, examples: Sequence[Example]
) -> tuple[Float[Tensor, "batch time vocabulary"], Asked]:
    asked = ask(model, words, examples)
    most = int(asked.loops.max())
    asked = asked.to(str(model.embedding.weight.device))
    return model(asked.tokens, asked.loops, most), asked


def _pieces(
    model: LoopedTransformer, words: Vocabulary, examples: Sequence[Example]
) -> Sequence[Sequence[Example]]:
    """As many at once as the longest of them allows."""
    time = max(len(words.split(example.prompt + words.separator + example.completion)) for example in examples)
    size = max(1, SCORES_AT_ONCE // (model.config.heads * time * time))
    return [examples[first : first + size] for first in range(0, len(examples), size)]
