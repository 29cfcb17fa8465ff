"""Run the page's tests in Chromium, and record which of them passed, with which version and on which files.

Run: python -m benchmarks.serving.browser --out benchmarks/results/serving/browser.jsonl
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from benchmarks.report import command_line, digests, finish
from stree.bench.records import ROOT

TESTS = "tests/serving/test_page_in_browser.py"
SERVING = ROOT / "stree" / "serving"


def sources() -> dict[str, str]:
    """Return the hash of every file that the page is made of, and of its tests."""
    return digests([*(SERVING / "static").iterdir(), SERVING / "document.py", SERVING / "page.py", ROOT / TESTS])


def main() -> None:
    """Run the tests; where all have passed, replace the record."""
    options = command_line(__doc__, "the file of the record").parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("the page's tests need chromium on the path")
    version = subprocess.run([chromium, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-m", "slow", TESTS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    passed = [line.rpartition("::")[2] for line in run.stdout.splitlines() if line.startswith("PASSED ")]
    if run.returncode or not passed:
        raise SystemExit(f"not all tests have passed, so nothing is recorded:\n{run.stdout}{run.stderr}")
    record = {"bench": "page-in-browser", "chromium": version, "passed": passed, "sources": sources()}
    finish([record], options.out, replaces=True)


if __name__ == "__main__":
    main()
