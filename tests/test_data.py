"""Vocabularies, batches and the read-ahead."""

import hashlib
import itertools
import random
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from prism.data import Batch, Prefetcher, Vocabulary, batch, collate, draw, vocabulary
from prism.errors import UserError
from prism.tasks import Example, Task, all_tasks, find_task
from prism.tasks.addition import Addition
from prism.tasks.copy import Copy
from prism.tasks.odds_first import OddsFirst
from prism.tasks.scan_cot import ScanCot

# The beginning of the SHA-256 of four training examples.
PINNED = {
    "addition": "2018ace657b9",
    "copy": "fd793b82ec2d",
    "dyn_str_cpy": "5042cbabe5ac",
    "multiplication": "842a9b1d838d",
    "odds_first": "bf62bf75122a",
    "reverse": "61d7b06bac6b",
    "scan_cot": "0652e5672c9c",
    "stack": "d806f4d42f5a",
}

tasks = pytest.mark.parametrize("task", [kind() for kind in all_tasks().values()], ids=list(all_tasks()))


def training_batch(task: Task, **changes) -> Batch:
    return batch(task, **{"seed": 0, "stream": "train", "step": 0, "size": 20, "max_length": task.training_length,
                          **changes})


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@tasks
def test_a_batch_says_what_its_examples_say(task):
    words = vocabulary(task)
    examples = draw(task, seed=1, stream="train", step=2, size=30, max_length=task.training_length)
    made = batch(task, seed=1, stream="train", step=2, size=30, max_length=task.training_length)
    assert made.tokens.dtype == made.targets.dtype == torch.int64
    assert made.mask.dtype == torch.bool
    assert made.tokens.shape == made.targets.shape == made.mask.shape
    assert all(part.is_contiguous() for part in made)
    longest = 0
    for row, (prompt, completion) in enumerate(examples):
        ids = [task.alphabet.index(token) for token in words.split(task.separator.join((prompt, completion)))]
        width = len(ids) - 1
        longest = max(longest, width)
        assert made.tokens[row, :width].tolist() == ids[:-1]
        assert made.targets[row, :width].tolist() == ids[1:]
        assert words.decode(made.targets[row][made.mask[row]].tolist()) == completion
        first = int(made.mask[row].int().argmax())
        assert words.decode(made.tokens[row, : first + 1].tolist()) == prompt
        assert not made.mask[row, width:].any()
        assert not made.targets[row, width:].any()
        assert not made.tokens[row, width + 1 :].any()
    assert made.tokens.shape == (30, longest)


def test_padding_to_a_width():
    narrow, wide = training_batch(Copy()), training_batch(Copy(), pad_to=50)
    width = narrow.tokens.shape[1]
    assert wide.tokens.shape == (20, 50)
    assert torch.equal(wide.targets[:, :width], narrow.targets)
    assert torch.equal(wide.mask[:, :width], narrow.mask)
    assert not wide.mask[:, width:].any()
    with pytest.raises(UserError, match="more than pad_to=3"):
        training_batch(Copy(), pad_to=3)


@pytest.mark.parametrize(("digits", "width"), [(3, 8), (4, 16), (8, 24), (12, 32)])
def test_padding_to_a_multiple(digits, width):
    """n digits are n + 1 and n + 1 tokens, the last of which is no input: 9 for four, 25 for twelve."""
    made = training_batch(Copy(), max_length=None, length=digits, multiple=8)
    assert made.tokens.shape == (20, width)
    plain = training_batch(Copy(), max_length=None, length=digits)
    assert equal(Batch(*(part[:, : 2 * digits + 1] for part in made)), plain)
    assert not made.mask[:, 2 * digits + 1 :].any()


@tasks
def test_batches_are_a_pure_function(task):
    first = training_batch(task)
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    assert equal(first, training_batch(task))


def test_every_seed_stream_step_and_length_has_its_own_draws():
    drawn = [tuple(draw(Copy(), seed=seed, stream=stream, step=step, size=3, **{kind: 20}))
             for seed, stream, step, kind in itertools.product(
                 (0, 1, 10), ("train", "validation", "test"), (0, 1, 10, 11), ("length", "max_length"))]
    assert len(set(drawn)) == len(drawn)
    short, long = (draw(Copy(), seed=0, stream="test", step=0, size=1, length=n)[0].prompt for n in (20, 21))
    assert not long.startswith(short[:5])


def test_neighbouring_steps_are_independent():
    """The share of agreeing digits at the same place in consecutive steps is that of chance."""
    texts = [draw(Copy(), seed=0, stream="train", step=step, size=1, length=50)[0].prompt[:-1] for step in range(201)]
    agreeing = sum(x == y for a, b in itertools.pairwise(texts) for x, y in zip(a, b, strict=True))
    assert agreeing == pytest.approx(1000, abs=5 * 30)


@pytest.mark.parametrize("name", sorted(PINNED))
def test_draws_never_change(name):
    """Run folders promise that a batch can be made again: what is pinned changes only with a note to users."""
    task = find_task(name)()
    examples = draw(task, seed=7, stream="train", step=123, size=4, max_length=task.training_length)
    assert hashlib.sha256(repr([tuple(each) for each in examples]).encode()).hexdigest()[:12] == PINNED[name]


def test_a_smaller_batch_begins_a_larger_one():
    arguments = {"seed": 0, "stream": "test", "step": 4, "length": 9}
    assert draw(Addition(), size=50, **arguments)[:10] == draw(Addition(), size=10, **arguments)


def test_fixed_length_and_split_follow_the_stream():
    for stream in ("validation", "test"):
        examples = draw(Addition(), seed=0, stream=stream, step=0, size=20, length=6)
        assert all(len(example.prompt) == 14 for example in examples)
    scan = ScanCot()
    test_set = set(scan.subsets()["test set"])
    assert set(draw(scan, seed=0, stream="test", step=0, size=20, length=70)) <= test_set
    for other in ({"stream": "train"}, {"stream": "validation"}, {"stream": "test", "split": "train"}):
        assert not test_set & set(draw(scan, seed=0, step=0, size=20, length=70, **other))


@pytest.mark.parametrize("lengths", [{}, {"max_length": 3, "length": 3}, {"length": 0}, {"max_length": 0}])
def test_lengths_that_make_no_sense(lengths):
    with pytest.raises(UserError, match="length"):
        draw(Copy(), seed=0, stream="train", step=0, size=1, **lengths)


def test_empty_batches_are_refused():
    with pytest.raises(UserError, match="got none"):
        collate(vocabulary(Copy()), [])
    with pytest.raises(UserError, match="at least 1; got 3 and 0"):
        draw(Copy(), seed=0, stream="train", step=0, size=0, length=3)


@tasks
def test_vocabulary_there_and_back(task):
    words = vocabulary(task)
    text = task.separator.join(task.training_example(random.Random(0), task.training_length))
    assert words.decode(words.encode(text)) == text
    assert words.decode(torch.from_numpy(words.encode(text))) == text
    assert words.decode([0, 63, -1]) == task.separator.join([task.alphabet[0], "<63>", "<-1>"])


@pytest.mark.parametrize(("task", "text", "message"), [
    (Copy(), "12a=", r"'a' at position 3 of '12a=' is not a symbol of copy \(its symbols: 0 1 2 3 4 5 6 7 8 9 = \.\)"),
    (Copy(), "1→=", "'→' at position 2"),
    (Copy(), "1\U0001f600=", "at position 2"),
    (Copy(), "\udcff=", "at position 1"),
    (Copy(), "\x00", "at position 1"),
    (OddsFirst(symbols=2), "012=", "'2' at position 3"),
    (ScanCot(), "walk fast =", "'fast' at position 2"),
    (Copy(), "", "the prompt is empty"),
    (Copy(), "  ", "the prompt is empty"),
    (ScanCot(), " ", "the prompt is empty"),
])
def test_strange_prompts(task, text, message):
    with pytest.raises(UserError, match=message):
        Vocabulary(task).encode(text)


def test_a_task_that_writes_outside_its_alphabet_is_found_out():
    with pytest.raises(UserError, match=r"'x' at position 1 of 'x=1\.'"):
        collate(vocabulary(Copy()), [Example("1=", "1."), Example("x=", "1.")])


@dataclass(frozen=True)
class Alphabet(Task):
    """A task that has only an alphabet."""

    name = "letters"
    letters: tuple[str, ...] = ()

    @property
    def alphabet(self) -> tuple[str, ...]:
        return self.letters


@pytest.mark.parametrize(("letters", "message"), [
    (tuple(map(chr, range(100, 165))), "has 65 tokens"),
    ((), "has 0 tokens"),
    (("a", "b", "a"), "more than once: a"),
    (("a", "bc"), "holds 'bc'"),
    (("a", ""), "holds ''"),
    (("a", " "), "holds ' '"),
])
def test_alphabets_that_do_not_fit(letters, message):
    with pytest.raises(UserError, match=message):
        Vocabulary(Alphabet(letters))


def test_an_alphabet_of_64_fits():
    assert len(Vocabulary(Alphabet(tuple(map(chr, range(200, 264))))).tokens) == 64


def make(step: int) -> Batch:
    return training_batch(Copy(), step=step)


def test_prefetcher_changes_nothing():
    with Prefetcher(make, range(5, 25), depth=3) as ahead:
        batches = list(ahead)
    assert len(batches) == 20
    assert all(equal(got, make(step)) for step, got in zip(range(5, 25), batches, strict=True))
    assert next(ahead, None) is None


def test_prefetcher_hands_on_what_went_wrong_in_its_place():
    def breaking(step: int) -> Batch:
        if step == 2:
            raise UserError("step 2 is broken")
        return make(step)

    ahead = Prefetcher(breaking, range(10))
    assert equal(next(ahead), make(0))
    assert equal(next(ahead), make(1))
    with pytest.raises(UserError, match="step 2 is broken"):
        next(ahead)
    assert next(ahead, None) is None
    assert not ahead._thread.is_alive()


def test_prefetcher_stays_within_its_depth_and_closes_early():
    made, reached, beyond = [], threading.Event(), threading.Event()

    def counting(step: int) -> Batch:
        made.append(step)
        if len(made) == 4:
            reached.set()
        if len(made) > 4:
            beyond.set()
        return make(step)

    with Prefetcher(counting, itertools.count(), depth=3) as ahead:
        next(ahead)
        assert reached.wait(10)
        assert not beyond.wait(0.2)
    assert not ahead._thread.is_alive()
    assert len(made) == 4
    ahead.close()
    assert next(ahead, None) is None


def test_prefetcher_closes_while_it_waits_for_room():
    ahead = Prefetcher(make, range(100), depth=1)
    ahead.close()
    assert not ahead._thread.is_alive()
    with pytest.raises(UserError, match="depth must be at least 1"):
        Prefetcher(make, range(3), depth=0)
