"""Generation with a cached state: the tokens that re-reading everything would give, and never a token read twice."""

import dataclasses

import pytest
import torch

from prism.config import LONGEST
from prism.data import vocabulary
from prism.errors import UserError
from prism.generate import generate, stream_tokens
from prism.tasks import find_task
from prism.trained import build
from tests.small import MODEL, memorise, short_examples, small_config, stirred
from tests.tolerances import assert_close

MODELS = {
    "gru": ("prism", {}),
    "gru, copying": ("prism", {"copy_every": 2}),
    "gru, copying with trained keys": ("prism", {"copy_every": 2, "copy_key": "trained"}),
    "gru, two depths": ("prism", {"depths": (0, 1), "copy_every": 2}),
    "gru, late": ("prism", {"depths": (1,)}),
    "local": ("prism", {"gates": "local", "window": 3}),
    "local, one token": ("prism", {"gates": "local", "window": 1}),
    "local, absolute, copying": ("prism", {"gates": "local", "absolute": True, "copy_every": 2}),
    "absolute, joint norm": ("prism", {"absolute": True, "norm": "joint"}),
    "learned start": ("prism", {"start_spread": 2}),
    "positions only": ("prism", {"content": False}),
    "expected position": ("prism", {"superposition": "expected"}),
    "full width": ("prism", {"superposition": "full"}),
    "sinusoidal": ("sinusoidal", {}),
    "nope": ("nope", {}),
}
PROMPTS = [[3, 1, 4, 1, 10], [2, 7, 1, 8, 10]]
COPY = find_task("copy")()
WORDS = vocabulary(COPY)
MODEL_OF = pytest.mark.parametrize("kind", MODELS)


def from_scratch(model, prompt: list[int], limit: int) -> list[int]:
    """Greedy decoding that reads the whole prefix again for every token."""
    made: list[int] = []
    with torch.no_grad():
        for _ in range(limit):
            made.append(int(model(torch.tensor([prompt + made]))[0, -1].argmax()))
    return made


def never_twice(model, arguments, logits):
    """Untrained models say one symbol over and over, which would prove nothing: no symbol may follow itself."""
    return logits - 99 * torch.nn.functional.one_hot(arguments[0], logits.shape[-1])


def model_of(kind: str, seed: int = 0):
    encoding, options = MODELS[kind]
    config = small_config("copy", encoding, options, seed=seed, model=dataclasses.replace(MODEL, vocabulary=12))
    return stirred(config, 0.5).double()


@MODEL_OF
def test_a_cached_state_gives_the_tokens_of_reading_everything_again(kind):
    for seed in range(9):
        model = model_of(kind, seed)
        model.register_forward_hook(never_twice)
        made = torch.stack(list(stream_tokens(model, torch.tensor(PROMPTS), 7)), dim=1).tolist()
        assert made == [from_scratch(model, prompt, 7) for prompt in PROMPTS]
        if len(set(made[0])) > 2 and made[0] != made[1]:
            return
    raise AssertionError("no seed gives a model with something to say")


@MODEL_OF
def test_cached_logits_are_the_parallel_ones(kind):
    model, tokens = model_of(kind), torch.randint(0, 12, (2, 11))
    with torch.no_grad():
        cache = model.new_cache(11)
        parts = [model(tokens[:, :4], cache), *(model(tokens[:, place : place + 1], cache) for place in range(4, 11))]
        assert_close(torch.cat(parts, dim=1), model(tokens), dtype=torch.float64, tolerance=1e-9)


@MODEL_OF
def test_no_token_is_read_twice(kind, monkeypatch):
    encoding, options = MODELS[kind]
    model, read = build(small_config("copy", encoding, options)), []
    real = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, *rest: (read.append(ids.shape[1]), real(ids, *rest))[1])
    for _ in stream_tokens(model, torch.tensor([[1, 2, 3, 10]]), 6):
        pass
    assert read == [4, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["gru, copying", "local", "sinusoidal"])
def test_prompts_of_any_lengths_are_completed_in_their_order(kind):
    model = memorise(build(small_config("copy", *MODELS[kind])), COPY, short_examples(COPY, 8), 15)
    prompts = ["12=", "3=", "45=", "678=", "9=", "12="]
    together = generate(model, WORDS, prompts, 7)
    assert together == [generate(model, WORDS, [prompt], 7)[0] for prompt in prompts]
    assert len(set(together)) > 2
    for prompt, made in zip(prompts, together, strict=True):
        text = WORDS.decode(from_scratch(model, WORDS.encode(prompt).tolist(), 7))
        assert made == text[: text.index(".") + 1] if "." in text else made == text


def test_the_end_token_ends_a_completion_and_the_limit_does_too(monkeypatch):
    model = build(small_config("copy", "nope")).eval()
    script = iter([[1, 11], [2, 5], [11, 5], [3, 3]])

    def told(ids, cache=None):
        return torch.nn.functional.one_hot(torch.tensor(next(script)), 64)[:, None].float()

    monkeypatch.setattr(model, "forward", told)
    assert generate(model, WORDS, ["1=", "2="], 99) == ["12.", "."]
    assert len(list(script)) == 1, "all had ended: nothing more to generate"
    script = iter([[1], [2], [3]])
    assert generate(model, WORDS, ["1="], 2) == ["12"]


def test_what_is_no_symbol_is_written_as_its_number():
    model = build(small_config("copy", "nope"))
    with torch.no_grad():
        model.norm.bias.copy_(10 * model.embedding.weight[40])
        model.norm.weight.zero_()
    assert generate(model, WORDS, ["1="], 2) == ["<40><40>"]


def test_generation_leaves_the_model_as_it_was():
    model = build(small_config("copy", "sinusoidal"))
    for training in (True, False):
        model.train(training)
        first, second = (generate(model, WORDS, ["123="], 4) for _ in range(2))
        assert first == second  # no random shift, even for a model in training
        assert model.training is training


@pytest.mark.parametrize("limit", [0, -1, LONGEST + 1])
def test_a_limit_is_a_sensible_number(limit):
    with pytest.raises(UserError, match="limit"):
        generate(build(small_config("copy", "nope")), WORDS, ["1="], limit)


@pytest.mark.parametrize(("prompt", "sentence"), [("", "empty"), ("1a=", "'a' at position 2"), ("1\n=", "position 2")])
def test_a_prompt_must_be_of_the_tasks_symbols(prompt, sentence):
    with pytest.raises(UserError, match=sentence):
        generate(build(small_config("copy", "nope")), WORDS, [prompt], 3)
