"""One step of a sum that is rounded once, from its exact value: arithmetic for the loops of `gemm`.

A sum of two floats need not be a float; rounding it to one and then to a format would round twice. Rounded
to odd it keeps on which side of every shorter number it lies, so rounding once more gives what rounding the
exact sum would, to formats of two significand bits less than the carrier's or fewer (Boldo, Melquiond:
"Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from .scalar import (
    ABS64,
    FRACTION64,
    HALF,
    INF64,
    LOW,
    ONE,
    U,
    W,
    bits64_of,
    bits_of,
    double_of,
    float_of,
    philox,
)

ONE64, IMPLICIT64, QUIET64 = W(1), W(1 << 52), W(1 << 51)
F16C = "+f16c" in cpu_target.target_context.codegen()._tm_features


@intrinsic
def half(typing_context, x):
    """float32 rounded to IEEE half and back: nearest even, by the CPU's F16C.

    Without F16C LLVM would call a function that numba does not link. Loops that use it are compiled, but not
    chosen then.
    """

    def build(context, builder, sig, args):
        if not F16C:
            return args[0]
        return builder.fpext(builder.fptrunc(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.float32), build


@intrinsic
def fma(typing_context, x, y, z):
    """``x * y + z`` of float32, rounded once; by the C library where the CPU has no such instruction."""

    def build(context, builder, sig, args):
        kind = ir.FloatType()
        function = builder.module.declare_intrinsic("llvm.fma", [kind], ir.FunctionType(kind, [kind] * 3))
        return builder.call(function, args)

    return types.float32(types.float32, types.float32, types.float32), build


@njit(inline="always")
def sum_to_odd(x, y):
    """Sum of two float32, rounded to odd."""
    s = np.float32(x + y)
    # Knuth's TwoSum: s + e is x + y.
    z = np.float32(s - x)
    e = np.float32(np.float32(x - np.float32(s - z)) + np.float32(y - z))
    u = bits_of(s)
    # An infinite or NaN sum has e = NaN, and stays.
    inexact = e > np.float32(0) or e < np.float32(0)
    # Toward zero, then the last bit set.
    beyond = U(U(bits_of(e) ^ u) >> U(31))
    return float_of(U(U(u - beyond) | ONE) if inexact else u)


@njit(inline="always")
def sum_to_odd64(x, y):
    """Sum of two float64, rounded to odd."""
    s = x + y
    z = s - x
    e = (x - (s - z)) + (y - z)
    u = bits64_of(s)
    inexact = e > 0.0 or e < 0.0
    beyond = W(W(bits64_of(e) ^ u) >> W(63))
    return double_of(W(W(u - beyond) | ONE64) if inexact else u)


@njit(inline="always")
def stochastic_short(u, word, rule):
    """`scalar.stochastic64` in a third of the instructions, for the formats that `ways` calls short.

    They are signed, have subnormals, -0.0 and at most 20 significand bits, and an infinity becomes what an
    overflow does. Returns also a number below 2**16 if the word's lower half could change the result.
    """
    a = W(u & ABS64)
    field = W(a >> W(52))
    least = field if field > rule.emin else rule.emin
    away = W(least - field)
    away = away if away < W(63) else W(63)
    # In units of the last kept place, with `drop` bits of fraction, of which the first 32 count.
    significand = W(W(W(a & FRACTION64) | IMPLICIT64) >> away)
    unused = W(rule.drop - W(32))
    quanta = W(W(significand + W(W(word) << unused)) >> rule.drop)
    # Back to a float: a power of two times an integer of few bits.
    scale = double_of(W(W(least + rule.drop - W(52)) << W(52)))
    r = bits64_of(np.float64(np.int64(quanta)) * scale)
    r = rule.over_positive if r > rule.max else r
    r = rule.over_positive if a == INF64 else r
    r = W(a | QUIET64) if a > INF64 else r
    near = U(U(W(significand >> unused)) ^ U(~U(word)))
    return W(r | W(u ^ a)), near


@njit(inline="always")
def folded(number, seed, stream):
    """Seed and stream of ``Key(seed, stream).fold_in(number)``, for a number below 2**63."""
    both, _ = philox(W(W(number) & LOW), W(W(number) >> HALF), W(0), LOW, seed, stream)
    return W(both & LOW), W(both >> HALF)
