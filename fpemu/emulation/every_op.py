"""The result of every floating-point operation rounded, forward and backward, as on a machine of one format.

Autograd lies above a TorchDispatchMode: gradients are those of the unrounded operations, evaluated on rounded
numbers, and each operation of the backward pass is rounded too.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from ..quantizer import Quantizer
from ..random import Key
from .sites import Site, cast_at
from .tensors import unsuitable

# They write statistics that their schema does not say they write: the places of those arguments.
SILENT = {
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
    torch.ops.aten.miopen_batch_norm.default: (3, 4),
}


NOTHING_COMPUTED = frozenset(
    f"aten.{name}"
    for name in (
        "clone copy_ _to_copy lift_fresh empty empty_like empty_strided new_empty new_empty_strided".split()
    )
)


class EveryOp(TorchDispatchMode):
    """Rounds what every operation returns or writes, from ``start`` to ``stop``, but in optimizers' steps."""

    def __init__(self, quantizer: Quantizer, except_ops: tuple[str, ...], key: Key, count: bool) -> None:
        super().__init__()
        self.quantizer, self.except_ops, self.key = quantizer, except_ops, key
        self.count = count
        self.sites: dict[str, Site] = {}
        self.skipped: dict[str, str] = {}
        self.paused = False
        self.step = 0
        self._exempt: dict[Any, bool] = {}
        self._handles: list[Any] = []
        names = {name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names()}
        for pattern in except_ops:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"except_ops: no operation of torch is named {pattern!r}; they look like 'aten.mm'"
                )

    def start(self) -> None:
        """Begin to round."""
        self.__enter__()
        self._handles.append(register_optimizer_step_pre_hook(self._pause))
        self._handles.append(register_optimizer_step_post_hook(self._go_on))

    def stop(self) -> None:
        """End it. A second call does nothing."""
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            modes = []  # entered later, and staying
            while self in _get_current_dispatch_mode_stack() and (mode := _pop_mode()) is not self:
                modes.append(mode)
            for mode in reversed(modes):
                _push_mode(mode)

    def _pause(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Before an optimizer's step. Its closure computes the model's loss, which is rounded."""
        self.paused = True
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._rounding(args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, kwargs | {"closure": self._rounding(kwargs["closure"])}
        return None

    def _go_on(self, *_: Any) -> None:
        self.paused = False

    def _rounding(self, closure: Any) -> Any:
        def rounded() -> Any:
            self.paused = False
            try:
                return closure()
            finally:
                self.paused = True

        return rounded

    def before(self, module: nn.Module, args: Any) -> None:
        """Before each forward of the model but a recomputed one: new words from here on."""
        self.paused = False  # also after a step that failed
        if self not in _get_current_dispatch_mode_stack():
            raise RuntimeError(
                "every_op no longer rounds: a mode that was entered before emulate() was left before "
                "remove(); leave them in the order of a stack"
            )
        if torch._C._current_graph_task_id() != -1:
            return
        self.step += 1
        for site in self.sites.values():
            site.next_step()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handles": [], "_exempt": {}}

    def __torch_dispatch__(self, op: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        """As torch calls it, with itself out of the way."""
        kwargs = {} if kwargs is None else kwargs
        result = op(*args, **kwargs)
        if self.paused or self._is_exempt(op):
            return result
        written = result if op._schema.returns else _written(op, args)
        for x in tree_leaves(written):
            if isinstance(x, Tensor):
                self._round(x, op)
        for place in SILENT.get(op, ()):
            if args[place] is not None:
                self._round(args[place], op)
        return result

    def _is_exempt(self, op: Any) -> bool:
        """Views and copies compute nothing; fpemu's own operations round by themselves."""
        if op not in self._exempt:
            returns = op._schema.returns
            view = bool(returns) and all(
                r.alias_info is not None and not r.alias_info.is_write for r in returns
            )
            name = op._schema.name.replace("::", ".")
            excepted = any(fnmatchcase(name, pattern) for pattern in self.except_ops)
            self._exempt[op] = view or excepted or name in NOTHING_COMPUTED or op.namespace == "fpemu"
        return self._exempt[op]

    def new_site(self, name: str) -> Site:
        """For an operation that is seen for the first time, with the words of this step."""
        site = Site(self.quantizer, self.key.fold_in(name), self.count)
        if site.key is not None:
            site.key[2] += self.step
        return site

    def _round(self, x: Tensor, op: Any) -> None:
        name = op._schema.name.replace("::", ".")
        reason = unsuitable(x)
        if reason is not None:
            if reason:
                self.skipped[name] = reason
            return
        if name not in self.sites:
            self.sites[name] = self.new_site(name)
        x.detach().copy_(cast_at(x.detach(), self.sites[name], None))


def _written(op: Any, args: Any) -> list[Any]:
    """What an operation that returns nothing writes to, as ``_foreach_mul_`` does."""
    known = zip(op._schema.arguments, args, strict=False)
    return [x for argument, x in known if argument.alias_info is not None and argument.alias_info.is_write]
