"""Checks for any quantizer, one's own included, and hypothesis strategies for tests of one's own."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .arrays import is_tensor
from .columns import aligned
from .formats import NAMED, Format, Specials, as_format
from .kernels.rules import carried
from .quantize import planned, quantize
from .reference import decode, round_value

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Floats = npt.NDArray[np.float64]
Quantizer = Callable[..., Any]

REGIONS = ("underflow", "subnormal", "normal", "tie", "overflow", "special")
SIGNS = ("+", "-")
SIGMAS = 5
CHUNK = 1 << 22  # patterns at a time, about 350 MB at work
POSITIONS, COPIES = 64, 256  # of stochastic rounding: places between two values, and elements at each
# Quiet; signalling, which a quantizer that cuts bits off takes for infinity; all ones.
NANS = (0x7FC0_0000, 0x7F80_0001, 0x7FFF_FFFF)


class Example(NamedTuple):
    """One wrong result: what went in (None: no single number did), what came and what was right."""

    input: float | None
    got: float
    wanted: float


@dataclass(frozen=True, slots=True)
class Row:
    """How one kind of input fared.

    Attributes:
        region: One of ``REGIONS``; of stochastic rounding, the property that was checked.
        sign: ``"+"`` or ``"-"``, of the input; empty where both were checked together.
        tried: Inputs, or for a statistical property positions.
        wrong: How many of them had a wrong result.
        example: The wrong result that is furthest off, None if there is none.
    """

    region: str
    sign: str
    tried: int
    wrong: int
    example: Example | None


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found; printed, a table.

    Attributes:
        fmt: The format.
        rounding: The rounding that was asked for.
        overflow: The overflow policy that was asked for.
        rows: One `Row` a region or property, and sign.
    """

    fmt: Format
    rounding: str
    overflow: str
    rows: tuple[Row, ...]

    @property
    def tried(self) -> int:
        """Number of checks made."""
        return sum(row.tried for row in self.rows)

    @property
    def wrong(self) -> int:
        """Number of checks failed."""
        return sum(row.wrong for row in self.rows)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.wrong == 0

    def row(self, region: str, sign: str = "+") -> Row:
        """The row of a region or property and sign.

        Raises:
            KeyError: there is no such row.
        """
        for row in self.rows:
            if (row.region, row.sign) == (region, sign):
                return row
        known = ", ".join(f"{row.region} {row.sign}".strip() for row in self.rows)
        raise KeyError(f"no row {region!r} with sign {sign!r}; choose from {known}")

    def __str__(self) -> str:
        table = [("region", "sign", "tried", "wrong", "worst: input", "got", "wanted")]
        for row in self.rows:
            table.append((row.region, row.sign, str(row.tried), str(row.wrong), *_written(row)))
        lines = aligned(table, right=(2, 3))
        asked = f"{self.fmt.name}, {self.rounding}, {self.overflow}"
        return "\n".join([*lines, f"{asked}: {self.wrong} of {self.tried} wrong"])


def _written(row: Row) -> tuple[str, str, str]:
    """Input, result and right result of a row's example."""
    if row.example is None:
        return "", "", ""
    x, got, wanted = row.example
    first = "" if x is None else _with_hex(x)
    if row.region in ("probability", "bias"):  # shares, no values of the format
        return first, f"{got:.5f}", f"{wanted:.5f}"
    return first, _with_hex(got), _with_hex(wanted)


def _with_hex(x: float) -> str:
    return f"{x!r} = {re.sub(r'[.]?0*p', 'p', x.hex())}" if math.isfinite(x) and x != 0 else repr(x)


def check(
    quantizer: Quantizer,
    fmt: str | Format,
    rounding: str = "nearest_even",
    *,
    overflow: str = "ieee",
    exhaustive: Literal[16, 32] | None = None,
    repeats: int = 64,
    seed: int = 0,
) -> Report:
    """How a quantizer compares with the exact reference, by kind of input and sign.

    It is tried on every value of the format, every midpoint of two, the float32 numbers next to both,
    infinities, NaNs, zeros, the ends of float32 and some random patterns; of a format of more than 16 bits,
    on a sample of its values.

    With ``rounding="stochastic"`` the rows are properties: a result is one of the two neighbours
    (``neighbour``); values of the format stay (``exact``); each position goes up as often as it should, to
    five sigma (``probability``); so do all of a sign together, to about 1/1000 ulp (``bias``); two calls
    differ (``fresh``); and, if the quantizer takes a second positional parameter, without default or called
    ``key``, the same key, an int, gives the same bits (``same key``).

    Args:
        quantizer: Takes a 1-d float32 numpy array, returns as many numbers in a numpy array or torch tensor
            of a floating dtype, which float64 holds exactly.
        fmt: The format it should round to, or its name; one that float32 carries.
        rounding: How it should round, one of ``formats.ROUNDINGS``.
        overflow: What it should do beyond the range, one of ``formats.OVERFLOWS``.
        exhaustive: 16: the 2**16 float32 patterns whose lower half is zero, instead. 32: all 2**32, which
            takes minutes; then `fpemu.quantize`, itself proven equal to the reference, says what is right.
        repeats: Calls with the same inputs, for stochastic rounding.
        seed: Of the random inputs, and the first key of stochastic rounding.

    Returns:
        A `Report`; NaN counts as NaN whatever its payload, -0.0 is not 0.0.

    Raises:
        ValueError: unknown format, rounding or overflow; a result of another shape.
        TypeError: a result that is no floating array.

    Example:
        >>> check(lambda x: x.astype(np.float16), "fp16").ok
        True
        >>> report = check(lambda x: x.clip(-448, 448).astype(np.float16), "e4m3fn")
        >>> report.row("tie").example
        Example(input=0.0009765625, got=0.0009765625, wanted=0.0)
    """
    planned(fmt, rounding, overflow)  # refuses unknown names
    target = carried(as_format(fmt))
    if exhaustive not in (None, 16, 32):
        raise ValueError(f"exhaustive must be 16, 32 or None for the hard inputs, got {exhaustive!r}")
    if not callable(quantizer):
        raise TypeError(f"quantizer must be a function of one array, got {quantizer!r}")
    if rounding == "stochastic":
        if exhaustive is not None:
            raise ValueError("exhaustive= does not apply to rounding='stochastic'; leave it out")
        if repeats < 2:
            raise ValueError(f"repeats must be at least 2 to see that draws differ, got {repeats!r}")
        return Report(target, rounding, overflow, _stochastic(quantizer, target, overflow, repeats, seed))
    counts = _Counts(target)
    for bits in _patterns(target, exhaustive, seed):
        x = bits.view(np.float32)
        if exhaustive == 32:
            wanted = _as_float64(quantize(x, target, rounding, overflow=overflow), x.size)
        else:
            wanted = _expected(x, target, rounding, overflow)
        counts.add(x, _call(quantizer, x), wanted)
    return Report(target, rounding, overflow, counts.rows(rounding, overflow))


# The inputs


def _patterns(fmt: Format, exhaustive: int | None, seed: int) -> Iterator[npt.NDArray[np.uint32]]:
    """Bits of the float32 inputs, in chunks, by sign and then by magnitude."""
    if exhaustive is None:
        yield _hard_patterns(fmt, np.random.default_rng(seed))
    elif exhaustive == 16:
        yield np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    else:
        for start in range(0, 1 << 32, CHUNK):
            yield np.uint32(start) + np.arange(CHUNK, dtype=np.uint32)


def _hard_patterns(fmt: Format, rng: np.random.Generator) -> npt.NDArray[np.uint32]:
    codes = _codes(fmt, rng)
    values = np.array([fmt.magnitude(code) for code in codes])
    above = np.array([fmt.magnitude(code + 1) for code in codes])  # also the one after the largest
    with np.errstate(over="ignore"):
        points = np.concatenate([values, (values + above) / 2, above[-1:]]).astype(np.float32)
        beside = [np.nextafter(points, np.float32(toward)) for toward in (math.inf, -math.inf)]
    points = np.abs(np.concatenate([points, *beside]))
    info = np.finfo(np.float32)
    ends = np.array([0, info.smallest_subnormal, info.smallest_normal, info.max, math.inf], np.float32)
    one_sign = np.concatenate([points.view(np.uint32), ends.view(np.uint32), np.array(NANS, np.uint32)])
    random = rng.integers(0, 1 << 32, 1 << 12, np.uint32)
    return np.unique(np.concatenate([one_sign, one_sign | np.uint32(1 << 31), random]))


def _codes(fmt: Format, rng: np.random.Generator) -> list[int]:
    """Codes of finite magnitudes, ascending: all, or of many both ends, every binade's and a sample."""
    count = fmt.max_code + 1
    if count <= 1 << 16:
        return list(range(count))
    near = 1 << 12
    binades = np.arange(0, count, 1 << (fmt.precision - 1))
    chosen = [np.arange(near), np.arange(count - near, count), rng.integers(0, count, 1 << 15)]
    chosen += [np.clip(binades + step, 0, count - 1) for step in (-1, 0, 1)]
    return np.unique(np.concatenate(chosen)).tolist()


# The calls


def _call(quantizer: Quantizer, x: npt.NDArray[np.float32], *key: int) -> Floats:
    with np.errstate(all="ignore"):  # overflow, signalling NaNs: the input is meant to be hard
        return _as_float64(quantizer(x.copy(), *key), x.size)


def _as_float64(result: Any, size: int) -> Floats:
    if not is_tensor(result) and not isinstance(result, np.ndarray):
        raise TypeError(
            f"the quantizer must return a numpy array or a torch tensor, got {type(result).__name__}"
        )
    try:
        as_format(result.dtype)
    except TypeError:
        raise TypeError(
            f"the quantizer must return floating numbers that float64 holds, got dtype {result.dtype}; "
            "decode codes and scale integers first"
        ) from None
    if tuple(result.shape) != (size,):
        raise ValueError(
            f"the quantizer must return one number for each input, shape ({size},), got shape "
            f"{tuple(result.shape)}"
        )
    if is_tensor(result):
        import torch

        result = result.detach().cpu().to(torch.float64).numpy()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.asarray(result).astype(np.float64)


def _takes_key(quantizer: Quantizer) -> bool:
    """Whether a second positional parameter waits for a key; one with a default is an option."""
    try:
        parameters = inspect.signature(quantizer).parameters.values()
    except (TypeError, ValueError):  # some compiled functions do not say
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return any(p.default is p.empty or p.name == "key" for p in positional[1:2])


def _differ(a: Floats, b: Floats) -> npt.NDArray[np.bool_]:
    return (a.view(np.uint64) != b.view(np.uint64)) & ~(np.isnan(a) & np.isnan(b))


# The right results


class _Split(NamedTuple):
    """Magnitudes as ``(quanta + remainder) * 2**exponent``, ``0 <= remainder < 1``; 0 if not finite."""

    magnitude: Floats
    quanta: Floats
    remainder: Floats
    exponent: npt.NDArray[np.int64]


def _split(x: npt.NDArray[Any], fmt: Format) -> _Split:
    # float32 numbers of at most 24 bits over a quantum, a power of two: each step is exact in float64.
    with np.errstate(invalid="ignore"):
        magnitude = np.where(np.isfinite(x), np.abs(x), 0).astype(np.float64)
    binade = np.frexp(magnitude)[1].astype(np.int64) - 1
    lowest = math.frexp(fmt.smallest_subnormal)[1] - 1
    exponent = np.where(binade < fmt.emin, lowest, binade - fmt.precision + 1)
    scaled = np.ldexp(magnitude, -exponent)
    quanta = np.floor(scaled)
    return _Split(magnitude, quanta, scaled - quanta, exponent)


def _expected(x: npt.NDArray[np.float32], fmt: Format, rounding: str, overflow: str) -> Floats:
    """`reference.round_value` of a whole array, to any mode but stochastic."""
    split = _split(x, fmt)
    negative = np.signbit(x)
    inexact, tie = split.remainder > 0, split.remainder == 0.5
    odd = split.quanta % 2 == 1
    if fmt.precision == 1 and fmt.ties_to_even_code:
        odd = (split.quanta > 0) & ((split.exponent - fmt.emin + 1) % 2 == 1)
    up = {
        "nearest_even": (split.remainder > 0.5) | (tie & odd),
        "nearest_away": split.remainder >= 0.5,
        "toward_zero": np.zeros_like(tie),
        "toward_positive": inexact & ~negative,
        "toward_negative": inexact & negative,
        "to_odd": inexact & ~odd,
    }[rounding]
    return _value(x, split, up, fmt, rounding, overflow)


def _value(
    x: npt.NDArray[np.float32],
    split: _Split,
    up: npt.NDArray[np.bool_],
    fmt: Format,
    rounding: str,
    overflow: str,
) -> Floats:
    """The result where the magnitude went up or stayed below; the reference decides on all but numbers."""

    def exact(number: float | Fraction) -> float:
        return round_value(number, fmt, rounding, overflow=overflow, word=0)

    rounded = np.ldexp(split.quanta + up, split.exponent)
    over = rounded > fmt.max
    if not fmt.has_zero:
        rounded[rounded == 0] = fmt.smallest_subnormal
    negative = np.signbit(x)
    result = np.where(negative & ((rounded != 0) | fmt.has_negative_zero), -rounded, rounded)
    huge = Fraction(2) ** 2000
    result[over] = np.where(negative, exact(-huge), exact(huge))[over]
    if not fmt.signed:
        result[x < 0] = exact(-1.0)
    for special in (0.0, -0.0, math.inf, -math.inf):
        result[(x == special) & (negative == (math.copysign(1, special) < 0))] = exact(special)
    result[np.isnan(x)] = math.nan
    return result


# The count


class _Counts:
    """Results by region and sign, chunk by chunk."""

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt
        groups = len(REGIONS) * len(SIGNS)
        self.tried = np.zeros(groups, np.int64)
        self.wrong = np.zeros(groups, np.int64)
        self.worst: list[tuple[float, float, float]] = [(-1.0, 0.0, 0.0)] * groups  # error, input, result

    def add(self, x: npt.NDArray[np.float32], got: Floats, wanted: Floats) -> None:
        split = _split(x, self.fmt)
        group = _regions(x, split, self.fmt) * len(SIGNS) + np.signbit(x)
        self.tried += np.bincount(group, minlength=self.tried.size)
        wrong = np.flatnonzero(_differ(got, wanted))
        self.wrong += np.bincount(group[wrong], minlength=self.wrong.size)
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.ldexp(np.abs(got[wrong] - wanted[wrong]), -split.exponent[wrong])
        error[~np.isfinite(error)] = math.inf  # a number for no number
        for i in np.unique(group[wrong]).tolist():
            inside = np.flatnonzero(group[wrong] == i)
            worst = inside[np.argmax(error[inside])]
            if error[worst] > self.worst[i][0]:
                self.worst[i] = (float(error[worst]), float(x[wrong[worst]]), float(got[wrong[worst]]))

    def rows(self, rounding: str, overflow: str) -> tuple[Row, ...]:
        rows = []
        for i, (tried, wrong) in enumerate(zip(self.tried.tolist(), self.wrong.tolist(), strict=True)):
            example = None
            if wrong:
                _, x, got = self.worst[i]
                example = Example(x, got, round_value(x, self.fmt, rounding, overflow=overflow))
            rows.append(Row(REGIONS[i // len(SIGNS)], SIGNS[i % len(SIGNS)], tried, wrong, example))
        return tuple(rows)


def _regions(x: npt.NDArray[np.float32], split: _Split, fmt: Format) -> npt.NDArray[np.int64]:
    """Index into REGIONS; a tie is one wherever it lies, up to where every number overflows."""
    name = {region: i for i, region in enumerate(REGIONS)}
    region = np.full(x.shape, name["normal"])
    region[split.magnitude < fmt.smallest_normal] = name["subnormal"]
    region[split.magnitude < fmt.smallest_subnormal] = name["underflow"]
    region[split.magnitude > fmt.max] = name["overflow"]
    region[(split.remainder == 0.5) & (split.magnitude < fmt.magnitude(fmt.max_code + 1))] = name["tie"]
    region[(x == 0) | ~np.isfinite(x)] = name["special"]
    return region


# Stochastic rounding


def _stochastic(quantizer: Quantizer, fmt: Format, overflow: str, repeats: int, seed: int) -> tuple[Row, ...]:
    rng = np.random.default_rng(seed)
    keys = range(seed, seed + repeats) if _takes_key(quantizer) else None
    x = _hard_patterns(fmt, rng).view(np.float32)
    got = _call(quantizer, x, *(keys[:1] if keys else ()))
    down, up = _neighbours(x, fmt, overflow)
    fixed = ~_differ(down, up)
    rows = [*_each_sign("neighbour", x, got, down, up, ~fixed), *_each_sign("exact", x, got, down, up, fixed)]

    x, p = _positions(fmt, overflow, rng)
    if not x.size:  # no float32 number between two values
        return tuple(rows)
    tiled = np.tile(x, COPIES)
    _, up = _neighbours(x, fmt, overflow)
    ups = np.zeros(x.size, np.int64)
    results: list[Floats] = []
    fresh = False
    for i in range(repeats):
        got = _call(quantizer, tiled, *(keys[i : i + 1] if keys else ()))
        ups += np.sum(~_differ(got, np.tile(up, COPIES)).reshape(COPIES, -1), axis=0)
        results = [*results[:1], got]
        fresh = fresh or bool(_differ(results[0], results[-1]).any())
    rows += _statistics(x, p, ups, repeats * COPIES)
    rows.append(Row("fresh", "", 1, int(not fresh), None))
    if keys:
        again = _call(quantizer, tiled, keys[-1])
        other = _differ(again, results[-1])
        i = int(np.argmax(other))
        example = Example(float(tiled[i]), float(again[i]), float(results[-1][i])) if other.any() else None
        rows.append(Row("same key", "", tiled.size, int(other.sum()), example))
    return tuple(rows)


def _neighbours(x: npt.NDArray[np.float32], fmt: Format, overflow: str) -> tuple[Floats, Floats]:
    """What ``x`` may become: down and up in magnitude, the same where nothing is left to chance."""
    split = _split(x, fmt)
    inexact = split.remainder > 0
    down = _value(x, split, np.zeros_like(inexact), fmt, "stochastic", overflow)
    return down, _value(x, split, inexact, fmt, "stochastic", overflow)


def _each_sign(
    name: str,
    x: npt.NDArray[np.float32],
    got: Floats,
    down: Floats,
    up: Floats,
    among: npt.NDArray[np.bool_],
) -> list[Row]:
    rows = []
    wrong = among & _differ(got, down) & _differ(got, up)
    for sign in SIGNS:
        here = np.signbit(x) == (sign == "-")
        example = None
        if (wrong & here).any():
            i = int(np.argmax(wrong & here))
            nearer = down if abs(got[i] - down[i]) <= abs(got[i] - up[i]) else up
            example = Example(float(x[i]), float(got[i]), float(nearer[i]))
        rows.append(Row(name, sign, int((among & here).sum()), int((wrong & here).sum()), example))
    return rows


def _positions(
    fmt: Format, overflow: str, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float32], Floats]:
    """Inputs between two values, from the smallest to beyond the largest, and their chance to go up."""
    codes = np.unique(np.linspace(0, fmt.max_code, POSITIONS).astype(np.int64)).tolist()
    low = np.array([fmt.magnitude(code) for code in codes])
    high = np.array([fmt.magnitude(code + 1) for code in codes])
    fractions = np.concatenate([rng.uniform(1 / 64, 63 / 64, (3, low.size)), np.full((1, low.size), 0.5)])
    with np.errstate(over="ignore"):
        x = (low + fractions * (high - low)).astype(np.float32).ravel()
    x = np.concatenate([x, -x])
    p = _split(x, fmt).remainder
    down, up = _neighbours(x, fmt, overflow)
    # Nearer to 0 or 1 than this five sigma are too few draws.
    kept = _differ(down, up) & (p >= 1 / 64) & (p <= 63 / 64)
    return x[kept], p[kept]


def _statistics(x: npt.NDArray[np.float32], p: Floats, ups: npt.NDArray[np.int64], draws: int) -> list[Row]:
    rows, bias = [], []
    variance = draws * p * (1 - p)
    off = (ups - draws * p) / np.sqrt(variance)
    for sign in SIGNS:
        here = np.flatnonzero(np.signbit(x) == (sign == "-"))
        if not here.size:
            continue
        worst = here[np.argmax(np.abs(off[here]))]
        wrong = int((np.abs(off[here]) > SIGMAS).sum())
        example = Example(float(x[worst]), float(ups[worst] / draws), float(p[worst])) if wrong else None
        rows.append(Row("probability", sign, here.size, wrong, example))
        total = float((ups[here] - draws * p[here]).sum())
        biased = abs(total) > SIGMAS * math.sqrt(variance[here].sum())
        mean = Example(None, total / (draws * here.size), 0.0) if biased else None  # in ulps
        bias.append(Row("bias", sign, 1, int(biased), mean))
    return rows + bias


# Strategies


def _hypothesis(name: str) -> Any:
    try:
        from hypothesis import strategies
    except ImportError:
        raise ImportError(
            f"fpemu.testing.{name}() needs hypothesis; install it: pip install 'fpemu[test]'"
        ) from None
    return strategies


P3109 = tuple(
    f"binary{bits}p{precision}{sign}{domain}"
    for bits in (4, 6, 8, 15)
    for precision in (1, 2, 3, 4)
    for sign in "su"
    for domain in "ef"
    if 1 <= bits - precision + (sign == "u") <= 7  # float32 holds them
)


def formats() -> SearchStrategy[Format]:
    """Formats that float32 carries: named, of IEEE P3109, and made up.

    Raises:
        ImportError: hypothesis is not installed.

    Example:
        >>> from hypothesis import given
        >>> @given(formats())
        ... def test(fmt):
        ...     assert fmt.max <= np.finfo(np.float32).max
        >>> test()
    """
    st = _hypothesis("formats")
    named = [fmt for fmt in map(as_format, (*NAMED, *P3109)) if _is_carried(fmt)]

    @st.composite
    def custom(draw: Any) -> Format | None:
        specials: Specials = draw(st.sampled_from(["ieee", "fn", "fnuz", "finite", "p3109e", "p3109f"]))
        exponent_bits, precision = draw(st.integers(1, 8)), draw(st.integers(1, 24))
        top = 2**exponent_bits - 1 - (specials == "ieee")
        low, high = top - 127, 127
        bias = draw(st.integers(low, high)) if low <= high else None
        subnormal, signed = draw(st.booleans()), draw(st.booleans())
        try:
            fmt = Format("custom", exponent_bits, precision, bias, specials, subnormal, signed)
        except ValueError:
            return None
        return fmt if _is_carried(fmt) else None

    strategy: SearchStrategy[Format] = st.one_of(
        st.sampled_from(named), custom().filter(lambda fmt: fmt is not None)
    )
    return strategy


def _is_carried(fmt: Format) -> bool:
    try:
        return carried(fmt) == fmt
    except ValueError:
        return False


def values(fmt: str | Format) -> SearchStrategy[float]:
    """Values of a format, and what else it has: infinities, NaN, -0.0; float32 holds each.

    Args:
        fmt: A format that float32 carries, or its name.

    Raises:
        ImportError: hypothesis is not installed.

    Example:
        >>> from hypothesis import given
        >>> @given(values("e2m1"))
        ... def test(x):
        ...     assert abs(x) in (0, 0.5, 1, 1.5, 2, 3, 4, 6)
        >>> test()
    """
    st = _hypothesis("values")
    target = carried(as_format(fmt))
    strategy: SearchStrategy[float] = st.builds(
        lambda magnitude, sign: decode(magnitude | sign, target),
        st.one_of(
            st.integers(0, ((1 << target.bits) - 1) & ~target.sign_code), st.sampled_from(_edges(target))
        ),
        st.sampled_from([0, target.sign_code]),
    )
    return strategy


def _edges(fmt: Format) -> list[int]:
    """Codes of the smallest and largest, subnormal and normal magnitudes."""
    normal = 1 << (fmt.precision - 1)
    codes = (0, 1, normal - 1, normal, normal + 1, fmt.max_code - 1, fmt.max_code)
    return [code for code in codes if 0 <= code <= fmt.max_code]


def hard_inputs(fmt: str | Format) -> SearchStrategy[np.float32]:
    """float32 numbers where rounding to a format goes wrong.

    Values and midpoints of two, the float32 numbers next to both, NaNs and infinities, and any pattern.

    Args:
        fmt: A format that float32 carries, or its name.

    Raises:
        ImportError: hypothesis is not installed.

    Example:
        >>> from hypothesis import given
        >>> @given(hard_inputs("fp16"))
        ... def test(x):
        ...     assert x.dtype == np.float32
        >>> test()
    """
    st = _hypothesis("hard_inputs")
    target = carried(as_format(fmt))

    def point(code: int, half: bool, step: int, sign: int) -> np.float32:
        low, high = target.magnitude(code), target.magnitude(code + 1)
        with np.errstate(over="ignore"):
            near = np.float32((low + high) / 2 if half else low)
        # Past either end the next pattern is no number: there the point itself.
        pattern = int(near.view(np.uint32)) + step
        return _from_bits(pattern if 0 <= pattern <= 0x7F80_0000 else pattern - step, sign)

    signs = st.sampled_from([0, 1])
    codes = st.one_of(
        st.integers(0, target.max_code), st.sampled_from([*_edges(target), target.max_code + 1])
    )
    strategy: SearchStrategy[np.float32] = st.one_of(
        st.builds(point, codes, st.booleans(), st.integers(-1, 1), signs),
        st.builds(_from_bits, st.sampled_from([0, 0x7F80_0000, *NANS]), signs),
        st.builds(_from_bits, st.integers(0, 0x7FFF_FFFF), signs),
    )
    return strategy


def _from_bits(pattern: int, sign: int) -> np.float32:
    return np.uint32(pattern | sign << 31).view(np.float32)
