"""The scan of Algorithm 1 as two Triton kernels: a whole sequence in registers, forward and backward.

A chain (one cursor of one sequence) is held by LANES threads, K bins each: bin = K * lane + k, as K separate tensors
of shape [LANES, chains] (lanes first: Triton then keeps all loads in one layout). A shift by one bin is then another
register, and only two values a step cross lanes. K is a compile-time constant and need not be a power of two. Names
of tensors follow histogram_adjoint.py:

    x = u + epsilon;  h' = x^gamma / sum x^gamma;  a = gradient of u;  g = gradient of h'

Rows of histograms are kept in the order in which lanes write them (`row_order` in histogram_triton.py): consumers
permute their tables once instead of permuting every row. 16-bit rows hold the bins 2j and 2j + 1 of a lane side by
side, in one 32-bit store.

The forward keeps, beside the histograms, log2 of each step's normaliser; the backward makes everything else again
from the histogram one step earlier: two special functions a bin, as the forward.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _log2(x, FAST: tl.constexpr):
    if FAST:  # tl.log2 is a polynomial of twenty instructions; the chip has one
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True,
                                         pack=1)
    else:
        return tl.log2(x)


@triton.jit
@no_type_check
def _exp2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True,
                                         pack=1)
    else:
        return tl.exp2(x)


@triton.jit
@no_type_check
def _reciprocal(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True,
                                         pack=1)
    else:
        return 1.0 / x


@triton.jit
@no_type_check
def _fma(a, b, c):
    return tl.fma(a, b, c)


@triton.jit
@no_type_check
def _tree_sum(values, N: tl.constexpr):
    """Sum of a tuple, in four strands so that additions don't wait for one another."""
    s0 = values[0]
    s1 = tl.zeros_like(s0)
    s2 = tl.zeros_like(s0)
    s3 = tl.zeros_like(s0)
    for k in tl.static_range(1, N):
        if k % 4 == 0:
            s0 += values[k]
        elif k % 4 == 1:
            s1 += values[k]
        elif k % 4 == 2:
            s2 += values[k]
        else:
            s3 += values[k]
    return (s0 + s1) + (s2 + s3)


@triton.jit
@no_type_check
def _tree_max(values, N: tl.constexpr):
    m0 = values[0]
    m1 = values[0]
    for k in tl.static_range(1, N):
        if k % 2 == 0:
            m0 = tl.maximum(m0, values[k])
        else:
            m1 = tl.maximum(m1, values[k])
    return tl.maximum(m0, m1)


@triton.jit
@no_type_check
def _moved(h, w, lane, below, above, epsilon, K: tl.constexpr, L: tl.constexpr):
    """x = u + epsilon for every bin: Algorithm 1 (2) and (3), the clamps included. `w` are the six weights."""
    MID: tl.constexpr = L // 2
    UP: tl.constexpr = min(MID + 1, L - 1)
    DOWN: tl.constexpr = max(MID - 1, 0)
    LAST: tl.constexpr = L - 1
    left = tl.gather(h[K - 1], below, 0)
    left = tl.where(lane == 0, 0.0, left)
    right = tl.gather(h[0], above, 0)
    right = tl.where(lane == above, 0.0, right)
    x = ()
    for k in tl.static_range(K):
        if k == 0:
            before = left
        else:
            before = h[k - 1]
        if k == K - 1:
            after = right
        else:
            after = h[k + 1]
        u = _fma(w[4], h[k], _fma(w[3], before, _fma(w[5], after, epsilon)))
        if k == 0:
            u += tl.where(lane == 0, w[5] * h[0], 0.0)
        if k == LAST % K:
            u += tl.where(lane == LAST // K, w[3] * h[k], 0.0)
        if k == UP % K:
            u += tl.where(lane == UP // K, w[0], 0.0)
        if k == MID % K:
            u += tl.where(lane == MID // K, w[1], 0.0)
        if k == DOWN % K:
            u += tl.where(lane == DOWN // K, w[2], 0.0)
        x = x + (u,)
    return x


@triton.jit
@no_type_check
def _load_weights(pointer, stride, mask):
    return (
        tl.load(pointer, mask, 0.0), tl.load(pointer + stride, mask, 0.0), tl.load(pointer + 2 * stride, mask, 0.0),
        tl.load(pointer + 3 * stride, mask, 0.0), tl.load(pointer + 4 * stride, mask, 0.0),
        tl.load(pointer + 5 * stride, mask, 0.0),
    )


@triton.jit
@no_type_check
def _add_copied(x, pointer, lane, inside, first, width, K: tl.constexpr):
    """x plus the copied mass: columns of `copied` stand at the bins first, first + 1, ..."""
    out = ()
    for k in tl.static_range(K):
        column = K * lane + k - first
        out = out + (x[k] + tl.load(pointer + column, inside & (column >= 0) & (column < width), 0.0),)
    return out


@triton.jit
@no_type_check
def _store_row(pointer, h, lane, inside, K: tl.constexpr, LANES: tl.constexpr, HALF: tl.constexpr, FAST: tl.constexpr):
    for k in tl.static_range(K):
        if HALF:
            if k % 2 == 1:
                if FAST:
                    packed = tl.inline_asm_elementwise(
                        "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [h[k], h[k - 1]], dtype=tl.int32, is_pure=True,
                        pack=1)
                    words = pointer.to(tl.pointer_type(tl.int32))
                    tl.store(words + (k // 2) * LANES + lane, packed, inside)
                else:
                    at = pointer + (k - 1) * LANES + 2 * lane
                    tl.store(at, h[k - 1].to(tl.float16), inside)
                    tl.store(at + 1, h[k].to(tl.float16), inside)
        else:
            tl.store(pointer + k * LANES + lane, h[k], inside)


@triton.jit
@no_type_check
def _fetch_row(pointer, lane, inside, K: tl.constexpr, LANES: tl.constexpr, HALF: tl.constexpr, FAST: tl.constexpr):
    """The raw words of a row, not yet numbers, so that few registers wait for memory. See `_unpack`."""
    raw = ()
    for k in tl.static_range(K):
        if HALF:
            if FAST:
                if k % 2 == 1:
                    words = pointer.to(tl.pointer_type(tl.int32))
                    raw = raw + (tl.load(words + (k // 2) * LANES + lane, inside, 0),)
            else:
                at = pointer + (k // 2) * 2 * LANES + 2 * lane + k % 2
                raw = raw + (tl.load(at, inside, 0.0),)
        else:
            raw = raw + (tl.load(pointer + k * LANES + lane, inside, 0.0),)
    return raw


@triton.jit
@no_type_check
def _unpack(raw, K: tl.constexpr, HALF: tl.constexpr, FAST: tl.constexpr):
    values = ()
    for k in tl.static_range(K):
        if HALF:
            if FAST:
                if k % 2 == 0:
                    part = raw[k // 2].to(tl.int16)
                else:
                    part = (raw[k // 2] >> 16).to(tl.int16)
                values = values + (part.to(tl.float16, bitcast=True).to(tl.float32),)
            else:
                values = values + (raw[k].to(tl.float32),)
        else:
            values = values + (raw[k],)
    return values


@triton.jit
@no_type_check
def _natural_row(pointer, lane, inside, K: tl.constexpr, L: tl.constexpr):
    """A row in the order of its bins: the start, once a sequence."""
    values = ()
    for k in tl.static_range(K):
        at = K * lane + k
        values = values + (tl.load(pointer + at, inside & (at < L), 0.0),)
    return values


@triton.jit
@no_type_check
def scan_forward(
    start, weights, gamma, copied, places, rows, normalisers,
    chains, cursors, slots, time, weight_b, weight_c, weight_t, weight_6,
    copied_b, copied_c, copied_t, copy_first, copy_width, epsilon,
    L: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, CHAINS: tl.constexpr, COPY: tl.constexpr,
    HALF: tl.constexpr, FAST: tl.constexpr,
):
    lane = tl.arange(0, LANES)[:, None] + tl.zeros([LANES, CHAINS], tl.int32)
    chain = (tl.program_id(0) * CHAINS + tl.arange(0, CHAINS))[None, :] + tl.zeros([LANES, CHAINS], tl.int32)
    below = tl.maximum(lane - 1, 0)
    above = tl.minimum(lane + 1, LANES - 1)
    inside = chain < chains
    batch = (chain // cursors).to(tl.int64)
    cursor = (chain % cursors).to(tl.int64)
    exponent = tl.load(gamma + cursor, inside, 1.0)
    weight = weights + batch * weight_b + cursor * weight_c
    place = tl.load(places + cursor, inside, 0).to(tl.int64)
    row = rows + (batch * time * slots + place) * (K * LANES)
    normaliser = normalisers + batch * time * cursors + cursor
    copying = copied + batch * copied_b + cursor * copied_c
    first_lane = inside & (lane == 0)

    h = _natural_row(start + chain.to(tl.int64) * L, lane, inside, K, L)
    total = tl.sum(_tree_sum(h, K), 0, keep_dims=True)
    w = _load_weights(weight, weight_6, inside)
    w = (w[0] * total, w[1] * total, w[2] * total, w[3], w[4], w[5])
    for t in range(time):
        weight += weight_t
        following = _load_weights(weight, weight_6, inside & (t + 1 < time))
        x = _moved(h, w, lane, below, above, epsilon, K, L)
        if COPY:
            x = _add_copied(x, copying, lane, inside, copy_first, copy_width, K)
            copying += copied_t
        logs = ()
        for k in tl.static_range(K):
            log = _log2(x[k], FAST)
            if (L - 1 - k) // K < LANES - 1:  # bins that only fill up the last lanes
                log = tl.where(lane <= (L - 1 - k) // K, log, -1e30)
            logs = logs + (log,)
        peak = tl.max(_tree_max(logs, K), 0, keep_dims=True)
        shift = exponent * peak
        powers = ()
        for k in tl.static_range(K):
            powers = powers + (_exp2(_fma(exponent, logs[k], -shift), FAST),)
        total = tl.sum(_tree_sum(powers, K), 0, keep_dims=True)
        inverse = _reciprocal(total, FAST)
        h = ()
        for k in tl.static_range(K):
            h = h + (powers[k] * inverse,)
        _store_row(row, h, lane, inside, K, LANES, HALF, FAST)
        tl.store(normaliser, shift + _log2(total, FAST), first_lane)
        row += slots * (K * LANES)
        normaliser += cursors
        w = following


@triton.jit
@no_type_check
def _weight_gradients(a, h, lane, below, above, K: tl.constexpr, L: tl.constexpr):
    """The gradients of the weights that move what there is, summed over this lane's bins; a across lane borders."""
    LAST: tl.constexpr = L - 1
    left = tl.where(lane == 0, a[0], tl.gather(a[K - 1], below, 0))  # clamped: bin 0 hands down to itself
    right = tl.where(lane == above, 0.0, tl.gather(a[0], above, 0))
    increment = tl.where(lane == LAST // K, a[LAST % K] * h[LAST % K], 0.0)
    keep = a[0] * h[0]
    decrement = left * h[0]
    for k in tl.static_range(K):
        if k == K - 1:
            increment = _fma(right, h[k], increment)
        else:
            increment = _fma(a[k + 1], h[k], increment)
        if k > 0:
            keep = _fma(a[k], h[k], keep)
            decrement = _fma(a[k - 1], h[k], decrement)
    return (increment, keep, decrement), left, right


@triton.jit
@no_type_check
def _move_adjoint(a, w, g, lane, left, right, K: tl.constexpr, L: tl.constexpr):
    """The gradient of the histogram that was moved, added to `g`: the transpose of `_moved`.

    `w` are the weights of increment, keep and decrement.
    """
    LAST: tl.constexpr = L - 1
    out = ()
    for k in tl.static_range(K):
        if k == 0:
            before = left
        else:
            before = a[k - 1]
        if k == K - 1:
            after = right
        else:
            after = a[k + 1]
        carried = _fma(w[1], a[k], _fma(w[0], after, _fma(w[2], before, g[k])))
        if k == LAST % K:
            carried += tl.where(lane == LAST // K, w[0] * a[k], 0.0)
        out = out + (carried,)
    return out


@triton.jit
@no_type_check
def _scaled(values, times, K: tl.constexpr):
    out = ()
    for k in tl.static_range(K):
        out = out + (values[k] * times,)
    return out


@triton.jit
@no_type_check
def _sharpen_adjoint(x, g, exponent, norm, of_gamma, lane, K: tl.constexpr, L: tl.constexpr, LANES: tl.constexpr,
                     FAST: tl.constexpr):
    """a / factor and factor, where a is the gradient of x, from g, that of the sharpened histogram.

    The factor, the same for all bins, is left to whoever uses a: to the weights, and to sums once they are made.
    `of_gamma` receives sum a x log2 x.
    """
    powers, logs, masses, products = (), (), (), ()
    for k in tl.static_range(K):
        log = _log2(x[k], FAST)
        power = _exp2(_fma(exponent - 1.0, log, -norm), FAST)  # h' / x
        if (L - 1 - k) // K < LANES - 1:
            power = tl.where(lane <= (L - 1 - k) // K, power, 0.0)
        powers = powers + (power,)
        logs = logs + (x[k] * log,)
        masses = masses + (x[k] * power,)
        products = products + (x[k] * power * g[k],)
    # 1 but for the rounding of the histogram that was kept: divided out, so that no constant in g leaks through.
    inverse = _reciprocal(tl.sum(_tree_sum(masses, K), 0, keep_dims=True), FAST)
    mean = tl.sum(_tree_sum(products, K), 0, keep_dims=True) * inverse
    factor = exponent * inverse
    a = ()
    even = tl.zeros_like(x[0])
    odd = tl.zeros_like(x[0])
    for k in tl.static_range(K):
        a_k = powers[k] * (g[k] - mean)
        a = a + (a_k,)
        if k % 2 == 0:
            even = _fma(a_k, logs[k], even)
        else:
            odd = _fma(a_k, logs[k], odd)
    return a, factor, _fma(factor, even + odd, of_gamma)


@triton.jit
@no_type_check
def scan_backward(
    start, weights, gamma, copied, places, rows, normalisers, upstream, scales,
    grad_start, grad_weights, grad_gamma, grad_copied,
    chains, cursors, slots, time, weight_b, weight_c, weight_t, weight_6,
    copied_b, copied_c, copied_t, copy_first, copy_width, epsilon,
    L: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, CHAINS: tl.constexpr, COPY: tl.constexpr,
    HALF: tl.constexpr, HALF_UPSTREAM: tl.constexpr, FAST: tl.constexpr,
):
    MID: tl.constexpr = L // 2
    UP: tl.constexpr = min(MID + 1, L - 1)
    DOWN: tl.constexpr = max(MID - 1, 0)
    lane = tl.arange(0, LANES)[:, None] + tl.zeros([LANES, CHAINS], tl.int32)
    chain = (tl.program_id(0) * CHAINS + tl.arange(0, CHAINS))[None, :] + tl.zeros([LANES, CHAINS], tl.int32)
    below = tl.maximum(lane - 1, 0)
    above = tl.minimum(lane + 1, LANES - 1)
    inside = chain < chains
    first_lane = inside & (lane == 0)
    batch = (chain // cursors).to(tl.int64)
    cursor = (chain % cursors).to(tl.int64)
    exponent = tl.load(gamma + cursor, inside, 1.0)
    last = batch * time * cursors + (time - 1) * cursors + cursor  # rows are [batch, time, cursors]
    weight = weights + batch * weight_b + cursor * weight_c + (time - 1) * weight_t
    grad_weight = grad_weights + last * 6
    place = tl.load(places + cursor, inside, 0).to(tl.int64)
    last_row = batch * time * slots + (time - 1) * slots + place
    row = rows + (last_row - slots) * (K * LANES)
    normaliser = normalisers + last
    incoming = upstream + last_row * (K * LANES)
    scale = scales + last_row
    copying = copied + batch * copied_b + cursor * copied_c + (time - 1) * copied_t
    grad_copying = grad_copied + last * copy_width
    origin = start + chain.to(tl.int64) * L

    of_gamma = tl.zeros([LANES, CHAINS], tl.float32)
    raw = _fetch_row(row, lane, inside & (time > 1), K, LANES, HALF, FAST)
    g = _unpack(_fetch_row(incoming, lane, inside, K, LANES, HALF_UPSTREAM, FAST), K, HALF_UPSTREAM, FAST)
    if HALF_UPSTREAM:
        g = _scaled(g, tl.load(scale, inside, 0.0), K)
    w = _load_weights(weight, weight_6, inside)
    norm = tl.load(normaliser, inside, 0.0)
    for i in range(time):
        t = time - 1 - i
        h = _unpack(raw, K, HALF, FAST)
        total = tl.full([LANES, CHAINS], 1.0, tl.float32)
        if t == 0:
            h = _natural_row(origin, lane, inside, K, L)
            total = tl.sum(_tree_sum(h, K), 0, keep_dims=True) + tl.zeros([LANES, CHAINS], tl.float32)
        # What the step before this one needs is asked for now, so that it is there in time.
        row -= slots * (K * LANES)
        incoming -= slots * (K * LANES)
        scale -= slots
        weight -= weight_t
        normaliser -= cursors
        raw = _fetch_row(row, lane, inside & (t > 1), K, LANES, HALF, FAST)
        raw_following = _fetch_row(incoming, lane, inside & (t > 0), K, LANES, HALF_UPSTREAM, FAST)
        w_following = _load_weights(weight, weight_6, inside & (t > 0))
        norm_following = tl.load(normaliser, inside & (t > 0), 0.0)
        if HALF_UPSTREAM:
            times = tl.load(scale, inside & (t > 0), 0.0)

        x = _moved(h, (w[0] * total, w[1] * total, w[2] * total, w[3], w[4], w[5]), lane, below, above, epsilon, K, L)
        if COPY:
            x = _add_copied(x, copying, lane, inside, copy_first, copy_width, K)
        a, factor, of_gamma = _sharpen_adjoint(x, g, exponent, norm, of_gamma, lane, K, L, LANES, FAST)
        of_weights, left, right = _weight_gradients(a, h, lane, below, above, K, L)
        g = _unpack(raw_following, K, HALF_UPSTREAM, FAST)
        if HALF_UPSTREAM:
            g = _scaled(g, times, K)
        g = _move_adjoint(a, (w[3] * factor, w[4] * factor, w[5] * factor), g, lane, left, right, K, L)

        whole = factor * total
        tl.store(grad_weight, a[UP % K] * whole, inside & (lane == UP // K))
        tl.store(grad_weight + 1, a[MID % K] * whole, inside & (lane == MID // K))
        tl.store(grad_weight + 2, a[DOWN % K] * whole, inside & (lane == DOWN // K))
        for branch in tl.static_range(3):
            value = tl.sum(of_weights[branch], 0, keep_dims=True) * factor
            tl.store(grad_weight + 3 + branch, value, first_lane)
        if COPY:
            for k in tl.static_range(K):
                column = K * lane + k - copy_first
                tl.store(grad_copying + column, a[k] * factor, inside & (column >= 0) & (column < copy_width))
            copying -= copied_t
            grad_copying -= cursors * copy_width
        if t == 0:  # the start's total mass feeds the reset branches of the first step
            fed = tl.where(lane == UP // K, w[0] * a[UP % K], 0.0)
            fed += tl.where(lane == MID // K, w[1] * a[MID % K], 0.0)
            fed += tl.where(lane == DOWN // K, w[2] * a[DOWN % K], 0.0)
            fed = tl.sum(fed, 0, keep_dims=True) * factor
            for k in tl.static_range(K):
                at = K * lane + k
                tl.store(grad_start + chain.to(tl.int64) * L + at, g[k] + fed, inside & (at < L))
        grad_weight -= cursors * 6
        w = w_following
        norm = norm_following
    of_gamma = tl.sum(of_gamma, 0, keep_dims=True) * (0.6931471805599453 / exponent)
    tl.store(grad_gamma + chain, of_gamma + tl.zeros([LANES, CHAINS], tl.float32), first_lane)
