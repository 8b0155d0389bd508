"""On a card: the bits of the CPU, streams, graphs, models. Skipped where torch sees none."""

from __future__ import annotations

import copy

import pytest
import torch

import fpemu
from fpemu import Key, Policy, Quantizer, cast, decode, emulate, encode, quantize, tally
from fpemu.formats import ROUNDINGS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no card")

FORMATS = ("fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz", "e2m1", "dlfloat16")


def patterns(start, count):
    return torch.arange(start, start + count, dtype=torch.int64).to(torch.int32).view(torch.float32)


def same(a, b):
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.cpu().view(integer), b.cpu().view(integer))


def key_of(rounding):
    return Key(3, offset=2**33) if rounding == "stochastic" else None


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_card_gives_the_bits_of_the_cpu(fmt, rounding):
    x = strided(2**26)
    there = quantize(x.cuda(), fmt, rounding, key=key_of(rounding))
    assert same(there, quantize(x, fmt, rounding, key=key_of(rounding)))


def strided(count):
    return (torch.arange(count, dtype=torch.int64) * (2**32 // count) + 5).to(torch.int32).view(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_every_float32_in_binary16(rounding):
    for start in range(0, 2**32, 2**26):
        x = patterns(start, 2**26)
        there = quantize(x.cuda(), "fp16", rounding, key=key_of(rounding))
        assert same(there, quantize(x, "fp16", rounding, key=key_of(rounding)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_other_dtypes(dtype, rounding):
    x = torch.randn(10_001, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    there = quantize(x.cuda(), "e4m3fn", rounding, key=key_of(rounding))
    assert there.dtype == dtype and same(there, quantize(x, "e4m3fn", rounding, key=key_of(rounding)))


@pytest.mark.parametrize("offset", [0, 1, 1023, 1024, 2**40 + 3])
def test_offsets_and_misaligned_views(offset):
    x = torch.randn(9001, generator=torch.Generator().manual_seed(0))
    key = Key(1, offset=offset)
    for view in (slice(None), slice(1, None), slice(2, 5000), slice(None, None, 3)):
        there = quantize(x.cuda()[view], "e5m2", "stochastic", key=key)
        assert same(there, quantize(x[view], "e5m2", "stochastic", key=key))


def test_in_place_out_and_layouts():
    x = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(0)).cuda()
    x = x.contiguous(memory_format=torch.channels_last)
    wanted = quantize(x, "fp16")
    assert wanted.is_contiguous(memory_format=torch.channels_last)
    assert quantize(x, "fp16", out=x) is x and same(x, wanted)
    assert quantize(x[:0], "fp16").numel() == 0


def test_codes_and_tallies():
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(0)) * 2.0**-12
    assert same(encode(x.cuda(), "fp16").view(torch.int16), encode(x, "fp16").view(torch.int16))
    codes = encode(x, "e4m3fn")
    assert same(decode(codes.cuda(), "e4m3fn"), decode(codes, "e4m3fn"))
    for dtype in (torch.float32, torch.float64, torch.float16):
        assert tally(x.to(dtype).cuda(), "e5m2") == tally(x.to(dtype), "e5m2")
        assert tally(x.to(dtype).cuda(), "e5m2").amax == tally(x.to(dtype), "e5m2").amax


def test_another_stream():
    x = torch.randn(2**20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = x * 2
        got = quantize(y, "e4m3fn")
    stream.synchronize()
    assert same(got, quantize((x * 2).cpu(), "e4m3fn"))


def test_a_captured_graph_rounds_again():
    x = torch.randn(2**16, device="cuda")
    out = torch.empty_like(x)
    quantize(x, "fp16", out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize(x, "fp16", out=out)
    x.mul_(3)
    graph.replay()
    assert same(out, quantize(x.cpu(), "fp16"))


def test_cast_and_emulation():
    x = torch.tensor([0.3], device="cuda", requires_grad=True)
    y = cast(x, forward="e4m3fn", backward="e5m2")
    y.backward(torch.tensor([0.3], device="cuda"))
    assert (y.item(), x.grad.item()) == (0.3125, 0.3125)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    there = copy.deepcopy(model).cuda()
    data = torch.randn(32, 64)
    random = Quantizer("e4m3fn", rounding="stochastic")
    policy = Policy(weight="e4m3fn", activation=random, gradient="e5m2", weight_gradient="fp16")
    for m, d in ((model, data), (there, data.cuda())):
        with emulate(m, policy, key=Key(7)) as emulation:
            m(d).square().mean().backward()
        assert sum(t.count for t in emulation.tallies().values()) > 0
        assert fpemu.is_representable(m[0].weight.grad.cpu(), "fp16").all()


def test_an_optimizer_keeps_weights_in_the_format():
    w = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = fpemu.LowPrecision(torch.optim.SGD([w], lr=1.0), weight="bf16", rounding="stochastic")
    for _ in range(10):
        w.grad = torch.full_like(w, -0.001)
        optimizer.step()
    assert fpemu.is_representable(w.detach().cpu(), "bf16").all()
    assert optimizer.updates == 10_000 and 0 < optimizer.lost < 10_000
