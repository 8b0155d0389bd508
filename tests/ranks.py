"""Run by torchrun: a data-parallel step under emulation, compared with the same step in one process."""

from __future__ import annotations

import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from fpemu import Key, Policy, Quantizer, emulate

RANDOM = Quantizer("e4m3fn", rounding="stochastic")
POLICIES = {
    "nearest": Policy(weight="e4m3fn", activation="e4m3fn", gradient="e5m2", weight_gradient="e4m3fn"),
    "stochastic": Policy(weight=RANDOM, activation=RANDOM, gradient=RANDOM, weight_gradient="e4m3fn"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.second(self.first(x).relu() @ x.mT @ x)


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 4))


def step(net, x):
    for parameter in net.parameters():
        parameter.grad = None
    y = net(x)
    y.square().mean().backward()
    return y.detach()


def gradients(net):
    full = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()]
    return [gradient.clone() for gradient in full]


def wrapped(kind, net):
    if kind == "ddp":
        return DistributedDataParallel(net)
    for block in net:
        fully_shard(block)
    return fully_shard(net)


def check(kind, name, emulate_first):
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.randn(world, 3, 5, 8, generator=torch.Generator().manual_seed(1)) * 0.3
    outputs, sums = [], None
    for part in data:
        alone = model()
        with emulate(alone, POLICIES[name], key=Key(7)):
            outputs.append(step(alone, part))
        own = gradients(alone)
        sums = own if sums is None else [a + b for a, b in zip(sums, own, strict=True)]
    net = model()
    if emulate_first:
        emulation = emulate(net, POLICIES[name], key=Key(7))
        whole = wrapped(kind, net)
    else:
        whole = wrapped(kind, net)
        emulation = emulate(whole, POLICIES[name], key=Key(7))
    y = step(whole, data[rank])
    assert torch.equal(y, outputs[rank]), (kind, name, emulate_first, "outputs")
    for got, wanted in zip(gradients(net), sums, strict=True):
        assert wanted.isfinite().all() and torch.equal(got, wanted / world), (
            kind,
            name,
            emulate_first,
            "gradients",
        )
    assert emulation.tallies()["0.first", "weight"].count == 72
    emulation.remove()
    plain = model()
    assert torch.equal(step(whole, data[rank]), step(plain, data[rank]))


def check_compiled():
    """A parametrized model, wrapped, compiled and emulated."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.randn(world, 5, 8, generator=torch.Generator().manual_seed(1)) * 0.3
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)))
    eager, whole = nets[0], torch.compile(DistributedDataParallel(nets[1]), backend="aot_eager")
    with emulate(eager, POLICIES["nearest"]), emulate(nets[1], POLICIES["nearest"]):
        assert torch.equal(step(eager, data[rank]), step(whole, data[rank])), "compiled outputs"
        summed = [gradient.clone() for gradient in gradients(eager)]
        for gradient in summed:
            dist.all_reduce(gradient)
        for got, wanted in zip(gradients(nets[1]), summed, strict=True):
            assert torch.equal(got, wanted / world), "compiled gradients"


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for policy in POLICIES:
        for first in (True, False):
            check(sys.argv[1], policy, first)
    if sys.argv[1] == "ddp":
        check_compiled()
    dist.barrier()
    dist.destroy_process_group()
