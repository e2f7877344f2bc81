"""The fused attention and position scores, against dense float64: compiled where there is a GPU, else interpreted."""

import math
import os

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
triton = pytest.importorskip("triton")

from prism.device import matmul_precision  # noqa: E402
from prism.errors import UserError  # noqa: E402
from prism.ops import attention_triton  # noqa: E402
from prism.ops.attention import all_position_scores, attend  # noqa: E402
from tests.tolerances import assert_close  # noqa: E402

HALF_ERROR = 2e-3  # of sums of products of float16 numbers, which are exact to 5e-4 each

# batch, heads, queries, keys, features
SIZES = [(2, 3, 1, 1, 5), (2, 2, 5, 5, 16), (1, 2, 17, 17, 32), (1, 3, 33, 33, 5), (2, 2, 5, 22, 16), (1, 2, 1, 40, 32)]


@pytest.fixture(autouse=True)
def _exact_products():
    with matmul_precision("float32"):
        yield


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def compare(run, dense, leaves: dict[str, Tensor], tolerance: float | None = None) -> None:
    """Values, and every gradient for a random upstream gradient, with those of `dense` in float64 on the CPU."""
    exact = {name: leaf.detach().cpu().double().requires_grad_() for name, leaf in leaves.items()}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    out, expected = run(**leaves), dense(**exact)
    assert_close(out, expected, tolerance=tolerance)
    upstream = normal(*out.shape, seed=9)
    got = torch.autograd.grad(out, list(leaves.values()), upstream.to(out.dtype))
    wanted = torch.autograd.grad(expected, list(exact.values()), upstream.cpu().double())
    for name, ours, theirs in zip(leaves, got, wanted, strict=True):
        if theirs.abs().max() < 1e-12:  # one key alone: nothing but rounding is left
            assert ours.abs().max() < 1e-6, name
        else:
            assert_close(ours, theirs, tolerance=tolerance, what=f"gradient of {name}")


# --- Attention ---


def dense_attention(query, key, value, bias=None):
    """Each query by itself, over the keys it sees."""
    rows = []
    for i in range(query.shape[2]):
        seen = key.shape[2] - query.shape[2] + i + 1
        scores = torch.einsum("bhf,bhkf->bhk", query[:, :, i], key[:, :, :seen])
        scores = scores if bias is None else scores + bias[:, :, i, :seen]
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        rows.append(torch.einsum("bhk,bhkf->bhf", weights, value[:, :, :seen]))
    return torch.stack(rows, 2)


def fused(**leaves):
    return attend(**leaves, method="triton")


def parts(batch, heads, queries, keys, features, bias=None) -> dict[str, Tensor]:
    made = {
        "query": normal(batch, heads, queries, features, seed=1) / math.sqrt(features),
        "key": normal(batch, heads, keys, features, seed=2), "value": normal(batch, heads, keys, features, seed=3),
    }
    if bias is not None:
        made["bias"] = normal(*(1 if d in bias else n for d, n in zip("bh", (batch, heads), strict=True)), queries,
                              keys, seed=4)
    return made


@pytest.mark.parametrize("bias", [None, "", "b", "bh"], ids=["no bias", "bias", "one for all batches", "one for all"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_attention_and_its_gradients(size, bias):
    compare(fused, dense_attention, parts(*size, bias))


@pytest.mark.parametrize("whole", [0, 128], ids=["two kernels", "one kernel"])
@pytest.mark.parametrize("size", [(1, 1, 70, 70, 16), (1, 1, 40, 101, 16), (1, 2, 33, 40, 5)], ids=str)
def test_several_blocks_of_queries_and_keys(size, whole, monkeypatch):
    monkeypatch.setattr(attention_triton, "WHOLE", whole)
    compare(fused, dense_attention, parts(*size, bias=""))


def test_more_queries_than_one_program_takes():
    compare(fused, dense_attention, parts(1, 1, 131, 133, 16, bias=""))


@pytest.mark.skipif(DEVICE == "cpu", reason="too much to interpret")
@pytest.mark.parametrize("size", [(100, 7, 85, 85, 32), (3, 8, 284, 284, 64), (2, 3, 128, 129, 128),
                                  (1, 2, 700, 900, 80)], ids=str)
def test_sizes_of_real_models(size):
    compare(fused, dense_attention, parts(*size, bias=""))


def test_values_may_be_wider_or_narrower_than_keys():
    for features, values in ((5, 20), (33, 16)):
        made = parts(2, 2, 9, 9, features, bias="")
        compare(fused, dense_attention, {**made, "value": normal(2, 2, 9, values, seed=5)})


def test_views_of_a_projection_and_of_all_layers_biases():
    def split(projected, biases):
        query, key, value = (part.transpose(1, 2) for part in projected.unbind(2))
        return {"query": query, "key": key, "value": value, "bias": biases.unbind(1)[1]}

    leaves = {"projected": normal(2, 7, 3, 2, 16, seed=1), "biases": normal(2, 3, 2, 7, 7, seed=2)}
    compare(lambda **x: fused(**split(**x)), lambda **x: dense_attention(**split(**x)), leaves)


def test_features_need_not_be_neighbours():
    made = {name: x.transpose(2, 3).contiguous().transpose(2, 3) for name, x in parts(2, 2, 9, 12, 16, "").items()}
    assert not made["query"].is_contiguous()
    compare(fused, dense_attention, made)


def test_the_output_is_ready_to_be_flattened_by_tokens():
    assert fused(**parts(2, 3, 5, 7, 16)).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("level", [1000.0, -1000.0])
def test_what_all_scores_share_does_not_matter(level):
    made, bias = parts(1, 1, 20, 20, 16), torch.full((1, 1, 20, 20), level, device=DEVICE)
    out = fused(**made, bias=bias)
    assert_close(out, dense_attention(**made), tolerance=1e-4)  # the scores themselves are rounded to 6e-5
    assert_close(out, attend(**made, bias=bias, method="reference"))


def test_minus_infinity_hides_a_key():
    made, bias = parts(1, 2, 20, 40, 16), normal(1, 2, 20, 40, seed=6)
    bias[..., :20] = float("-inf")
    kept = {name: x if name == "query" else x[:, :, 20:] for name, x in made.items()}
    assert_close(fused(**made, bias=bias), dense_attention(**kept, bias=bias[..., 20:]))


NO_BFLOAT16 = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies bfloat16 numbers as integers")


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=NO_BFLOAT16)])
def test_half_precision(dtype):
    made = parts(1, 2, 33, 33, 32, bias="")
    halves = {name: x if name == "bias" else x.to(dtype) for name, x in made.items()}
    out = fused(**halves)
    assert out.dtype == dtype
    compare(fused, dense_attention, halves, tolerance=2e-2)
    # Mixed precision may leave queries and keys wider than values.
    assert_close(fused(**{**made, "value": halves["value"]}), out, dtype=torch.bfloat16)


def test_a_bias_nobody_differentiates_costs_no_gradient(monkeypatch):
    made = {name: x if name == "bias" else x.requires_grad_() for name, x in parts(1, 1, 5, 5, 16, "").items()}
    asked = []
    backward = attention_triton.attend_backward
    monkeypatch.setattr(attention_triton, "attend_backward", lambda *x: asked.append(x[-1]) or backward(*x))
    fused(**made).sum().backward()
    assert asked == [False]
    assert made["bias"].grad is None
    assert made["query"].grad.isfinite().all()


def test_the_same_numbers_come_out_every_time():
    made = {name: x.requires_grad_() for name, x in parts(2, 2, 33, 33, 16, "").items()}
    first, second = (torch.autograd.grad(fused(**made).sin().sum(), list(made.values())) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_operator_keeps_torchs_contract():
    made = [x.requires_grad_() for x in parts(2, 2, 5, 7, 5, "").values()]
    torch.library.opcheck(attention_triton.attend, tuple(made))
    torch.library.opcheck(attention_triton.attend, (*made[:3], None))
    query, key, value, bias = (x.detach() for x in made)
    out, lse = attention_triton.attend(query, key, value, bias)
    torch.library.opcheck(attention_triton.attend_backward, (out, query, key, value, bias, out, lse, True))


# --- Position scores ---


def dense_scores(query, key, weight):
    """Algorithm 4, a head and a cursor at a time."""
    heads, cursors = weight.shape
    scores = []
    for head in range(heads):
        mine = range(head * cursors, (head + 1) * cursors)
        scores.append(sum(weight[head, c] * query[:, :, i] @ key[:, :, i].mT for c, i in enumerate(mine)))
    scores = torch.stack(scores, 1)
    return scores.tril(diagonal=key.shape[1] - query.shape[1])


def fused_scores(**leaves):
    return all_position_scores(**leaves, method="triton")


def vectors(batch, heads, cursors, queries, keys, columns, dtype=torch.float32) -> dict[str, Tensor]:
    return {
        "query": normal(batch, queries, heads * cursors, columns, seed=1, dtype=dtype),
        "key": normal(batch, keys, heads * cursors, columns, seed=2, dtype=dtype),
        "weight": normal(heads, cursors, seed=3).abs(),
    }


# batch, heads, cursors, queries, keys, columns
SCORES = [(2, 3, 2, 1, 1, 16), (2, 2, 1, 5, 5, 16), (1, 3, 4, 17, 17, 48), (1, 2, 3, 33, 70, 80), (2, 1, 2, 1, 40, 7),
          (1, 1, 1, 140, 140, 16)]


@pytest.mark.parametrize("size", SCORES, ids=str)
def test_position_scores_and_their_gradients(size):
    compare(fused_scores, dense_scores, vectors(*size))


@pytest.mark.parametrize("size", SCORES[1:3], ids=str)
def test_position_scores_of_half_precision_vectors(size):
    made = vectors(*size, dtype=torch.float16)
    assert fused_scores(**made).dtype == torch.float32
    compare(fused_scores, dense_scores, made, tolerance=HALF_ERROR)


def test_half_precision_vectors_can_have_exact_gradients():
    # For whoever made the vectors and calls the backward form itself: float16 would lose small gradients.
    made = vectors(1, 2, 2, 9, 9, 16, dtype=torch.float16)
    dout = 1e-7 * normal(1, 2, 9, 9, seed=5)
    exact = [x.cpu().double().requires_grad_() for x in made.values()]
    wanted = torch.autograd.grad(dense_scores(*exact), exact, dout.cpu().double())
    for ours, theirs in zip(attention_triton.position_scores_backward(dout, *made.values()), wanted, strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours, theirs)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0])
def test_half_precision_gradients_come_with_a_scale_a_row(size):
    made = vectors(2, 2, 2, 9, 9, 48, dtype=torch.float16)
    dout = size * normal(2, 2, 9, 9, seed=5)
    both, scales, dweight = attention_triton.position_gradients(dout, *made.values())
    assert both.dtype == torch.float16
    assert both.abs().max() <= 1
    exact = attention_triton.position_scores_backward(dout, *made.values())
    for ours, theirs in zip((both.double() * scales[..., None]).chunk(2, dim=2), exact, strict=False):
        assert_close(ours, theirs, tolerance=HALF_ERROR)
    assert torch.equal(dweight, exact[2])


@pytest.mark.skipif(DEVICE == "cpu", reason="too much to interpret")
@pytest.mark.parametrize("size", [(20, 35, 4, 85, 85, 64), (2, 14, 4, 284, 284, 96), (1, 8, 4, 100, 600, 176)],
                         ids=str)
def test_position_scores_of_real_models(size):
    compare(fused_scores, dense_scores, vectors(*size))


def test_position_scores_take_views():
    made = vectors(2, 2, 3, 9, 9, 32)
    for side in ("query", "key"):
        made[side] = made[side].permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    made["weight"] = made["weight"].mT.contiguous().mT
    compare(fused_scores, dense_scores, made)
    summed = {name: x.detach().requires_grad_() for name, x in made.items()}
    fused_scores(**summed).sum().backward()  # an upstream gradient without strides
    exact = {name: x.detach().cpu().double().requires_grad_() for name, x in made.items()}
    dense_scores(**exact).sum().backward()
    for name, x in summed.items():
        assert_close(x.grad, exact[name].grad, what=name)


def test_invisible_entries_pass_no_gradient():
    made = {name: x.requires_grad_() for name, x in vectors(1, 2, 2, 9, 12, 16).items()}
    upstream = torch.full((1, 2, 9, 12), float("nan"), device=DEVICE).triu(diagonal=4)
    out = fused_scores(**made)
    assert not out.triu(diagonal=4).any()
    assert all(not x.any() for x in torch.autograd.grad(out, list(made.values()), upstream))


def test_the_scores_operator_keeps_torchs_contract():
    made = [x.requires_grad_() for x in vectors(1, 2, 2, 5, 7, 16).values()]
    torch.library.opcheck(attention_triton.position_scores, tuple(made))
    dout = normal(1, 2, 5, 7)
    torch.library.opcheck(attention_triton.position_scores_backward, (dout, *(x.detach() for x in made)))


# --- Refusals ---


@pytest.mark.parametrize(("change", "message"), [
    ({"query": normal(2, 2, 5, 16).double(), "key": normal(2, 2, 5, 16).double()}, "needs float32, .* got float64"),
    ({"query": normal(2, 2, 5, 130), "key": normal(2, 2, 5, 130)}, "heads up to 128 wide, got 130"),
    ({"query": normal(2, 2, 6, 16)}, "as many keys as queries, got query \\[2, 2, 6, 16\\]"),
    ({"query": normal(2, 2, 5, 8)}, "needs \\[batch heads tokens width\\]"),
    ({"key": normal(2, 2, 4, 16)}, "needs \\[batch heads tokens width\\]"),
], ids=["dtype", "width", "more queries", "features", "keys"])
def test_attention_the_kernels_cannot_do_is_refused(change, message):
    attend_unchecked = getattr(attend, "__wrapped__", attend)
    with pytest.raises(UserError, match=message):
        attend_unchecked(**{**parts(2, 2, 5, 5, 16), **change}, method="triton")


def test_scores_the_kernels_cannot_do_are_refused():
    made, unchecked = vectors(1, 2, 2, 5, 5, 16), getattr(all_position_scores, "__wrapped__", all_position_scores)
    with pytest.raises(UserError, match="got float64"):
        unchecked(**{name: x.double() for name, x in made.items()}, method="triton")
    with pytest.raises(UserError, match="needs \\[batch tokens cursors columns\\]"):
        unchecked(made["query"], made["key"].half(), made["weight"], method="triton")
    wide = {**made, "query": normal(1, 5, 4, 257), "key": normal(1, 5, 4, 257)}
    with pytest.raises(UserError, match="up to 256 columns, got 257"):
        unchecked(**wide, method="triton")
    with pytest.raises(UserError, match="a cursor for each weight"):
        unchecked(made["query"], made["key"], made["weight"][:1], method="triton")


def test_the_method_is_checked_and_the_processor_too(monkeypatch):
    made = parts(1, 1, 3, 3, 16)
    with pytest.raises(UserError, match="did you mean 'triton'"):
        getattr(attend, "__wrapped__", attend)(**made, method="tritn")  # as the annotations, unchecked, would let it
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="needs CUDA tensors, got one on cpu"):
        attend(**{name: x.cpu() for name, x in made.items()}, method="triton")
