"""What tasks tell encodings, against the texts taken apart by hand; and the encodings that ask: abacus, coupling, BiPE.

Oracles are plain Python over characters, built from an example's operands and not by scanning its text.
"""

import cmath
import itertools
import math
import random
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from prism.config import ModelConfig, RunConfig, preset
from prism.data import collate, vocabulary
from prism.encodings import all_encodings, find_encoding
from prism.encodings.abacus import Abacus, AbacusConfig
from prism.encodings.bipe import Bipe, BipeConfig
from prism.encodings.coupling import PositionCoupling, PositionCouplingConfig
from prism.encodings.encoding import NO_TOKEN, Encoding, Stream
from prism.errors import TooLong, UserError
from prism.hints import hints_of, tasks_with
from prism.tasks import Task, all_tasks, find_task
from prism.tasks.odds_first import OddsFirst
from prism.trained import build
from prism.transformer import Transformer
from tests.tolerances import assert_close

TOLD = [(name, kind) for name, task in all_tasks().items() for kind in task.hint_kinds()]
each_hint = pytest.mark.parametrize(("name", "kind"), TOLD)


def words_of(task: Task, text: str) -> list[str]:
    return text.split() if task.separator else list(text)


def hint(task: Task, kind: str, text: str) -> list[int]:
    ids = torch.tensor([vocabulary(task).encode(text).tolist()])
    return hints_of(task, kind)(ids)[0].tolist()


def examples(task: Task, count: int = 30) -> list[str]:
    rng = random.Random(1)
    longest = 40 if not task.has_curriculum else 13
    return [task.separator.join(task.training_example(rng, longest, "train")) for _ in range(count)]


# --- Coupling: numbers from what a text was made of ---


def coupled_addition(a: str, b: str) -> list[int]:
    columns, width = [], max(len(a), len(b))
    for column in range(1, width + 1):
        columns += [column] * 5  # a, b, carry, sum, and the comma
    total = str(int(a[::-1]) + int(b[::-1]))
    up_to = lambda number: list(range(1, len(number) + 1))  # noqa: E731
    return [*up_to(a), 0, *up_to(b), 0, *columns[:-1], 0, *up_to(total), -1]


def coupled_multiplication(a: str, b: str) -> list[int]:
    first, second = range(1, len(a) + 1), range(1, len(b) + 1)
    numbers = [*first, 0, *second, 0, *first, 0, 0]
    for summand in second:
        numbers += [summand, summand]  # the digit and `*`
        for digit in range(summand, len(b) + 1):
            numbers += [digit] * 5  # bracket, digit, arrow, flag, bracket
        numbers.append(summand)  # `+` announces the summand after
    numbers[-1] = len(b)  # `]` ends the last
    return [*numbers, -1]


@pytest.mark.parametrize("name", ["copy", "reverse", "odds_first"])
def test_a_symbol_and_its_copy_share_a_number(name):
    task = find_task(name)()
    for length in (1, 2, 3, 8, 9, 23):
        prompt = "".join(random.Random(length).choices("0123456789", k=length))
        places = list(range(1, length + 1))
        copied = {"copy": places, "reverse": places[::-1], "odds_first": places[1::2] + places[0::2]}[name]
        announced = {"copy": 0, "reverse": length + 1, "odds_first": 0}[name]
        assert hint(task, "coupling", f"{prompt}={task.answer(prompt + '=')}") == [*places, announced, *copied, -1]


def test_all_that_stands_for_a_column_shares_a_number():
    task = find_task("addition")()
    for a, b in [("0", "0"), ("9", "1"), ("829", "03"), ("03", "829"), ("99", "1"), ("1" * 12, "2"), ("9" * 7,) * 2]:
        assert hint(task, "coupling", f"{a}+{b}={task.answer(f'{a}+{b}=')}") == coupled_addition(a, b), (a, b)


def test_a_digit_of_the_multiplier_and_all_that_is_written_of_it_share_a_number():
    task = find_task("multiplication")()
    for a, b in [("7", "4"), ("675", "1259"), ("12", "34567"), ("123456", "7")]:
        assert hint(task, "coupling", f"{a}x{b}={task.answer(f'{a}x{b}=')}") == coupled_multiplication(a, b), (a, b)


@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_plain_numbering_is_the_authors(length):
    """Cho et al.'s code, data/copy.py: a start plus these, whether the copy is turned around or not."""
    up = list(range(length))
    assert hint(find_task("copy")(), "coupling", "7" * length + "=" + "7" * length) == [
        *(1 + step for step in up), 0, *(1 + step for step in up)]
    assert hint(find_task("reverse")(), "coupling", "7" * length + "=" + "7" * length) == [
        1 + number for number in [*up, length, *up[::-1]]]


# --- Digits and segments, off the text ---


@pytest.mark.parametrize("name", [name for name, kind in TOLD if kind == "digits"])
def test_digits_are_counted_within_their_runs(name):
    task = find_task(name)()
    for text in examples(task):
        expected = [0] * len(text)
        for run in re.finditer("[0-9]+", text):
            expected[run.start() : run.end()] = range(1, len(run[0]) + 1)
        assert hint(task, "digits", text) == expected


@pytest.mark.parametrize("name", all_tasks())
def test_segments_end_with_their_marks(name):
    task = find_task(name)()
    marks = {"scan_cot": {*"=+→:.", "and", "after"}, "multiplication": set("x=[]*()→+.")}.get(name, set("+=,→."))
    for text in examples(task):
        words = words_of(task, text)
        expected = [sum(word in marks for word in words[:place]) for place in range(len(words))]
        assert hint(task, "segments", text) == expected


def test_a_smaller_alphabet_has_fewer_digits():
    assert hint(OddsFirst(symbols=2), "digits", "0110=") == [1, 2, 3, 4, 0]


# --- What holds for every hint ---


def noise(task: Task, seed: int = 0) -> Tensor:
    """Any ids in any order, even such as the task has no token for."""
    return torch.randint(0, len(task.alphabet) + 3, (6, 40), generator=torch.Generator().manual_seed(seed))


@each_hint
def test_the_hint_of_a_prefix_is_a_prefix_of_the_hint(name, kind):
    task = find_task(name)()
    tell = hints_of(task, kind)
    texts = [vocabulary(task).encode(text).tolist() for text in examples(task, 5)]
    for tokens in [noise(task), *(torch.tensor([ids]) for ids in texts)]:
        whole = tell(tokens)
        assert whole.shape == tokens.shape
        assert whole.dtype == torch.int64
        assert whole.min() >= -1
        for time in range(1, tokens.shape[1]):
            assert torch.equal(tell(tokens[:, :time]), whole[:, :time])
        assert torch.equal(tell(tokens[:1]), whole[:1])  # and other sequences don't matter


@each_hint
def test_a_start_token_moves_nothing(name, kind):
    task = find_task(name)()
    tell, tokens = hints_of(task, kind), noise(task)
    opened = tell(torch.nn.functional.pad(tokens, (1, 0), value=NO_TOKEN))
    assert (opened[:, 0] == {"digits": 0, "segments": 0, "coupling": -1}[kind]).all()
    assert torch.equal(opened[:, 1:], tell(tokens) + (kind == "segments"))  # a segment of its own


@each_hint
def test_what_pads_a_batch_is_coupled_to_nothing(name, kind):
    task = find_task(name)()
    rng = random.Random(2)
    drawn = [task.training_example(rng, 40 if not task.has_curriculum else 9, "train") for _ in range(8)]
    made = collate(vocabulary(task), drawn)
    told = hints_of(task, kind)(made.tokens)
    for row, example in zip(told, drawn, strict=True):
        expected = hint(task, kind, task.separator.join(example))
        time = min(len(expected), len(row))
        assert row[:time].tolist() == expected[:time]
        if kind == "coupling":
            assert (row[time:] == -1).all()


def test_which_tasks_tell_what():
    assert tasks_with("segments") == sorted(all_tasks())
    assert tasks_with("digits") == ["addition", "copy", "dyn_str_cpy", "multiplication", "odds_first", "reverse"]
    assert tasks_with("coupling") == ["addition", "copy", "multiplication", "odds_first", "reverse"]


@pytest.mark.parametrize(("encoding", "task"), [("abacus", "stack"), ("position_coupling", "dyn_str_cpy"),
                                                ("position_coupling", "scan_cot")])
def test_a_run_without_the_hint_it_needs_is_refused(encoding, task):
    with pytest.raises(UserError) as refusal:
        preset("quick", find_task(task)(), encoding)
    kind = find_encoding(encoding).hint
    assert str(refusal.value) == (f"{encoding} needs a task that tells its {kind}, and {task} does not; "
                                  f"tasks that do: {', '.join(tasks_with(kind))}")


def test_a_model_is_built_with_its_tasks_hints():
    for name, kind in all_encodings().items():
        told = build(preset("quick", find_task("addition")(), name)).encoding.hints
        assert (told is None) == (kind.hint is None)
        assert told is None or (told.task.name, told.kind) == ("addition", kind.hint)


def test_tasks_are_known_without_torch():
    found = "import sys, prism.config, prism.tasks; prism.tasks.all_tasks(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", found], check=True)


# --- The encodings ---


def opened(encoding: Encoding, task: Task, texts: list[str], seen: int = 0) -> Stream:
    """A stream over texts of one length, told by the task."""
    encoding.hints = hints_of(task, encoding.hint)
    stream = encoding.start(len(texts[0]))
    stream.tokens = torch.stack([torch.from_numpy(vocabulary(task).encode(text)) for text in texts])
    stream.seen, stream.time = seen, stream.tokens.shape[1] - seen
    return stream


def rows_read(encoding: Encoding, stream: Stream) -> list[list[int]]:
    """Which row of its table an encoding added to each token."""
    zeros = torch.zeros(stream.tokens.shape[0], stream.time, encoding.width, dtype=torch.float64)
    added = encoding.double().embed(zeros, stream)
    match = (added[:, :, None] == encoding.table.weight).all(-1)
    assert (match.sum(-1) == 1).all()
    return match.long().argmax(-1).tolist()


def told_model(encoding: str, task: str, config: object = None, start_token: bool = False) -> Transformer:
    """A small model of a task in float64, its parameters far from their start."""
    size = ModelConfig(width=12, layers=2, heads=3, head_width=4, vocabulary=33, start_token=start_token)
    positions = config or find_encoding(encoding).Config()
    model = build(RunConfig(task=find_task(task)(), encoding=encoding, positions=positions, model=size)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


KINDS = [("abacus", None), ("position_coupling", None), ("bipe", None), ("bipe", BipeConfig(between="rope")),
         ("bipe", BipeConfig(within="sinusoidal"))]


@pytest.mark.parametrize("start_token", [False, True], ids=["", "start token"])
@pytest.mark.parametrize(("encoding", "config"), KINDS, ids=str)
def test_chunks_of_a_told_text_give_what_the_whole_gives(encoding, config, start_token):
    model = told_model(encoding, "addition", config, start_token)
    task = find_task("addition")()
    tokens = torch.from_numpy(vocabulary(task).encode("829+03=8008,2305,9009→859."))[None]
    whole = model(tokens)
    for sizes in ([1] * 26, [7, 1, 12, 6], [25, 1]):
        cache = model.new_cache(26)
        assert_close(torch.cat([model(chunk, cache) for chunk in tokens.split(sizes, dim=1)], 1), whole)
    told, model.encoding.hints = whole, None
    assert (model(tokens) - told).abs().max() > 1e-3  # it did listen


@pytest.mark.parametrize("kind", [Abacus, PositionCoupling, Bipe])
def test_hints_without_tokens_are_refused(kind):
    encoding = kind(8, 1, 2)
    encoding.hints = hints_of(find_task("copy")(), kind.hint)
    stream = encoding.start(3)
    stream.time = 3
    with pytest.raises(UserError, match=r"set `stream\.tokens`"):
        encoding.embed(torch.zeros(1, 3, 8), stream)


def test_abacus_reads_the_row_of_a_digits_place():
    encoding = Abacus(8, 1, 2, config=AbacusConfig(shift=3, places=5)).eval()
    task = find_task("addition")()
    texts = ["829+03=8008,2305", "1234567+1=1102,2"]
    assert rows_read(encoding, opened(encoding, task, texts)) == [
        [1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4],
        [1, 2, 3, 4, 5, 5, 5, 0, 1, 0, 1, 2, 3, 4, 0, 1],  # five places: a longer number's other digits share the last
    ]


def test_abacus_shifts_a_whole_batch_by_one_draw():
    encoding = Abacus(8, 1, 2, config=AbacusConfig(shift=3, places=20)).train()
    torch.manual_seed(0)
    drawn = set()
    for _ in range(60):
        first, second = rows_read(encoding, opened(encoding, find_task("copy")(), ["12=1", "1234"]))
        shift = first[0] - 1
        assert first == [1 + shift, 2 + shift, 0, 1 + shift]
        assert second == [1 + shift, 2 + shift, 3 + shift, 4 + shift]
        drawn.add(shift)
    assert drawn == {0, 1, 2, 3}


def test_abacus_can_shift_each_sequence_by_a_draw_of_its_own():
    encoding = Abacus(8, 1, 2, config=AbacusConfig(shift=3, places=20, draws="sequence")).train()
    torch.manual_seed(0)
    drawn = set()
    for _ in range(100):
        first, second = rows_read(encoding, opened(encoding, find_task("copy")(), ["12=1", "1234"]))
        shifts = first[0] - 1, second[0] - 1
        assert first == [1 + shifts[0], 2 + shifts[0], 0, 1 + shifts[0]]
        assert second == [place + shifts[1] for place in (1, 2, 3, 4)]
        drawn.add(shifts)
    assert drawn == set(itertools.product(range(4), repeat=2))
    assert preset("quick", find_task("copy")(), "abacus").positions.draws == "sequence"
    assert preset("paper", find_task("copy")(), "abacus").positions == AbacusConfig()


def test_abacus_wants_a_place_beyond_its_shift():
    with pytest.raises(UserError, match="places must be more than shift"):
        AbacusConfig(shift=5, places=5)


def test_coupled_tokens_read_one_row():
    encoding = PositionCoupling(8, 1, 2, config=PositionCouplingConfig(max_position=6)).eval()
    task = find_task("reverse")()
    assert rows_read(encoding, opened(encoding, task, ["829=928.00", "12345678=8"])) == [
        [2, 3, 4, 5, 4, 3, 2, 0, 0, 0],
        [2, 3, 4, 5, 6, 6, 6, 6, 6, 6],  # beyond max_position
    ]


def test_a_sequence_starts_wherever_it_fits():
    encoding = PositionCoupling(8, 1, 2, config=PositionCouplingConfig(max_position=9)).train()
    torch.manual_seed(0)
    counts: dict[int, set[int]] = {0: set(), 1: set()}
    differ = False
    for _ in range(150):
        both = rows_read(encoding, opened(encoding, find_task("copy")(), ["829=829.00", "123456=123"]))
        starts = [rows[0] - 1 for rows in both]
        for row, numbers in enumerate(([1, 2, 3, 0, 1, 2, 3], [1, 2, 3, 4, 5, 6, 0, 1, 2, 3])):
            rows = both[row]
            assert rows == [starts[row] + number for number in numbers] + [0] * (10 - len(numbers))
            counts[row].add(starts[row])
        differ = differ or starts[0] != starts[1]
    # The authors draw from 1 to max_pos - length, both included.
    assert counts == {0: set(range(1, 9 - 3 + 1)), 1: set(range(1, 9 - 6 + 1))}
    assert differ


@pytest.mark.parametrize("kind", [Abacus, PositionCoupling])
def test_chunks_of_a_sequence_are_moved_alike(kind):
    encoding = kind(8, 1, 2).train()
    torch.manual_seed(0)
    stream = opened(encoding, find_task("copy")(), ["8293=829"])
    whole, read = stream.tokens, []
    for place in range(8):
        stream.tokens, stream.seen, stream.time = whole[:, : place + 1], place, 1
        read += rows_read(encoding, stream)[0]
    moved = read[0] - 1
    assert moved > 1
    assert read == [number + moved if number or kind is PositionCoupling else 0 for number in (1, 2, 3, 4, 0, 1, 2, 3)]


@pytest.mark.parametrize("kind", [Abacus, PositionCoupling])
def test_told_nothing_every_token_has_a_place(kind):
    encoding = kind(8, 1, 2).eval()
    most = encoding.longest()
    stream = encoding.start(most)
    stream.tokens, stream.time = torch.zeros(1, most, dtype=torch.int64), most
    first = 1 if kind is Abacus else 2
    assert rows_read(encoding, stream) == [list(range(first, first + most))]
    with pytest.raises(TooLong):
        encoding.start(most + 1)
    encoding.hints = hints_of(find_task("copy")(), kind.hint)
    encoding.start(most + 1)  # numbers may be short in a long text


@pytest.mark.parametrize(("encoding", "task"), [
    (encoding, task) for encoding in ("abacus", "position_coupling")
    for task in tasks_with(find_encoding(encoding).hint)])
def test_presets_have_a_trained_row_for_every_test(encoding, task):
    config = preset("quick", find_task(task)(), encoding)
    rng, kind = random.Random(0), find_encoding(encoding).hint
    longest = [max(hint(config.task, kind, "".join(config.task.example(rng, length)))) for length in
               (config.max_length, max(config.test_lengths()))]
    if encoding == "abacus":
        assert longest[1] <= longest[0] + config.positions.shift
        assert longest[0] + config.positions.shift <= config.positions.places
    else:  # starts are drawn so that every row up to the last is trained
        assert longest[1] + 1 <= config.positions.max_position


# --- BiPE, weight by weight ---


def slopes(heads: int) -> list[float]:
    """The recursion of Press et al.'s code, which BiPE's has too."""
    if heads & (heads - 1) == 0:
        start = 2 ** -(2 ** -(math.log2(heads) - 3))
        return [start * start**head for head in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return slopes(below) + slopes(2 * below)[0::2][: heads - below]


def bilevel(text: str) -> list[tuple[int, int]]:
    """(segment, place within it) of each character; a mark is the last of its segment."""
    pairs, segment, place = [], 0, 0
    for character in text:
        pairs.append((segment, place))
        segment, place = (segment, place + 1) if character.isdigit() else (segment + 1, 0)
    return pairs


def bipe_weights(query, key, text: str, head: int, heads: int, config: BipeConfig) -> list[list[float]]:
    """One head's attention weights, one at a time, from vectors given as lists of numbers."""
    pairs, weights = bilevel(text), []
    for i in range(len(text)):
        scores = []
        for j in range(i + 1):
            apart = pairs[i][0] - pairs[j][0]
            if config.between == "alibi":
                score = sum(a * b for a, b in zip(query[i], key[j], strict=True))
                scores.append(score - config.slope_scale * slopes(heads)[head] * apart)
                continue
            score = 0.0
            for pair in range(len(query[i]) // 2):
                rate = config.base ** (-2 * pair / len(query[i]))
                q = complex(*query[i][2 * pair : 2 * pair + 2])
                k = complex(*key[j][2 * pair : 2 * pair + 2])
                score += (q * k.conjugate() * cmath.exp(1j * rate * apart)).real
            scores.append(score)
        total = sum(math.exp(score) for score in scores)
        weights.append([math.exp(score) / total for score in scores] + [0.0] * (len(text) - i - 1))
    return weights


BIPES = [BipeConfig(slope_scale=1.3), BipeConfig(), BipeConfig(between="rope", base=50.0)]


@pytest.mark.parametrize("config", BIPES, ids=str)
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_bipes_weights_are_those_of_the_definition(heads, config):
    torch.manual_seed(heads)
    encoding = Bipe(10, 2, heads, 6, config).double()
    texts = ["829+03=8008,2305,9009→8", "1+999999=1900,,0901,091"]
    stream = opened(encoding, find_task("addition")(), texts)
    encoding.embed(torch.zeros(2, 23, 10, dtype=torch.float64), stream)
    query, key = torch.randn(2, 2, heads, 23, 6, dtype=torch.float64)
    q, k = encoding.transform(query, key, 0, stream)
    weights = encoding.weigh(encoding.score(q @ k.mT, 0, stream), torch.ones(23, 23).tril().bool(), 0, stream)
    for (row, text), head in itertools.product(enumerate(texts), range(heads)):
        asked, given = query[row, head].tolist(), key[row, head].tolist()
        assert_close(weights[row, head], bipe_weights(asked, given, text, head, heads, config))


@pytest.mark.parametrize("within", ["learned", "sinusoidal"])
def test_bipe_adds_a_vector_for_the_place_within_the_segment(within):
    encoding = Bipe(6, 1, 2, config=BipeConfig(within=within, places=4)).double()
    text = "829+030303=8008,,5"
    stream = opened(encoding, find_task("addition")(), [text])
    x = torch.randn(1, len(text), 6, dtype=torch.float64)
    added = encoding.embed(x, stream) - x
    for (_, place), vector in zip(bilevel(text), added[0], strict=True):
        if within == "learned":
            expected = encoding.table.weight[min(place, 3)].tolist()  # a longer segment's other tokens share the last
        else:
            angles = [place / 10_000 ** (2 * pair / 6) for pair in range(3)]
            expected = [value for angle in angles for value in (math.sin(angle), math.cos(angle))]
        assert_close(vector, expected, tolerance=1e-12)


@pytest.mark.parametrize("config", BIPES, ids=str)
def test_bipe_says_how_much_it_keeps(config):
    encoding = Bipe(10, 2, 3, 6, config)
    stream = opened(encoding, find_task("addition")(), ["829+03=8008,2305"])
    encoding.embed(torch.zeros(1, 16, 10), stream)
    bias = encoding.bias(0, stream)
    assert encoding.footprint(16) == (0 if bias is None else bias[0, :, 0].numel())


def test_bipe_told_nothing_is_one_segment():
    encoding = Bipe(6, 1, 2).double().eval()
    stream = encoding.start(5)
    stream.time = 5
    x = torch.zeros(2, 5, 6, dtype=torch.float64)
    assert torch.equal(encoding.embed(x, stream), encoding.table.weight[:5].expand(2, 5, 6))
    assert not encoding.bias(0, stream).any()


@pytest.mark.parametrize("encoding", ["abacus", "position_coupling", "bipe"])
def test_only_the_rows_that_were_read_learn(encoding):
    model = told_model(encoding, "copy").train()
    tokens = torch.from_numpy(vocabulary(find_task("copy")()).encode("8293=829"))[None].repeat(4, 1)
    model(tokens).square().sum().backward()
    learnt = (model.encoding.table.weight.grad.abs().sum(1) > 0).nonzero()[:, 0].tolist()
    if encoding == "bipe":
        assert learnt == [0, 1, 2, 3, 4]
    elif encoding == "abacus":  # `=` reads row 0, digits four rows in a line
        assert learnt[0] == 0
        assert learnt[1:] == list(range(learnt[1], learnt[1] + 4))
    else:
        assert 0 not in learnt
        assert 5 <= len(learnt) <= 20
