"""Device functions that generated kernels call."""

import triton
import triton.language as tl


@triton.jit
def uniforms(key, env, step, group):
    """Five blocks of uniforms in [0, 1) a group: Philox 4x32-10 (Salmon et al., 2011) of env and step under a key.

    Four are the upper 24 bits of its words, all that a float32 below 1 can tell apart; their last 8 make the fifth.
    """
    low, high = step.to(tl.uint32), (step >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(key, env.to(tl.uint32), low, high, group)
    last = ((a & 255) << 16) | ((b & 255) << 8) | (c & 255)
    return _unit(a >> 8), _unit(b >> 8), _unit(c >> 8), _unit(d >> 8), _unit(last)


@triton.jit
def _unit(bits):
    return bits.to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def normals(u, v):
    """Two independent standard normals of two uniforms in [0, 1) (Box & Muller, 1958)."""
    radius = tl.sqrt(-2.0 * tl.log(1.0 - u))
    angle = 6.283185307179586 * v
    return radius * cos(angle), radius * sin(angle)


@triton.jit
def _quadrant(x):
    """x = quarter * pi / 2 + rest, |rest| <= pi / 4 (Cody & Waite, 1980, with pi / 2 in three parts)."""
    shifted = tl.fma(x, 0.6366197723675814, 12582912.0)  # 1.5 * 2**23: the sum's last bits are the rounded quotient
    quarter = shifted - 12582912.0
    rest = tl.fma(-quarter, 1.57079601287841796875, x)
    rest = tl.fma(-quarter, 3.1391647326017846e-07, rest)
    rest = tl.fma(-quarter, 5.390302529957764e-15, rest)
    return shifted.to(tl.int32, bitcast=True), rest


@triton.jit
def _sin_of_rest(x):
    """Within a unit in the last place for |x| <= pi / 4 (Moshier's Cephes, sinf)."""
    z = x * x
    poly = tl.fma(tl.fma(z, -1.9515295891e-4, 8.3321608736e-3), z, -1.6666654611e-1)
    return tl.fma(poly * z, x, x)


@triton.jit
def _cos_of_rest(x):
    z = x * x
    poly = tl.fma(tl.fma(z, 2.443315711809948e-5, -1.388731625493765e-3), z, 4.166664568298827e-2)
    return tl.fma(poly * z, z, tl.fma(z, -0.5, 1.0))


@triton.jit
def sin(x):
    """To two units in the last place for |x| < 1e5. Without the branch for more that a library's has, which would
    keep everything else from being done meanwhile."""
    quarter, rest = _quadrant(x)
    value = tl.where((quarter & 1) == 0, _sin_of_rest(rest), _cos_of_rest(rest))
    return tl.where((quarter & 2) == 0, value, -value)


@triton.jit
def cos(x):
    """As `sin`; of the same angle they share most of the work."""
    quarter, rest = _quadrant(x)
    value = tl.where((quarter & 1) == 0, _cos_of_rest(rest), _sin_of_rest(rest))
    return tl.where(((quarter + 1) & 2) == 0, value, -value)


@triton.jit
def tanh(x):
    """Within 1e-6 of what it is; near 0 by its series, where the formula would leave nothing of the last digits."""
    z = x * x
    series = x * (1.0 + z * (-0.3333333333 + z * (0.1333333333 - z * 0.0539682540)))
    return tl.where(tl.abs(x) < 0.1, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def fast_tanh(x):
    """The hardware's: off by 5e-4 at most, about as much as TF32 products."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rounded(x):
    """To the nearest number of TF32, which has 11 significant bits. Two operations; the hardware's way takes three."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def close_tanh(x):
    """1 - 2 / (exp(2 x) + 1) by the hardware's power of two and reciprocal: off by 3e-7 at most."""
    ratio = tl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0f4038AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, t; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    return 1.0 - 2.0 * ratio


@triton.jit
def fast_log(x):
    """The hardware's, of normal numbers: off by 2e-7 at most near 1, and by two units in the last place elsewhere."""
    log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return log2 * 0.6931471805599453


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_slope(x):
    sigmoid = 1.0 / (1.0 + tl.exp(-x))
    return sigmoid * (1.0 + x * (1.0 - sigmoid))


@triton.jit
def minimum(x, y):
    """As torch's and JAX's: NaN if either is."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def floor_mod(x, y):
    """Python's x % y of floats, the divisor's sign; an fma keeps what `x - q * y` would round away."""
    inverse, y = 1.0 / y, y + tl.zeros_like(x)
    rest = tl.fma(-tl.floor(x * inverse), y, x)
    rest = tl.where(rest * y < 0, rest + y, rest)  # the quotient was rounded to a whole number past it
    return tl.where(tl.abs(rest) >= tl.abs(y), rest - y, rest)


@triton.jit
def floor_div(x, y):
    """Python's x // y of floats: what floor_mod leaves is a whole number of y."""
    return tl.floor((x - floor_mod(x, y)) / y + 0.5)


@triton.jit
def floor_mod_int(x, y):
    """Python's x % y of integers; a kernel's own has the dividend's sign."""
    rest = x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@triton.jit
def floor_div_int(x, y):
    return (x - floor_mod_int(x, y)) // y


@triton.jit
def store2(pointers, a, b, here):
    """Two numbers side by side, in one access."""
    tl.store(pointers[:, None] + tl.arange(0, 2)[None, :], tl.join(a, b), mask=here[:, None])


@triton.jit
def store4(pointers, a, b, c, d, here):
    """Four numbers side by side, in one access."""
    values = tl.join(tl.join(a, c), tl.join(b, d)).reshape(a.shape[0], 4)
    tl.store(pointers[:, None] + tl.arange(0, 4)[None, :], values, mask=here[:, None])


@triton.jit
def mean_and_deviation(moments_ptr, M, TILES: tl.constexpr, TILE: tl.constexpr):
    """Of a minibatch from the moments of its tiles (Chan, Golub & LeVeque, 1979); the deviation with M - 1."""
    tile = tl.arange(0, TILES)
    count = tl.maximum(tl.minimum(M - tile * TILE, TILE), 0).to(tl.float32)
    means = tl.load(moments_ptr + 2 * tile, mask=count > 0, other=0.0)
    squares = tl.load(moments_ptr + 2 * tile + 1, mask=count > 0, other=0.0)
    mean = tl.sum(count * means, axis=0) / M
    distance = means - mean
    return mean, tl.sqrt_rn(tl.sum(squares + count * distance * distance, axis=0) / (M - 1))
