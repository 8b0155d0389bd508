"""Products that modules compute by functions: what is rounded, under what transforms, and what stays."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from fpemu import Key, Policy, Quantizer, cast, emulate, quantize

WAG = Policy(weight="e4m3fn", activation="e4m3fn", gradient="e5m2")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(x):
    return cast(x, forward="e4m3fn", backward="e5m2")


def w(parameter):
    return cast(parameter, forward="e4m3fn")


class Calls(nn.Module):
    """One function of an input and of a parameter of the module's own; a leaf, or with a child."""

    def __init__(self, function, shape, leaf):
        super().__init__()
        self.weight = nn.Parameter(normal(*shape, seed=1))
        self.function = function
        if not leaf:
            self.child = nn.Identity()

    def forward(self, x):
        return self.function(x, self.weight).tanh() * 0.5


FUNCTIONS = {
    "F.linear": (F.linear, (4, 4)),
    "F.linear by name": (lambda x, w: F.linear(input=x, weight=w), (4, 4)),
    "@": (lambda x, w: x @ w, (4, 4)),
    "matmul": (torch.matmul, (4, 4)),
    "Tensor.matmul": (lambda x, w: x.matmul(w), (4, 4)),
    "mm": (torch.mm, (4, 4)),
    "addmm": (lambda x, w: torch.addmm(torch.ones(4), x, w), (4, 4)),
    "bmm": (lambda x, w: torch.bmm(x[None], w[None])[0], (4, 4)),
    "baddbmm": (lambda x, w: torch.baddbmm(torch.ones(1, 1, 4), x[None], w[None])[0], (4, 4)),
    "mv": (torch.mv, (4,)),
    "einsum": (lambda x, w: torch.einsum("ij,jk->ik", x, w), (4, 4)),
    "einsum of a list": (lambda x, w: torch.einsum("ij,jk->ik", [x, w]), (4, 4)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, 1), (4, 4)),
    "conv1d": (lambda x, w: F.conv1d(x[None], w, padding=1)[0], (6, 6, 3)),
    "conv_transpose1d": (lambda x, w: F.conv_transpose1d(x[None], w)[0], (6, 6, 3)),
    "attention": (lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None])[0], (6, 4)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_module_with_children_is_rounded_like_a_leaf(name):
    function, shape = FUNCTIONS[name]
    model, x = Calls(function, shape, leaf=False), normal(6, 4).requires_grad_()
    with emulate(model, WAG):
        y = model(x)
        y.square().sum().backward()
    mine, plain = normal(6, 4).requires_grad_(), model.weight.detach().clone().requires_grad_()
    expected = both(function(mine, w(plain))).tanh() * 0.5
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, mine.grad) and torch.equal(model.weight.grad, plain.grad)


def test_a_leaf_rounds_products_inside_and_what_it_returns():
    model, x = Calls(torch.matmul, (4, 4), leaf=True), normal(6, 4)
    with emulate(model, WAG) as emulation:
        y = model(x)
    assert torch.equal(y, both(both(x @ w(model.weight)).tanh() * 0.5))
    assert emulation.tallies()["", "activation"].count == 2 * y.numel()


def test_a_product_that_a_leaf_returns_counts_once():
    class Product(nn.Module):
        def forward(self, x):
            return x @ x.T

    with emulate(Product(), WAG) as emulation:
        emulation.model(normal(3, 4))
    assert emulation.tallies()["", "activation"].count == 9


def test_layers_of_torch_count_their_products_once():
    with emulate(nn.Linear(4, 3), WAG) as emulation:
        emulation.model(normal(2, 4))
    assert emulation.tallies()["", "activation"].count == 6


def test_an_excluded_layers_product_is_not_its_parents():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), normal(2, 4)
    with emulate(model, Policy(activation="e4m3fn", exclude="1")):
        y = model(x)
    assert torch.equal(y, model[1](quantize(model[0](x).detach(), "e4m3fn")))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 4)
        self.body = nn.Linear(4, 4)

    def forward(self, tokens):
        return F.linear(self.body(self.embedding(tokens)), self.embedding.weight)


def test_a_head_that_reads_the_embeddings_weight_reads_it_rounded():
    model, tokens = Tied(), torch.arange(10)
    with emulate(model, WAG) as emulation:
        y = model(tokens)
        y.square().sum().backward()
        assert emulation.audit(tokens).uncovered == ()
    copied = copy.deepcopy(model)
    copied.zero_grad()
    table = w(copied.embedding.weight)
    hidden = both(F.embedding(tokens, table))
    hidden = both(F.linear(hidden, w(copied.body.weight), w(copied.body.bias)))
    expected = both(F.linear(hidden, w(copied.embedding.weight)))
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(model.embedding.weight.grad, copied.embedding.weight.grad)


def test_attention_reads_and_rounds_everything():  # scenario 5
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), normal(2, 5, 8)
    policy = Policy(weight="e4m3fn", activation="e4m3fn", gradient="e5m2", input="e4m3fn")
    for need_weights in (False, True):
        with emulate(model, policy) as emulation:
            y = model(x, x, x, need_weights=need_weights)[0]
        q, k, v = both(F.linear(w(x), w(model.in_proj_weight), w(model.in_proj_bias))).chunk(3, -1)
        q, k, v = (t.reshape(2, 5, 2, 4).transpose(1, 2) for t in (q, k, v))
        if need_weights:
            scores = both((q * 0.5) @ k.transpose(-2, -1))
            h = both(scores.softmax(-1) @ v)
        else:
            h = both(F.scaled_dot_product_attention(q, k, v))
        expected = both(
            F.linear(h.transpose(1, 2).flatten(2), w(model.out_proj.weight), w(model.out_proj.bias))
        )
        assert torch.equal(y, expected)
        assert "out_proj" not in emulation.report().skipped


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_the_formats_of_the_six_factors_are_those_of_hand_written_products(rounding):
    formats = dict(
        forward_a="e4m3fn", forward_w="e3m2", dgrad_g="e5m2", dgrad_w="e4m3fn", wgrad_g="e2m3", wgrad_a="e5m2"
    )
    q = {role: Quantizer(fmt, rounding=rounding) for role, fmt in formats.items()}
    model, x = nn.Linear(5, 3), normal(4, 5).requires_grad_()
    key, g = Key(3), normal(4, 3, seed=2)
    with emulate(model, Policy(**q), key=key):
        y = model(x)
        y.backward(g)

    def of(role, t):
        own = key.fold_in("").fold_in(role) if rounding == "stochastic" else None
        return q[role](t.detach(), key=own)

    assert torch.equal(y, F.linear(of("forward_a", x), of("forward_w", model.weight), model.bias))
    assert torch.equal(x.grad, of("dgrad_g", g) @ of("dgrad_w", model.weight))
    assert torch.equal(model.weight.grad, of("wgrad_g", g).T @ of("wgrad_a", x))
    assert torch.equal(model.bias.grad, g.sum(0))


@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: nn.Conv2d(3, 4, 3, padding=1, stride=2), (2, 3, 8, 8)),
        (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5)),
        (lambda: nn.Conv1d(4, 4, 3, groups=2), (2, 4, 8)),
    ],
    ids=["conv", "transposed", "groups"],
)
def test_convolutions_take_a_format_for_each_factor(make, shape):
    model, x = make(), normal(*shape).requires_grad_()
    factors = dict(forward_a="e4m3fn", forward_w="e4m3fn", dgrad_w="e5m2", wgrad_a="e5m2", dgrad_g="e5m2")
    with emulate(model, Policy(**factors)):
        y = model(x)
        g = normal(*y.shape, seed=3)
        y.backward(g)
    got = x.grad, model.weight.grad

    def plain(fmt_w, fmt_a):
        other = copy.deepcopy(model)
        other.weight.data = quantize(model.weight.data, fmt_w)
        leaf = quantize(x.detach(), fmt_a).requires_grad_()
        other.zero_grad()
        return other, leaf, other(leaf)

    assert torch.equal(y, plain("e4m3fn", "e4m3fn")[2])
    other, leaf, out = plain("e5m2", "e4m3fn")
    out.backward(quantize(g, "e5m2"))
    assert torch.equal(got[0], leaf.grad)
    other, leaf, out = plain("e4m3fn", "e5m2")
    out.backward(g)
    assert torch.equal(got[1], other.weight.grad)


def test_attention_takes_a_format_for_each_factor():
    class Model(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = (normal(2, 5, 4, seed=i) for i in range(3))
    with emulate(Model(), Policy(forward_a="e4m3fn", forward_w="e4m3fn")) as emulation:
        y = emulation.model(q, k, v)
    scores = w(q * 0.5) @ w(k).transpose(-2, -1)
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    assert torch.equal(y, w(scores.softmax(-1)) @ w(v))


# Composition.


class Block(nn.Module):
    def __init__(self, checkpointed=None):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.norm = nn.LayerNorm(4)
        self.checkpointed = checkpointed

    def mix(self, x):
        return self.norm((x @ self.weight).relu() @ x.transpose(-2, -1) @ x)

    def forward(self, x):
        if self.checkpointed is None:
            return self.mix(x)
        return checkpoint(self.mix, x, use_reentrant=self.checkpointed)


def gradients(model, run, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


SR = Policy(*[Quantizer("e4m3fn", rounding="stochastic")] * 4)


@pytest.mark.parametrize("policy", [WAG, SR], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_function_recomputes_the_same_bits(policy, reentrant):  # S9, scenario 40
    model = nn.Sequential(Block(), Block())
    x = normal(3, 4, 4)
    with emulate(model, policy):
        expected = gradients(model, model, x)
    for block in model:
        block.checkpointed = reentrant
    with emulate(model, policy):
        assert equal(gradients(model, model, x), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("before", [True, False])
def test_functional_products_compile_without_a_break(backend, before):
    model, x = nn.Sequential(Block(), nn.Linear(4, 4), Block()), normal(3, 4, 4)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    plain = gradients(model, model, x)
    if before:
        assert equal(gradients(model, compiled, x), plain)
    with emulate(model, WAG):
        expected = gradients(model, model, x)
    with emulate(compiled, WAG) as emulation:
        assert equal(gradients(model, compiled, x), expected)
        assert emulation.tallies()["0", "activation"].count == 3 * (16 + 16 + 16)
    assert not equal(expected, plain)
    assert equal(gradients(model, compiled, x), plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_with_a_format_for_each_factor_compile_without_gradients(mode):
    model, x = nn.Linear(5, 3), normal(4, 5)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    policy = Policy(forward_a="e4m3fn", forward_w="e3m2", dgrad_w="e4m3fn", wgrad_a="e5m2")
    with emulate(model, policy):
        expected = model(x)
    with mode(), emulate(compiled, policy):
        assert torch.equal(compiled(x), expected)


def test_functional_products_under_vmap_and_grad():
    model, x = Block(), normal(3, 4, 4)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    with emulate(model, WAG):
        together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        for i in range(3):
            alone = torch.func.grad(loss)(weights, x[i])
            assert all(torch.allclose(together[n][i], alone[n], rtol=1e-5) for n in weights)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_round_their_products_too(copied):
    model, x = nn.Sequential(Block(), Tied().body), normal(3, 4, 4)
    with emulate(model, WAG):
        expected = gradients(model, model, x)
        other = copied(model)
    assert equal(gradients(other, other, x), expected)


def test_a_part_of_a_model_is_emulated_when_called_alone():
    model, x = nn.Sequential(Block(), nn.ReLU()), normal(3, 4, 4)
    with emulate(model, WAG):
        y = model[0](x)
    with emulate(model[0], WAG):
        assert torch.equal(y, model[0](x))


def test_nothing_outside_the_model_is_rounded_or_seen():
    model, x = Block(), normal(3, 4, 4)
    expected = x @ x
    with emulate(model, WAG):
        model(x)
        assert torch.equal(x @ x, expected)
        assert torch.overrides._len_torch_function_stack() == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_interrupted_forward_all_goes_on(error):
    class Stops(nn.Module):
        stop = True

        def forward(self, x):
            if self.stop:
                raise error("stop")
            return x

    model, x = nn.Sequential(Block(), Stops()), normal(3, 4, 4)
    emulation = emulate(model, WAG)
    with pytest.raises(error):
        model(x)
    model[1].stop = False
    y = model(x)
    assert torch.overrides._len_torch_function_stack() == 0
    with pytest.raises(error):
        model[1].stop = True
        model(x)
    emulation.remove()
    assert torch.overrides._len_torch_function_stack() == 0
    model[1].stop = False
    with emulate(model, WAG):
        assert torch.equal(model(x), y)


def test_two_models_are_rounded_each_by_its_policy():
    first, second, x = Block(), Block(), normal(3, 4, 4)
    with emulate(first, Policy(activation="e5m2")):
        a = first(x)
    with emulate(second, WAG):
        b = second(x)
    with emulate(first, Policy(activation="e5m2")), emulate(second, WAG):
        assert torch.equal(first(x), a)
        assert torch.equal(second(x), b)
        assert torch.equal(first(x), a)
    assert not torch.equal(a, b)


# Found by attacks.


READS = {
    "T": lambda e: e.weight.T,
    "t": lambda e: e.weight.t(),
    "transpose": lambda e: e.weight.transpose(0, 1),
    "slice": lambda e: e.weight[:11].t(),
    "permute": lambda e: e.weight.view(11, 4).permute(1, 0),
}


CASES = [(name, False) for name in READS]
# Compiled, an attribute such as T is not seen; the page on limitations says so.
CASES += [(name, True) for name in READS if name != "T"]


@pytest.mark.parametrize("name, compiled", CASES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile asks, and hides it
def test_another_modules_weight_is_read_rounded_through_views(name, compiled):
    class Head(Tied):
        def forward(self, tokens):
            return self.embedding(tokens) @ READS[name](self.embedding)

    model, tokens = Head(), torch.arange(10)
    torch._dynamo.reset()
    with emulate(model, Policy(weight="e4m3fn")) as emulation:
        run = torch.compile(model, backend="aot_eager") if compiled else model
        table = quantize(model.embedding.weight.detach(), "e4m3fn")
        assert torch.equal(run(tokens), table[tokens] @ table.T)
        assert emulation.audit(tokens).uncovered == ()


def test_what_is_written_to_a_product_before_it_is_returned_is_rounded():
    class Adds(nn.Module):
        def forward(self, x):
            y = x @ x.T
            y += 0.1
            return y

    with emulate(Adds(), WAG) as emulation:
        y = emulation.model(normal(3, 4))
    assert torch.equal(y, quantize(y.detach(), "e4m3fn"))


def test_a_product_with_out_is_rounded_in_place():
    class Out(nn.Module):
        def forward(self, x):
            out = torch.empty(3, 3)
            return torch.matmul(x, x, out=out) is out, out.clone()

    with emulate(Out(), WAG) as emulation, torch.no_grad():
        same, y = emulation.model(normal(3, 3))
    assert same and torch.equal(y, quantize(normal(3, 3) @ normal(3, 3), "e4m3fn"))


def test_rows_masked_altogether_attend_to_nothing():
    class Masked(nn.Module):
        def forward(self, q, mask):
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[0] = False
    with emulate(Masked(), Policy(forward_a="fp32", forward_w="fp32")) as emulation:
        y = emulation.model(normal(1, 1, 3, 4), mask)
    assert torch.equal(y[0, 0, 0], torch.zeros(4)) and y.isfinite().all()


@pytest.mark.parametrize("wgrad", ["e2m1", "e3m2"])
def test_a_bias_gets_its_gradient_unrounded_by_the_formats_of_factors(wgrad):
    model, g = nn.Linear(4, 3), normal(5, 3)
    with emulate(model, Policy(dgrad_g="e2m1", wgrad_g=wgrad)):
        model(normal(5, 4)).backward(g)
    assert torch.equal(model.bias.grad, g.sum(0))


def test_factors_that_cannot_be_rounded_are_listed():
    half = nn.Linear(4, 4).bfloat16()
    with emulate(half, Policy(forward_a="e4m3fn")) as emulation:
        half(normal(2, 4).bfloat16())
    assert emulation.report().skipped == {"factors of linear": "dtype torch.bfloat16"}

    class Three(nn.Module):
        def forward(self, x):
            return torch.einsum("ij,jk,kl->il", x, x, x)

    with emulate(Three(), Policy(forward_a="e4m3fn")) as emulation:
        emulation.model(normal(3, 3))
    assert emulation.report().skipped == {"factors of einsum": "there are 3 of them"}


def test_under_autocast_the_factors_of_the_forward_are_rounded_still():
    model = nn.Linear(4, 4)
    fp16 = dict.fromkeys(("forward_a", "forward_w", "dgrad_g", "wgrad_g"), "fp16")
    with emulate(model, Policy(**fp16)) as emulation, torch.autocast("cpu", torch.bfloat16):
        model(normal(2, 4)).float().sum().backward()
    assert emulation.tallies()["", "forward_w"].count == 16


def test_a_training_loop_that_calls_parts_draws_new_words_each_step():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Identity(), nn.Identity()

    model, x = Whole(), normal(1000)
    random = Quantizer("e4m3fn", rounding="stochastic")
    with emulate(model, Policy(activation=random)):
        first = model.encoder(x), model.decoder(x)
        second = model.encoder(x), model.decoder(x)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "norm",
    [
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
        lambda m: nn.utils.spectral_norm(m).eval(),
    ],
    ids=["pruned", "spectral"],
)
def test_weights_that_hooks_compute_are_rounded_as_computed(norm):
    model = nn.Linear(4, 4, bias=False)
    norm(model)
    x = normal(2, 4)
    model(x)
    weight = model.weight.detach().clone()
    with emulate(model, Policy(weight="e2m1")) as emulation:
        y = model(x)
        rows = [row for row in emulation.audit(x).products if row.op == "aten.mm" and row.phase == "forward"]
        assert [f.fmt for row in rows for f in row.factors if f.role == "weight"] == ["e2m1"]
    assert torch.equal(y, F.linear(x, quantize(weight, "e2m1")))
    assert torch.equal(model(x), F.linear(x, weight))


def test_two_threads_at_once_are_refused_and_nothing_is_left_behind():
    entered, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            if threading.current_thread() is not threading.main_thread():
                entered.set()
                assert go_on.wait(60)
            return x

    model, x = nn.Sequential(nn.Linear(4, 4), Waits(), nn.Linear(4, 4)), normal(2, 4)
    parameters = list(model.parameters())
    with emulate(model, WAG), torch.no_grad():
        expected, found = model(x), []
        thread = threading.Thread(target=lambda: found.append(model(x)))
        thread.start()
        assert entered.wait(60)
        with pytest.raises(RuntimeError, match="runs in two threads at once; make a copy for each thread"):
            model(x)
        go_on.set()
        thread.join()
        assert torch.equal(found[0], expected)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
