"""Run by torchrun: LowPrecision on replicas and shards, compared with the same steps in one process."""

from __future__ import annotations

import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from fpemu import Key, LowPrecision, Quantizer

SCALED = Quantizer("e4m3fn", rounding="stochastic", scaling="tensor")
OPTIONS = {
    "nearest": {"weight": "bf16", "kahan": True, "state": Quantizer("fp16", scaling="tensor")},
    "stochastic": {"weight": "bf16", "rounding": "stochastic", "state": SCALED, "master": False},
    "master": {"weight": "e4m3fn", "rounding": "stochastic", "master": True},
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))  # 5 and 3 rows: parts are uneven


def around(net, name):
    inner = torch.optim.Adam(net.named_parameters(), lr=0.01)
    return LowPrecision(inner, key=Key(3), **OPTIONS[name])


def train(net, optimizer, steps, start=0):
    data = torch.randn(10, 6, 7, generator=torch.Generator().manual_seed(1))
    for x in data[start : start + steps]:
        optimizer.zero_grad()
        # Rows of very different sizes: the parts' own scales are not that of the whole.
        (net(x) * torch.tensor([1.0, 2.0**-6, 2.0**-12])).square().mean().backward()
        optimizer.step()


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def same(net, alone, what):
    for (name, a), b in zip(net.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(whole(a).detach(), b.detach()), (what, name)


def copied(x):
    # A deep copy of a shard would copy its mesh, process groups and all.
    return x.clone() if isinstance(x, torch.Tensor) else x


def wrapped(kind):
    return DistributedDataParallel(model()) if kind == "ddp" else fully_shard(model())


def check(kind, name):
    alone = model()
    single = around(alone, name)
    train(alone, single, 6)
    net, resumed = wrapped(kind), wrapped(kind)
    optimizer = around(net, name)
    train(net, optimizer, 3)
    resumed.load_state_dict(net.state_dict())
    again = around(resumed, name)
    again.load_state_dict(tree_map(copied, optimizer.state_dict()))
    train(resumed, again, 3, start=3)
    same(resumed, alone, (kind, name))
    counts = torch.tensor([again.updates, again.lost])
    if kind == "fsdp":
        dist.all_reduce(counts)
    assert counts.tolist() == [single.updates, single.lost], (kind, name, counts, single.updates)


def check_columns():
    """Parts that are columns, of more dimensions than two."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(2))
    for dimension in range(3):
        alone = nn.Parameter(values.clone())
        part = nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(dimension)]))
        for w in (alone, part):
            inner = torch.optim.SGD([("w", w)], lr=2.0**-12)
            optimizer = LowPrecision(inner, weight="fp16", rounding="stochastic", key=Key(5))
            w.grad = w.detach().clone()
            optimizer.step()
        assert torch.equal(part.detach().full_tensor(), alone.detach()), dimension


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in OPTIONS:
        check(sys.argv[1], name)
    if sys.argv[1] == "fsdp":
        check_columns()
    dist.barrier()
    dist.destroy_process_group()
