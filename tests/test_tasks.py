"""What every task promises, checked on whatever is discovered; then each of the paper's tasks against an oracle."""

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.errors import UserError
from prism.tasks import Task, all_tasks, find_task
from prism.tasks.addition import Addition
from prism.tasks.dyn_str_cpy import DynStrCpy
from prism.tasks.multiplication import Multiplication
from prism.tasks.odds_first import OddsFirst
from prism.tasks.stack import Stack

THE_PAPERS = {"addition", "copy", "reverse", "odds_first", "stack", "scan_cot", "dyn_str_cpy", "multiplication"}

TASK_FACTS = {
    "addition": "829+03=8008,2305,9009→859.",
    "copy": "8349216=8349216.",
    "reverse": "8349216=6129438.",
    "odds_first": "012345=135024.",
    "stack": "0110422=11020000.",
    "dyn_str_cpy": "5839472,3=39472.",
    "multiplication": "675x1259=675x[1*(1→1)(2→0)(5→0)(9→0)+2*(2→1)(5→0)(9→0)+5*(5→1)(9→0)+9*(9→1)].",
    "scan_cot": "walk around left thrice and look opposite right = walk around left + walk around left + walk around "
                "left and look opposite right → walk around left : I_TURN_LEFT I_WALK I_TURN_LEFT I_WALK I_TURN_LEFT "
                "I_WALK I_TURN_LEFT I_WALK walk around left : I_TURN_LEFT I_WALK I_TURN_LEFT I_WALK I_TURN_LEFT "
                "I_WALK I_TURN_LEFT I_WALK walk around left : I_TURN_LEFT I_WALK I_TURN_LEFT I_WALK I_TURN_LEFT "
                "I_WALK I_TURN_LEFT I_WALK look opposite right : I_TURN_RIGHT I_TURN_RIGHT I_LOOK .",
}

TRAINING_LENGTHS = {"addition": 10, "copy": 10, "reverse": 40, "odds_first": 40, "stack": 40, "dyn_str_cpy": 10,
                    "multiplication": 9, "scan_cot": 80}

# Length of an example, read off its prompt without the task's help.
MEASURES = {
    "addition": lambda prompt: max(map(len, prompt[:-1].split("+"))),
    "copy": lambda prompt: len(prompt) - 1,
    "reverse": lambda prompt: len(prompt) - 1,
    "odds_first": lambda prompt: len(prompt) - 1,
    "stack": lambda prompt: len(prompt) - 1,
    "dyn_str_cpy": lambda prompt: prompt.index(","),
    "multiplication": lambda prompt: max(map(len, prompt[:-1].split("x"))),
}

MALFORMED = [
    ("copy", "=", "12", "12==", "1 2=", "a=", "12=1", "१२=", "12=\n"),
    ("reverse", "=", "12", "x="),
    ("odds_first", "=", "12", "x="),
    ("addition", "1+=", "+1=", "1+2", "10+1=", "1+00=", "1+2+3=", "1-2="),
    ("multiplication", "1x=", "x1=", "1x2", "01x1=", "1x00=", "1x2x3=", "1*2="),
    ("stack", "=", "2=", "01=", "0120=", "015=", "01"),
    ("dyn_str_cpy", "12,3=", "11,1=", ",1=", "12,=", "12,12=", "121="),
    ("scan_cot", "=", "walk", "turn =", "walk around =", "twice walk =", "walk and =", "walk and run after look =",
     "walk and run and look =", "fly ="),
]

tasks = pytest.mark.parametrize("task", [kind() for kind in all_tasks().values()], ids=list(all_tasks()))


def lengths_of(task: Task) -> tuple[int, ...]:
    return task.sweep(task.training_length) if task.name == "scan_cot" else (1, 2, 3, 7, 10, 25)


def uniform(counts: Counter, categories: int) -> bool:
    """Whether every category came up, none more than five standard deviations from its share."""
    total = counts.total()
    share = total / categories
    deviation = (share * (1 - 1 / categories)) ** 0.5
    return len(counts) == categories and all(abs(count - share) < 5 * deviation for count in counts.values())


def test_the_papers_tasks_are_there():
    assert set(all_tasks()) >= THE_PAPERS
    assert all(kind.__module__ == f"prism.tasks.{name}" for name, kind in all_tasks().items())


@pytest.mark.parametrize("name", sorted(TASK_FACTS))
def test_example_of_the_paper(name):
    task = find_task(name)()
    whole = TASK_FACTS[name]
    cut = whole.index("=") + 1
    assert task.answer(whole[:cut]) == whole[cut:].removeprefix(task.separator)
    assert task.training_length == TRAINING_LENGTHS[name]
    assert task.has_curriculum == (name != "scan_cot")


@tasks
def test_describes_itself(task):
    assert task.summary
    assert task.length_means
    assert task.training_length >= 1
    assert hash(task) == hash(type(task)())
    sweep = task.sweep(task.training_length)
    assert list(sweep) == sorted(set(sweep))
    assert sweep[0] >= 1


@tasks
def test_alphabet_fits_and_covers(task):
    rng = random.Random(3)
    assert len(set(task.alphabet)) == len(task.alphabet) <= 64
    drawn = [task.training_example(rng, task.training_length) for _ in range(1000)]
    texts = [task.separator.join(example) for example in drawn]
    used = {token for text in texts for token in (text.split(task.separator) if task.separator else text)}
    assert used == set(task.alphabet)


@tasks
def test_examples_are_right_and_bounded(task):
    rng = random.Random(1)
    for length in lengths_of(task):
        for _ in range(50):
            prompt, completion = task.example(rng, length)
            assert prompt.endswith("=")
            assert completion.endswith(".")
            assert prompt.count("=") == completion.count(".") == 1
            assert task.answer(prompt) == completion
            if task.name in MEASURES:
                assert MEASURES[task.name](prompt) == length


@tasks
def test_training_examples_are_right_and_bounded(task):
    rng = random.Random(2)
    measured = Counter()
    for _ in range(2000):
        prompt, completion = task.training_example(rng, task.training_length)
        assert task.answer(prompt) == completion
        if task.name in MEASURES:
            measured[MEASURES[task.name](prompt)] += 1
    if task.name in MEASURES:
        assert set(measured) == set(range(1, task.training_length + 1))
    if task.name in {"copy", "reverse", "odds_first", "stack", "dyn_str_cpy"}:
        assert uniform(measured, task.training_length)


@tasks
def test_deterministic(task):
    length = lengths_of(task)[-1]
    twice = [[task.example(rng, length) for _ in range(20)] for rng in (random.Random(5), random.Random(5))]
    assert twice[0] == twice[1]
    other = random.Random(6)
    assert twice[0] != [task.example(other, length) for _ in range(20)]


@tasks
def test_parts_lie_inside_the_completion(task):
    completion = task.example(random.Random(4), lengths_of(task)[-1]).completion
    tokens = completion.split(task.separator) if task.separator else completion
    for part in task.parts(completion).values():
        assert 0 <= part.start < part.stop <= len(tokens)


@pytest.mark.parametrize(("name", "prompt"), [(name, prompt) for name, *prompts in MALFORMED for prompt in prompts])
def test_malformed_prompts_are_refused(name, prompt):
    with pytest.raises(UserError, match=re.escape(name)) as caught:
        find_task(name)().answer(prompt)
    assert repr(prompt) in str(caught.value)


@settings(deadline=None)
@given(st.integers(0, 10**30), st.integers(0, 10**30))
def test_addition_is_addition(a, b):
    first, second = str(a)[::-1], str(b)[::-1]
    completion = Addition().answer(f"{first}+{second}=")
    steps, total = completion[:-1].split("→")
    assert total == str(a + b)[::-1]
    steps = steps.split(",")
    assert len(steps) == max(len(first), len(second))
    for place, step in enumerate(steps):
        below = 10 ** (place + 1)
        assert int(step[0]) == a // 10**place % 10
        assert int(step[1]) == b // 10**place % 10
        assert int(step[2]) == (a % below + b % below) // below
        assert int(step[3]) == (a + b) // 10**place % 10


def test_addition_operands():
    rng = random.Random(0)
    pairs = [Addition().training_example(rng, 10).prompt[:-1].split("+") for _ in range(5000)]
    assert uniform(Counter(len(a) for a, _ in pairs), 10)
    assert uniform(Counter(len(b) for _, b in pairs), 10)
    assert uniform(Counter((len(a), len(b)) for a, b in pairs), 100)
    assert all(number == "0" or number[-1] != "0" for pair in pairs for number in pair)
    assert uniform(Counter(a for a, _ in pairs if len(a) == 1), 10)
    assert uniform(Counter(a[-1] for a, _ in pairs if len(a) > 1), 9)
    exact = Addition().example(rng, 7).prompt[:-1].split("+")
    assert [len(number) for number in exact] == [7, 7]


def test_addition_parts():
    completion = "8008,2305,9009→859."
    parts = Addition().parts(completion)
    assert {name: completion[part] for name, part in parts.items()} == {
        "chain of thought": "8008,2305,9009→", "final sum": "859."}


@settings(deadline=None)
@given(st.integers(0, 10**20), st.integers(0, 10**20))
def test_multiplication_adds_up(a, b):
    completion = Multiplication().answer(f"{a}x{b}=")
    head, body = completion.removesuffix("].").split("x[")
    assert int(head) == a
    value = 0
    for summand in body.split("+"):
        digit, terms = summand.split("*")
        marks = re.findall(r"\((\d)→([01])\)", terms)
        assert "".join(f"({symbol}→{mark})" for symbol, mark in marks) == terms
        assert marks[0] == (digit, "1")
        value += int(digit) * int("".join(mark for _, mark in marks))
        assert str(b).endswith("".join(symbol for symbol, _ in marks))
    assert value == b


@pytest.mark.parametrize(("digits", "tokens"), [(9, 284), (15, 695), (20, 1175), (30, 2510)])
def test_multiplication_sequence_lengths(digits, tokens):
    prompt, completion = Multiplication().example(random.Random(0), digits)
    assert len(prompt) == 2 * digits + 2
    assert len(prompt + completion) == tokens


def test_multiplication_operands():
    rng = random.Random(0)
    pairs = [Multiplication().training_example(rng, 9).prompt[:-1].split("x") for _ in range(5000)]
    assert uniform(Counter((len(a), len(b)) for a, b in pairs), 81)
    assert all(number == "0" or number[0] != "0" for pair in pairs for number in pair)


def test_stack_draws():
    rng = random.Random(0)
    assert {Stack().example(rng, 1) for _ in range(50)} == {("0=", "02."), ("1=", "12.")}
    prompts = [Stack().example(rng, 8).prompt for _ in range(4000)]
    assert uniform(Counter(len(re.match("[01]+", prompt)[0]) for prompt in prompts), 7)
    assert uniform(Counter("".join(re.findall("[01]", "".join(prompts)))), 2)
    assert uniform(Counter("".join(re.findall("[234]", "".join(prompts)))), 3)


@settings(deadline=None)
@given(st.text("01", min_size=1, max_size=12), st.text("234", min_size=1, max_size=12))
def test_stack_by_rewriting(bits, actions):
    """The stack as a string that is rewritten: the oracle has no list and no loop over actions by kind."""
    length = len(bits + actions)
    state = bits
    for action in actions:
        state = {"2": state[:-1], "3": state + "0", "4": state + "1"}[action]
    expected = state[::-1] + "2" + "0" * (length - len(state)) + "."
    assert Stack().answer(f"{bits}{actions}=") == expected
    assert len(expected) == length + 2


def test_dyn_str_cpy_draws():
    rng = random.Random(0)
    places, digits = Counter(), Counter()
    for _ in range(4000):
        prompt, completion = DynStrCpy().example(rng, 8)
        text, digit = prompt[:-1].split(",")
        assert len(text) == 8
        assert text.count(digit) == 1
        assert completion == text.partition(digit)[1] + text.partition(digit)[2] + "."
        places[text.index(digit)] += 1
        digits[digit] += 1
    assert uniform(places, 8)
    assert uniform(digits, 10)


@pytest.mark.parametrize("name", ["copy", "reverse", "odds_first"])
def test_symbols_are_uniform(name):
    rng = random.Random(0)
    assert uniform(Counter("".join(find_task(name)().example(rng, 20).prompt[:-1] for _ in range(500))), 10)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=30))
def test_binary_odds_first(bits):
    expected = [bit for place, bit in enumerate(bits) if place % 2] + [
        bit for place, bit in enumerate(bits) if not place % 2]
    answer = OddsFirst(symbols=2).answer("".join(map(str, bits)) + "=")
    assert answer == "".join(map(str, expected)) + "."


def test_odds_first_alphabet_is_an_option():
    binary = OddsFirst(symbols=2)
    assert binary.alphabet == ("0", "1", "=", ".")
    assert set(binary.example(random.Random(0), 100).prompt) == set("01=")
    with pytest.raises(UserError, match="0 to 1"):
        binary.answer("012=")
    with pytest.raises(UserError, match="at least 2"):
        OddsFirst(symbols=1)
    with pytest.raises(UserError, match="at most 10"):
        OddsFirst(symbols=11)
