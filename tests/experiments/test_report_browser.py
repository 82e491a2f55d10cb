"""The report in a real browser, where there is one: nothing wider than the page on a phone and on a desktop, light and
dark, and a script that works.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from synthetic import sparse_layers, variants

from resformer.experiments.index import write_index
from resformer.experiments.report import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FOUND = next((path for name in BROWSERS if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(FOUND is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed")

WIDTHS = (375, 1280)
# Looks at each frame, points at a chart, presses a name, and leaves what it saw as the text of the page.
LOOK = """
addEventListener('load', () => setTimeout(() => {
  const told = [];
  for (const frame of document.querySelectorAll('iframe')) {
    const page = frame.contentDocument, view = frame.contentWindow, width = page.documentElement.clientWidth;
    const outside = [...page.querySelectorAll('body *')].filter(e =>
      e.getBoundingClientRect().right > width + 1 && !e.closest('.scroll, pre, svg, .readout'));
    const svg = [...page.querySelectorAll('.plot svg')].find(s => view.getComputedStyle(s).display !== 'none');
    const seen = {width, scroll: page.documentElement.scrollWidth, outside: outside.map(e => e.outerHTML.slice(0, 90)),
      paper: view.getComputedStyle(page.body).backgroundColor, ink: view.getComputedStyle(page.body).color};
    if (svg) {
      const box = svg.getBoundingClientRect();
      svg.dispatchEvent(new view.PointerEvent('pointermove', {clientX: box.left + box.width / 2}));
      const readout = svg.closest('.plot').querySelector('.readout');
      seen.readout = readout.hidden ? null : readout.textContent;
      const button = page.querySelector('.legend button');
      button.click();
      seen.hidden = page.querySelectorAll('.plot .off').length;
    }
    told.push(seen);
  }
  document.body.textContent = 'SEEN' + JSON.stringify(told) + 'END';
}, 300));
"""


def look(page: Path, place: Path, *, dark: bool) -> list[dict]:
    """What a browser makes of a page at both widths."""
    text = html.escape(page.read_text(encoding="utf-8"), quote=True)
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{text}"></iframe>' for width in WIDTHS
    )
    wrapper = place / "look.html"
    wrapper.write_text(
        f"<!doctype html><meta charset=utf-8><body>{frames}<script>{LOOK}</script></body>", encoding="utf-8"
    )
    assert FOUND is not None
    command = [
        FOUND, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--user-data-dir={place / 'profile'}", "--window-size=1400,1000", "--virtual-time-budget=5000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", wrapper.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(place)}, check=False
    )
    found = re.search(r"SEEN(.*)END", done.stdout, re.S)
    if found is None:
        pytest.skip(f"{FOUND} does not run here (exit code {done.returncode}): {done.stderr.strip()[-200:]}")
    return json.loads(html.unescape(found[1]))


def brightness(colour: str) -> float:
    """Mean of red, green and blue, 0..255."""
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    top = tmp_path_factory.mktemp("results")
    reports = [write_report(variants(top / "variants")), write_report(sparse_layers(top / "sparse"))]
    return [*reports, write_index(top)]


@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_their_width_and_have_both_schemes(pages: list[Path], tmp_path: Path, dark: bool) -> None:
    for page in pages:
        for width, seen in zip(WIDTHS, look(page, tmp_path, dark=dark), strict=True):
            assert seen["width"] >= width - 20  # a scroll bar may take some
            assert seen["scroll"] <= seen["width"] and seen["outside"] == [], page
            assert (brightness(seen["paper"]) < 60) == dark
            assert (brightness(seen["ink"]) > 180) == dark


def test_the_script_reads_values_and_hides_curves(pages: list[Path], tmp_path: Path) -> None:
    for seen in look(pages[0], tmp_path, dark=False):
        assert "tokens" in seen["readout"] and "learnable_plus" in seen["readout"]
        assert seen["hidden"] > 3  # in every chart
