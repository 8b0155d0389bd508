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
from torch.utils._python_dispatch import TorchDispatchMode
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


COPIES = ("aten.clone", "aten.copy_", "aten._to_copy", "aten.lift_fresh")


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
        for register, paused in (
            (register_optimizer_step_pre_hook, True),
            (register_optimizer_step_post_hook, False),
        ):
            self._handles.append(register(lambda *_, paused=paused: setattr(self, "paused", paused)))

    def stop(self) -> None:
        """End it. A second call does nothing."""
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self.__exit__(None, None, None)

    def before(self, module: nn.Module, args: Any) -> None:
        """Before each forward of the model but a recomputed one: new words from here on."""
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
        for x in tree_leaves(result):
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
            self._exempt[op] = view or excepted or name in COPIES or op.namespace == "fpemu"
        return self._exempt[op]

    def _round(self, x: Tensor, op: Any) -> None:
        name = op._schema.name.replace("::", ".")
        reason = unsuitable(x)
        if reason is not None:
            if reason:
                self.skipped[name] = reason
            return
        if name not in self.sites:
            site = Site(self.quantizer, self.key.fold_in(name), self.count)
            if site.key is not None:
                site.key[2] += self.step
            self.sites[name] = site
        x.detach().copy_(cast_at(x.detach(), self.sites[name], None))
