"""The drawing of the layers, as data: a module imports only from the rows above its own."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

import fpemu

PACKAGE = pathlib.Path(fpemu.__file__).parent

# Lowest first. A layer of several rows stands in the order in which its modules use each other.
LAYERS = [
    ["columns", "files", "formats", "random", "kernels.layout"],  # L0
    ["reference", "blocks", "kernels.scalar"],  # L1
    ["kernels.rules", "kernels.scales", "kernels.cpu", "kernels.cuda", "kernels.sums"],
    ["kernels.gemm", "kernels.updates"],
    ["kernels.gemm_random", "kernels.ways"],
    ["kernels.blocks", "kernels.block_rules"],
    ["kernels.launch", "kernels.device"],
    ["kernels"],
    ["arrays"],  # L2
    ["blockwise"],
    ["quantize"],
    ["codes", "arithmetic", "matmul", "stats"],
    ["block_codes", "rotation"],
    ["testing.report", "testing.inputs", "testing.calls"],
    ["testing.exact"],
    ["testing.randomness", "testing.strategies"],
    ["testing.conformance"],
    ["testing"],
    ["quantizer", "patterns", "updates"],  # L3
    ["autograd"],
    ["accumulation", "shards"],
    ["policy"],
    ["emulation.sites", "emulation.tensors", "emulation.report"],
    ["emulation.convolve"],
    ["emulation.recompute", "emulation.every_op", "emulation.accumulated"],
    ["emulation.functional"],
    ["emulation.products"],
    ["emulation.hooks"],
    ["emulation.audit"],
    ["emulation.attach"],
    ["comm.sums"],
    ["comm.wire"],
    ["comm.reduction"],
    ["comm.hooks", "comm.ranks"],
    ["emulation", "optim", "scaling", "comm"],
    ["taps", "answers"],  # L4
    ["watching"],
    ["parts"],
    ["records"],
    ["record"],
    ["plot"],
    ["observation", "report", "terminal", "export"],
    ["__init__"],  # the public names: of the package, only programs import these
    [
        "experiments.strategies",
        "experiments.data",
        "experiments.normalization",
        "experiments.checkpoint",
    ],  # L5
    ["experiments.models"],
    ["experiments.settings"],
    ["experiments.result"],
    ["experiments.train"],
    ["experiments.runs"],
    ["experiments.grid_figure"],
    ["experiments.ablate", "experiments.grid"],
    ["experiments"],
    ["bench", "doctor"],
    ["bench_training", "bench_gemm"],
    ["commands.common"],  # the command
    ["commands.ablate", "commands.bench", "commands.check", "commands.numbers", "commands.runs"],
    ["commands"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules(package: pathlib.Path) -> dict[str, pathlib.Path]:
    """Dotted name below the package -> file; a folder stands for its ``__init__``."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: pathlib.Path, package: pathlib.Path = PACKAGE) -> set[str]:
    """Names of the fpemu modules that a file imports, at any depth of the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == package.name:
                    found.add(".".join(parts[1:]) or "__init__")
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                inside = path.relative_to(package).parts
                above = [*inside[: len(inside) - node.level], *(node.module or "").split(".")]
            elif (node.module or "").split(".")[0] == package.name:
                above = (node.module or "").split(".")[1:]
            else:
                continue
            base = ".".join(part for part in above if part)
            for alias in node.names:
                name = f"{base}.{alias.name}".strip(".")
                found.add(name if name in LEVEL else base or "__init__")
    return found


MODULES = modules(PACKAGE)


def test_every_module_has_a_layer():
    unknown = MODULES.keys() - LEVEL.keys()
    assert not unknown, f"write {sorted(unknown)} into LAYERS, and into the design"


@pytest.mark.parametrize("name", [name for name in LEVEL if name in MODULES])
def test_imports_only_from_below(name):
    above = {other for other in imports(MODULES[name]) if LEVEL.get(other, len(LAYERS)) >= LEVEL[name]}
    assert not above, f"fpemu.{name} may import only from lower layers, but imports {sorted(above)}"


@pytest.mark.parametrize(
    "line, found",
    [
        ("from .scalar import Rule", "kernels.scalar"),
        ("from . import cpu", "kernels.cpu"),
        ("from ..formats import Format", "formats"),
        ("from .. import quantize", "quantize"),
        ("from .. import Key", "__init__"),
        ("import fpemu", "__init__"),
        ("import fpemu.stats as s", "stats"),
        ("from fpemu import plot", "plot"),
        ("from fpemu.kernels.cpu import fill", "kernels.cpu"),
        ("def f():\n    from ..record import load", "record"),
    ],
)
def test_every_way_to_import_is_seen(line, found, tmp_path):
    path = tmp_path / "fpemu" / "kernels" / "launch.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"import numpy\nimport fpemulator\nfrom numpy import stats\n{line}\n")
    assert imports(path, tmp_path / "fpemu") == {found}


def test_import_is_light():
    code = "import fpemu, sys; print([m for m in ('torch', 'matplotlib', 'numba.cuda') if m in sys.modules])"
    out = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=PACKAGE.parent)
    assert out.strip() == "[]"
