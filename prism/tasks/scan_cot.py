"""SCAN with its chain of thought: commands in small English, carried out clause by clause.

SCAN is a grammar (Lake and Baroni, 2018) of 20,910 commands. A phrase is a verb, alone or with a direction; a
clause is a phrase, perhaps "twice" or "thrice"; a command is a clause, or two of them joined. Its chain of
thought first writes the phrases in the order in which they are carried out, then the actions of each:

    walk left twice                   walk left + walk left      "twice" and "thrice" are written out
    jump after walk left twice        walk left + walk left after jump      what comes first is written first
    walk left : I_TURN_LEFT I_WALK    one heading and its actions, for every phrase in turn

>>> ScanCot().answer("jump after walk left twice =")
'walk left + walk left after jump → walk left : I_TURN_LEFT I_WALK walk left : I_TURN_LEFT I_WALK jump : I_JUMP .'

The length split asks for longer action sequences than were ever shown: commands of at most 22 actions are for
training (16,990), the others (24 to 48 actions) are the test set (3,920). The split has no validation set, so
one training command in 17, picked by a checksum of its text, is set aside for it and never trained on.

Lengths are tokens of the whole sequence, prompt and completion, in bins of ten: length 60 means 51 to 60.
"""

import random
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from prism.errors import UserError
from prism.tasks.task import Example, Split, Task

BIN = 10
MOST_TRAINING_ACTIONS = 22

_VERBS = {"walk": "I_WALK", "look": "I_LOOK", "run": "I_RUN", "jump": "I_JUMP"}
_TURNS = {"left": "I_TURN_LEFT", "right": "I_TURN_RIGHT"}
_REPEATS = {"twice": 2, "thrice": 3}
_JOINTS = ("and", "after")


@dataclass(frozen=True)
class ScanCot(Task):
    """A SCAN command, then its phrases in order and the actions of each."""

    name = "scan_cot"
    summary = "turn a command into actions, clause by clause: jump twice = jump + jump → jump : I_JUMP jump : I_JUMP ."
    length_means = "tokens of the whole sequence, in bins of ten"
    training_length = 80  # no training sequence is longer
    has_curriculum = False
    separator = " "

    @property
    def alphabet(self) -> tuple[str, ...]:
        words = (*_VERBS, "turn", *_TURNS, "opposite", "around", *_REPEATS, *_JOINTS)
        return (*words, *_VERBS.values(), *_TURNS.values(), "=", "+", "→", ":", ".")

    def example(self, rng: random.Random, length: int, split: Split = "test") -> Example:
        """A pair of the split, uniform among those whose sequence has `length` - 9 to `length` tokens."""
        pool = _pools()[split]
        start, stop = bisect_left(pool.tokens, length - BIN + 1), bisect_right(pool.tokens, length)
        if start == stop:
            bins = ", ".join(map(str, pool.bins()))
            raise UserError(f"{self.name} has no {split} sequence of {length - BIN + 1} to {length} tokens; "
                            f"lengths with examples: {bins}")
        return pool.examples[rng.randrange(start, stop)]

    def training_example(self, rng: random.Random, max_length: int, split: Split = "train") -> Example:
        """A pair of the split, uniform among those of at most `max_length` tokens."""
        pool = _pools()[split]
        stop = bisect_right(pool.tokens, max_length)
        if stop == 0:
            raise UserError(f"{self.name} has no {split} sequence of at most {max_length} tokens; "
                            f"the shortest has {pool.tokens[0]}")
        return pool.examples[rng.randrange(stop)]

    def answer(self, prompt: str) -> str:
        form = "a SCAN command and '=', such as 'walk around left thrice and look opposite right ='"
        (command,) = self.parse("(.+) =", " ".join(prompt.split()), form)
        known = _clauses()
        clauses = [command]
        joint = next((word for word in _JOINTS if f" {word} " in command), "")
        if joint:
            clauses = command.split(f" {joint} ")
        if len(clauses) > 2 or not all(clause in known for clause in clauses):
            raise UserError(f"a prompt of {self.name} is {form}; got {prompt!r}")
        return _completion([known[clause] for clause in clauses], joint)

    def sweep(self, max_length: int) -> tuple[int, ...]:
        """Every bin of the test set: its lengths are what they are, whatever the model was trained on."""
        return _pools()["test"].bins()

    def subsets(self) -> Mapping[str, Sequence[Example]]:
        """The test set, and the part of it whose sequences are longer than any in the training split."""
        pools = _pools()
        test, longest = pools["test"], max(pools["train"].tokens[-1], pools["validation"].tokens[-1])
        longer = test.examples[bisect_right(test.tokens, longest) :]
        return {"test set": test.examples, "longer than training": longer}

    @property
    def marks(self) -> tuple[str, ...]:
        """Punctuation, and the words that join two clauses as `+` joins phrases."""
        return (*super().marks, *_JOINTS)


def split_examples(split: Split) -> tuple[Example, ...]:
    """All pairs of a split, the shortest sequence first."""
    return _pools()[split].examples


class _Clause(NamedTuple):
    thought: str  # its phrases, written out
    performance: str  # each phrase as a heading, with its actions


class _Pool(NamedTuple):
    """The pairs of a split, shortest sequence first, and the number of tokens of each."""

    examples: tuple[Example, ...]
    tokens: tuple[int, ...]

    def bins(self) -> tuple[int, ...]:
        return tuple(sorted({-(-count // BIN) * BIN for count in self.tokens}))


def _phrases() -> Iterator[tuple[str, tuple[str, ...]]]:
    """The 34 phrases and what they mean. `turn` is a verb without an action that needs a direction."""
    for verb, action in _VERBS.items():
        yield verb, (action,)
    for verb, actions in [*((verb, (action,)) for verb, action in _VERBS.items()), ("turn", ())]:
        for direction, turn in _TURNS.items():
            yield f"{verb} {direction}", (turn, *actions)
            yield f"{verb} opposite {direction}", (turn, turn, *actions)
            yield f"{verb} around {direction}", (turn, *actions) * 4


@cache
def _clauses() -> dict[str, _Clause]:
    """The 102 clauses."""
    clauses = {}
    for phrase, actions in _phrases():
        heading = f"{phrase} : {' '.join(actions)}"
        clauses[phrase] = _Clause(phrase, heading)
        for word, count in _REPEATS.items():
            clauses[f"{phrase} {word}"] = _Clause(" + ".join([phrase] * count), " ".join([heading] * count))
    return clauses


def _completion(clauses: Sequence[_Clause], joint: str) -> str:
    """The chain of thought for one clause, or for two as the command has them."""
    order = reversed(clauses) if joint == "after" else clauses
    thoughts, performances = zip(*order, strict=True)
    return f"{f' {joint} '.join(thoughts)} → {' '.join(performances)} ."


def _commands() -> Iterator[Example]:
    """All 20,910 pairs."""
    clauses = _clauses()
    for text, clause in clauses.items():
        yield Example(f"{text} =", _completion([clause], ""))
    for first, a in clauses.items():
        for second, b in clauses.items():
            for joint in _JOINTS:
                yield Example(f"{first} {joint} {second} =", _completion([a, b], joint))


def _split(example: Example) -> Split:
    if example.completion.count("I_") > MOST_TRAINING_ACTIONS:
        return "test"
    # A checksum and not a stride: the grammar's own periods (102 clauses) would show in a stride.
    return "validation" if zlib.crc32(example.prompt.encode()) % 17 == 0 else "train"


@cache
def _pools() -> dict[Split, _Pool]:
    pools: dict[Split, list[tuple[int, Example]]] = {"train": [], "validation": [], "test": []}
    for example in _commands():
        tokens = len(example.prompt.split()) + len(example.completion.split())
        pools[_split(example)].append((tokens, example))
    result = {}
    for split, pairs in pools.items():
        pairs.sort()
        result[split] = _Pool(tuple(example for _, example in pairs), tuple(tokens for tokens, _ in pairs))
    return result
