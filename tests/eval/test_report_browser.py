"""The report in a real browser: no error, no request, tables sort, nothing overlaps on a desk or a phone."""

import html
import json
import re
import shutil
import subprocess

import pytest

from clip_linear_eval.report import write_report
from tests.eval.report_sweep import write_sweep

CHROMIUM = next((c for c in ("chromium", "chromium-browser", "google-chrome") if shutil.which(c)), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
    *("--virtual-time-budget=8000", "--dump-dom"),
]

# Runs in a page that holds the report in a frame of the wanted width; what it finds becomes the page's text.
PROBE = """
<!doctype html><meta charset="utf-8"><body><iframe id="frame" style="width:WIDTHpx;height:3000px;border:0"></iframe>
<pre id="found"></pre><script>
const frame = document.getElementById("frame"), found = {errors: [], requests: [], overlaps: []};
frame.srcdoc = PAGE;
frame.addEventListener("load", () => {
  const win = frame.contentWindow, doc = frame.contentDocument, root = doc.documentElement;
  doc.addEventListener("securitypolicyviolation", e => found.requests.push(e.blockedURI));
  win.addEventListener("error", e => found.errors.push(String(e.message)));
  found.requests.push(...win.performance.getEntriesByType("resource").map(r => r.name));
  found.title = doc.title;
  doc.querySelectorAll("details").forEach(d => { d.open = true; });
  found.overflow = root.scrollWidth - root.clientWidth;
  const crossing = (a, b, slack) => a.left + slack < b.right && b.left + slack < a.right &&
    a.top + slack < b.bottom && b.top + slack < a.bottom;
  const cards = [...doc.querySelectorAll("h1, h2, .card, .scroll, summary")];
  const check = (all, slack, name) => {
    const boxes = all.map(e => e.getBoundingClientRect());
    for (let i = 0; i < all.length; i++) for (let j = 0; j < i; j++)
      if (boxes[i].width && boxes[j].width && crossing(boxes[i], boxes[j], slack))
        found.overlaps.push([name, all[i].textContent.trim().slice(0, 40), all[j].textContent.trim().slice(0, 40)]);
  };
  check(cards, 1, "page");
  doc.querySelectorAll("figure").forEach(f => check([...f.querySelectorAll("svg text")], 1.5, f.id));
  found.figures = doc.querySelectorAll("figure svg").length;
  found.smallest = Math.min(...[...doc.querySelectorAll("svg text")].map(t => t.getBoundingClientRect().height));
  const table = [...doc.querySelectorAll("table")].pop(), button = table.querySelectorAll("th button")[2];
  const values = () => [...table.tBodies[0].rows].map(r => Number(r.cells[2].dataset.v));
  found.before = values(); button.click(); found.up = values(); button.click(); found.down = values();
  found.sorted = table.querySelector("th[aria-sort]").getAttribute("aria-sort");
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; on Debian: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_in_chromium(tmp_path, width):
    page = write_report(write_sweep(tmp_path / "sweep", variants=("softmax", "mala", "affine_eq7", "elu")))
    body = json.dumps(page.read_text()).replace("</", "<\\/")
    (tmp_path / "probe.html").write_text(PROBE.replace("WIDTH", str(width)).replace("PAGE", body))
    where = [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,3200", (tmp_path / "probe.html").as_uri()]
    ran = subprocess.run([CHROMIUM, *FLAGS, *where], capture_output=True, text=True, timeout=120)
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', ran.stdout, re.S)[1]))
    assert "how error falls" in found["title"] and found["figures"] >= 8
    assert found["errors"] == [] and not re.search(r"CONSOLE.*(error|Refused)", ran.stderr, re.I), ran.stderr
    assert found["requests"] == []
    assert found["overflow"] <= 0, "the page scrolls sideways"
    assert found["overlaps"] == []
    assert found["smallest"] > 6, "letters must be readable"
    assert found["up"] == sorted(found["before"]) and found["down"] == found["up"][::-1]
    assert found["up"] != found["down"] and found["sorted"] == "descending"
