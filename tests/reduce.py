"""Run by torchrun: reductions between processes, compared with the same ones in one process."""

from __future__ import annotations

import contextlib
from functools import partial

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fpemu import Format, Key, comm, quantize
from fpemu.scaling import LossScaler

SIX_BITS = Format("six", exponent_bits=3, precision=3)
SR = {"rounding": "stochastic", "key": Key(5, step=3)}
OPTIONS = {
    "ring": {"fmt": "fp16"},
    "tree": {"fmt": "e5m2", "order": "tree", "divide": "before", **SR},
    "fp32": {"fmt": "bf16", "order": "fp32", "divide": "premultiply"},
    "wire": {"fmt": "fp16", "transport": "wire"},
    "wire random": {"fmt": "e4m3fn", "transport": "wire", "accumulate": "fp16", **SR},
    "wire packed": {"fmt": SIX_BITS, "transport": "wire", "divide": "before"},
    "wire fp32": {"fmt": "bf16", "transport": "wire", "accumulate": "fp32", "order": "ring"},
}


class Net(nn.Module):
    """The second layer takes part if asked."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x, all_of_it=True):
        x = self.first(x).relu()
        return self.last(self.second(x) if all_of_it else x)


def model():
    torch.manual_seed(0)
    return Net()


def backward(net, step, all_of_it=True):
    seed = 100 * step + dist.get_rank()
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(seed))
    net(x, all_of_it).square().mean().backward()


def gathered(x):
    parts = x.new_empty(dist.get_world_size(), x.numel())
    dist.all_gather(list(parts), x.contiguous())
    return parts


def grads(net):
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def same_on_all(x):
    assert all(torch.equal(part, x) for part in gathered(x))


def emulated(options):
    """The same reduction for one process."""
    return comm.AllReduce(**{name: value for name, value in options.items() if name != "transport"})


class Checked:
    """A state whose every bucket is compared with `emulate_ranks` of all ranks' buckets."""

    def __init__(self, options):
        self.reduction, self.alone = comm.AllReduce(**options), emulated(options)
        self.sizes = []


def checked_hook(state: Checked, bucket):
    wanted = comm.emulate_ranks(gathered(bucket.buffer()), state.alone)
    done = comm.hook(state.reduction, bucket)
    assert torch.equal(done.value(), wanted)
    state.sizes.append(bucket.buffer().numel())
    return done


def check_hook(name):
    state = Checked(OPTIONS[name])
    # Small buckets, which DistributedDataParallel lays out anew after the first step.
    net = DistributedDataParallel(model(), bucket_cap_mb=1e-4, find_unused_parameters=name == "tree")
    net.register_comm_hook(state, checked_hook)
    for step in range(4):
        net.zero_grad()
        with net.no_sync() if step == 2 else contextlib.nullcontext():
            backward(net, step, all_of_it=name != "tree" or step != 1)
        if step == 2:
            calls = state.reduction.calls
            backward(net, 9)
            assert state.reduction.calls > calls
        assert grads(net).isfinite().all() and grads(net).any()
        same_on_all(grads(net))
    assert len(set(state.sizes)) > 1, state.sizes
    bytes_of_all = gathered(torch.tensor([float(state.reduction.bytes)])).sum()
    assert bytes_of_all == state.alone.bytes * dist.get_world_size(), name
    ours, theirs = state.reduction.tallies(), state.alone.tallies()
    assert list(ours) == list(theirs)
    for place in ours:
        counts = gathered(torch.from_numpy(ours[place].counts))
        whole = counts.sum(0) if state.reduction.transport == "wire" else counts[0]
        assert whole.tolist() == theirs[place].counts.tolist(), (name, place)


def check_few_elements():
    """Fewer than ranks: some chunks are empty, and nothing is sent for those."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for n in range(4):
        x = torch.randn(world, n, generator=torch.Generator().manual_seed(n))
        sums = (sent := comm.AllReduce("e5m2", transport="wire")).arithmetic(world)
        got = sent.send(sums, sums.contribution(x[rank], rank, 0), None, gather=True)
        assert torch.equal(got, comm.emulate_ranks(x, comm.AllReduce("e5m2"))), n


def check_one_rank():
    """A group of one: as without a hook."""
    mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    plain, net = model(), DistributedDataParallel(model(), process_group=mine)
    net.register_comm_hook(comm.AllReduce("e2m1", group=mine), comm.hook)
    for each in (plain, net):
        backward(each, 0)
    assert torch.equal(grads(net), grads(plain))


def check_infinity():
    """Infinite on one rank: all ranks skip."""
    for transport in ("emulate", "wire"):
        net = DistributedDataParallel(model())
        net.register_comm_hook(comm.AllReduce("fp16", transport=transport), comm.hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = LossScaler(2.0**8, device="cpu")
        before = [p.detach().clone() for p in net.parameters()]
        factor = float("inf") if dist.get_rank() == 1 else 1.0
        scaler.scale(net(torch.ones(2, 7)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped == 1 and scaler.get_scale() == 2.0**7
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def check_feedback():
    """Errors belong to parameters, and a resumed run goes on, once its buckets are laid out as they were."""
    options = {"fmt": "e5m2", "error_feedback": True, **SR}
    nets, states = [], []
    for transport in ("emulate", "wire"):
        state = comm.AllReduce(**options, transport=transport)
        net = DistributedDataParallel(model())
        net.register_comm_hook(state, comm.hook)
        nets.append(net)
        states.append(state)
    for step in range(3):
        for net in nets:
            net.zero_grad()
            backward(net, step)
    assert torch.equal(grads(nets[0]), grads(nets[1]))
    saved = states[0].state_dict(nets[0])
    assert sorted(saved["residuals"]) == sorted(name for name, _ in model().named_parameters())
    assert any(error.any() for error in saved["residuals"].values())
    resumed = comm.AllReduce(**options)
    net = DistributedDataParallel(model())
    net.register_comm_hook(resumed, comm.hook)
    backward(net, 0)
    resumed.load_state_dict(saved, net)
    for each in (nets[0], net):
        each.zero_grad()
        backward(each, 3)
    assert torch.equal(grads(nets[0]), grads(net))
    again = resumed.state_dict(net)["residuals"]
    assert all(
        torch.equal(error, again[name]) for name, error in states[0].state_dict(nets[0])["residuals"].items()
    )


def check_wrapped():
    """torch's own all-reduce around which gradients and result are rounded."""
    net, alone = DistributedDataParallel(model()), model()
    net.register_comm_hook(comm.AllReduce("e4m3fn", then=partial(allreduce_hook, None)), comm.hook)
    for each in (net, alone):
        backward(each, 0)
    rounded = quantize(grads(alone), "e4m3fn") / dist.get_world_size()
    assert torch.equal(grads(net), quantize(gathered(rounded).sum(0), "e4m3fn"))


class CheckedScatter(comm.ReduceScatter):
    """A reduce-scatter whose every result is compared with its slice of the whole."""

    def __init__(self, options):
        super().__init__(comm.AllReduce(**options))
        self.alone, self.times = emulated(options), 0

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        whole = comm.emulate_ranks(gathered(input_tensor), self.alone)
        super().__call__(output_tensor, input_tensor, group, op, async_op)
        if self.alone.partial == self.alone.fmt:
            assert torch.equal(output_tensor, whole.view(dist.get_world_size(), -1)[dist.get_rank()])
        self.times += 1


def check_shards(name):
    net, reduce = model(), CheckedScatter(OPTIONS[name])
    for part in (net.first, net.second, net.last, net):
        fully_shard(part)
    for part in (net.first, net.second, net.last):
        part.set_custom_reduce_scatter(reduce)
    for step in range(2):
        backward(net, step)
    assert reduce.times == 6
    assert all(p.grad.full_tensor().isfinite().all() for p in net.parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in OPTIONS:
        check_hook(name)
        check_shards(name)
    check_few_elements()
    check_one_rank()
    check_infinity()
    check_feedback()
    check_wrapped()
    dist.barrier()
    dist.destroy_process_group()
