"""The page and the terminal's table say what was recorded."""

from __future__ import annotations

import base64
import html.parser
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from fpemu import Recorder, as_format, load, tally
from fpemu.parts import row_of
from fpemu.records import records_of
from fpemu.report import html as page_of
from fpemu.report import summary, write_report
from fpemu.terminal import view
from fpemu.watching import Counted, Step

LOST = [2.0**-30] * 31 + [2.0**-3] * 69  # 31 % below fp16 and, from a scale of 2**6, none
FINE = [0.5] * 100


def made(scale=None, **roles):
    """Records of two layers, whose numbers of each role are given."""
    counted = [
        row_of(step, Counted(module, role, 1.0, [tally(np.array(values))]))
        for step in (0, 10)
        for role, (first, second) in roles.items()
        for module, values in (("layer1", first), ("layer2.conv1", second))
    ]
    return records_of(counted, [Step(step, scale, None if scale is None else step == 4, None, None)
                                for step in range(11)])  # fmt: skip


def test_the_summary_names_the_layer_that_loses_and_the_scales_that_help():
    lines = summary(made(gradient=(FINE, LOST), activation=(FINE, [1e6, 1.0])), "fp16")
    assert lines == [
        "2 steps recorded, 0 to 10, on 1 rank: 604 numbers of 2 modules.",
        "layer2.conv1 loses 31.0% of its activation gradients in binary16; a loss scale of 2^6 to 2^18 loses "
        "under 0.1%.",
        "1 module of 2 with activations beyond the largest value of binary16, 65504; layer2.conv1 has most.",
        "There was no infinity and no NaN.",
    ]


def test_the_summary_tells_of_updates_scales_and_nan():
    ratios = [2.0**5, 2.0**11, 2.0**20, 2.0**20]
    lines = summary(made(1024.0, gradient=(FINE, [np.nan, 1.0]), update_ratio=(ratios, ratios)), "fp16")
    assert lines[1:] == [
        "Without a loss scale no layer loses more than 0.1% of its gradients in binary16.",
        "The first infinity or NaN: step 0, rank 0: the gradient of layer2.conv1 has 0 infinities and 1 "
        "NaNs.",
        "Of the weight updates that were not zero, 50.0% to 75.0% would leave a weight kept in binary16 as "
        "it was, rounded to nearest.",
        "The loss scale went from 2^10 to 2^10, at most 2^10; the scaler left out 1 step of 11.",
    ]


def test_a_window_that_does_not_exist_is_said_to_be_empty():
    both = [2.0**-80] * 10 + [1.0] * 10
    assert summary(made(gradient=(both, FINE)), "fp16")[1] == (
        "layer1 loses 50.0% of its activation gradients in binary16; a loss scale of 2^56 would lose under "
        "0.1%, but from above 2^15 some overflow."
    )


class Page(html.parser.HTMLParser):
    """The text, the sources and the tags that are open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sources, self.cells, self.seen = [], [], [], set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "a&b"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with Recorder(directory, every=2).watch(model, optimizer, scaler) as recorder:
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(5, 6)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            recorder.step()
    return directory


def test_the_page_stands_alone_and_has_every_number(run, tmp_path):
    records = load(run)
    write_report(records, tmp_path / "page.html", "e5m2")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert page.sources and all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert "url(" not in text and "@import" not in text and "a&amp;b" in text
    for source in page.sources:
        assert base64.b64decode(source.partition(",")[2]).startswith(b"<?xml")
    assert len(page.sources) == 6
    for module, role, group in records.groups():
        if role != "update_ratio":
            t = group.tally()
            place = next(
                i
                for i, pair in enumerate(zip(page.cells, page.cells[1:], strict=False))
                if pair == (module, role)
            )
            assert page.cells[place + 2 : place + 5] == [
                f"{t.count:,}", f"{t.share('zero'):.2%}", f"{t.lost('e5m2'):.2%}"
            ]  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html"]


def test_names_cannot_break_the_page():
    records = records_of([row_of(0, Counted("<b>&", "gradient", 1.0, [tally(np.ones(3))]))], [])
    assert "<b>" not in page_of(records, as_format("fp16"))


def test_a_page_of_zeros_has_no_figures():
    text = page_of(made(gradient=(np.zeros(3), np.zeros(3))), as_format("fp16"))
    assert "<img" not in text and Page(text).cells[:3] == ["layer1", "gradient", "6"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
def test_a_browser_sorts_the_table(run, tmp_path):
    page = tmp_path / "page.html"
    write_report(load(run), page)
    click = "<script>document.querySelectorAll('th button')[2].click()</script></body>"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", click), encoding="utf-8")
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'user'}",
    ]
    out = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    table = out[out.index("<thead>") : out.index("</table>")]
    counts = [float(v) for v in re.findall(r'</td><td>[\w.]+</td><td data-value="([^"]+)"', table)]
    assert len(counts) > 5 and counts == sorted(counts, reverse=True)
    assert 'aria-sort="descending"' in table


def shown(renderable):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(renderable)
    console.file.close()
    return console.export_text()


def test_the_terminal_shows_the_last_recorded_step(run):
    table, finished = view(str(run), "fp16")
    text = shown(table)
    assert finished
    assert "ended, step 4, loss scale 256, 0 steps left out" in text
    last = load(run).select("2", "gradient", steps=4).seen()
    assert re.search(rf"2 +gradient +{re.escape(f'{last.amax:.3g}')} +{last.lost('fp16'):.1%} +0", text)
    assert "update_ratio" not in text


def test_the_terminal_waits_for_a_run_that_begins(tmp_path):
    assert view(str(tmp_path), "fp16")[1] is False
    recorder = Recorder(tmp_path, every=1, flush=1).watch(nn.Linear(2, 2))
    text, finished = view(str(tmp_path), "fp16")
    assert "nothing was recorded yet" in shown(text) and not finished
    recorder.step()
    text, finished = view(str(tmp_path), "fp16")
    assert "running, step 0" in shown(text) and not finished
    recorder.close()
    assert view(str(tmp_path), "fp16")[1]
