"""Every Python block and command of README.md and docs/ runs, and prints what the block after it says."""

from __future__ import annotations

import contextlib
import io
import itertools
import pathlib
import re
import sys
import types

import pytest
from typer.testing import CliRunner

import fpemu
from fpemu.__main__ import app

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SLOW_COMMANDS = ("pip ", "pytest ", "fpemu ablate", "fpemu bench")


def blocks(page: pathlib.Path) -> list[tuple[str, str]]:
    """Language and content of a page's code blocks."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def with_output(page: pathlib.Path, language: str) -> list[tuple[str, str | None]]:
    """A page's blocks of a language, with the text block right after each, if there is one."""
    all_blocks = [*blocks(page), ("", "")]
    return [
        (content, after if kind == "text" else None)
        for (lang, content), (kind, after) in itertools.pairwise(all_blocks)
        if lang == language
    ]


def test_a_block_and_its_output_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nprint(1)\n```\n\n```text\n1\n```\n```sh\nfpemu formats\n```\n")
    assert with_output(page, "python") == [("print(1)\n", "1\n")]
    assert with_output(page, "sh") == [("fpemu formats\n", None)]


class Callback:
    """Stands for Lightning's."""


class Accelerator:
    """Stands for Accelerate's, as far as a recipe uses it."""

    def prepare(self, model):
        return model

    def backward(self, loss):
        loss.backward()


@pytest.fixture
def other_libraries(monkeypatch):
    """Recipes for libraries that are not installed run against what stands for those."""
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    for name, known in (("lightning.pytorch", Callback), ("accelerate", Accelerator)):
        module = types.ModuleType(name)
        setattr(module, known.__name__, known)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("other_libraries")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_print_what_the_page_says(page):
    names: dict[str, object] = {}
    for code, expected in with_output(page, "python"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), names)
        assert printed.getvalue() == (expected or "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_print_what_the_page_says(page):
    for commands, expected in with_output(page, "sh"):
        lines = [line for line in commands.splitlines() if not line.startswith(SLOW_COMMANDS)]
        results = [CliRunner().invoke(app, line.removeprefix("fpemu ").split()) for line in lines]
        assert [result.exit_code for result in results] == [0] * len(lines)
        assert "".join(result.output for result in results) == (expected or "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_first_code_is_on_line_7_at_the_latest():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines.index("```python") + 1 < 7


def test_the_api_page_lists_every_public_name():
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", page, re.MULTILINE)
    assert {name for name, _ in rows} >= set(fpemu.__all__)
    for name, text in rows:
        value = fpemu
        for part in name.split("."):
            value = getattr(value, part)
        assert (value.__doc__ or "").splitlines()[0] == text
