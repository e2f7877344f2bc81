"""The Transformer, against a second implementation that reads the same weights; and the sinusoidal baseline."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prism.config import ModelConfig
from prism.encodings.nope import NoPE
from prism.encodings.sinusoidal import Sinusoidal, SinusoidalConfig
from prism.transformer import Transformer
from tests.tolerances import assert_close, relative_error

WIDTH, LAYERS, HEADS, HEAD_WIDTH, VOCABULARY = 12, 3, 2, 5, 11
SIZE = ModelConfig(width=WIDTH, layers=LAYERS, heads=HEADS, head_width=HEAD_WIDTH, feedforward=3, vocabulary=VOCABULARY)


def build(kind, config=None) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(SIZE, kind(WIDTH, LAYERS, HEADS, HEAD_WIDTH, config)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens(batch: int = 3, time: int = 7) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(1))


def plain_logits(state: dict[str, Tensor], ids: Tensor, added: Tensor | float = 0.0) -> Tensor:
    """Pre-norm blocks, causal attention, a GELU feed-forward, the embedding as unembedding; `added` to the tokens."""
    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / spread * state[f"{name}.weight"] + state[f"{name}.bias"]

    embedding = state["embedding.weight"]
    x = embedding[ids] * math.sqrt(WIDTH) + added
    for layer in range(LAYERS):
        at = f"blocks.{layer}"
        normed = norm(f"{at}.attention_norm", x)
        projected = linear(f"{at}.attention.project", normed).chunk(3, dim=-1)
        heads = []
        for head in range(HEADS):
            q, k, v = (part[..., head * HEAD_WIDTH : (head + 1) * HEAD_WIDTH] for part in projected)
            heads.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + linear(f"{at}.attention.out", torch.cat(heads, -1))
        inner = linear(f"{at}.feedforward.1", norm(f"{at}.feedforward.0", x))
        inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
        x = x + linear(f"{at}.feedforward.3", inner)
    return norm("norm", x) @ embedding.T


def test_logits_are_those_of_a_plain_transformer():
    model = build(NoPE)
    assert_close(model(tokens()), plain_logits(model.state_dict(), tokens()))


def test_a_start_token_is_one_more_symbol_in_front():
    size = dataclasses.replace(SIZE, start_token=True)
    model = Transformer(size, NoPE(WIDTH, LAYERS, HEADS, HEAD_WIDTH)).double()
    state = model.state_dict()
    start = state.pop("start")
    state["embedding.weight"] = torch.cat((state["embedding.weight"], start[None]))
    given = torch.cat((torch.full((len(tokens()), 1), VOCABULARY), tokens()), 1)
    expected = plain_logits(state, given)[:, 1:, :VOCABULARY]
    assert_close(model(tokens()), expected)


def test_the_unembedding_is_the_embedding():
    model = build(NoPE)
    assert sum(parameter.shape[0] == VOCABULARY for parameter in model.parameters()) == 1
    before = model(tokens())
    with torch.no_grad():
        model.embedding.weight[4] += 1.0
    unread = tokens().clone()
    unread[unread == 4] = 5
    assert relative_error(model(unread)[..., 4], before[..., 4]) > 1e-3


def test_the_start_is_small_where_layers_add_to_the_stream():
    torch.manual_seed(0)
    size = ModelConfig(width=64, layers=8, heads=4, head_width=16, vocabulary=64)
    model = Transformer(size, NoPE(64, 8, 4, 16))
    assert float(model.embedding.weight.detach().std()) == pytest.approx(64**-0.5, rel=0.05)
    for block in model.blocks:
        for last in (block.attention.out.weight, block.feedforward[-1].weight):
            assert float(last.detach().std()) == pytest.approx(0.02 / math.sqrt(16), rel=0.05)


# --- The sinusoidal baseline ---


def waves(positions: range) -> np.ndarray:
    angles = np.outer(positions, [math.exp(-math.log(10000.0) * 2 * i / WIDTH) for i in range(WIDTH // 2)])
    out = np.empty((len(positions), WIDTH))
    out[:, 0::2], out[:, 1::2] = np.sin(angles), np.cos(angles)
    return out


def test_sinusoids_are_added_to_the_tokens_and_never_shifted_in_evaluation():
    model = build(Sinusoidal, SinusoidalConfig(shift=1000))
    expected = plain_logits(model.state_dict(), tokens(), torch.from_numpy(waves(range(7))))
    assert_close(model(tokens()), expected)


def test_training_shifts_each_sequence_by_its_own_amount():
    encoding = Sinusoidal(WIDTH, 1, 1, config=SinusoidalConfig(shift=3)).double().train()
    x = torch.zeros(200, 4, WIDTH, dtype=torch.float64)
    stream = encoding.start(8)
    first = encoding.embed(x, stream)
    stream.seen = 4
    second = encoding.embed(x, stream)  # a later chunk goes on where the first one stopped
    expected = [waves(range(shift, shift + 8)) for shift in range(4)]
    met = set()
    for row in torch.cat((first, second), 1).numpy():
        errors = [np.abs(row - wave).max() for wave in expected]
        assert min(errors) < 1e-12
        met.add(int(np.argmin(errors)))
    assert met == {0, 1, 2, 3}
    encoding.config = SinusoidalConfig(shift=0)
    assert_close(encoding.embed(x[:1], encoding.start(4))[0], waves(range(4)))
