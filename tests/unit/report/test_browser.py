"""The page in a real browser: its script runs, draws every bar, and fetches nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.planning.graphs import cluster
from tests.unit.report.pages import Page
from tests.unit.report.test_page import made, slowed
from whale.report import comparison_html, recorded_run, report_html

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine (apt-get install chromium)")
@pytest.mark.parametrize(("width", "schedule", "is_of_two"), [(1300, "1f1b", False), (420, "zb_h1", False), (900, "1f1b", True)])
def test_the_script_draws_every_bar(width: int, schedule: str, is_of_two: bool, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    found = made(cluster((3e9, 1e9)), num_stages=2, num_micro_batch=4, schedule=schedule)
    runs = [recorded_run(found[0], found[3], [slowed(found[3], factor)]) for factor in (1.0, 3.0)]
    html = comparison_html(*runs, ("one", "two")) if is_of_two else report_html(*found, recordings=[slowed(found[3])])  # type: ignore[call-arg]
    file = tmp_path / "report.html"
    file.write_text(html)
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--enable-logging=stderr", "--v=0"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom", file.as_uri()]
    browser = subprocess.run([CHROMIUM, *words], capture_output=True, text=True, timeout=300, check=True)
    drawn, strips = (re.search(rf'data-{name}="(\d+)"', browser.stdout) for name in ("bars", "strips"))
    assert not re.findall(r"CONSOLE.*(?:Error|Refused)", browser.stderr)
    data = Page(html).data
    assert drawn is not None and int(drawn[1]) == sum(len(run["bars"]) for track in data["tracks"] for run in track["runs"])
    assert is_of_two or (strips is not None and int(strips[1]) == len(data["tracks"]))
    assert "forward (F)" in browser.stdout, "the legend"
