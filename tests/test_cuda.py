"""The CUDA kernels without a card: the simulator's bits are the CPU's, and PTX holds what it should."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

import fpemu
from fpemu.kernels import device

pytest.importorskip("numba_cuda", reason="needs fpemu[cuda13] or fpemu[cuda12]")

from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda, types

from fpemu.kernels import cuda as kernels

ARCHITECTURES = [(7, 5), (8, 0), (9, 0), (10, 0)]
if version("cuda-toolkit").startswith("12."):
    ARCHITECTURES.insert(0, (7, 0))  # CUDA 13 left it behind
ARRAY = {4: types.Array(types.uint32, 1, "C"), 8: types.Array(types.uint64, 1, "C")}
INTEGER = (
    "nearest_even_wide",
    "deterministic",
    "deterministic64",
    "stochastic",
    "stochastic64",
    "encode",
    "encode64",
)


def test_the_simulator_gives_the_bits_of_the_cpu():
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    script = pathlib.Path(__file__).with_name("simulate.py")
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=1200
    )
    assert result.returncode == 0, result.stderr
    differences = json.loads(result.stdout)
    assert len(differences) > 200
    assert {name: count for name, count in differences.items() if count} == {}


def ptx(kernel, signature, architecture):
    """The kernel's own part of its PTX, which assembles for the architecture without spilled registers."""
    text, _ = cuda.compile_ptx(kernel.py_func, signature, cc=architecture)
    options = LinkerOptions(arch="sm_{}{}".format(*architecture), ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ptx(text.encode()), options=options)
    linker.link("cubin")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in linker.get_info_log()
    return text[text.index(".visible .entry") :]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_kernels_compile_without_local_memory_or_spills(name, architecture):
    whole, guarded = kernels.KERNELS[name]
    width = 8 if name.endswith("64") else 4
    drawn = (types.uint64,) * 5 if name.startswith("stochastic") else ()
    texts = [ptx(guarded, (ARRAY[width], ARRAY[width], ARRAY[width], *drawn), architecture)]
    if whole is not None:
        texts.append(ptx(whole, (ARRAY[8], ARRAY[8], ARRAY[width], *drawn), architecture))
        # Eight elements a thread in four 64-bit loads and stores, or two of 128 bits.
        for access in ("ld", "st"):
            wide = re.findall(rf"{access}\.global\S*\.(v2\.)?[bu]64", texts[1])
            assert len(wide) in (2, 4)
            assert not re.search(rf"{access}\.global\S*\.u32", texts[1]) or access == "ld"
    for text in texts:
        assert "ld.local" not in text and "st.local" not in text
        if name in INTEGER:
            assert not re.search(r"\b(add|sub|mul|fma|div)\.(\w+\.)*f(32|64)", text)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
@pytest.mark.parametrize(
    "kernel, width", [(kernels.TALLY, 4), (kernels.TALLY64, 8)], ids=["float32", "float64"]
)
def test_tallies_compile_without_local_memory_or_spills(kernel, width, architecture):
    counts, parts = types.Array(types.int64, 1, "C"), types.Array(types.float64, 2, "C")
    text = ptx(kernel, (ARRAY[width], ARRAY[width], ARRAY[width], counts, parts), architecture)
    assert "ld.local" not in text and "st.local" not in text


def test_without_numba_cuda_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "numba_cuda", raising=False)
    with pytest.raises(RuntimeError, match=r"pip install 'fpemu\[cuda13\]'"):
        device.check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_doctor_says_that_there_is_no_card():
    result = subprocess.run(
        [sys.executable, "-m", "fpemu", "doctor"], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"^GPU +none", result.stdout, re.MULTILINE)
    assert f"fpemu     {fpemu.__version__}" in result.stdout
