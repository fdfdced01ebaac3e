"""The page of a plan: what is on it, and that a browser shows it without a complaint."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.inductor.cost.cluster import load_cluster
from weft.plan import page
from weft.plan.batch import with_batch
from weft.plan.changes import with_changes
from weft.plan.plan import StepPlanner
from weft.plan.prediction import Prediction

pytestmark = pytest.mark.fake

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "link", "br", "img", "input", "hr"}


def a_step(width: int = 512) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    for layer in model:
        weft.fully_shard(layer, mp_policy=weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.fixture(scope="module")
def found() -> Prediction:
    cluster = load_cluster("h200x8")
    with weft.fake_world(16):
        planner = StepPlanner(a_step(), (torch.zeros(64, 512, device="cuda"),))
        return with_changes(planner, planner.predict(cluster), cluster, None)


class Structure(HTMLParser):
    """Checks that tags are closed in order, and collects the text and the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.links += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_small_and_needs_no_network(found: Prediction) -> None:
    text = found.to_html()
    structure = Structure()
    structure.feed(text)
    assert structure.open == []
    assert len(text.encode()) < 2_000_000
    assert all(link.startswith("data:") for link in structure.links)
    assert not re.search(r"https?://|@import|url\(", text)
    words = " ".join(structure.text)
    for name in ("Where the step goes", "Memory over the step", "Timeline", "Communication", "What would change it"):
        assert name in words
    assert text.count("<dt>") == 14
    assert "None" not in words
    assert text == page.render(json.loads(found.to_json()))


def test_names_are_text_and_never_markup(found: Prediction) -> None:
    data = json.loads(found.to_json())
    bad = "</script><script>alert(1)</script><b>"
    data["name"] = data["top_tensors"][0]["name"] = data["top_tensors"][0]["line"] = bad
    data["collectives"][0]["members"] = [bad]
    data["collectives"][0]["exposed"] = 1.0
    data["timeline"][0]["slices"][0]["name"] = data["changes"][0]["name"] = data["assumptions"][0] = bad
    data["memory_timeline"]["roles"]["activations"] = data["memory_timeline"]["total"]
    text = page.render(data)
    assert "alert(1)" in text
    assert "<script>alert" not in text
    assert text.count("<script>") == 1
    assert text.count("</script>") == 1


def test_a_step_of_one_gpu_that_does_not_fit_has_a_page() -> None:
    with weft.fake_world(1):
        model = nn.Linear(64, 64, device="cuda")

        def step(x: Tensor) -> Tensor:
            return model(x).sum()

        cluster = load_cluster("h100x8")
        planner = StepPlanner(step, (torch.zeros(8, 64, device="cuda"),))
        small = with_changes(planner, planner.predict(cluster, 0.00001), cluster, 10)
    text = small.to_html()
    assert "does not fit" in text
    assert "no measured interval" in text
    assert text.count("<dt>") == 14


def test_changes_and_other_numbers_of_ranks(found: Prediction) -> None:
    changes = {change.name: change for change in found.changes}
    half, twice = changes["half the batch"], changes["twice the batch"]
    assert half.peak_bytes is not None
    assert twice.peak_bytes is not None
    assert half.peak_bytes < found.peak_bytes < twice.peak_bytes
    slower = changes["half the network"].step_seconds
    assert slower is not None
    assert slower >= found.step_seconds
    own = next(point for point in found.scaling if point.world_size == 16)
    assert own.step_seconds == pytest.approx(found.step_seconds, rel=1e-9)
    assert [point.world_size for point in found.scaling] == [8 * 2**power for power in range(12)]
    late = found.scaling[-1]
    assert late.step_seconds > own.step_seconds  # thousands of ranks wait for each other


def test_another_number_of_ranks_is_priced_as_a_plan_of_its_own(found: Prediction) -> None:
    """The curve prices the schedule of 16 ranks at 64: a plan for 64 may only be a little better."""
    with weft.fake_world(64):
        own = weft.plan(a_step(), torch.zeros(64, 512, device="cuda"))
    point = next(point for point in found.scaling if point.world_size == 64)
    assert point.step_seconds == pytest.approx(own.step_seconds, rel=0.05)


def test_large_steps_have_a_page_without_planning_again(found: Prediction) -> None:
    cluster = load_cluster("h200x8")
    with weft.fake_world(16):
        planner = StepPlanner(a_step(), (torch.zeros(64, 512, device="cuda"),))
        quick = with_changes(planner, planner.predict(cluster), cluster, None, plans_again=False)
    assert [change.name for change in quick.changes] == ["half the network", "twice the GPUs"]
    assert quick.scaling == found.scaling
    assert "--what-if yes" in quick.to_html()


def test_a_batch_of_another_size_changes_the_arguments_that_have_it() -> None:
    with weft.fake_world(1):
        x, mask, weight = torch.zeros(8, 5), torch.zeros(8, dtype=torch.bool), torch.zeros(3)
        (args, kwargs) = with_batch((x, {"mask": mask}), {"weight": weight, "count": 8}, 2)
    assert args[0].shape == (2, 5)
    assert args[1]["mask"].shape == (2,)
    assert args[1]["mask"].dtype is torch.bool
    assert kwargs["weight"] is weight
    assert kwargs["count"] == 8


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_the_page_without_a_complaint(found: Prediction, tmp_path: Path) -> None:
    file, picture = tmp_path / "page.html", tmp_path / "page.png"
    check = """<script>{
        const chart = document.getElementById("memory"), box = chart.getBoundingClientRect();
        const x = box.left + box.width / 2, y = box.top + box.height / 2;
        chart.dispatchEvent(new MouseEvent("mousemove", {clientX: x, clientY: y}));
        document.querySelector('[data-zoom="4"]').click();
        const wide = document.getElementById("timeline").getBoundingClientRect().width;
        const inside = document.querySelectorAll("main > section").length;
        const overflows = document.documentElement.scrollWidth > document.documentElement.clientWidth;
        document.title = [document.getElementById("tip").innerText.length > 20, wide > 2000, inside, overflows].join();
        }</script></body>"""
    file.write_text(found.to_html().replace("</body>", check))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += ["--window-size=1180,3000", f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
    shown = subprocess.run([*command, "--dump-dom", f"file://{file}"], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    title = re.search("<title>(.*?)</title>", shown.stdout)
    assert title is not None
    assert title[1] == "true,true,9,false"
