"""The report of a sweep in a browser: headless Chromium, at the width of a desk and of a phone."""

import html
import json
import re
import shutil
import subprocess

import pytest

from analysis.report import report_page
from analysis.sweeps import read_sweep
from tests.analysis.sweep_folder import write_sweep

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 400)

#: Added to a copy of the page: tells the page around it what the browser made of it.
_SEE = """<script>addEventListener("load", () => {
const images = [...document.images], right = image => image.getBoundingClientRect().right;
parent.postMessage({
  window: innerWidth, page: document.documentElement.scrollWidth,
  images: images.length, drawn: images.every(image => image.naturalWidth > 0),
  right: Math.max(...images.map(right)),
  loaded: performance.getEntriesByType("resource").filter(entry => !entry.name.startsWith("data:")).length,
  cells: document.querySelectorAll("td").length, heading: document.querySelector("h1").textContent,
  text: parseFloat(getComputedStyle(document.querySelector("td")).fontSize)}, "*")})</script>"""

#: Chromium's own window is never narrower than 500, so the pages are shown in frames.
_AROUND = """<!doctype html><body><script>const seen = {};
addEventListener("message", event => {
  seen[event.data.window] = event.data; document.body.dataset.seen = JSON.stringify(seen)})</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_is_whole_and_fits_windows_of_a_desk_and_of_a_phone(tmp_path):
    records = read_sweep(write_sweep(tmp_path))
    text = report_page(records)
    (tmp_path / "report.html").write_text(text.replace("</body>", f"{_SEE}</body>"), encoding="utf-8")
    frames = [
        f'<iframe src="report.html" style="border: 0; width: {width}px; height: 900px"></iframe>'
        for width in WIDTHS
    ]
    around = tmp_path / "around.html"
    around.write_text(_AROUND + "".join(frames), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run(
        [*command, around.as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found is not None, done.stderr
    seen = json.loads(html.unescape(found[1]))
    assert set(seen) == {str(width) for width in WIDTHS}
    for width in WIDTHS:
        page = seen[str(width)]
        # Wide tables scroll by themselves; the page never does.
        assert page["page"] <= width
        assert page["right"] <= width
        assert page["drawn"]
        assert page["images"] == text.count("<img")
        assert page["cells"] == text.count("<td")
        assert (page["heading"], page["loaded"]) == (records.name, 0)
        assert page["text"] >= 12
