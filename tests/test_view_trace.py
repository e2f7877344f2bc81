"""What the page shows is what the model computed: every number of a trace against the model and its recordings."""

import base64
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import prism.view.cursors
import prism.view.trace
from prism.architectures.lstm import Lstm
from prism.data import vocabulary
from prism.errors import UserError
from prism.generate import generate
from prism.inside import record
from prism.runs import RunFolder
from prism.trained import Trained, build, open_run
from prism.view.block import block, block_bytes
from prism.view.trace import LiveModel
from tests.small import prepared, small_config, stirred

MODELS = Path(__file__).parent.parent / "models"
HALF_A_STEP = 0.5 / 255 + 1e-6  # of a block's bytes
SHORT = pytest.mark.filterwarnings("ignore:.*piled up at the edge")
KINDS = {
    "plain": {},
    "copying": {"copy_every": 2},
    "copying with trained keys": {"copy_every": 2, "copy_key": "trained"},
    "two depths, copying": {"depths": (0, 1), "copy_every": 2, "cursors": 2},
    "late": {"depths": (1,), "cursors": 3},
    "absolute": {"absolute": True, "cursors": 2},
    "learned start": {"start_spread": 2},
    "short support": {"support": 3},
}


@pytest.fixture(scope="module")
def copy10() -> LiveModel:
    return LiveModel(open_run(MODELS / "copy-10"))


@pytest.fixture(scope="module")
def reverse10() -> LiveModel:
    return LiveModel(open_run(MODELS / "reverse-10"))


def live_model(folder: Path, encoding: str = "prism", options: dict | None = None, **changes) -> LiveModel:
    """A small model that says something, of a run that is only a configuration."""
    config = small_config("copy", encoding, options, **changes)
    run = RunFolder.open(prepared(folder / "run", config))
    return LiveModel(Trained(run, config, stirred(config), vocabulary(config.task), 0))


@pytest.fixture(params=[pytest.param(kind, marks=SHORT if kind == "short support" else ()) for kind in KINDS])
def cursored(request, tmp_path) -> LiveModel:
    return live_model(tmp_path, options=KINDS[request.param])


def values(packed: dict) -> np.ndarray:
    """A block as a page reads it."""
    assert packed["scale"] == pytest.approx(1 / 255)
    return np.frombuffer(base64.b64decode(packed["data"]), np.uint8).reshape(packed["shape"]) * packed["scale"]


def ids_of(live: LiveModel, trace: dict) -> torch.Tensor:
    """The tokens as the model reads them, found by hand."""
    names = list(live.trained.config.task.alphabet)
    tokens = trace["tokens"][trace["run"]["start_token"] :]
    return torch.tensor([[int(t[1:-1]) if t.startswith("<") else names.index(t) for t in tokens]])


def cursor_histograms(live: LiveModel, trace: dict, which: dict) -> np.ndarray:
    """One cursor's histograms [time, bins], from a recording of everything."""
    seen = record(live.model, ids_of(live, trace))
    each, heads, depths = live.model.encoding.config.cursors, live.model.config.heads, live.model.encoding.config.depths
    assert which["depth"] == max(depth for depth in depths if depth <= which["layer"])
    slot = ((which["layer"] - which["depth"]) * heads + which["head"]) * each + which["cursor"]
    return seen[f"prism.{which['depth']}.histograms.{which['side']}"][0, slot].numpy()


# --- Tokens, predictions, verdicts ---


def test_a_right_completion(copy10):
    trace = copy10.complete("31415926=")
    assert trace["tokens"] == list("31415926=31415926.")
    assert trace["prompt"] == 9
    assert (trace["right"], trace["expected"], trace["verdict"]) == ("31415926.", list("31415926."), "right")
    assert trace["note"] is None
    stored = json.loads((MODELS / "copy-10" / "result.json").read_text())
    assert trace["run"] == {
        "name": "copy-10", "task": "copy", "label": "prism", "max_length": 10, "parameters": stored["parameters"],
        "step": 1200, "start_token": False,
    }
    assert trace["format"] == 1
    assert trace["seconds"]["generate"] > 0
    assert trace["seconds"]["record"] > 0


def test_a_wrong_completion_and_one_without_end(tmp_path):
    trace = live_model(tmp_path).complete("12=")
    assert trace["verdict"] == "wrong"
    assert trace["right"] == "12."
    if trace["tokens"][-1] != ".":
        assert len(trace["tokens"]) - trace["prompt"] == 3 + 8
        assert trace["note"] == "stopped after 11 tokens without an end"


def test_a_prompt_that_is_none_of_the_tasks(copy10):
    trace = copy10.complete("12", limit=3)
    assert (trace["verdict"], trace["right"], trace["expected"]) == ("unknown", None, None)
    assert "a prompt of copy is digits and '='" in trace["note"]


def test_the_limit_holds(copy10):
    trace = copy10.complete("31415926=", limit=3)
    assert trace["tokens"] == list("31415926=314")
    assert trace["note"] == "stopped after 3 tokens without an end"
    assert trace["verdict"] == "wrong"


@pytest.mark.parametrize("start", [False, True])
def test_predictions_are_the_models_own(tmp_path, start):
    model = dataclasses.replace(small_config().model, start_token=start)
    live = live_model(tmp_path, model=model)
    trace = live.complete("2031=", limit=9)
    with torch.no_grad():
        shares = live.model(ids_of(live, trace))[0].softmax(-1).numpy()
    names = list(live.trained.config.task.alphabet)
    assert trace["predictions"][:start] == [[]] * start  # nothing is said of the first token after the start
    assert len(trace["predictions"]) == len(trace["tokens"])
    for row, said in zip(shares, trace["predictions"][start:], strict=True):
        best = np.argsort(-row, kind="stable")[:5]
        assert [token for token, _ in said] == [names[i] if i < len(names) else f"<{i}>" for i in best]
        assert [share for _, share in said] == pytest.approx(row[best], abs=2e-6)


def test_what_is_written_is_what_generate_writes(copy10, cursored):
    for live in (copy10, cursored):
        question = live.asked("40217=")
        written = list(live.write(question))
        made = generate(live.model, live.words, ["40217="], question.limit)[0]
        assert "".join(each.token for each in written) == made
        assert all(each.token == each.top[0][0] and len(each.top) == 5 for each in written)


def test_a_start_token_is_a_token_of_the_trace(reverse10):
    trace = reverse10.complete("2718281=")
    assert trace["tokens"] == ["⊢", *"2718281=1828172."]
    assert (trace["prompt"], trace["verdict"], trace["run"]["start_token"]) == (9, "right", True)
    time = len(trace["tokens"])
    assert trace["attention"]["shape"] == [trace["layers"], trace["heads"], time, time]
    assert trace["histograms"]["shape"][1] == trace["gates"]["shape"][1] == time
    # What the model says after a token is what it writes next.
    for place in range(trace["prompt"], time):
        assert trace["predictions"][place - 1][0][0] == trace["tokens"][place]


# --- What goes on inside ---


@pytest.mark.parametrize("encoding", ["prism", "nope", "sinusoidal"])
def test_attention_is_the_recorded_one(tmp_path, encoding):
    live = live_model(tmp_path, encoding)
    trace = live.complete("10492=")
    shown, time = values(trace["attention"]), len(trace["tokens"])
    assert shown.shape == (trace["layers"], trace["heads"], time, time)
    seen = record(live.model, ids_of(live, trace), ["layer.*.attention"])
    for layer in range(trace["layers"]):
        assert np.abs(shown[layer] - seen[f"layer.{layer}.attention"][0].numpy()).max() <= HALF_A_STEP
    assert np.abs(shown.sum(-1) - 1).max() <= time * HALF_A_STEP
    assert not np.triu(shown, 1).any()


@pytest.mark.parametrize("encoding", ["nope", "sinusoidal"])
def test_other_encodings_have_no_cursors(tmp_path, encoding):
    trace = live_model(tmp_path, encoding).complete("10492=")
    assert trace["cursors"] == trace["shown"] == []
    time = len(trace["tokens"])
    assert (trace["histograms"]["shape"], trace["gates"]["shape"]) == ([0, time, 0], [0, time, 5])
    assert trace["offset"] == 0


def test_histograms_are_the_recorded_ones_cropped_where_nothing_shows(cursored):
    trace = cursored.complete("10492=")
    shown, first = values(trace["histograms"]), trace["offset"]
    assert len(shown) == len(trace["shown"]) > 0
    for row, index in zip(shown, trace["shown"], strict=True):
        whole = cursor_histograms(cursored, trace, trace["cursors"][index])
        home = whole.shape[1] // 2
        inside = slice(home + first, home + first + shown.shape[2])
        assert np.abs(row - whole[:, inside]).max() <= HALF_A_STEP
        assert np.delete(whole, np.r_[inside], axis=1).max(initial=0) <= 1 / 512
    assert shown[:, :, 0].any()
    assert shown[:, :, -1].any()


def test_the_table_of_cursors(cursored):
    trace, encoding = cursored.complete("10492="), cursored.model.encoding
    seen = record(cursored.model, ids_of(cursored, trace))
    first, rows = encoding.config.depths[0], trace["cursors"]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    positioned = range(first, trace["layers"])
    assert sorted((row["side"], row["layer"], row["head"], row["cursor"]) for row in rows) == sorted(
        (side, layer, head, cursor) for side in ("query", "key") for layer in positioned
        for head in range(trace["heads"]) for cursor in range(encoding.config.cursors)
    )
    for row in rows:
        whole = cursor_histograms(cursored, trace, row)
        place = (row["layer"] - first, row["head"], row["cursor"])
        slot = place[1] * encoding.config.cursors + place[2]
        slot += (row["layer"] - row["depth"]) * trace["heads"] * encoding.config.cursors
        assert row["alpha"] == pytest.approx(abs(float(encoding.alpha[place].detach())), rel=1e-5)
        gamma = float(seen[f"prism.{row['depth']}.gamma.{row['side']}"][slot])
        assert row["gamma"] == (pytest.approx(gamma, rel=1e-5) if np.isfinite(gamma) else None)
        every = encoding.config.copy_every
        assert row["copies"] == (row["side"] == "query" and every > 0 and slot % every == every - 1)
        assert row["sharpness"] == pytest.approx(np.mean([step.max() for step in whole]), rel=1e-5)
        moves = 1 if len({int(step.argmax()) for step in whole}) > 2 else 0.1
        assert row["importance"] == pytest.approx(row["alpha"] * row["sharpness"] * moves, rel=1e-4)


def test_gates_are_the_recorded_ones_and_copying_beside_them(cursored):
    trace, config = cursored.complete("10492="), cursored.model.encoding.config
    seen, shown = record(cursored.model, ids_of(cursored, trace)), values(trace["gates"])
    heads, jumps = trace["heads"], 0
    for gates, row in zip(shown, (trace["cursors"][index] for index in trace["shown"]), strict=True):
        slot = ((row["layer"] - row["depth"]) * heads + row["head"]) * config.cursors + row["cursor"]
        whole = seen[f"prism.{row['depth']}.gates.{row['side']}"][0, slot].numpy()
        assert np.abs(gates[:, :4] - whole).max() <= HALF_A_STEP
        assert np.abs(gates[:, :3].sum(-1) - 1).max() <= 3 * HALF_A_STEP
        copy = np.zeros(len(gates))
        if row["copies"]:
            jumped = seen[f"prism.{row['depth']}.copy"][0, slot // config.copy_every, :, :-1].sum(-1).numpy()
            copy, jumps = jumped, jumps + jumped.max()
        assert np.abs(gates[:, 4] - copy).max() <= HALF_A_STEP
        if config.copy_every and row["side"] == "key" and row["gamma"] is None:
            assert (gates == [1, 0, 0, 0, 0]).all()
    assert bool(jumps) == bool(config.copy_every)


def test_the_most_important_pairs_are_shown_first(tmp_path):
    live = live_model(tmp_path, options={"cursors": 3})
    with torch.no_grad():
        live.model.encoding.alpha.uniform_(0.1, 5)
    trace = live.complete("10492=")
    rows = [trace["cursors"][index] for index in trace["shown"]]
    assert len(rows) == 16
    queries, keys = rows[::2], rows[1::2]
    for query, key in zip(queries, keys, strict=True):
        assert (query["side"], key["side"]) == ("query", "key")
        assert all(query[name] == key[name] for name in ("layer", "head", "cursor", "depth"))
    best = sorted((row["importance"] for row in trace["cursors"] if row["side"] == "query"), reverse=True)
    assert [query["importance"] for query in queries] == best[:8]


def test_long_traces_begin_with_fewer_cursors(tmp_path, monkeypatch):
    live = live_model(tmp_path, options={"cursors": 3})
    monkeypatch.setattr(prism.view.cursors, "AT_ONCE", 6000)
    trace = live.complete("1234567890=")
    assert 2 <= len(trace["shown"]) < 16
    assert len(trace["histograms"]["data"]) + len(trace["gates"]["data"]) <= 6000
    monkeypatch.setattr(prism.view.cursors, "AT_ONCE", 1)
    assert len(live.complete("1234567890=")["shown"]) == 2  # the first pair is there whatever it takes


# --- More of a trace that is there ---


def test_cursors_not_yet_shown(cursored):
    trace = cursored.complete("10492=")
    for wanted in ([row["index"] for row in trace["cursors"]], [1], [len(trace["cursors"]) - 1, 0]):
        more = cursored.cursors(trace["tokens"], wanted)
        assert more["shown"] == wanted
        for row, gates, index in zip(values(more["histograms"]), values(more["gates"]), wanted, strict=True):
            whole = cursor_histograms(cursored, trace, trace["cursors"][index])
            start = whole.shape[1] // 2 + more["offset"]
            assert np.abs(row - whole[:, start : start + row.shape[1]]).max() <= HALF_A_STEP
            if index in trace["shown"]:
                assert (gates == values(trace["gates"])[trace["shown"].index(index)]).all()


def test_the_same_trace_from_its_tokens(copy10, reverse10, cursored):
    for live in (copy10, reverse10, cursored):
        first = live.complete("10492=")
        for prompt in (None, first["prompt"]):
            again = live.again(first["tokens"], prompt)
            assert {**again, "seconds": None} == {**first, "seconds": None}
        fewer = live.again(first["tokens"], shown=[1])
        assert fewer["shown"] == [1]
    unfinished = copy10.again(list("12"))
    assert (unfinished["prompt"], unfinished["verdict"]) == (2, "unknown")


def test_ids_without_a_symbol_come_back_as_they_went(tmp_path):
    live = live_model(tmp_path)
    again = live.again([*"12=", "<37>", "<63>"])
    assert again["tokens"] == [*"12=", "<37>", "<63>"]
    seen = record(live.model, torch.tensor([[1, 2, 10, 37, 63]]), ["layer.0.attention"])
    assert np.abs(values(again["attention"])[0] - seen["layer.0.attention"][0].numpy()).max() <= HALF_A_STEP


# --- Several at a time, and what is refused ---


def test_writing_and_recording_may_take_turns(copy10):
    alone = [[each.token for each in copy10.write(copy10.asked(prompt))] for prompt in ("112233=", "98765=")]
    first, second = (copy10.write(copy10.asked(prompt)) for prompt in ("112233=", "98765="))
    mixed: list[list[str]] = [[], []]
    for one, other in zip(first, second, strict=False):
        copy10.cursors(list("5="), [0])
        mixed[0].append(one.token)
        mixed[1].append(other.token)
    assert mixed == [each[: len(mixed[0])] for each in alone]
    assert copy10.model.recorder is None


@pytest.mark.parametrize(("prompt", "limit", "sentence"), [
    ("", None, "the prompt is empty"),
    ("  ", None, "the prompt is empty"),
    ("12a=", None, "'a' at position 3 of '12a=' is not a symbol of copy"),
    ("1\ud800=", None, "is not a symbol of copy"),
    (None, None, "prompt must be text"),
    (["1", "="], None, "prompt must be text"),
    ("1" * 100_000, None, "a prompt of 100,000 tokens is too long to show: prompt and completion may have 1,744"),
    ("12=", 5000, "a prompt of 3 tokens and 5,000 to write is too long to show"),
    ("12=", 0, "limit must be a whole number from 1"),
    ("12=", True, "limit must be a whole number"),
    ("12=", 2.5, "limit must be a whole number"),
    ("12=", 10**30, "limit must be a whole number"),
])
def test_bad_prompts_are_refused_in_a_sentence(copy10, prompt, limit, sentence):
    with pytest.raises(UserError) as refused:
        copy10.complete(prompt, limit)
    assert sentence in str(refused.value)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(("tokens", "cursors", "sentence"), [
    ("12=", [0], "tokens must be a list"),
    ([1, 2], [0], "tokens must be a list"),
    ([], [0], "tokens must be 1 to 1,744"),
    (["1"] * 2000, [0], "tokens must be 1 to 1,744, got 2,000"),
    (["1", "x"], [0], "'x' at position 2 is not a token of copy"),
    (["⊢", "1"], [0], "'⊢' at position 1 is not a token"),
    (["1", "<64>"], [0], "'<64>' at position 2"),
    (["1"], [], "cursors must be a list"),
    (["1"], 3, "cursors must be a list"),
    (["1"], [16], "the model has cursors 0 to 15, and 16"),
    (["1"], [-1], "the model has cursors 0 to 15"),
    (["1"], [True], "the model has cursors 0 to 15"),
    (["1"], [3, 3], "names a cursor twice"),
])
def test_bad_requests_for_cursors_are_refused_in_a_sentence(copy10, tokens, cursors, sentence):
    with pytest.raises(UserError, match=sentence):
        copy10.cursors(tokens, cursors)


def test_a_prompt_is_some_of_the_tokens(copy10, reverse10):
    for prompt in (0, 4, -1, True, 1.5, "1"):
        with pytest.raises(UserError, match="prompt must say how many"):
            copy10.again(list("12="), prompt)
    with pytest.raises(UserError, match="prompt must say how many"):
        reverse10.again(["⊢", *"12="], 1)


def test_cursors_of_an_encoding_without(tmp_path):
    with pytest.raises(UserError, match="this model has no cursors"):
        live_model(tmp_path, "nope").cursors(["1"], [0])


def test_what_is_no_transformer(tmp_path):
    config = small_config("copy", "nope", architecture="lstm", model=Lstm.Config(width=8, layers=1))
    run = RunFolder.open(prepared(tmp_path / "run", config))
    with pytest.raises(UserError, match=r"shows what goes on in a Transformer, and .* is a run of lstm"):
        LiveModel(Trained(run, config, build(config), vocabulary(config.task), 0))


@pytest.mark.parametrize("kind", ["plain", "two depths, copying", "nope"])
def test_the_longest_trace_fits_the_promise(tmp_path, monkeypatch, kind):
    bound = 300_000
    monkeypatch.setattr(prism.view.trace, "MOST_JSON", bound)
    monkeypatch.setattr(prism.view.cursors, "AT_ONCE", 0)
    live = live_model(tmp_path, "nope" if kind == "nope" else "prism", KINDS.get(kind))
    prompt = "1" * (live.longest - 1)
    assert 40 < live.longest < 400
    assert len(json.dumps(live.complete(prompt), separators=(",", ":"))) <= bound
    with pytest.raises(UserError, match="too long to show"):
        live.complete(prompt + "11")


def test_memory_and_the_encoding_bound_the_length_too(tmp_path, monkeypatch):
    monkeypatch.setattr(prism.view.trace, "MOST_NUMBERS", 100_000)
    live = live_model(tmp_path)
    assert 20 < live.longest < 200
    seen = record(live.model, torch.ones(1, live.longest, dtype=torch.int64),
                  ["logits", "layer.*.attention", "prism.*.histograms.*", "prism.*.gates.*"])
    assert seen.bytes <= 4 * 100_000
    (tmp_path / "other").mkdir()
    bounded = live_model(tmp_path / "other", "learned", {"longest": 33})
    assert bounded.longest == bounded.model.longest() == 33


def test_as_many_cursors_as_have_room(tmp_path, monkeypatch):
    live, tokens = live_model(tmp_path), list("1234567890" * 5)
    all_of_them = live.cursors(tokens, list(range(8)))
    half = (len(all_of_them["histograms"]["data"]) + len(all_of_them["gates"]["data"])) // 2
    monkeypatch.setattr(prism.view.trace, "MOST_JSON", block_bytes(2, 2, 50, 50) + half)
    with pytest.raises(UserError, match=r"8 cursors over 50 tokens are too much for one page: ask for [34] at most"):
        live.cursors(tokens, list(range(8)))
    with pytest.raises(UserError, match="8 cursors over 50 tokens are too much"):
        live.again(tokens, shown=list(range(8)))
    assert len(live.cursors(tokens, [0, 1, 2])["shown"]) == 3


def test_the_model_stays_as_it_is(copy10):
    before = {name: tensor.clone() for name, tensor in copy10.model.state_dict().items()}
    copy10.complete("123=")
    for bad in ("", "x", "1" * 9999):
        with pytest.raises(UserError):
            copy10.complete(bad)
    assert not copy10.model.training
    assert copy10.model.recorder is None
    after = copy10.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(parameter.grad is not None for parameter in copy10.model.parameters())


def test_examples_are_the_tasks_and_fit(copy10):
    for example in copy10.examples():
        right = copy10.trained.config.task.answer(example["prompt"])
        assert len(example["prompt"]) + len(right) <= copy10.longest
        assert len(example["prompt"]) == example["length"] + 1
    lengths = [example["length"] for example in copy10.examples()]
    assert min(lengths) <= 10 < max(lengths)


def test_a_task_of_words_joins_them_as_it_should(tmp_path):
    config = small_config("scan_cot", "nope", max_length=80, evaluation={"lengths": (30, 60)})
    run = RunFolder.open(prepared(tmp_path / "run", config))
    live = LiveModel(Trained(run, config, stirred(config), vocabulary(config.task), 0))
    trace = live.complete("jump  twice =")
    assert trace["tokens"][:3] == ["jump", "twice", "="]
    assert trace["right"] == "jump + jump → jump : I_JUMP jump : I_JUMP ."
    assert trace["expected"] == trace["right"].split()
    assert live.again(trace["tokens"])["right"] == trace["right"]
    assert [example["length"] for example in live.examples()] == [60]


def test_a_block_is_off_by_half_a_step_at_most():
    shares = torch.rand(3, 5, 7)
    packed = block(torch.cat((shares.flatten(), torch.tensor([0.0, 1.0, 1.0 + 1e-6, -1e-9]))))
    assert np.abs(values(packed)[:105] - shares.flatten().numpy()).max() <= HALF_A_STEP
    assert list(values(packed)[105:]) == pytest.approx([0, 1, 1, 0])
    for shape in [(1,), (2,), (3,), (0, 4), (7, 5)]:
        assert len(block(torch.zeros(shape))["data"]) == block_bytes(*shape)
