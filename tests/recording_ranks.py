"""Run by torchrun: records of all ranks together are those of one process that trains on all the data."""

from __future__ import annotations

import pathlib
import sys
import warnings

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fpemu import Recorder, Tally, load

STEPS, EVERY, BATCH = 3, 2, 3


def exact(*shape, seed):
    """-1, 0 and 1: products and sums of a few of them, and of steps by them, are exact in any order."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def model():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(exact(*parameter.shape, seed=number))
    return net


def data(step, world):
    return exact(world, BATCH, 4, seed=100 + step)


def train(net, optimizer, recorder, loss):
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        recorder.step()


def tallies(directory):
    return {(m, r): (g.seen("fp16"), len(g)) for m, r, g in load(directory).groups()}


def check(kind, directory):
    rank, world = dist.get_rank(), dist.get_world_size()
    net = model()
    if kind in ("ddp", "compiled"):
        whole: nn.Module = DistributedDataParallel(net)
        if kind == "compiled":
            whole = torch.compile(whole, backend="aot_eager")
    else:
        if kind == "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
        else:
            mesh = init_device_mesh("cpu", (world,))
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=mesh)
        whole = fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(whole.parameters(), lr=2.0**-4, momentum=0.5)
    with Recorder(directory / kind, every=EVERY, formats=["fp16"], flush=1).watch(
        whole, optimizer
    ) as recorder:
        train(whole, optimizer, recorder, lambda step: whole(data(step, world)[rank]).sum())
    dist.barrier()
    if rank == 0:
        compare(kind, directory, world)
    dist.barrier()


def compare(kind, directory, world):
    recorded = len(range(0, STEPS, EVERY))
    records = load(directory / kind)
    assert records.modules == ["0", "1", "2"], records.modules
    for module, width in (("0", 8), ("1", 8), ("2", 4)):
        for role in ("activation", "gradient"):
            t = records.select(module, role).tally()
            assert t.count == BATCH * width * recorded * world, (module, role, t)
            assert t.histogram.sum() + t.zero == t.count
    parameters = sum(p.numel() for p in model().parameters())
    for role in ("weight", "weight_gradient", "update", "state.momentum_buffer"):
        assert records.select(role=role).tally().count == parameters * recorded, role
    for role in records.roles:
        reduced = set(records.select(role=role).table.column("reduced").to_pylist())
        assert reduced == {role == "weight_gradient"}, role
    ranks = sorted(set(records.table.column("rank").to_pylist()))
    assert ranks == list(range(world))

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-4, momentum=0.5)
    alone = directory / f"{kind}-alone"
    with Recorder(alone, every=EVERY, formats=["fp16"]).watch(net, optimizer) as recorder:
        # Ranks average gradients of weights, not those of activations.
        train(net, optimizer, recorder, lambda step: net(data(step, world).flatten(0, 1)).sum() / world)
    together, single = tallies(directory / kind), tallies(alone)
    assert together.keys() == single.keys()
    for where, (tally, _) in together.items():
        wanted = single[where][0]
        if where[1] == "gradient":
            tally, wanted = tally.scaled(1.0), wanted.scaled(float(world))
        assert tally == wanted, (kind, where, tally, wanted)
        # Sums of squares are float64, which rounds by the order of the additions.
        assert tally.amax == wanted.amax and np.allclose(tally.sums, wanted.sums, 1e-13, 0), (kind, where)
        assert tally.count or where[1] == "update_ratio"
    assert sum((t for t, _ in together.values()), Tally()).count > 0


if __name__ == "__main__":
    warnings.simplefilter("error", RuntimeWarning)  # a damaged file
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for one in sys.argv[2:]:
        check(one, pathlib.Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
