"""The page in a browser: nothing overlaps, is cut off or scrolls sideways, and its few controls
work. Skipped where there is no Chromium."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

import shardwright as sw
from sample_models import llama

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")

PROBE = """
const all = (selector) => [...document.querySelectorAll(selector)];
const visible = (element) => element.getClientRects().length > 0;
const box = (element) => element.getBoundingClientRect();
const shown = () => all(".op").filter(visible).length;
const press = (element, name) => element.dispatchEvent(new Event(name, {bubbles: true}));
const result = {};
result.rows = shown();
document.getElementById("followers").click();
result.rows_with_followers = shown();
document.getElementById("expand").click();
result.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
result.overlaps = all(".line, .row, .headlines, header").flatMap((line) => {
  const boxes = [...line.children].filter(visible).map(box);
  return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
    .map(() => line.textContent.trim().slice(0, 80)));
});
result.cut_off = all("span, p, h1, h2, dd, td, th, small").filter((element) => visible(element)
  && !element.closest(".scroll") && element.scrollWidth > element.clientWidth + 1
  && getComputedStyle(element).display !== "inline").map((element) => element.textContent.trim());
const slider = document.getElementById("other-plan");
const chosen = () => all(".other-plan").filter(visible)
  .map((each) => each.firstElementChild.textContent);
result.plans = [chosen()];
for (const place of ["1", "2"]) {
  slider.value = place; press(slider, "input");
  result.plans.push(chosen());
}
document.getElementById("collapse").click();
const search = document.getElementById("search");
search.value = "down_proj"; press(search, "input");
result.matches = shown();
result.said = document.getElementById("matches").textContent;
document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "/", bubbles: true}));
result.focus = document.activeElement.id;
search.value = ""; press(search, "input");
const order = document.getElementById("order");
order.value = "bytes"; press(order, "change");
const sizes = (list) => [...list.children].map((item) => Number(item.dataset.bytes || 0));
const sorted = (numbers) => numbers.every((each, i) => !i || numbers[i - 1] >= each);
const lists = all("#tree ul").filter((list) => !list.closest(".card"));
result.sorted = lists.every((list) => sorted(sizes(list)));
const background = () => getComputedStyle(document.body).backgroundColor;
result.first = background();
document.getElementById("theme").click();
result.other = background();
const answer = document.createElement("pre");
answer.id = "probe";
answer.textContent = JSON.stringify(result);
document.body.append(answer);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a plan with all there is to show, and a script that tries it."""
    net, args, kwargs = llama(batch=16, layers=4)
    sw.recompute(net.model.layers[0])
    options: dict[str, Any] = {"micro_batches": 4, "cluster": "h100", "hsdp": {"threshold": 0}}
    plan = sw.plan(net, args, kwargs, devices=8, mode="data_parallel", stages=2, **options)
    path = tmp_path_factory.mktemp("page") / "plan.html"
    other = sw.plan(net, args, kwargs, devices=16, mode="data_parallel", cluster="h100")
    plan.report(path, {"twice the devices": other, "half the memory": "no plan fits into it"})
    html = path.read_text(encoding="utf-8")
    path.write_text(html.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8")
    return path


def probe(page: Path, width: int, *options: str) -> dict[str, Any]:
    """What the script has found in a window of this width."""
    assert BROWSER is not None
    size = f"--window-size={width},900"
    headless = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    # The page remembers its theme in the profile.
    profile = f"--user-data-dir={mkdtemp(dir=page.parent)}"
    log = "--enable-logging=stderr"
    command = [BROWSER, *headless, profile, log, size, *options, "--dump-dom", page.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [line for line in run.stderr.splitlines() if "CONSOLE" in line] == []
    found = re.search(r'<pre id="probe">(.*?)</pre>', run.stdout, re.DOTALL)
    assert found is not None
    result: dict[str, Any] = json.loads(found[1])
    return result


@pytest.mark.parametrize("width", [800, 1280, 1600])
def test_nothing_overlaps_is_cut_off_or_scrolls_sideways(page: Path, width: int) -> None:
    found = probe(page, width)
    assert (found["wide"], found["overlaps"], found["cut_off"]) == (0, [], [])


def test_search_order_and_theme_work(page: Path) -> None:
    light, dark = probe(page, 1280), probe(page, 1280, "--blink-settings=preferredColorScheme=0")
    assert 0 < light["rows"] < light["rows_with_followers"]
    assert light["matches"] == 1 and re.fullmatch(r"1 of \d+ rows", light["said"])
    assert light["focus"] == "search" and light["sorted"]
    assert (light["first"], light["other"]) == (dark["other"], dark["first"])
    assert light["first"] != light["other"]
    assert light["plans"] == [["this plan"], ["twice the devices"], ["half the memory"]]
