"""The Recorder against plain counts of the same tensors; files whole, damaged and cut off."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpemu
from fpemu import Policy, Quantizer, Recorder, Tally, emulate, load, tally


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


def train(model, recorder, optimizer, steps=4, scaler=None, data=None):
    """Steps of training; the loss of each."""
    losses = []
    for number in range(steps):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number)) if data is None else data
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if recorder is not None:
            recorder.step()
        losses.append(loss.item())
    return losses


def test_every_role_is_counted_as_plain_code_counts_it(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Recorder(tmp_path, every=1, formats=["e4m3fn"]).watch(model, optimizer) as recorder:
        twin = mlp()
        twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(5, 6)
        train(model, recorder, optimizer, steps=1, data=x)
    h = twin[0](x)
    a = h.clone().relu()
    y = twin[2](a)
    for tensor in (h, a, y):
        tensor.retain_grad()
    y.square().mean().backward()
    before = [p.detach().clone() for p in twin.parameters()]
    twin_optimizer.step()
    after = list(twin.parameters())
    moves = [(b, p.detach() - b) for p, b in zip(after, before, strict=True)]
    momenta = [twin_optimizer.state[p]["momentum_buffer"] for p in after]
    wanted = {
        ("0", "activation"): [h], ("1", "activation"): [a], ("2", "activation"): [y],
        ("0", "gradient"): [h.grad], ("1", "gradient"): [a.grad], ("2", "gradient"): [y.grad],
    }  # fmt: skip
    for module, first in (("0", 0), ("2", 2)):
        pair = slice(first, first + 2)
        wanted[module, "weight"] = before[pair]
        wanted[module, "weight_gradient"] = [p.grad for p in after[pair]]
        wanted[module, "update"] = [u for _, u in moves[pair]]
        wanted[module, "update_ratio"] = [(w / u).masked_fill(u == 0, 0) for w, u in moves[pair]]
        wanted[module, "state.momentum_buffer"] = momenta[pair]
    records = load(tmp_path)
    groups = {(module, role): group for module, role, group in records.groups()}
    assert groups.keys() == wanted.keys()
    for where, tensors in wanted.items():
        counted = sum((tally(t.detach(), "e4m3fn") for t in tensors), Tally())
        seen = groups[where].seen("e4m3fn")
        assert seen == counted, where
        assert seen.sums.tolist() == counted.sums.tolist()
        assert groups[where].tally() == sum((tally(t.detach()) for t in tensors), Tally())


def test_steps_between_are_not_recorded_and_training_is_the_same(tmp_path):
    model, plain = mlp(), mlp()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain)]
    with Recorder(tmp_path, every=3, first_step=100).watch(model, optimizers[0]) as recorder:
        losses = train(model, recorder, optimizers[0], steps=8)
    assert losses == train(plain, None, optimizers[1], steps=8)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    records = load(tmp_path)
    assert records.steps == [100, 103, 106]
    assert records.steps_table.column("step").to_pylist() == list(range(100, 108))
    assert records.select("0", "activation").tally().count == 3 * 5 * 8
    assert {r for r in records.roles if r.startswith("state.")} == {"state.exp_avg", "state.exp_avg_sq"}


def test_hooks_are_gone_after_close(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path).watch(model, optimizer):
        assert model[0]._forward_hooks
    assert not any(m._forward_hooks for m in model.modules())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compile_first", [True, False])
def test_a_compiled_model_is_recorded_like_an_eager_one(tmp_path, backend, compile_first):
    torch._dynamo.reset()
    records = []
    for compiled in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = torch.compile(model, backend=backend, fullgraph=True) if compiled and compile_first else model
        if compiled and compile_first:
            run(torch.zeros(5, 6)).sum().backward()
        directory = tmp_path / str(compiled)
        with Recorder(directory, every=2, formats=["fp16"]).watch(run, optimizer) as recorder:
            if compiled and not compile_first:
                run = torch.compile(model, backend=backend, fullgraph=True)
            train(run, recorder, optimizer, steps=4)
        records.append(load(directory))
    eager, compiled = records
    assert compiled.steps == eager.steps == [0, 2]
    assert [(m, r) for m, r, _ in compiled.groups()] == [(m, r) for m, r, _ in eager.groups()]
    for (_, _, a), (_, _, b) in zip(eager.groups(), compiled.groups(), strict=True):
        assert a.seen("fp16") == b.seen("fp16")


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.body, self.reentrant = mlp(), reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_in_a_checkpoint_is_not_counted_twice(tmp_path, reentrant):
    found = []
    for kind in (None, reentrant):
        model = Checkpointed(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(tmp_path / str(kind), every=1).watch(model, optimizer) as recorder:
            train(model, recorder, optimizer, steps=2)
        found.append({(m, r): g.tally() for m, r, g in load(tmp_path / str(kind)).groups()})
    assert found[0] == found[1]
    assert ("body.2", "gradient") in found[0]


def test_evaluation_without_gradients_is_not_counted(tmp_path):
    model = mlp()
    with Recorder(tmp_path, every=1).watch(model) as recorder:
        model(torch.zeros(5, 6)).sum().backward()
        model.eval()
        with torch.no_grad():
            model(torch.zeros(100, 6))
        recorder.step()
    assert load(tmp_path).select("0", "activation").tally().count == 40


def test_a_recorder_beside_an_emulation_counts_before_rounding(tmp_path):
    model = mlp()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
    wanted = tally(nn.functional.linear(x, model[0].weight, model[0].bias).detach())
    policy = Policy(activation="e2m1", gradient=Quantizer("e5m2", overflow="saturate"))
    with emulate(model, policy) as emulation:
        with Recorder(tmp_path, every=1, formats=["e5m2"]).watch(model) as recorder:
            model(x).sum().backward()
            recorder.step()
        kept = emulation.tallies()
    records = load(tmp_path)
    assert records.select("0", "activation").tally() == wanted
    for module in "012":
        assert records.select(module, "gradient").seen("e5m2") == kept[module, "gradient"]
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["emulated"]["0"] == {"activation": "e2m1", "gradient": "e5m2 saturate"}


class Skipping(torch.amp.GradScaler):
    """Finds an infinity in its second step."""

    def __init__(self):
        super().__init__("cpu", init_scale=1024.0, growth_interval=2)
        self.number = 0

    def step(self, optimizer):
        self.number += 1
        if self.number == 2:
            next(iter(optimizer.param_groups[0]["params"])).grad.fill_(torch.inf)
        return super().step(optimizer)


def test_scales_and_skipped_steps_of_a_scaler(tmp_path):
    model, scaler = mlp(), Skipping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(tmp_path, every=1).watch(model, optimizer, scaler) as recorder:
        train(model, recorder, optimizer, steps=4, scaler=scaler)
    records = load(tmp_path)
    assert records.steps_table.column("scale").to_pylist() == [1024, 1024, 512, 512]
    assert records.steps_table.column("skipped").to_pylist() == [False, True, False, False]
    gradients, weights = records.select(role="gradient"), records.select(role="weight_gradient")
    assert sorted(set(gradients.table.column("scale").to_pylist())) == [512, 1024]
    assert set(weights.table.column("scale").to_pylist()) == {1.0}
    assert weights.select(steps=1).seen().positive_infinity == 48
    assert records.first_overflow().step == 1
    assert "update" not in records.select(steps=1).roles
    # Divided by the scale they are the gradients of the loss itself.
    assert gradients.select(steps=0).tally() == gradients.select(steps=0).seen().scaled(2.0**-10)


def test_gradients_that_nobody_unscaled_carry_the_scale(tmp_path):
    model = mlp()
    with Recorder(tmp_path, every=1).watch(model, scaler=256.0) as recorder:
        (256 * model(torch.ones(5, 6)).sum()).backward()
        recorder.step()
    records = load(tmp_path)
    plain = mlp()
    plain(torch.ones(5, 6)).sum().backward()
    assert records.select("0", "weight_gradient").tally() == tally(plain[0].weight.grad) + tally(
        plain[0].bias.grad
    )
    assert set(records.select(role="weight").table.column("scale").to_pylist()) == {1.0}


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_a_fused_optimizer_that_unscales_itself_gets_scaled_gradients(tmp_path, factor):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    with Recorder(tmp_path, every=1).watch(model, optimizer, scaler) as recorder:
        scaler.scale(model(torch.ones(5, 6)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        recorder.step()
    records = load(tmp_path)
    assert set(records.select(role="weight_gradient").table.column("scale").to_pylist()) == {128.0}
    assert records.steps_table.column("skipped").to_pylist() == [factor == math.inf]


def test_the_gradients_that_a_closure_computes_are_counted_after_it(tmp_path):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(5, 6)).square().mean()
        loss.backward()
        return loss

    with Recorder(tmp_path, every=1).watch(model, optimizer) as recorder:
        optimizer.step(closure)
        recorder.step()
    records = load(tmp_path)
    wanted = tally(model[2].weight.grad) + tally(model[2].bias.grad)
    assert records.select("2", "weight_gradient").tally() == wanted
    assert records.select("2", "update").tally().count == 27


def test_outputs_of_autocast_are_counted(tmp_path):
    model = mlp()
    with Recorder(tmp_path, every=1, formats=["fp16", "tf32"]).watch(model) as recorder:
        x = torch.randn(5, 6)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            wanted = tally(model[0](x).detach(), "tf32")
        y.float().sum().backward()
        recorder.step()
    # The second forward, of one layer, is counted too.
    assert load(tmp_path).select("0", "activation").seen("tf32") == wanted + wanted
    assert load(tmp_path).select("2", "gradient").tally() == tally(torch.ones(5, 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_scripted_modules_transforms_and_lazy_parameters_are_left_alone_with_a_reason(tmp_path):
    lazy = nn.LazyLinear(3)
    model = nn.Sequential(torch.jit.trace(nn.Linear(6, 6), torch.ones(1, 6)), nn.Linear(6, 6), lazy)
    with Recorder(tmp_path, every=1).watch(model) as recorder:
        torch.vmap(model[1])(torch.ones(5, 6))
        recorder.step()
    records = load(tmp_path)
    assert records.roles == ["weight"] and records.modules == ["0", "1"]
    assert json.loads((tmp_path / "run.json").read_text())["left_alone"] == {
        "0 activation": "a torch.jit module takes no hooks",
        "1 activation": "it is within a transform of torch.func",
    }


def test_a_watched_model_can_be_audited_and_rounded_op_by_op(tmp_path):
    model = mlp()
    for name, policy in (("a", Policy(activation="e5m2", weight="e5m2")), ("b", Policy(every_op="e5m2"))):
        with emulate(model, policy) as emulation:
            audited = str(emulation.audit(torch.ones(5, 6)))
            with Recorder(tmp_path / name, every=1).watch(model) as recorder:
                assert str(emulation.audit(torch.ones(5, 6))) == audited
                recorder.step()
        assert load(tmp_path / name).select("2", "gradient").tally().count == 15


class Odd(nn.Module):
    """Returns what is seldom returned."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = x * self.weight
        return {
            "half": y.half(), "bfloat": [y.bfloat16()], "double": y.double(), "empty": y[:0],
            "bad": y * torch.tensor([torch.nan, torch.inf, 0.0, 1.0]), "int": torch.arange(3), "none": None,
            "complex": y + 1j, "sparse": y.detach().to_sparse(), "other": object(),
        }  # fmt: skip


def test_odd_outputs_never_raise_and_are_accounted_for(tmp_path):
    model = Odd()
    with Recorder(tmp_path, every=1, formats=["fp16", "bf16"]).watch(model) as recorder:
        out = model(torch.full((4,), 0.1))
        (out["half"].float().sum() + out["bfloat"][0].sum() + out["double"].sum()).backward()
        recorder.step()
    seen = load(tmp_path).select("", "activation").seen("bf16")
    assert seen.count == 4 * 4 and (seen.nan, seen.positive_infinity, seen.zero) == (1, 1, 1)
    y = torch.full((4,), 0.1)
    for x in (y.half(), y.bfloat16(), y.double(), y * torch.tensor([torch.nan, torch.inf, 0.0, 1.0])):
        assert (seen.histogram >= tally(x).histogram).all()
    reasons = json.loads((tmp_path / "run.json").read_text())["left_alone"]["(model) activation"]
    assert reasons == "a object is not opened, dtype torch.complex64, layout torch.sparse_coo"


def test_sparse_gradients_are_left_alone_with_a_reason(tmp_path):
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with Recorder(tmp_path, every=1).watch(model, optimizer) as recorder:
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        recorder.step()
    records = load(tmp_path)
    assert records.select(role="update").tally().count == 15
    assert json.loads((tmp_path / "run.json").read_text())["left_alone"] == {
        "(model) weight_gradient": "layout torch.sparse_coo"
    }


def test_a_shared_parameter_is_counted_once_and_a_pattern_chooses(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    with Recorder(tmp_path, every=1, modules=["0", "1"]).watch(model) as recorder:
        model(torch.ones(1, 4)).sum().backward()
        recorder.step()
    records = load(tmp_path)
    assert records.modules == ["0", "1"]
    assert records.select(role="weight").tally().count == 16
    assert records.select(role="weight").modules == ["0"]


def test_weights_of_parametrized_layers_go_by_the_layer_s_name(tmp_path):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    with Recorder(tmp_path, every=1).watch(torch.compile(model, backend="eager")) as recorder:
        model(torch.ones(1, 4)).sum().backward()
        recorder.step()
    records = load(tmp_path)
    assert records.modules == ["0"]
    assert records.select(role="weight").tally().count == 12 + 3 + 3  # directions, lengths, bias


def test_attention_is_one_module(tmp_path):
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    with Recorder(tmp_path, every=1).watch(model) as recorder:
        x = torch.randn(2, 3, 4)
        model(x, x, x)[0].sum().backward()
        recorder.step()
    records = load(tmp_path)
    assert records.select("", "activation").tally().count == 2 * 3 * 4 + 2 * 3 * 3  # and its weights
    assert set(records.select(role="weight").modules) == {"", "out_proj"}


def test_copies_of_a_watched_model_are_not_recorded(tmp_path):
    model = mlp()
    with Recorder(tmp_path, every=1).watch(model) as recorder:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(torch.ones(5, 6)).sum().backward()
        recorder.step()
    assert "activation" not in load(tmp_path).roles


def test_a_thousand_steps_keep_nothing(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path, every=1, flush=50).watch(model, optimizer) as recorder:
        train(model, recorder, optimizer, steps=50)
        sizes = [t.element_size() * t.numel() for c in recorder._watch.counters.values() for t in (c.counts,)]
        assert not recorder._rows and not recorder._steps and not recorder._watch._before
        train(model, recorder, optimizer, steps=100)
        assert sizes == [
            t.element_size() * t.numel() for c in recorder._watch.counters.values() for t in (c.counts,)
        ]
        assert not recorder._rows
    assert sorted(p.name for p in tmp_path.glob("tallies/rank=0/*")) == [
        f"part-{n:08d}.parquet" for n in range(3)
    ]


KILLED = """
import os, sys, torch, fpemu
model = torch.nn.Linear(4, 2)
recorder = fpemu.Recorder(sys.argv[1], every=1, flush=3).watch(model)
for _ in range(8):
    model(torch.ones(1, 4)).sum().backward()
    recorder.step()
os._exit(9)
"""


def test_a_killed_run_loses_what_was_not_flushed(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == 9
    records = load(tmp_path)
    assert records.steps == list(range(6))
    assert next(iter(records.runs.values()))["finished"] is False


def parts(tmp_path):
    model = mlp()
    with Recorder(tmp_path, every=1, flush=1).watch(model) as recorder:
        for _ in range(3):
            model(torch.ones(5, 6)).sum().backward()
            recorder.step()
    return sorted(tmp_path.glob("tallies/rank=0/part-*"))


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "other"])
def test_damaged_files_are_skipped_with_a_warning(tmp_path, how):
    broken = parts(tmp_path)[1]
    content = broken.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 8] ^= 255
    broken.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "empty": b"",
            "flipped": bytes(flipped),
            "other": b"PAR1 not parquet PAR1",
        }[how]
    )
    with pytest.warns(RuntimeWarning, match=r"part-00000001.parquet is skipped, it does not hold records"):
        records = load(tmp_path)
    assert records.steps == [0, 2]


def test_a_file_of_another_kind_is_skipped_with_a_warning(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), parts(tmp_path)[0])
    with pytest.warns(RuntimeWarning, match="part-00000000"):
        assert load(tmp_path).steps == [1, 2]


def test_a_damaged_run_json_is_skipped_with_a_warning(tmp_path):
    parts(tmp_path)
    (tmp_path / "run.json").write_text('{"every": 1')
    with pytest.warns(RuntimeWarning, match=r"run\.json is skipped, it is damaged"):
        records = load(tmp_path)
    assert records.steps == [0, 1, 2] and records.runs == {str(tmp_path): {}}


def test_unfinished_files_are_not_read(tmp_path):
    first = parts(tmp_path)[0]
    first.rename(first.with_name(f".{first.name}.123"))
    assert load(tmp_path).steps == [1, 2]


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda d: Recorder(d, every=0), ValueError, "every must be an int of at least 1, got 0"),
        (lambda d: Recorder(d, formats=["fp17"]), ValueError, "unknown format 'fp17'"),
        (lambda d: Recorder(d).step(), RuntimeError, "nothing is recorded: call watch"),
        (lambda d: Recorder(d).watch("model"), TypeError, "watch needs a torch.nn.Module, got str"),
        (lambda d: Recorder(d, modules="x*").watch(mlp()), ValueError, r"pattern 'x\*' matches none"),
        (lambda d: Recorder(d).watch(mlp()).watch(mlp()), RuntimeError, "watches a model already"),
        (lambda d: load(d), FileNotFoundError, "no records in"),
        (lambda d: load(d / "none"), FileNotFoundError, "no directory"),
    ],
)
def test_wrong_use_is_refused(tmp_path, call, error, message):
    with pytest.raises(error, match=message):
        call(tmp_path)


def test_a_directory_with_records_is_not_written_to(tmp_path):
    parts(tmp_path)
    with pytest.raises(ValueError, match="holds records already; choose another directory"):
        Recorder(tmp_path)


def test_run_json_tells_how_the_run_was_made(tmp_path):
    torch.manual_seed(77)
    with Recorder(tmp_path, every=5, formats=["fp16", "half"]).watch(nn.Linear(2, 2)) as recorder:
        recorder.step()
    about = json.loads((tmp_path / "run.json").read_text())
    assert (about["every"], about["formats"], about["seed"], about["finished"]) == (5, ["binary16"], 77, True)
    assert about["versions"]["torch"] == torch.__version__
    assert np.datetime64(about["began"].rstrip("Z")) > np.datetime64("2020-01-01")


def test_lost_updates_of_a_low_precision_optimizer_are_recorded(tmp_path):
    model = mlp()
    optimizer = fpemu.LowPrecision(torch.optim.SGD(model.parameters(), lr=1e-4), weight="bf16")
    with Recorder(tmp_path, every=2).watch(model, optimizer) as recorder:
        train(model, recorder, optimizer, steps=3)
        wanted = optimizer.updates, optimizer.lost
    last = load(tmp_path).steps_table.to_pylist()[-1]
    assert (last["updates"], last["lost"]) == wanted and wanted[1] > 0
