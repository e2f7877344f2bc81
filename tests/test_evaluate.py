"""Exact match is what generation would give, counted once each, however the work is cut up."""

import dataclasses
import math

import pytest
import torch

import prism.evaluate
from prism.data import draw, vocabulary
from prism.errors import RunError
from prism.evaluate import TEST_SEED, Score, read_logits, score, score_subsets, sweep, wilson
from prism.generate import generate
from prism.results import top_three
from prism.tasks import Example, all_tasks
from prism.tasks.scan_cot import ScanCot
from prism.trained import build
from tests.small import ENCODINGS, MODEL, memorise, short_examples, small_config, stirred
from tests.tolerances import assert_close

TASKS = sorted(all_tasks())


@pytest.fixture(scope="module")
def memorised():
    """Per task and encoding: examples, a few of them learned by heart; so the score lies between 0 and 1."""
    made = {}

    def of(name: str, encoding: str):
        if (name, encoding) not in made:
            options = {"prism": {"copy_every": 2, "gates": "local"}, "sinusoidal": {"shift": 0}}.get(encoding)
            config = small_config(name, encoding, options)
            examples = short_examples(config.task, 12)
            made[name, encoding] = config.task, memorise(build(config), config.task, examples[:3]), examples
        return made[name, encoding]

    return of


def greedily(model, task, examples) -> list[str]:
    """What generation makes of each prompt, with room for as many tokens as the right answer has."""
    words = vocabulary(task)
    return [
        generate(model, words, [example.prompt], len(words.split(example.completion)))[0] for example in examples
    ]


# --- Teacher forcing and generation ---


@pytest.mark.parametrize(("name", "encoding"), [
    *((name, encoding) for name in TASKS for encoding in ("sinusoidal", "nope")), ("copy", "prism"), ("stack", "prism")
])
def test_exact_match_is_what_greedy_generation_reproduces(name, encoding, memorised):
    task, model, examples = memorised(name, encoding)
    made = greedily(model, task, examples)
    found = score(model, task, examples)
    assert found.correct == sum(text == example.completion for text, example in zip(made, examples, strict=True))
    assert 0 < found.correct < found.examples == 12


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", TASKS)
def test_an_untrained_model_is_scored_as_it_generates(name, encoding, monkeypatch):
    """Examples by turns as the task has them, and as the model itself would complete them."""
    task = small_config(name).task
    model = stirred(small_config(name, encoding, model=dataclasses.replace(MODEL, vocabulary=len(task.alphabet))))
    examples = short_examples(task, 6)
    for place in (0, 2, 4):
        prompt = examples[place].prompt
        examples[place] = Example(prompt, generate(model, vocabulary(task), [prompt], 5)[0])
    monkeypatch.setattr(type(task), "parts", lambda self, completion: {})  # a model's own text has none
    made = greedily(model, task, examples)
    right = [text == one.completion for text, one in zip(made, examples, strict=True)]
    assert right[::2] == [True] * 3
    assert score(model, task, examples).correct == sum(right) < 6


def test_one_wrong_token_makes_an_example_wrong_and_padding_makes_none(memorised):
    task, model, examples = memorised("copy", "nope")
    known = [example for example in examples[:3] if score(model, task, [example]).correct]
    assert known
    longer = [*known, *short_examples(task, 4, seed=5)]
    assert score(model, task, longer).correct >= len(known)
    spoiled = [Example(one.prompt, "7" + one.completion[1:]) for one in known if one.completion[0] != "7"]
    assert score(model, task, spoiled).correct == 0


def test_parts_are_scored_apart(memorised):
    """Addition: against text cut at the arrow, token by token, without masks or slices."""
    task, model, examples = memorised("addition", "nope")
    words, thought, total = vocabulary(task), 0, 0
    for prompt, completion in examples:
        ids = torch.from_numpy(words.encode(prompt + completion))[None]
        guesses = "".join(words.decode([token]) for token in model(ids)[0].argmax(-1).tolist()[len(prompt) - 1 : -1])
        arrow = completion.index("→") + 1
        thought += guesses[:arrow] == completion[:arrow]
        total += guesses[arrow:] == completion[arrow:]
    found = score(model, task, examples)
    assert found.parts == {"chain of thought": thought, "final sum": total}
    assert 0 < thought < 12
    assert found.correct <= min(thought, total)
    assert found.to_json()["parts"]["final sum"] == total / 12


def test_the_loss_is_per_completion_token(memorised):
    task, model, examples = memorised("reverse", "sinusoidal")
    words, surprise, count = vocabulary(task), 0.0, 0
    for prompt, completion in examples:
        ids = torch.from_numpy(words.encode(prompt + completion))
        odds = torch.log_softmax(model(ids[None])[0], -1)
        for place in range(len(prompt), len(ids)):
            surprise -= odds[place - 1, ids[place]].item()
            count += 1
    assert score(model, task, examples).loss == pytest.approx(surprise / count, rel=1e-5)


def test_scoring_is_without_the_chances_of_training_and_leaves_the_model_as_it_was():
    config = small_config("copy", "sinusoidal", {"shift": 50})
    model, examples, found = stirred(config), short_examples(config.task, 4), []
    for training in (True, False):
        model.train(training)
        found.append(score(model, config.task, examples))
        assert model.training is training
    assert found[0] == found[1]


def test_nothing_to_score_is_an_error(memorised):
    task, model, _ = memorised("copy", "nope")
    with pytest.raises(RunError, match="no examples"):
        score(model, task, [])


# --- Sweeps ---


def test_a_sweep_tests_each_length_on_its_own_examples(memorised):
    task, model, _ = memorised("copy", "nope")
    heard = []
    found = sweep(model, task, (3, 1), 9, report=lambda name, one: heard.append((name, one)))
    assert list(found) == ["3", "1"]
    assert heard == list(found.items())
    drawn = draw(task, seed=TEST_SEED, stream="test", step=0, size=9, length=3)
    assert {len(example.prompt) for example in drawn} == {4}
    assert found["3"] == score(model, task, drawn)
    validation = draw(task, seed=TEST_SEED, stream="validation", step=0, size=9, length=3)
    assert validation != drawn
    assert sweep(model, task, (3,), 9, "validation")["3"] == score(model, task, validation)


def test_scan_is_scored_on_its_subsets(monkeypatch):
    config = small_config("scan_cot", "nope")
    whole = ScanCot().subsets()
    assert {name: len(examples) for name, examples in whole.items()}["test set"] == 3_920
    few = {name: examples[:3] for name, examples in whole.items()}
    monkeypatch.setattr(ScanCot, "subsets", lambda self: few)
    found = score_subsets(build(config), config.task)
    assert {name: one.examples for name, one in found.items()} == {"test set": 3, "longer than training": 3}


# --- However the work is cut ---


@pytest.mark.parametrize(("name", "encoding"), [("copy", "prism"), ("addition", "sinusoidal"), ("addition", "nope")])
def test_pieces_of_the_batch_add_up(name, encoding, memorised, monkeypatch):
    task, model, examples = memorised(name, encoding)
    whole, widths = score(model, task, examples), set()
    real = prism.evaluate.read_logits
    monkeypatch.setattr(prism.evaluate, "read_logits", lambda m, ids: (widths.add(len(ids)), real(m, ids))[1])
    for numbers in (1, *(2**power for power in range(11, 18)), 10**9):
        monkeypatch.setattr(prism.evaluate, "NUMBERS_AT_ONCE", numbers)
        pieces = score(model, task, examples)
        assert (pieces.correct, pieces.parts) == (whole.correct, whole.parts)
        assert pieces.loss == pytest.approx(whole.loss, rel=1e-5)
    assert {1, 12} < widths


@pytest.mark.parametrize("chunk", [1, 3, 7, 40])
@pytest.mark.parametrize(("encoding", "options"), [
    ("prism", {"copy_every": 2, "depths": (0, 1)}),
    ("prism", {"gates": "local", "copy_every": 2, "copy_key": "trained", "absolute": True}),
    ("sinusoidal", {}),
    ("nope", {}),
])
def test_a_long_sequence_read_in_chunks_gives_the_same_logits(encoding, options, chunk, monkeypatch):
    config = small_config("copy", encoding, options)
    model, tokens = stirred(config).double(), torch.randint(0, 12, (3, 23))
    with torch.no_grad():
        whole = read_logits(model, tokens)
        monkeypatch.setattr(prism.evaluate, "LONG", 10)
        monkeypatch.setattr(prism.evaluate, "CHUNK", chunk)
        times = []
        real = model.forward
        monkeypatch.setattr(model, "forward", lambda ids, *rest: (times.append(ids.shape[1]), real(ids, *rest))[1])
        parts = read_logits(model, tokens)
    assert times == [min(chunk, 23 - first) for first in range(0, 23, chunk)]
    assert_close(parts, whole, dtype=torch.float64, tolerance=1e-10)


@pytest.mark.parametrize("numbers", [1, 5_000, 50_000, 10**6, 10**9])
def test_no_pass_reads_more_tokens_than_there_is_memory_for(numbers, monkeypatch):
    """And none reads fewer sequences than it could: each pass waits for the one before."""
    task, config = all_tasks()["copy"](), small_config("copy", "prism")
    model, time = build(config), 42  # of copying 20
    monkeypatch.setattr(prism.evaluate, "NUMBERS_AT_ONCE", numbers)
    monkeypatch.setattr(prism.evaluate, "LONG", 50)
    fitting, passes, real = prism.evaluate._tokens_that_fit(model, time), [], model.forward
    monkeypatch.setattr(model, "forward", lambda ids, *rest: (passes.append(ids.shape), real(ids, *rest))[1])
    examples = draw(task, seed=0, stream="test", step=0, size=30, length=20)
    score(model, task, examples)
    most = prism.evaluate._tokens_that_fit(model, time - 1)  # the last token is only ever an answer
    assert all(rows * tokens <= most for rows, tokens in passes)
    if fitting >= time:
        assert passes[0] == (min(30, fitting // time), time - 1)
    else:
        assert passes[0] == (max(1, fitting // 16), max(1, most // max(1, fitting // 16)))
    assert sum(rows * tokens for rows, tokens in passes) == 30 * (time - 1)


@pytest.mark.parametrize("sizes", [[3, 1, 1, 1, 9, 2], [1] * 17, [17], [16, 1]], ids=str)
def test_a_cache_grows_without_losing_anything(sizes):
    model = build(small_config("copy", "nope"))
    given = torch.randn(2, 2, 17, 3)
    cache = model.new_cache(17)
    for chunk in given.split(sizes, dim=2):
        keys, values = cache.extend(1, chunk, chunk[..., :2] + 1)
        cache.stream.seen += chunk.shape[2]
        seen = cache.stream.seen
        assert torch.equal(keys, given[:, :, :seen])
        assert torch.equal(values, given[:, :, :seen, :2] + 1)
    assert cache.keys[1].shape[2] == 17  # never more than there will be


def test_the_pieces_of_long_sequences_are_scored_alike(memorised, monkeypatch):
    task, model, examples = memorised("stack", "prism")
    whole = score(model, task, examples)
    monkeypatch.setattr(prism.evaluate, "LONG", 5)
    monkeypatch.setattr(prism.evaluate, "CHUNK", 4)
    monkeypatch.setattr(prism.evaluate, "NUMBERS_AT_ONCE", 20_000)
    assert score(model, task, examples).correct == whole.correct
    assert score(model, task, examples).parts == whole.parts


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")])  # fmt: skip
def test_memory_that_runs_out_is_said_with_the_length(memorised, monkeypatch, error):
    task, model, examples = memorised("copy", "nope")

    def hungry(*arguments):
        raise error

    monkeypatch.setattr(prism.evaluate, "read_logits", hungry)
    with pytest.raises(RunError, match=r"out of memory on sequences of 8 tokens.*--lengths"):
        score(model, task, examples)


# --- Statistics ---


@pytest.mark.parametrize(("correct", "examples"), [(0, 1), (1, 1), (0, 99), (99, 99), (1, 7), (37, 100), (999, 1000)])
def test_wilsons_interval_solves_its_equation(correct, examples):
    """Bounds p where (rate - p)^2 = z^2 p (1 - p) / n, by bisection; z from the normal distribution itself."""

    def bisected(wrong, right, inside):
        for _ in range(200):
            middle = (wrong + right) / 2
            wrong, right = (wrong, middle) if inside(middle) else (middle, right)
        return right

    z = bisected(10.0, 0.0, lambda z: math.erf(z / math.sqrt(2)) < 0.95)
    rate = correct / examples
    inside = lambda p: (rate - p) ** 2 <= z * z * p * (1 - p) / examples  # noqa: E731
    low, high = bisected(0.0, rate, inside), bisected(1.0, rate, inside)
    assert wilson(correct, examples) == pytest.approx((low, high), abs=1e-9)
    assert 0 <= wilson(correct, examples)[0] <= rate <= wilson(correct, examples)[1] <= 1
    assert Score(examples, correct, 0.0).interval() == wilson(correct, examples)


def test_the_mean_of_the_three_best_is_taken_length_by_length():
    def record(short, long):
        return {"test": {"10": {"exact": short}, "20": {"exact": long}}}

    history = [record(1.0, 0.0), record(0.9, 0.1), record(0.2, 0.7), record(0.8, 0.3), record(0.1, 0.5)]
    means = {length: one["exact"] for length, one in top_three(history).items()}
    assert means == {"10": pytest.approx(0.9), "20": pytest.approx(0.5)}
    assert top_three(history[:2])["20"]["exact"] == pytest.approx(0.05)
    assert top_three([]) == {}
