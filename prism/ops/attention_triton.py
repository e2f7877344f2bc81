"""Fused attention with a bias, and all heads' position scores, as Triton kernels; attention.py has the reference forms.

Attention keeps each query's log-sum-exp and makes the weights p again in the backward pass:

    s = <q, k> + bias;  p = exp(s - lse);  ds = p (<dout, v> - delta);  delta = <dout, out>
    dv = p' dout;  dq = ds k;  dk = ds' q;  dbias = ds

Up to WHOLE queries and WHOLE_WIDTH features, one program does a head's whole backward pass. Beyond, it takes two
kernels: rows (dq, dbias, delta), then keys (dk, dv). Nothing is added up by atomics, so the same numbers come out
every time.

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
WHOLE, WHOLE_WIDTH = 128, 64  # queries and features up to which a head's backward pass is one program's

# Rows, columns, warps and pipeline stages of a tile, for widths up to 32, 64 and more; products of exact float32 take
# smaller ones. Chosen by what sm_90's compiler says: no spills, and several programs to a multiprocessor.
TILES: dict[tuple[str, bool], list[tuple[int, int, int, int]]] = {
    ("forward", False): [(64, 32, 4, 2), (64, 32, 8, 2), (64, 32, 8, 2)],
    ("forward", True): [(64, 32, 8, 2), (64, 32, 8, 2), (32, 16, 8, 1)],
    ("whole", False): [(128, 32, 8, 1), (128, 16, 8, 1)],
    ("whole", True): [(128, 16, 8, 1), (128, 16, 8, 1)],
    ("rows", False): [(64, 16, 8, 1), (64, 16, 8, 1), (64, 16, 8, 1)],
    ("rows", True): [(64, 16, 8, 1), (64, 16, 8, 1), (32, 16, 4, 1)],
    ("keys", False): [(32, 64, 8, 1), (32, 64, 8, 1), (32, 64, 8, 1)],
    ("keys", True): [(32, 32, 8, 1), (16, 64, 8, 1), (16, 32, 8, 1)],
    ("scores", False): [(64, 64, 8, 2)] * 3,
    ("scores", True): [(64, 64, 8, 1)] * 3,
    ("score gradients", False): [(64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)],
    ("score gradients", True): [(64, 32, 8, 1), (64, 32, 8, 1), (32, 32, 8, 1)],
}


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
def _position_backward(dout, own, other, weight, gradient, scales, sums, dout_strides, own_strides, other_strides,
                       gradient_strides, scales_strides, heads, tokens, others, CURSORS: tl.constexpr,
                       WIDTH: tl.constexpr, KEYS: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
                       COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Gradient of a block of one side's vectors: weight_c (dout other). SCALED: each row over its largest entry.

    The queries' side also keeps sum_t <own, dout other>, from which the weights' gradient follows. For the KEYS' side
    `dout_strides` are those of the transpose.
    """
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    width = tl.arange(0, CHUNK)
    dout = _at(dout, dout_strides, batch, head)
    begin, end = 0, others
    if KEYS:  # of the queries, those that see any of these keys; the queries are the last of the keys
        begin = max(0, tl.program_id(1) * ROWS - (tokens - others)) // COLUMNS * COLUMNS
    else:
        end = min(others, others - tokens + (tl.program_id(1) + 1) * ROWS)
    for cursor in range(CURSORS):  # outside: the slopes then come from the cache
        slot = head * CURSORS + cursor
        vectors = _at(other, (other_strides[0], other_strides[2]), batch, slot)
        total = tl.zeros([ROWS, CHUNK], tl.float32)
        for start in range(begin, end, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            seen = (rows < tokens)[:, None] & (columns < others)[None, :]
            if KEYS:
                seen = seen & (rows[:, None] <= tokens - others + columns[None, :])
            else:
                seen = seen & (columns[None, :] <= others - tokens + rows[:, None])
            slopes = tl.load(dout + rows[:, None] * dout_strides[2] + columns[None, :] * dout_strides[3], mask=seen,
                             other=0.0)
            tile = _load(vectors, columns, width, other_strides[1], other_strides[3], others, WIDTH)
            total += tl.dot(slopes.to(tl.float32), tile.to(tl.float32), input_precision=PRECISION)
        if not KEYS:
            mine = _load(_at(own, (own_strides[0], own_strides[2]), batch, slot), rows, width, own_strides[1],
                         own_strides[3], tokens, WIDTH)
            block = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
            tl.store(sums + block * CURSORS + cursor, tl.sum(tl.sum(mine.to(tl.float32) * total, 1), 0))
        total = total * tl.load(weight + slot)
        if SCALED:
            largest = tl.max(tl.abs(total), 1)
            largest = tl.where(largest > 0, largest, 1.0)
            tl.store(_at(scales, (scales_strides[0], scales_strides[2]), batch, slot) + rows * scales_strides[1],
                     largest, mask=rows < tokens)
            total = total / largest[:, None]
        _store(_at(gradient, (gradient_strides[0], gradient_strides[2]), batch, slot),
               total.to(gradient.dtype.element_ty), rows, width, gradient_strides[1], gradient_strides[3], tokens,
               WIDTH)


# --- What is launched, and how autograd and torch.compile see it ---


def _precision(half: bool = False) -> str:
    """How float32 products are taken: as torch's own are. Exact ones of half-precision vectors need no more than 3."""
    if _takes_tf32():
        return "tf32"
    return "tf32x3" if half else "ieee"


def _takes_tf32() -> bool:
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _padded(size: int) -> int:
    return int(max(16, triton.next_power_of_2(size)))


def _tile(kind: str, like: Tensor, width: int, rows: int, columns: int) -> dict[str, int]:
    """The launch options of a tile from the table, cut to the problem's size."""
    exact = like.dtype == torch.float32 and not _takes_tf32()
    most_rows, most_columns, warps, stages = TILES[kind, exact][(width > 32) + (width > 64)]
    rows, columns = min(most_rows, _padded(rows)), min(most_columns, _padded(columns))
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": min(warps, max(1, rows * columns // 64)),
            "num_stages": stages}


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
    given, width = _or_stand_in(bias, query), _padded(max(features, values))
    tile = _tile("forward", query, width, queries, keys)
    with torch.cuda.device_of(query):
        _forward[(batch * heads, triton.cdiv(queries, tile["ROWS"]))](
            query, key, value, given, out, lse, query.stride(), key.stride(), value.stride(), given.stride(),
            out.stride(), heads, queries, keys, FEATURES=features, VALUES=values, BIASED=bias is not None, WIDTH=width,
            PRECISION=_precision(), **tile,
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
    given, width = _or_stand_in(bias, query), _padded(max(features, values))
    whole = queries <= WHOLE and width <= WHOLE_WIDTH
    delta = None if whole else torch.empty_like(lse)
    sizes: dict[str, Any] = {"FEATURES": features, "VALUES": values, "BIASED": bias is not None, "WIDTH": width,
                             "PRECISION": _precision()}
    with torch.cuda.device_of(query):
        tile = _tile("whole" if whole else "rows", query, width, queries, keys)
        _backward_rows[(batch * heads, triton.cdiv(queries, tile["ROWS"]))](
            query, key, value, given, out, dout, lse, delta, dq, dk, dv, dbias, query.stride(), key.stride(),
            value.stride(), given.stride(), out.stride(), dout.stride(), dq.stride(), dk.stride(), dv.stride(),
            dbias.stride(), heads, queries, keys, BIAS_GRADIENT=bias_gradient, WHOLE=whole, **sizes, **tile,
        )
        if not whole:
            tile = _tile("keys", query, width, queries, keys)
            _backward_keys[(batch * heads, triton.cdiv(keys, tile["COLUMNS"]))](
                query, key, value, given, dout, lse, delta, dk, dv, query.stride(), key.stride(), value.stride(),
                given.stride(), dout.stride(), dk.stride(), dv.stride(), heads, queries, keys, **sizes, **tile,
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
    tile = _tile("scores", query, width, queries, keys)
    with torch.cuda.device_of(query):
        _position_forward[(batch * heads, triton.cdiv(queries, tile["ROWS"]), triton.cdiv(keys, tile["COLUMNS"]))](
            query, key, weight.contiguous(), out, query.stride(), key.stride(), heads, queries, keys, CURSORS=cursors,
            WIDTH=width, CHUNK=min(_padded(width), 64), PRECISION=_precision(), **tile,
        )
    return out


def _position_gradients(
    dout: Tensor, query: Tensor, key: Tensor, weight: Tensor, dq: Tensor, dk: Tensor,
    scales: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Fills the vectors' gradients, and their scales if they have some; returns the weights' gradient."""
    (batch, _, _, width), keys, (heads, cursors) = query.shape, key.shape[1], weight.shape
    tile = _tile("score gradients", query, width, keys, keys)
    blocks = triton.cdiv(query.shape[1], tile["ROWS"])
    sums = query.new_empty(batch, heads, blocks, cursors, dtype=torch.float32)
    sides = (dout, query, key, dq), (dout.mT, key, query, dk)
    with torch.cuda.device_of(query):
        for side, (slopes, own, other, gradient) in enumerate(sides):
            scale = sums if scales is None else scales[side]
            _position_backward[(batch * heads, triton.cdiv(own.shape[1], tile["ROWS"]))](
                slopes, own, other, weight.contiguous(), gradient, scale, sums, slopes.stride(), own.stride(),
                other.stride(), gradient.stride(), scale.stride(), heads, own.shape[1], other.shape[1],
                CURSORS=cursors, WIDTH=width, KEYS=side == 1, SCALED=scales is not None, CHUNK=_padded(width),
                PRECISION=_precision(query.dtype != torch.float32), **tile,
            )
    return sums.sum((0, 2)).to(weight.dtype)


def position_gradients(
    dout: Tensor, query: Tensor, key: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for whoever made the vectors and wants them small: of queries' then keys' vectors along dimension 2,
    in the vectors' dtype, each row to be multiplied by its scale [batch time cursors]; and of weight. Queries and keys
    are the same tokens."""
    batch, time, cursors, width = query.shape
    gradient = query.new_empty(batch, time, 2 * cursors, width)
    scales = query.new_empty(batch, time, 2 * cursors, dtype=torch.float32)
    of_query, of_key = gradient.chunk(2, dim=2)
    q_scales, k_scales = scales.chunk(2, dim=2)
    dweight = _position_gradients(dout, query, key, weight, of_query, of_key, (q_scales, k_scales))
    return gradient, scales, dweight


@torch.library.custom_op("prism::position_scores_backward", mutates_args=())
def position_scores_backward(dout: Tensor, query: Tensor, key: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query and key, in float32 whatever these are, and of weight."""
    dq, dk = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (query, key))
    return dq, dk, _position_gradients(dout, query, key, weight, dq, dk, None)


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
