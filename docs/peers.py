"""Check other libraries' rounding with fpemu.testing and print what differs.

Run it as `python docs/peers.py`. A peer that is not installed is left out.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fpemu.columns import aligned
from fpemu.formats import as_format
from fpemu.testing import Report, check

Round = Callable[[Any], Any]
Peer = Iterator[tuple[str, str, Round]]  # format, rounding, function of a float32 or float64 numpy array


def numpy_peer() -> Peer:
    """A cast to numpy's float16."""
    yield "binary16", "nearest_even", lambda x: x.astype(np.float16)


def ml_dtypes_peer() -> Peer:
    """A cast to each dtype of ml_dtypes."""
    import ml_dtypes

    names = {"bfloat16": "bfloat16", "e3m2": "float6_e3m2fn", "e2m3": "float6_e2m3fn"}
    names |= {"e2m1": "float4_e2m1fn"}
    eight = ("e5m2", "e4m3fn", "e4m3", "e3m4", "e5m2fnuz", "e4m3fnuz", "e4m3b11fnuz", "e8m0fnu")
    names |= {name: f"float8_{name}" for name in eight}
    for fmt, name in names.items():
        dtype = getattr(ml_dtypes, name)
        yield fmt, "nearest_even", lambda x, dtype=dtype: x.astype(dtype)


def torch_peer() -> Peer:
    """A cast to each narrow dtype of torch, on the CPU."""
    import torch

    names = {"binary16": "float16", "bfloat16": "bfloat16"}
    names |= {name: f"float8_{name}" for name in ("e5m2", "e4m3fn", "e5m2fnuz", "e4m3fnuz", "e8m0fnu")}
    for fmt, name in names.items():
        dtype = getattr(torch, name)
        yield fmt, "nearest_even", lambda x, dtype=dtype: torch.from_numpy(x).to(dtype)


def gfloat_peer() -> Peer:
    """Rounding of numpy arrays by gfloat."""
    import gfloat
    from gfloat import formats

    infos = {"binary16": formats.format_info_binary16, "bfloat16": formats.format_info_bfloat16}
    infos |= {"e5m2": formats.format_info_ocp_e5m2, "e4m3fn": formats.format_info_ocp_e4m3}
    infos |= {"e8m0fnu": formats.format_info_ocp_e8m0}
    modes = {"nearest_even": gfloat.RoundMode.TiesToEven, "nearest_away": gfloat.RoundMode.TiesToAway}
    modes |= {"toward_zero": gfloat.RoundMode.TowardZero, "toward_positive": gfloat.RoundMode.TowardPositive}
    for fmt, info in infos.items():
        for rounding, mode in modes.items():
            yield (
                fmt,
                rounding,
                lambda x, info=info, mode=mode: gfloat.round_ndarray(info, x.astype(np.float64), mode),
            )


def qtorch_peer() -> Peer:
    """QPyTorch's float_quantize, which is given exponent and fraction bits."""
    import torch
    from qtorch.quant import float_quantize

    torch.manual_seed(0)  # its stochastic rounding draws from torch's generator
    for name in ("binary16", "bfloat16", "e4m3"):
        fmt = as_format(name)
        bits = {"exp": fmt.exponent_bits, "man": fmt.precision - 1}
        for rounding, mode in (("nearest_even", "nearest"), ("stochastic", "stochastic")):
            yield (
                name,
                rounding,
                lambda x, bits=bits, mode=mode: float_quantize(torch.from_numpy(x), **bits, rounding=mode),
            )


def pychop_peer(dtype: Any = np.float64) -> Peer:
    """pychop's Chop on numpy arrays, which is given exponent and fraction bits."""
    import pychop

    modes = {"nearest_even": 1, "toward_positive": 2, "toward_negative": 3, "toward_zero": 4}
    modes |= {"nearest_away": 8, "to_odd": 9, "stochastic": 5}
    for name in ("binary16", "e4m3"):
        fmt = as_format(name)
        for rounding, mode in modes.items():
            chop = pychop.Chop(exp_bits=fmt.exponent_bits, sig_bits=fmt.precision - 1, rmode=mode)
            yield name, rounding, lambda x, chop=chop: np.asarray(chop(x.astype(dtype)))


def pychop_float32_peer() -> Peer:
    """The same, to nearest even, on arrays that stay float32."""
    return (case for case in pychop_peer(np.float32) if case[1] == "nearest_even")


PEERS = {
    "numpy": numpy_peer,
    "ml_dtypes": ml_dtypes_peer,
    "torch": torch_peer,
    "gfloat": gfloat_peer,
    "qtorch": qtorch_peer,
    "pychop": pychop_peer,
    "pychop (float32)": pychop_float32_peer,
}


def where(report: Report) -> str:
    """Regions with wrong results, both signs together."""
    counts: dict[str, int] = {}
    for row in report.rows:
        counts[row.region] = counts.get(row.region, 0) + row.wrong
    return ", ".join(f"{region} {wrong}" for region, wrong in counts.items() if wrong) or "-"


def example(report: Report) -> str:
    """The first wrong result of the report that names an input."""
    for row in report.rows:
        if row.example and row.example.input is not None:
            x, got, wanted = row.example
            return f"{x:.9g} -> {got:.7g}, not {wanted:.7g}"
    return ""


def rounded_twice(function: Round, fmt: str) -> str:
    """How many float64 numbers beside a tie, nearer to it than float32 can tell, are taken for the tie."""
    f = as_format(fmt)
    low = 1 + np.arange(2 ** (f.precision - 1)) * f.eps
    tie = low + f.eps / 2
    x = np.concatenate([tie + 2.0**-40, tie - 2.0**-40])
    right = np.concatenate([low + f.eps, low])
    try:
        got = function(x)
        got = got.astype(np.float64) if isinstance(got, np.ndarray) else got.double().numpy()
    except RuntimeError as error:  # a peer may refuse float64
        return f"refused: {' '.join(str(error).split())[:60]}"
    return f"{np.count_nonzero(got != right)} of {x.size}"


def main() -> None:
    """Print who is right where, what is wrong elsewhere, and what each makes of float64 beside a tie."""
    warnings.simplefilter("ignore")
    right: dict[tuple[str, str], list[str]] = {}
    wrong = [("peer", "format", "rounding", "tried", "wrong", "where", "first example")]
    doubles = [("peer", "format", "float64 beside a tie wrong")]
    for name, peer in PEERS.items():
        package, _, only = name.partition(" ")
        try:
            cases = list(peer())
        except Exception as error:  # not installed, or its extension does not compile here
            print(f"{name} left out: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        title = f"{package} {importlib.metadata.version(package)} {only}".strip()
        for fmt, rounding, function in cases:
            report = check(function, fmt, rounding)
            if report.ok:
                right.setdefault((title, rounding), []).append(fmt)
            else:
                counts = str(report.tried), str(report.wrong)
                wrong.append((title, fmt, rounding, *counts, where(report), example(report)))
            if rounding == "nearest_even" and fmt != "e8m0fnu" and not only:
                doubles.append((title, fmt, rounded_twice(function, fmt)))
    nothing = [("peer", "rounding", "nothing wrong in")]
    nothing += [(*which, " ".join(formats)) for which, formats in right.items()]
    for table in (nothing, wrong, doubles):
        print("", *aligned(table), sep="\n")


if __name__ == "__main__":
    main()
