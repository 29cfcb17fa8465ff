"""Make the evidence again: run all parts one after the other; the same command goes on where it was interrupted.

    python -m benchmarks.evidence --data DATA --out benchmarks/results [--only PART,...] [--list]
    python -m benchmarks.evidence --data DATA --out benchmarks/results --draw 3 [--seed 1]

DATA holds humaneval/HumanEval.jsonl, gsm8k/train.jsonl and test.jsonl, mt_bench/question.jsonl and corpus/*.jsonl.zst.
``evidence.jsonl`` in ``--out`` lists the commands that have run; one that is finished and whose output exists is not
run again.  ``--draw`` measures rows of the recorded runs again, drawn at random: see ``benchmarks.evidence.draw``.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.evidence.draw import draw
from benchmarks.evidence.parts import PARTS, Part
from benchmarks.evidence.running import Evidence
from stree.bench.records import BUSY, busy_load


def chosen(names: str | None) -> tuple[Part, ...]:
    """Choose parts by name; all for None.

    Raises:
        ValueError: a name that no part has.
    """
    if names is None:
        return PARTS
    by_name = {part.name: part for part in PARTS}
    unknown = [name for name in names.split(",") if name not in by_name]
    if unknown:
        raise ValueError(f"--only must be of {', '.join(by_name)}, got {', '.join(unknown)}")
    return tuple(by_name[name] for name in names.split(","))


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; 1 where a command failed, a drawn row disagrees or the machine is busy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of suites and corpora")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the records")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"), help="folder of prompts and drafters")
    parser.add_argument("--only", help="names of parts, separated by commas")
    parser.add_argument("--list", action="store_true", help="list the parts and which are finished")
    parser.add_argument("--draw", type=int, help="recorded rows to draw at random and measure again")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--force", action="store_true", help="run on a busy machine too")
    options = parser.parse_args(arguments)
    try:
        parts = chosen(options.only)
        evidence = Evidence(options.data, options.out, options.work)
        if options.list:
            for part in parts:
                state = "finished" if evidence.is_finished(part) else f"{part.minutes:g} min"
                print(f"{part.name:20} {state:>9}  {part.claim}")
            return 0
        if (load := busy_load()) is not None and not options.force:
            raise ValueError(f"load average must be at most {BUSY:g} for timings, got {load:.2f}; --force goes on")
        evidence.prepare()
        return draw(evidence, parts, options.draw, options.seed) if options.draw else evidence.run(parts)
    except ValueError as error:
        print(f"evidence: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("evidence: interrupted; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # also in the background of a shell, where SIGINT is ignored
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
