"""Every kernel under NVIDIA's compute-sanitizer: no byte outside its tensors, no race in shared memory, on a GPU.

Run: python -m benchmarks.gpu.sanitizer --out DIR [--tools memcheck racecheck synccheck] [--minutes 9]

Each tool runs one process that launches every operation of the suite at tiny sizes and writes texts with tiny
models, launched operation by operation: growth, both samplings, verify, acceptance, commit.  torch gives every tensor
memory of its own there, so that a byte beyond it is noticed.  A machine on which the tool does
not run is reported and is no failure; an error that it finds is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time

import torch

import stree
from benchmarks.gpu import cases
from benchmarks.gpu import models as gpu_models
from benchmarks.gpu.run import begin, command_line
from stree.bench.records import Record
from stree.drafters import FusedDrafter, ModelDrafter, SuffixDrafter
from stree.sampling import Sampling

TOOL = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "synccheck")
SIZES = [(2, 5), (1, 64)]  # batch and nodes
UNABLE = re.compile(r"not supported|LibraryNotLoaded|InitializationFailed|Unable to|not permitted", re.IGNORECASE)
NUM_LINES = 40  # of what a tool says that a record keeps


def main() -> int:
    """Run the tools one after another, or, where one of them watches, what it watches."""
    parser = command_line(__doc__, "gpu_sanitizer.jsonl")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--launch", action="store_true", help="only launch what a tool watches")
    options, run = begin(parser, is_interpreted=True)
    if options.launch:
        print(json.dumps({"launched": launch(run.device)}))
        return 0
    for tool in options.tools:
        record = watched(tool, max(run.deadline - time.monotonic(), 1.0))
        is_right = record["errors"] == 0 or "unavailable" in record
        run.add({**record, "outcome": "passed" if is_right else "failed"})
        print(*record["said"], sep="\n")
    rows = [[r["tool"], r.get("unavailable", f"{r['errors']} errors, exit {r['exit']}")] for r in run.records]
    return run.report(["tool", "result"], rows)


def watched(tool: str, seconds: float) -> Record:
    """Run one process under a tool: the number of errors found, None where the tool did not report one."""
    record: Record = {"bench": "sanitizer", "metric": "errors", "tool": tool, "errors": None, "exit": None, "said": []}
    program = shutil.which(TOOL)
    if program is None:
        return record | {"unavailable": f"{TOOL} is not on the PATH"}
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu.sanitizer"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run([*command, "--launch"], env=environment, capture_output=True, text=True, timeout=seconds)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        parts = (part.decode() if isinstance(part, bytes) else part or "" for part in (error.stdout, error.stderr))
        output, code = "".join(parts), None
    said = [line for line in output.splitlines() if line.startswith("=====")]
    count = re.search(r"SUMMARY: (\d+) (?:error|hazard)", output)
    record |= {"exit": code, "errors": int(count[1]) if count else None}
    record["said"] = said[:NUM_LINES] or output.splitlines()[-NUM_LINES:]
    unable = next((line for line in said if UNABLE.search(line)), None)
    if unable is not None and '"launched"' not in output:
        record["unavailable"] = unable.lstrip("= ")
    elif code not in (0, 9):
        record["errors"] = None  # it did not see everything
    return record


def launch(device: torch.device) -> int:
    """Launch every operation at tiny sizes, then whole steps of tiny models; count operations and texts."""
    generator, count = torch.Generator(device).manual_seed(0), 0
    for dtype in (torch.float32, torch.bfloat16):
        for case in cases.cases(cases.SMALL, SIZES, dtype, device):
            case.providers["triton"](case.make(generator))
            count += 1
    shapes = gpu_models.configurations(smoke=True)
    draft = ModelDrafter(gpu_models.model_of(shapes["tiny-drafter"], device))
    for name in ("tiny-mamba2", "tiny-bamba"):
        lm = gpu_models.model_of(shapes[name], device)
        lm.captures_steps = False
        for temperature in (0.0, 0.8):
            for drafter in (draft, FusedDrafter(draft, SuffixDrafter())):
                prompts = [[3, 4, 5, 3, 4], [6, 7]]
                sampling = Sampling(temperature)
                stree.generate(lm, prompts, drafter, budget=16, sampling=sampling, max_new_tokens=6, ignore_eos=True)
                count += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return count


if __name__ == "__main__":
    sys.exit(main())
