"""Which factors of which matrix products are rounded: one forward and backward pass, watched op by op."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..accumulation import accumulator_of
from ..columns import aligned
from ..quantizer import quantizer_of
from .every_op import EveryOp
from .functional import Functional
from .hooks import ModuleHooks, RootHook

# The places of an operation's factors.
FACTORS: dict[str, tuple[int, ...]] = {
    "fpemu.matmul": (0, 1),
    "aten.mm": (0, 1),
    "aten.bmm": (0, 1),
    "aten.mv": (0, 1),
    "aten.dot": (0, 1),
    "aten.addmm": (1, 2),
    "aten.addmv": (1, 2),
    "aten.baddbmm": (1, 2),
    "aten.addbmm": (1, 2),
    "aten.linear": (0, 1),
    "aten._trilinear": (0, 1, 2),
    "aten.convolution": (0, 1),
    "aten.convolution_overrideable": (0, 1),
    "aten.convolution_backward": (0, 1, 2),
    "aten.mkldnn_rnn_layer": (0, 1, 2),
    "aten.mkldnn_rnn_layer_backward": (0, 1, 2),
    "aten._cudnn_rnn": (0, 1),
    "aten._cudnn_rnn_backward": (0, 1),
}
ATTENTION = "aten._scaled_dot_product_"
# Results hold numbers of the first argument, or of all of a list, and zeros; nothing is computed.
KEEPING = frozenset(
    f"aten.{name}"
    for name in """
    clone relu relu_ threshold_backward hardtanh cat stack max_pool1d max_pool2d
    max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward adaptive_max_pool2d adaptive_max_pool2d_backward max amax
    gather index index_select embedding masked_fill masked_fill_ constant_pad_nd reflection_pad1d
    reflection_pad2d replication_pad2d upsample_nearest1d upsample_nearest2d slice_backward
    select_backward neg abs repeat roll flip triu tril tril_ unfold_backward narrow_copy contiguous
    _unsafe_view _reshape_copy unbind_copy copy sort topk im2col pixel_shuffle
    """.split()
)
EXACT = frozenset(f"aten.{name}" for name in "zeros zeros_like new_zeros ones ones_like new_ones".split())


class Mark(NamedTuple):
    """What is known of a tensor's numbers: their role, and the format they were rounded to, if any."""

    role: str
    fmt: str | None


@dataclass(frozen=True)
class ProductRow:
    """One matrix product that torch computed.

    Attributes:
        module: Name of the module that computed it, or whose forward a backward product belongs to.
        op: Name of torch's operation.
        phase: ``"forward"`` or ``"backward"``; a checkpoint's recomputation is backward.
        factors: For each factor its role (input, weight, activation, gradient) and format, None if unrounded.
        inside: What torch computes in one, where the product is a part of such: attention, a recurrent layer.
        accumulate: Format that its sums are rounded to as they accumulate, None for torch's own.
    """

    module: str
    op: str
    phase: str
    factors: tuple[Mark, ...]
    inside: str | None = None
    accumulate: str | None = None


@dataclass(frozen=True)
class Audit:
    """The matrix products of one forward and backward pass; ``str()`` is a table.

    Attributes:
        products: In the order in which they were computed.
        roles: The roles that the policy sets for some module.
    """

    products: tuple[ProductRow, ...]
    roles: frozenset[str]

    @property
    def uncovered(self) -> tuple[ProductRow, ...]:
        """The products with an unrounded factor or sum that the policy sets, but those inside fused ones."""
        return tuple(row for row in self.products if row.inside is None and self._missing(row))

    def _missing(self, row: ProductRow) -> bool:
        sums = row.accumulate is None and "accumulate" in self.roles
        return sums or any(f.fmt is None and f.role in self.roles for f in row.factors)

    def __str__(self) -> str:
        head = ("module", "operation", "phase", "factors", "")
        rows: list[tuple[str, ...]] = [head]
        missing = set(self.uncovered)
        for row in self.products:
            factors = ", ".join(f"{f.role} {f.fmt or '-'}" for f in row.factors)
            if "accumulate" in self.roles:
                factors += f", sums {row.accumulate or '-'}"
            mark = "not covered" if row in missing else f"inside {row.inside}" if row.inside else ""
            rows.append((row.module or "(model)", row.op, row.phase, factors, mark))
        count = f"{len(self.products)} matrix products, {len(self.uncovered)} not covered"
        return "\n".join([*(line.rstrip() for line in aligned(rows, right=())), count])

    __repr__ = __str__


def audit(
    model: nn.Module,
    hooks: dict[str, ModuleHooks],
    root: RootHook,
    every_op: EveryOp | None,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
) -> Audit:
    """See `Emulation.audit`."""
    everywhere = None if every_op is None else every_op.quantizer.format.name
    watch = Watch(root.mode, everywhere)
    given = [x for x in tree_leaves((inputs, named)) if isinstance(x, Tensor)]
    with kept(model, hooks, root, every_op, given):
        for kept_by_model in (*model.parameters(), *model.buffers()):
            watch.mark(kept_by_model, Mark("weight", None))
        for x in given:
            watch.mark(x, Mark("input", None))
        with torch.enable_grad(), watch:
            outputs = tree_leaves(model(*inputs, **named))
        results = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
        if results:
            gradients = [torch.ones_like(x) for x in results]
            for gradient in gradients:
                watch.mark(gradient, Mark("gradient", everywhere))
            with watch:
                torch.autograd.backward(results, gradients)
    roles = _roles(hooks, root)
    return Audit(tuple(watch.rows), roles if every_op is None else roles | {"activation", "gradient"})


def _roles(hooks: dict[str, ModuleHooks], root: RootHook) -> frozenset[str]:
    roles = {role for one in hooks.values() for role in one.sites}
    if any(one.sums is not None for one in hooks.values()):
        roles.add("accumulate")
    if root.inputs is not None:
        roles.add("input")
    factors = {"forward_a": "activation", "forward_w": "weight", "dgrad_g": "gradient", "wgrad_g": "gradient"}
    return frozenset(roles | {factors[role] for role in roles if role in factors})


@contextmanager
def kept(
    model: nn.Module,
    hooks: dict[str, ModuleHooks],
    root: RootHook,
    every_op: EveryOp | None,
    given: list[Tensor],
) -> Iterator[None]:
    """Put back what a pass changes: gradients, buffers, tallies, keys and the state of torch's generator."""
    gradients = {p: p.grad for p in (*model.parameters(), *given) if p.is_leaf}
    buffers = [
        (m, n, b, b.detach().clone()) for m in model.modules() for n, b in m._buffers.items() if b is not None
    ]
    sites = [site for one in hooks.values() for site in one.sites.values()]
    sites += [] if root.inputs is None else [root.inputs]
    operations = {} if every_op is None else dict(every_op.sites)
    sites += operations.values()
    begun = list(root.mode._begun)
    states = [(site, dict(site.__dict__), site.counts.clone(), site.sums.clone()) for site in sites]
    flags = [(one, one.called, one.read, dict(one.skipped)) for one in hooks.values()]
    called = root.called
    for parameter in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer.copy_(value)
        root.mode._begun[:] = begun
        if every_op is not None:
            every_op.sites = operations
        for site, state, counts, sums in states:
            site.__dict__.update(state)
            site.counts.copy_(counts)
            site.sums.copy_(sums)
        for one, was_called, was_read, skipped in flags:
            one.called, one.read, one.skipped = was_called, was_read, skipped
        root.called = called


class Watch(TorchDispatchMode):
    """Follows by their memory which tensors hold rounded numbers, and lists matrix products."""

    def __init__(self, mode: Functional, everywhere: str | None) -> None:
        super().__init__()
        self.mode = mode
        self.everywhere = everywhere  # the format that every operation's result is rounded to
        self.rows: list[ProductRow] = []
        self._marks: dict[int, Mark] = {}
        self._alive: list[Any] = []  # so that no memory is used twice
        self._made: dict[int, tuple[str, str | None]] = {}  # by the number of a node of autograd

    def mark(self, x: Tensor, mark: Mark) -> None:
        """Say what a tensor's memory holds."""
        storage = x.untyped_storage()
        self._alive.append(storage)
        self._marks[storage._cdata] = mark

    def of(self, x: Any) -> Mark | None:
        """What is known of a tensor; None of what is none, or no floats."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        return self._marks.get(x.untyped_storage()._cdata, Mark("activation", None))

    def __torch_dispatch__(self, op: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        """As torch calls it, with itself out of the way."""
        kwargs = {} if kwargs is None else kwargs
        name = op._schema.name.replace("::", ".")
        module, inside = self._where()
        backward = torch._C._current_graph_task_id() != -1
        phase, role = ("backward", "gradient") if backward else ("forward", "activation")
        places = FACTORS.get(name, (0, 1, 2) if name.startswith(ATTENTION) else ())
        marks = [self.of(x) for place in places if place < len(args) for x in _tensors(args[place])]
        factors = tuple(mark for mark in marks if mark is not None)
        if factors:
            fused = inside if not name.startswith(ATTENTION) else None
            sums = accumulator_of(args[2]).accumulate.name if name == "fpemu.matmul" else None
            self.rows.append(ProductRow(module, name, phase, factors, fused, sums))
        before = self._given(name, args)
        result = op(*args, **kwargs)
        self._follow(op, name, args, result, before, role)
        return result

    def _where(self) -> tuple[str, str | None]:
        if self.mode.frames:
            # The operation's node was made just before; or it has none, and the last one was another's.
            made = torch._C._autograd._get_sequence_nr() - 1
            self._made.setdefault(made, self.mode.running())
            return self.mode.running()
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        return self._made.get(-1 if node is None else node._sequence_nr(), ("", None))

    def _given(self, name: str, args: Any) -> Mark | None:
        """What an operation that computes nothing new passes on."""
        if name in EXACT:
            return Mark("activation", "exact")
        if name == "aten.copy_":
            return self.of(args[1])
        if name == "aten.where":
            return _joined([self.of(x) for x in args[1:3]])
        return _joined([self.of(x) for x in _tensors(args[0])]) if args and name in KEEPING else None

    def _follow(self, op: Any, name: str, args: Any, result: Any, given: Mark | None, role: str) -> None:
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
        read = [mark for x in tree_leaves(args) if (mark := self.of(x)) is not None]
        if read and all(mark.role == "weight" for mark in read):
            role = "weight"  # computed from parameters alone
        # One that only counts returns nothing.
        if op.namespace == "fpemu" and outputs and name not in FACTORS:
            known = self.of(args[0])
            given = Mark(known.role if known else role, quantizer_of(args[1]).format.name)
        aliases = {r.alias_info is None for r in op._schema.returns}
        written = any(r.alias_info is not None and r.alias_info.is_write for r in op._schema.returns)
        for x in outputs:
            if aliases == {False} and not written:
                continue  # a view: the same memory
            self.mark(x, given if given is not None else Mark(role, self.everywhere))


def _tensors(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def _joined(marks: list[Mark | None]) -> Mark | None:
    known = [mark for mark in marks if mark is not None]
    if not known or any(mark.fmt is None for mark in known):
        return known[0]._replace(fmt=None) if known else None
    inexact = [mark for mark in known if mark.fmt != "exact"]
    return inexact[0] if inexact else known[0]
