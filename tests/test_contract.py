"""The check that a user's own encoding goes through: every rule can be broken, and says who broke it and how."""

import re

import pytest
import torch
from torch import nn

from prism.contract import RULES, check_encoding
from prism.encodings import Encoding, all_encodings
from prism.errors import UserError


@pytest.mark.parametrize("kind", all_encodings().values(), ids=all_encodings())
def test_every_encoding_here_keeps_the_contract(kind):
    before = torch.get_rng_state()
    check_encoding(kind, "here")
    assert torch.equal(torch.get_rng_state(), before)  # a check changes no run


class Named(Encoding):
    name, summary, citation, extrapolates = "mine", "a test", "nobody", True


class NarrowEmbedding(Named):
    def embed(self, x, stream):
        return x[..., :-1]


class QueriesOfAnotherShape(Named):
    def transform(self, query, key, layer, stream):
        return query[:, :1], key


class KeysOfAnotherWidth(Named):
    def transform(self, query, key, layer, stream):
        return query, key[..., :-2]


class ScalarBias(Named):
    def bias(self, layer, stream):
        return torch.zeros(())


class BiasOfAnotherLength(Named):
    def bias(self, layer, stream):
        return torch.zeros(1, 1, stream.time, 1)


class NumbersForScores(Named):
    def score(self, scores, layer, stream):
        return 3


class WeightsOnTheFuture(Named):
    def weigh(self, scores, visible, layer, stream):
        return torch.softmax(scores, dim=-1)


class Raises(Named):
    def observe(self, x, layer, stream):
        raise KeyError("nothing there")


class LooksAhead(Named):
    def embed(self, x, stream):
        return x + x.flip(1)


class Foresees(Named):
    def embed(self, x, stream):
        left = stream.capacity - stream.positions(x.device)
        return x + left[:, None] * torch.linspace(-1, 1, self.width)


class CountsFromTheChunk(Named):
    def embed(self, x, stream):
        place = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]
        return x + place * torch.linspace(-1, 1, self.width)  # not the same to all features: a norm would undo that


class Mixes(Named):
    def embed(self, x, stream):
        return x + x[:1] if x.shape[0] > 1 else x


class Bounded(Named):
    def longest(self):
        return 20

    def start(self, capacity):
        from prism.encodings import Stream

        return Stream(capacity)


class ShortTable(Named):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.table = nn.Parameter(torch.randn(12, self.width))

    def embed(self, x, stream):
        return x + self.table[stream.positions(x.device)]


class NotFinite(Named):
    def bias(self, layer, stream):
        return (1 / (20 - stream.distances(torch.device("cpu")).clamp_min(0)))[None, None].log()


class Random(Named):
    def embed(self, x, stream):
        return x + getattr(self, "shift", 0) * torch.linspace(-1, 1, self.width)

    def train(self, mode=True):
        self.shift = getattr(self, "shift", 0) + 0.1 * mode
        return super().train(mode)


class Idle(Named):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.unused = nn.Parameter(torch.ones(3))


class Forgetful(Named):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.table = torch.randn(self.width)

    def embed(self, x, stream):
        return x + self.table


BROKEN = [
    (NarrowEmbedding, "hooks keep their shapes", r"embed has the shape \[3, 9, 15\], where \[3, 9, 16\] belongs"),
    (QueriesOfAnotherShape, "hooks keep their shapes", r"transform's query has the shape \[3, 1, 9, 8\]"),
    (KeysOfAnotherWidth, "hooks keep their shapes", r"transform's key has the shape \[3, 2, 9, 6\]"),
    (ScalarBias, "hooks keep their shapes", r"bias has the shape \[\]"),
    (BiasOfAnotherLength, "hooks keep their shapes", r"bias has the shape \[1, 1, 9, 1\]"),
    (NumbersForScores, "hooks keep their shapes", "score is int, where a tensor belongs"),
    (WeightsOnTheFuture, "hooks keep their shapes", r"weigh gave a weight of 0\.\d+ to a key that is not visible"),
    (Raises, "hooks keep their shapes", "KeyError: 'nothing there'"),
    (LooksAhead, "causality", r"changing token \d moved the logits of earlier tokens by \d"),
    (Foresees, "no foresight", r"the first 8 of 9 tokens are off by 0\.\d+ .* foresees = True"),
    (CountsFromTheChunk, "chunks with a cache", r"in chunks of \[1, 1.*off by \d\.\d+"),
    (Mixes, "sequences of a batch", r"differs by 0\.\d+ from itself in a batch"),
    (Bounded, "longer sequences", r"longest\(\) says 20 tokens, and 21 were read all the same"),
    (ShortTable, "longer sequences", "IndexError: index 12 is out of bounds"),
    (NotFinite, "longer sequences", "the logits of 40 tokens are not all finite"),
    (Random, "in eval mode", r"read again after a training pass, differ by 0\.\d+"),
    (Idle, "a gradient reaches", "no gradient reaches its parameter unused"),
    (Forgetful, "weights saved", r"with the same saved weights differs by \d"),
]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("kind", "rule", "observed"), BROKEN, ids=[kind.__name__ for kind, *_ in BROKEN])
def test_a_broken_rule_is_named_with_the_file_and_what_was_seen(kind, rule, observed):
    with pytest.raises(UserError) as refusal:
        check_encoding(kind, "my/file.py")
    sentence = str(refusal.value)
    assert sentence.startswith(f"my/file.py: mine breaks the rule '{rule}")
    assert re.search(observed, sentence), sentence
    assert "\n" not in sentence


def test_each_rule_is_broken_by_somebody():
    assert {rule for rule in RULES for _, broken, _ in BROKEN if rule.startswith(broken)} == set(RULES)


def test_who_says_that_it_foresees_may():
    check_encoding(type("Honest", (Foresees,), {"foresees": True, "embed": Foresees.embed}), "file.py")
    with pytest.raises(UserError, match="chunks with a cache"):  # which is no leave to break the other rules
        check_encoding(type("Hasty", (CountsFromTheChunk,), {"foresees": True}), "file.py")


@pytest.mark.parametrize(("said", "sentence"), [
    ({"hint": "digit"}, "hint must be one of digits, coupling, segments, or None; got 'digit'"),
    ({"Config": dict}, "Config must be a frozen dataclass that inherits from Settings"),
])
def test_what_an_encoding_declares_is_checked(said, sentence):
    with pytest.raises(UserError, match=sentence):
        check_encoding(type("Mine", (Named,), said), "file.py")


def test_a_hinted_encoding_is_checked_with_hints():
    class Hinted(Named):
        hint = "digits"

        def embed(self, x, stream):
            return x + self.hints(stream.tokens)[:, stream.seen :, None] * torch.linspace(-1, 1, self.width)

    check_encoding(Hinted, "file.py")


@pytest.mark.parametrize(("missing", "sentence"), [
    ("name", "must say its name"), ("summary", "must say its summary"), ("citation", "must say its citation"),
    ("extrapolates", "must say whether it extrapolates"),
])
def test_an_encoding_introduces_itself(missing, sentence):
    said = {"name": "mine", "summary": "a test", "citation": "nobody", "extrapolates": True}
    kind = type("Mine", (Encoding,), {key: value for key, value in said.items() if key != missing})
    with pytest.raises(UserError, match=sentence):
        check_encoding(kind, "file.py")
