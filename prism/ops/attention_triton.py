"""Fused attention with a bias, and all heads' position scores, as Triton kernels; attention.py has the reference forms.

Attention keeps each query's log-sum-exp and makes the weights p again in the backward pass:

    s = <q, k> + bias;  p = exp(s - lse);  ds = p (<dout, v> - delta);  delta = <dout, out>
    dv = p' dout;  dq = ds k;  dk = ds' q;  dbias = ds

Up to WHOLE queries, one program does a head's whole backward pass. Longer ones take two kernels: rows (dq, dbias,
delta), then keys (dk, dv). Nothing is added up by atomics, so the same numbers come out every time.

Names in kernels: rows = the queries a program holds; columns = the keys that pass by. A tile's edge is padded: loads
beyond it give 0, scores beyond it -inf. Strides are tuples in the order of a tensor's dimensions.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
from typing import Any, no_type_check

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
WHOLE = 128  # queries up to which a head's backward pass is one program's


@triton.jit
@no_type_check
def _load(base, rows, columns, stride_row, stride_column, row_end, column_end):
    """A tile, with 0 where it sticks out."""
    inside = (rows < row_end)[:, None] & (columns < column_end)[None, :]
    return tl.load(base + rows[:, None] * stride_row + columns[None, :] * stride_column, mask=inside, other=0.0)


@triton.jit
@no_type_check
def _store(base, tile, rows, columns, stride_row, stride_column, row_end, column_end):
    inside = (rows < row_end)[:, None] & (columns < column_end)[None, :]
    tl.store(base + rows[:, None] * stride_row + columns[None, :] * stride_column, tile, mask=inside)


@triton.jit
@no_type_check
def _at(pointer, strides, batch, head):
    """Where a head of a [batch heads tokens width] tensor begins. 64 bits: whole tensors may exceed 2^31 elements."""
    return pointer + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
@no_type_check
def _exp(x):
    """The chip's own power of two. Differences come in, so that large scores lose nothing to the factor."""
    return tl.exp2(x * LOG2E)


@triton.jit
@no_type_check
def _scores(q, k, bias, rows, columns, queries, keys, stride_row, stride_column, BIASED: tl.constexpr,
            PRECISION: tl.constexpr):
    """Scores of a tile, -inf where the key is not visible."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if BIASED:
        scores += _load(bias, rows, columns, stride_row, stride_column, queries, keys).to(tl.float32)
    seen = (rows < queries)[:, None] & (columns < keys)[None, :] & (columns[None, :] <= keys - queries + rows[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
@no_type_check
def _forward(q, k, v, bias, out, lse, q_strides, k_strides, v_strides, bias_strides, out_strides, heads, queries, keys,
             FEATURES: tl.constexpr, VALUES: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    k, v = _at(k, k_strides, batch, head), _at(v, v_strides, batch, head)
    bias = _at(bias, bias_strides, batch, head)
    q_tile = _load(_at(q, q_strides, batch, head), rows, width, q_strides[2], q_strides[3], queries, FEATURES)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, min(keys, keys - queries + (tl.program_id(1) + 1) * ROWS), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k_tile = _load(k, columns, width, k_strides[2], k_strides[3], keys, FEATURES)
        scores = _scores(q_tile, k_tile, bias, rows, columns, queries, keys, bias_strides[2], bias_strides[3], BIASED,
                         PRECISION)
        higher = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf - -inf would be NaN
        p = _exp(scores - level[:, None])
        shrink = _exp(top - level)
        v_tile = _load(v, columns, width, v_strides[2], v_strides[3], keys, VALUES)
        total = total * shrink + tl.sum(p, 1)
        mixed = mixed * shrink[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        top = higher
    total = tl.where(rows < queries, total, 1.0)
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    _store(_at(out, out_strides, batch, head), mixed, rows, width, out_strides[2], out_strides[3], queries, VALUES)
    tl.store(lse + tl.program_id(0).to(tl.int64) * queries + rows, top + tl.log(total), mask=rows < queries)


@triton.jit
@no_type_check
def _weights(q, k, v, dout, lse, delta, bias, rows, columns, queries, keys, stride_row, stride_column,
             BIASED: tl.constexpr, PRECISION: tl.constexpr):
    """p and ds of a tile."""
    scores = _scores(q, k, bias, rows, columns, queries, keys, stride_row, stride_column, BIASED, PRECISION)
    p = _exp(scores - lse[:, None])
    return p, p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) - delta[:, None])


@triton.jit
@no_type_check
def _backward_rows(q, k, v, bias, out, dout, lse, delta, dq, dk, dv, dbias, q_strides, k_strides, v_strides,
                   bias_strides, out_strides, dout_strides, dq_strides, dk_strides, dv_strides, dbias_strides, heads,
                   queries, keys, FEATURES: tl.constexpr, VALUES: tl.constexpr, BIASED: tl.constexpr,
                   BIAS_GRADIENT: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """dq, dbias and delta of a block of queries; where these are WHOLE, all there are, dk and dv too."""
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    k, v, dk, dv = (_at(k, k_strides, batch, head), _at(v, v_strides, batch, head), _at(dk, dk_strides, batch, head),
                    _at(dv, dv_strides, batch, head))
    bias, dbias = _at(bias, bias_strides, batch, head), _at(dbias, dbias_strides, batch, head)
    q_tile = _load(_at(q, q_strides, batch, head), rows, width, q_strides[2], q_strides[3], queries, FEATURES)
    dout_tile = _load(_at(dout, dout_strides, batch, head), rows, width, dout_strides[2], dout_strides[3], queries,
                      VALUES)
    out_tile = _load(_at(out, out_strides, batch, head), rows, width, out_strides[2], out_strides[3], queries, VALUES)
    delta_rows = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    of_head = tl.program_id(0).to(tl.int64) * queries
    lse_rows = tl.load(lse + of_head + rows, mask=rows < queries, other=0.0)
    if not WHOLE:
        tl.store(delta + of_head + rows, delta_rows, mask=rows < queries)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    end = min(keys, keys - queries + (tl.program_id(1) + 1) * ROWS)
    for start in range(0, end, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k_tile = _load(k, columns, width, k_strides[2], k_strides[3], keys, FEATURES)
        v_tile = _load(v, columns, width, v_strides[2], v_strides[3], keys, VALUES)
        p, ds = _weights(q_tile, k_tile, v_tile, dout_tile, lse_rows, delta_rows, bias, rows, columns, queries, keys,
                         bias_strides[2], bias_strides[3], BIASED, PRECISION)
        if BIAS_GRADIENT:
            _store(dbias, ds, rows, columns, dbias_strides[2], dbias_strides[3], queries, keys)
        ds = ds.to(k_tile.dtype)
        total += tl.dot(ds, k_tile, input_precision=PRECISION)
        if WHOLE:
            dk_tile = tl.dot(tl.trans(ds), q_tile, input_precision=PRECISION)
            _store(dk, dk_tile.to(dk.dtype.element_ty), columns, width, dk_strides[2], dk_strides[3], keys, FEATURES)
            dv_tile = tl.dot(tl.trans(p.to(dout_tile.dtype)), dout_tile, input_precision=PRECISION)
            _store(dv, dv_tile.to(dv.dtype.element_ty), columns, width, dv_strides[2], dv_strides[3], keys, VALUES)
    if BIAS_GRADIENT:  # what these queries cannot see is written too
        for start in range(tl.cdiv(end, COLUMNS) * COLUMNS, keys, COLUMNS):
            _store(dbias, tl.zeros([ROWS, COLUMNS], tl.float32), rows, start + tl.arange(0, COLUMNS), dbias_strides[2],
                   dbias_strides[3], queries, keys)
    _store(_at(dq, dq_strides, batch, head), total.to(dq.dtype.element_ty), rows, width, dq_strides[2], dq_strides[3],
           queries, FEATURES)


@triton.jit
@no_type_check
def _backward_keys(q, k, v, bias, dout, lse, delta, dk, dv, q_strides, k_strides, v_strides, bias_strides,
                   dout_strides, dk_strides, dv_strides, heads, queries, keys, FEATURES: tl.constexpr,
                   VALUES: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """dk and dv of a block of keys; the queries pass by."""
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    width = tl.arange(0, WIDTH)
    q, dout = _at(q, q_strides, batch, head), _at(dout, dout_strides, batch, head)
    bias = _at(bias, bias_strides, batch, head)
    k_tile = _load(_at(k, k_strides, batch, head), columns, width, k_strides[2], k_strides[3], keys, FEATURES)
    v_tile = _load(_at(v, v_strides, batch, head), columns, width, v_strides[2], v_strides[3], keys, VALUES)
    of_head = tl.program_id(0).to(tl.int64) * queries
    dk_tile = tl.zeros([COLUMNS, WIDTH], tl.float32)
    dv_tile = tl.zeros([COLUMNS, WIDTH], tl.float32)
    first = max(0, tl.program_id(1) * COLUMNS - (keys - queries))  # the first query that sees any of these keys
    for start in range(first // ROWS * ROWS, queries, ROWS):
        rows = start + tl.arange(0, ROWS)
        q_tile = _load(q, rows, width, q_strides[2], q_strides[3], queries, FEATURES)
        dout_tile = _load(dout, rows, width, dout_strides[2], dout_strides[3], queries, VALUES)
        lse_rows = tl.load(lse + of_head + rows, mask=rows < queries, other=0.0)
        delta_rows = tl.load(delta + of_head + rows, mask=rows < queries, other=0.0)
        p, ds = _weights(q_tile, k_tile, v_tile, dout_tile, lse_rows, delta_rows, bias, rows, columns, queries, keys,
                         bias_strides[2], bias_strides[3], BIASED, PRECISION)
        dk_tile += tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile, input_precision=PRECISION)
        dv_tile += tl.dot(tl.trans(p.to(dout_tile.dtype)), dout_tile, input_precision=PRECISION)
    _store(_at(dk, dk_strides, batch, head), dk_tile.to(dk.dtype.element_ty), columns, width, dk_strides[2],
           dk_strides[3], keys, FEATURES)
    _store(_at(dv, dv_strides, batch, head), dv_tile.to(dv.dtype.element_ty), columns, width, dv_strides[2],
           dv_strides[3], keys, VALUES)


@triton.jit
@no_type_check
def _position_forward(q, k, weight, out, q_strides, k_strides, heads, queries, keys, CURSORS: tl.constexpr,
                      WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
                      PRECISION: tl.constexpr):
    """A tile of a head's scores (Algorithm 4), cursor by cursor: weights multiply sums that are float32 already."""
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if tl.program_id(2) * COLUMNS < keys - queries + (tl.program_id(1) + 1) * ROWS:
        for cursor in range(CURSORS):
            q_cursor = _at(q, (q_strides[0], q_strides[2]), batch, head * CURSORS + cursor)
            k_cursor = _at(k, (k_strides[0], k_strides[2]), batch, head * CURSORS + cursor)
            product = tl.zeros([ROWS, COLUMNS], tl.float32)
            for start in range(0, WIDTH, CHUNK):
                width = start + tl.arange(0, CHUNK)
                q_tile = _load(q_cursor, rows, width, q_strides[1], q_strides[3], queries, WIDTH)
                k_tile = _load(k_cursor, columns, width, k_strides[1], k_strides[3], keys, WIDTH)
                product += tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            total += product * tl.load(weight + head * CURSORS + cursor)
    seen = columns[None, :] <= keys - queries + rows[:, None]
    _store(out + tl.program_id(0).to(tl.int64) * queries * keys, tl.where(seen, total, 0.0), rows, columns, keys, 1,
           queries, keys)


@triton.jit
@no_type_check
def _position_backward(dout, own, other, weight, gradient, sums, dout_strides, own_strides, other_strides, heads,
                       tokens, others, CURSORS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
                       ROWS: tl.constexpr, OTHERS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Gradient of one side's vectors, all cursors of a head side by side as columns: weight_c (dout other).

    The queries' side also keeps sum_t own (dout other) of each column, from which the weights' gradient follows. For
    the KEYS' side `dout_strides` are those of the transpose.
    """
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    cursor, inner = head * CURSORS + columns // WIDTH, columns % WIDTH
    inside = columns < CURSORS * WIDTH
    other += batch.to(tl.int64) * other_strides[0]
    dout = _at(dout, dout_strides, batch, head)
    begin, end = 0, others
    if KEYS:  # of the queries, those that see any of these keys; the queries are the last of the keys
        begin = max(0, tl.program_id(1) * ROWS - (tokens - others)) // OTHERS * OTHERS
    else:
        end = min(others, others - tokens + (tl.program_id(1) + 1) * ROWS)
    total = tl.zeros([ROWS, CHUNK], tl.float32)
    for start in range(begin, end, OTHERS):
        across = start + tl.arange(0, OTHERS)
        seen = (rows < tokens)[:, None] & (across < others)[None, :]
        if KEYS:
            seen = seen & (rows[:, None] <= tokens - others + across[None, :])
        else:
            seen = seen & (across[None, :] <= others - tokens + rows[:, None])
        slope = tl.load(dout + rows[:, None] * dout_strides[2] + across[None, :] * dout_strides[3], mask=seen,
                        other=0.0)
        vectors = tl.load(other + across[:, None] * other_strides[1] + cursor[None, :] * other_strides[2]
                          + inner[None, :] * other_strides[3],
                          mask=(across < others)[:, None] & inside[None, :], other=0.0)
        total += tl.dot(slope.to(tl.float32), vectors.to(tl.float32), input_precision=PRECISION)
    here = (rows < tokens)[:, None] & inside[None, :]
    row = batch.to(tl.int64) * tokens + rows
    flat = row[:, None] * (heads * CURSORS * WIDTH) + head * CURSORS * WIDTH + columns[None, :]
    scale = tl.load(weight + cursor, mask=inside, other=0.0)
    tl.store(gradient + flat, total * scale[None, :], mask=here)
    if not KEYS:
        mine = tl.load(own + batch.to(tl.int64) * own_strides[0] + rows[:, None] * own_strides[1]
                       + cursor[None, :] * own_strides[2] + inner[None, :] * own_strides[3], mask=here, other=0.0)
        block = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(sums + block * (CURSORS * WIDTH) + columns, tl.sum(mine.to(tl.float32) * total, 0), mask=inside)


# --- What is launched, and how autograd and torch.compile see it ---


def _precision(half: bool = False) -> str:
    """How float32 products are taken: as torch's own are. Exact ones of half-precision vectors need no more than 3."""
    if torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "tf32x3" if half else "ieee"


def _tile(tokens: int, largest: int) -> int:
    return int(min(largest, max(16, triton.next_power_of_2(tokens))))


def _heads_last(like: Tensor, tokens: int | torch.SymInt, width: int | torch.SymInt) -> Tensor:
    """Empty [batch heads tokens width] whose memory is [batch tokens heads width]: ready to be flattened by tokens."""
    return like.new_empty(like.shape[0], tokens, like.shape[1], width).transpose(1, 2)


def _or_stand_in(bias: Tensor | None, query: Tensor) -> Tensor:
    """A pointer for kernels that don't follow it."""
    return query if bias is None else bias


@torch.library.custom_op("prism::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention's output, and the log-sum-exp of each query's scores."""
    batch, heads, queries, features = query.shape
    keys, values = value.shape[2:]
    out = _heads_last(query, queries, values)
    lse = query.new_empty(batch, heads, queries, dtype=torch.float32)
    rows, given = _tile(queries, 64), _or_stand_in(bias, query)
    with torch.cuda.device_of(query):
        _forward[(batch * heads, triton.cdiv(queries, rows))](
            query, key, value, given, out, lse, query.stride(), key.stride(), value.stride(), given.stride(),
            out.stride(), heads, queries, keys, FEATURES=features, VALUES=values, BIASED=bias is not None, ROWS=rows,
            COLUMNS=_tile(keys, 64), WIDTH=_tile(max(features, values), 128), PRECISION=_precision(), num_warps=4,
            num_stages=2,
        )
    return out, lse


@torch.library.custom_op("prism::attend_backward", mutates_args=())
def attend_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias; the last is empty unless asked for."""
    dq, dk, dv, dbias = _attend_gradients(dout, query, key, value, bias, out, lse, bias_gradient)
    batch, heads, queries, features = query.shape
    keys, values = value.shape[2:]
    whole, given = queries <= WHOLE, _or_stand_in(bias, query)
    delta = None if whole else torch.empty_like(lse)
    sizes: dict[str, Any] = {
        "FEATURES": features, "VALUES": values, "BIASED": bias is not None, "PRECISION": _precision(),
        "WIDTH": _tile(max(features, values), 128), "num_stages": 1,
    }
    rows, columns = _tile(queries, WHOLE if whole else 64), _tile(keys, 32)
    with torch.cuda.device_of(query):
        _backward_rows[(batch * heads, triton.cdiv(queries, rows))](
            query, key, value, given, out, dout, lse, delta, dq, dk, dv, dbias, query.stride(), key.stride(),
            value.stride(), given.stride(), out.stride(), dout.stride(), dq.stride(), dk.stride(), dv.stride(),
            dbias.stride(), heads, queries, keys, BIAS_GRADIENT=bias_gradient, WHOLE=whole, ROWS=rows,
            COLUMNS=columns, num_warps=8 if rows > 64 else 4, **sizes,
        )
        if not whole:
            rows, columns = 32, 64
            _backward_keys[(batch * heads, triton.cdiv(keys, columns))](
                query, key, value, given, dout, lse, delta, dk, dv, query.stride(), key.stride(), value.stride(),
                given.stride(), dout.stride(), dk.stride(), dv.stride(), heads, queries, keys, ROWS=rows,
                COLUMNS=columns, num_warps=4, **sizes,
            )
    return dq, dk, dv, dbias


def _attend_gradients(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_heads_last(x, x.shape[2], x.shape[3]) for x in (query, key, value))
    shape = (*query.shape[:3], key.shape[2]) if bias_gradient else (0, 0, 0, 0)
    return dq, dk, dv, query.new_empty(shape, dtype=torch.float32)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return _heads_last(query, query.shape[2], value.shape[3]), query.new_empty(query.shape[:3], dtype=torch.float32)


attend_backward.register_fake(_attend_gradients)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _attend_autograd(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return None, None, None, None
    query, key, value, bias, out, lse = ctx.saved_tensors
    wanted = bias is not None and ctx.needs_input_grad[3]
    dq, dk, dv, dbias = attend_backward(dout, query, key, value, bias, out, lse, wanted)
    return dq, dk, dv, dbias.to(bias.dtype) if wanted else None


attend.register_autograd(_attend_autograd, setup_context=_keep)


@torch.library.custom_op("prism::position_scores", mutates_args=())
def position_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """All heads' position scores; see attention.all_position_scores."""
    (batch, queries, _, width), keys, (heads, cursors) = query.shape, key.shape[1], weight.shape
    out = weight.new_empty(batch, heads, queries, keys)
    rows, columns = (_tile(tokens, 128 if tokens <= 128 else 64) for tokens in (queries, keys))
    with torch.cuda.device_of(query):
        _position_forward[(batch * heads, triton.cdiv(queries, rows), triton.cdiv(keys, columns))](
            query, key, weight.contiguous(), out, query.stride(), key.stride(), heads, queries, keys, CURSORS=cursors,
            WIDTH=width, ROWS=rows, COLUMNS=columns, CHUNK=_tile(width, 64), PRECISION=_precision(),
            num_warps=8 if rows * columns > 8192 else 4, num_stages=2,
        )
    return out


@torch.library.custom_op("prism::position_scores_backward", mutates_args=())
def position_scores_backward(dout: Tensor, query: Tensor, key: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key (float32 whatever these are: autograd would round them) and weight."""
    (batch, queries, _, width), keys, (heads, cursors) = query.shape, key.shape[1], weight.shape
    dq, dk = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (query, key))
    rows, chunk = _tile(max(queries, keys), 64), _tile(cursors * width, 128)
    sums = query.new_empty(batch, heads, triton.cdiv(queries, rows), cursors, width, dtype=torch.float32)
    flipped = dout.mT
    with torch.cuda.device_of(query):
        for side, slopes, own, other, gradient in ((0, dout, query, key, dq), (1, flipped, key, query, dk)):
            tokens, others = own.shape[1], other.shape[1]
            _position_backward[(batch * heads, triton.cdiv(tokens, rows), triton.cdiv(cursors * width, chunk))](
                slopes, own, other, weight.contiguous(), gradient, sums, slopes.stride(), own.stride(),
                other.stride(), heads, tokens, others, CURSORS=cursors, WIDTH=width, KEYS=bool(side), ROWS=rows,
                OTHERS=_tile(others, 32), CHUNK=chunk, PRECISION=_precision(query.dtype != torch.float32),
                num_warps=4, num_stages=2,
            )
    return dq, dk, sums.sum((0, 2, 4)).to(weight.dtype)


@position_scores.register_fake
def _(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(query.shape[0], weight.shape[0], query.shape[1], key.shape[1])


@position_scores_backward.register_fake
def _(dout: Tensor, query: Tensor, key: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (query, key))
    return dq, dk, torch.empty_like(weight, memory_format=torch.contiguous_format)


def _position_autograd(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, weight = ctx.saved_tensors
    dq, dk, dweight = position_scores_backward(dout, query, key, weight)
    return dq.to(query.dtype), dk.to(key.dtype), dweight


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


position_scores.register_autograd(_position_autograd, setup_context=_keep_inputs)
