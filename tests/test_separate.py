"""Methods with a contract of their own: what they compute, and that their results say what they were told."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from prism.config import ModelConfig, RunConfig
from prism.data import draw, vocabulary
from prism.errors import RunError, UserError
from prism.evaluate import TEST_SEED
from prism.separate import all_methods, find_method, run
from prism.separate.looped import Looped, LoopedTransformer, ask, score, train
from prism.tasks import Example, find_task
from tests.small import small_config
from tests.tolerances import assert_close, relative_error

COPY, REVERSE = find_task("copy")(), find_task("reverse")()
WORDS = vocabulary(COPY)
SIZE = ModelConfig(width=8, layers=2, heads=2, head_width=3, feedforward=2, vocabulary=13)
EXAMPLES = [Example("5839=", "5839."), Example("1=", "1."), Example("777=", "777.")]


def looped(seed: int = 0) -> LoopedTransformer:
    torch.manual_seed(seed)
    model = LoopedTransformer(SIZE).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def answered(model: LoopedTransformer, examples: list[Example]) -> torch.Tensor:
    asked = ask(model, WORDS, examples)
    return model(asked.tokens, asked.loops, int(asked.loops.max()))


# --- Every method ---


@pytest.mark.parametrize("name", all_methods())
def test_a_method_introduces_itself(name):
    kind = find_method(name)
    for said in (kind.summary, kind.citation, kind.told):
        assert said
        assert "\n" not in said
    assert kind.tasks
    for task in kind.tasks:
        find_task(task)


@pytest.mark.parametrize("name", all_methods())
def test_what_a_method_is_not_defined_for_is_refused(name):
    with pytest.raises(UserError, match="is defined for copy and reverse; got addition"):
        run(find_method(name), small_config("addition", "nope"))


@pytest.mark.parametrize("name", all_methods())
def test_a_result_says_what_it_was_told_and_on_what_terms(name, tmp_path):
    terms = small_config("reverse", "nope", steps=8)
    said: list[str] = []
    path = tmp_path / "new" / "result.json"
    result = run(find_method(name), terms, report=said.append, path=path)
    stored = json.loads(path.read_text())
    assert stored == result
    assert RunConfig.from_json(stored["terms"]) == terms
    assert stored["told"] == find_method(name).told
    assert set(stored["scores"]) == {"2", "4"}
    for counted in stored["scores"].values():
        assert counted["examples"] == terms.evaluation.final_examples
        low, high = counted["interval"]
        assert low - 1e-9 <= counted["exact"] <= high + 1e-9
    assert {"date", "torch", "commit"} <= set(stored["environment"])
    assert str(tmp_path) not in path.read_text()
    assert said
    assert run(find_method(name), terms)["scores"] == result["scores"]  # the same seed gives the same weights


def test_an_unknown_method_is_offered_the_nearest():
    with pytest.raises(UserError, match="looped"):
        find_method("loped")


# --- The looped Transformer ---


def test_an_answer_is_asked_for_by_placeholders_and_a_number_of_loops():
    asked = ask(looped(), WORDS, EXAMPLES)
    blank, equals, end = 13, 10, 11
    assert asked.tokens.tolist() == [
        [5, 8, 3, 9, equals, *[blank] * 5], [1, equals, blank, blank, *[0] * 6],
        [7, 7, 7, equals, *[blank] * 4, 0, 0],
    ]
    assert asked.targets[0].tolist() == [0, 0, 0, 0, 0, 5, 8, 3, 9, end]
    assert asked.mask.sum(1).tolist() == [5, 2, 4]
    assert asked.loops.tolist() == [4, 1, 3]


def by_hand(model: LoopedTransformer, example: Example) -> np.ndarray:
    """One example, one number at a time."""
    at = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * at[f"{name}.weight"] + at[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return at[f"{name}.weight"] @ x + at[f"{name}.bias"]

    def block(rows: list[np.ndarray], name: str) -> list[np.ndarray]:
        projected = [linear(norm(row, f"{name}.attention_norm"), f"{name}.attention.project") for row in rows]
        made = []
        for here, row in enumerate(rows):
            heads = []
            for head in range(2):
                query, key, value = (slice(6 * part + 3 * head, 6 * part + 3 * head + 3) for part in range(3))
                scores = [projected[here][query] @ projected[there][key] / math.sqrt(3) for there in range(here + 1)]
                powers = np.exp(np.array(scores) - max(scores))
                heads.append(sum(power * projected[there][value] for there, power in enumerate(powers)) / powers.sum())
            x = row + linear(np.concatenate(heads), f"{name}.attention.out")
            inner = linear(norm(x, f"{name}.feedforward.0"), f"{name}.feedforward.1")
            gelu = np.array([one * (1 + math.erf(one / math.sqrt(2))) / 2 for one in inner])
            made.append(x + linear(gelu, f"{name}.feedforward.3"))
        return made

    tokens = [*WORDS.encode(example.prompt), *[13] * len(example.completion)]
    given = [at["embedding.weight"][token] * math.sqrt(8) for token in tokens]
    state = [np.zeros(8) for _ in tokens]
    for _ in range(len(example.prompt) - 1):
        rows = [one + other for one, other in zip(state, given, strict=True)]
        for layer in range(2):
            rows = block(rows, f"blocks.{layer}")
        state = [norm(row, "norm") for row in rows]
    return np.stack([at["embedding.weight"][:13] @ row for row in state])


def test_it_is_the_loop_of_its_paper():
    """In a batch of different lengths: padding, and the loops of others, must not show."""
    model = looped()
    logits = answered(model, EXAMPLES)
    for row, example in enumerate(EXAMPLES):
        expected = by_hand(model, example)
        assert_close(logits[row, : len(expected)], expected, what=example.prompt)


def test_the_number_of_loops_matters():
    model, asked = looped(), ask(looped(), WORDS, EXAMPLES[:1])
    one, more = (model(asked.tokens, torch.tensor([loops]), loops) for loops in (4, 5))
    assert relative_error(one, more) > 1e-2


def test_gradients_reach_every_parameter():
    model = looped()
    asked = ask(model, WORDS, EXAMPLES)
    torch.nn.functional.cross_entropy(answered(model, EXAMPLES)[asked.mask], asked.targets[asked.mask]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-12, name


def test_a_score_counts_whole_answers(monkeypatch):
    """Against counting by eye, in pieces of one example as in one piece."""
    torch.manual_seed(0)
    model = LoopedTransformer(dataclasses.replace(SIZE, width=32, head_width=16))
    examples = draw(COPY, seed=TEST_SEED, stream="test", step=0, size=24, max_length=2)
    terms = small_config("copy", "nope", steps=150, max_length=2, batch_size=16)
    train(model, terms, lambda line: None)
    model.eval()
    right, summed, count = 0, 0.0, 0
    for example in examples:
        asked = ask(model, WORDS, [example])
        rows = model(asked.tokens, asked.loops, int(asked.loops[0]))[0, -len(example.completion) :].log_softmax(-1)
        right += WORDS.decode(rows.argmax(-1)) == example.completion
        summed -= sum(float(row[one].detach()) for row, one in zip(rows, WORDS.encode(example.completion), strict=True))
        count += len(example.completion)
    assert 0 < right < len(examples)
    whole = score(model, WORDS, examples)
    monkeypatch.setattr("prism.separate.looped.SCORES_AT_ONCE", 1)
    pieces = score(model, WORDS, examples)
    assert whole.correct == pieces.correct == right
    assert whole.loss == pytest.approx(summed / count, rel=1e-4)
    assert pieces.loss == pytest.approx(summed / count, rel=1e-4)


def test_a_training_that_diverges_stops():
    terms = small_config("copy", "nope", steps=9)
    model = LoopedTransformer(terms.model)
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    with pytest.raises(RunError, match=r"step 1: .* diverged"):
        train(model, terms, lambda line: None)


def test_it_learns_to_copy():
    terms = small_config("copy", "nope", steps=300, batch_size=32, evaluation={"lengths": (1, 2), "final_examples": 50})
    scores, _ = Looped().train_and_test(terms, "cpu", lambda line: None)
    assert scores["1"].exact > 0.9
