"""The parts of the evidence: what is run, for which claim, and about how long on two cores.

In a command, {data} is the folder of suites and corpora, {out} that of the records, {work} that of prompts, trained
drafters and other files made on the way, and {smollm2} the checkpoint that ``stree bench run --target smollm2`` makes.
What a command writes is at its ``--out``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PARTS", "Part"]

CODE = "humaneval={data}/humaneval/HumanEval.jsonl"
MATHS = "gsm8k={data}/gsm8k/test.jsonl"
CHAT = "mt_bench={data}/mt_bench/question.jsonl"
DRAFTED = "chain:4,calibrated:16x4,suffix,fused,auto"
SMOLLM2 = "--target smollm2 --chat --drafter"
SIX_LAYERS = f"{SMOLLM2} smollm2:6"
BASELINES = "plain,transformers,transformers-lookup:10"
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (512, 2048, 8192, 32768)
REQUESTS = (500, 2000)  # of passages that SmolLM2 is asked to summarise
SMOLLM2_CONTEXTS = (512, 2048, 8000)  # it has 8,192 positions


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the evidence.

    Attributes:
        name: for ``--only``.
        minutes: of all its commands together, on two cores.
        claim: what its records show.
        commands: run one after the other.
    """

    name: str
    minutes: float
    claim: str
    commands: tuple[str, ...]


def _part(name: str, minutes: float, claim: str, *commands: str) -> Part:
    return Part(name, minutes, claim, commands)


def _bench(
    out: str, methods: str, *suites: str, options: str = "", temperature: str = "0,0.8", threads: int = 2
) -> str:
    """Write a command of ``stree bench run``."""
    return (
        f"stree bench run --threads {threads} {options} --temperature {temperature} --methods {methods} "
        f"--suite {','.join(suites)} --out {{out}}/{out}"
    )


def _write_prompts(folder: str, lengths: tuple[int, ...], options: str = "") -> str:
    """Write the command that makes suites of passages of some lengths in tokens."""
    tokens = ",".join(map(str, lengths))
    return (
        f"python -m benchmarks.studies.long_prompts --corpus {{data}}/corpus --tokens {tokens} {options} "
        f"--out {{work}}/{folder}"
    )


def _long(folder: str, lengths: tuple[int, ...]) -> list[str]:
    """List those suites."""
    return [f"long-{length}={{work}}/{folder}/long-{length}.jsonl" for length in lengths]


def _distill(kind: str, minutes: int, options: str) -> tuple[str, ...]:
    """Write the commands that train a drafter for SmolLM2 on its own answers and list the tokens that it keeps."""
    return (
        "python -m benchmarks.training.answers --data {data} --minutes 3 --out {work}/smollm2-answers.jsonl",
        "stree trim-vocab --target {smollm2} --text {work}/smollm2-answers.jsonl --keep 4096 "
        "--out {work}/smollm2-vocab.json",
        f"stree distill --target {{smollm2}} --target-dtype bfloat16 --kind {kind} --minutes {minutes} --generated 0 "
        f"--length 256 {options} --text {{work}}/smollm2-answers.jsonl --force --out {{work}}/smollm2-{kind}",
    )


TRIMMED = "--drafter-vocab {work}/smollm2-vocab.json"
HEAD = _distill("mtp", 10, "--batch-size 2")
ALL = (CODE, MATHS, CHAT)
PARTS = (
    _part("speed", 3, "speed of every drafter over plain decoding and over transformers, bundled pair",
          _bench("speed", f"plain,transformers,{DRAFTED}", *ALL, options="--limit 5")),
    _part("nodes", 4, "tokens and time of a step by nodes of a chain and a tree, bundled pair",
          _bench("nodes", f"plain,{','.join(f'chain:{n}' for n in (1, 3, 4, 7, 15))},calibrated:2,calibrated:4,"
                 "calibrated:8,calibrated:16,calibrated:16x4,calibrated:32,calibrated:64", *ALL, options="--limit 3")),
    _part("batch", 6, "speed over plain decoding by batch size, bundled pair",
          *(_bench(f"batch-{size}", "plain,chain:4,calibrated:16x4,auto", MATHS, temperature="0.8",
                   options=f"--limit 32 --batch-size {size}") for size in BATCHES)),
    _part("context", 13, "speed over plain decoding by tokens of context, bundled pair; its loss at each position",
          "python -m benchmarks.studies.positions copy --out {work}/bundled-positions",
          "python -m benchmarks.studies.positions loss --target {work}/bundled-positions --corpus {data}/corpus "
          "--out {out}/positions/results.jsonl",
          _write_prompts("context", CONTEXTS, "--count 2"),
          _bench("context", f"plain,{DRAFTED}", *_long("context", CONTEXTS), temperature="0.8",
                 options="--target {work}/bundled-positions --drafter bundled --limit 2")),
    _part("smollm2", 15, "speed over plain decoding and transformers' own speculation, SmolLM2-135M, drafter untrained",
          _bench("smollm2", f"{BASELINES},transformers-assistant:4,chain:4,calibrated:16x4,suffix", *ALL,
                 options=f"--compile {SIX_LAYERS} --limit 3")),
    _part("smollm2-one-thread", 6, "the same on one core, without --compile",
          _bench("smollm2-one-thread", f"{BASELINES},suffix,auto", CODE, MATHS, options=f"{SIX_LAYERS} --limit 3",
                 threads=1)),
    _part("smollm2-long", 10, "the same for prompts that ask for a summary of a passage",
          _write_prompts("summary", REQUESTS, "--target smollm2 --request --count 4"),
          _bench("smollm2-long", f"{BASELINES},suffix", *_long("summary", REQUESTS),
                 options=f"--compile {SIX_LAYERS} --limit 4")),
    _part("smollm2-head", 24, "the same with an MTP head, trained for 10 minutes", *HEAD,
          _bench("smollm2-head", f"{BASELINES},chain:2,calibrated:8x2,fused:16,auto", *ALL,
                 options=f"--compile {SMOLLM2} {{work}}/smollm2-mtp {TRIMMED} --limit 3")),
    _part("smollm2-nodes", 8, "tokens and time of a step by nodes of a chain and a tree, SmolLM2 and that head", *HEAD,
          _bench("smollm2-nodes", "plain,chain:1,chain:2,chain:3,chain:4,chain:7,calibrated:4,calibrated:8x2,"
                 "calibrated:8,calibrated:16x4,calibrated:32", MATHS,
                 options=f"--compile {SMOLLM2} {{work}}/smollm2-mtp {TRIMMED} --limit 3")),
    _part("smollm2-context", 8, "speed over plain decoding by tokens of context, SmolLM2 and that head", *HEAD,
          _write_prompts("smollm2-context", SMOLLM2_CONTEXTS, "--target smollm2 --count 2"),
          _bench("smollm2-context", "plain,suffix,calibrated:8x2", *_long("smollm2-context", SMOLLM2_CONTEXTS),
                 temperature="0",
                 options=f"--compile --target smollm2 --drafter {{work}}/smollm2-mtp {TRIMMED} --limit 2")),
    _part("smollm2-drafter", 13, "the same with a Mamba-2 drafter, trained for 8 minutes",
          *_distill("model", 8, "--batch-size 4"),
          _bench("smollm2-drafter", "plain,chain:2,chain:4,calibrated:8x2,calibrated:16x4,auto", MATHS,
                 options=f"--compile {SMOLLM2} {{work}}/smollm2-model {TRIMMED} --limit 3")),
    _part("serving", 3, "tokens a second of stree serve: one client and eight",
          "python -m benchmarks.serving.load throughput --rounds 9 --out {out}/serving/results.jsonl"),
    _part("arrivals", 4, "tokens a second, time to first token and latency of stree serve by rate of Poisson arrivals",
          "python -m benchmarks.serving.arrivals --rates 1,2,4,8 --out {out}/serving/arrivals.jsonl"),
)  # fmt: skip
