"""Train the bundled pair: tokenizer, hybrid Bamba target, Mamba-2 drafter pretrained and then distilled on the target.

    python -m benchmarks.training.bundled --text ../shared/data/corpus ../shared/data/gsm8k

writes `stree/assets/{target,drafter}`, `metrics.json` and the model card `README.md`.  Every stage has a wall-clock
budget; its learning rate ends at zero when the budget does.  Checkpoints and encoded text go to `runs/bundled`;
`--resume` continues from them, or from the committed weights where there is no checkpoint.
"""

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.training import data, report
from benchmarks.training import model as nets
from stree.distill import network
from stree.distill.run import fit, save_model
from stree.distill.settings import Settings
from stree.distill.text import Batches, Corpus
from stree.distill.training import Budget, compiler, probs_of, text_loss, train
from stree.models.tree_lm import TreeLM


def load_or_build(
    kind: str, assets: Path, resume: bool, vocab_size: int, eos: int, *, hidden: int, layers: int
) -> PreTrainedModel:
    """Fresh model, or with `resume` the committed one in float32, ready for more training."""
    if resume and (assets / kind / "model.safetensors").exists():
        model = AutoModelForCausalLM.from_pretrained(assets / kind, dtype=torch.float32)
    elif kind == "target":
        model = nets.build(nets.target_config(vocab_size, eos, hidden, layers))
    else:
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eos)
        model = network.build(network.drafter_config(vocab_size, hidden, layers, special))
    if hasattr(model.base_model, "embed_tokens"):
        model.base_model.embed_tokens.padding_idx = None  # the pad token is end-of-text, whose embedding must learn
    return cast(PreTrainedModel, model)


def prepare_text(args: argparse.Namespace, runs: Path, assets: Path) -> tuple[dict, PreTrainedTokenizerFast, list]:
    """Tokenizer, packed streams (cached in `runs`) and documents."""
    documents = data.read_folders(args.text, args.seed)
    committed, cached = assets / "target" / "tokenizer.json", runs / "tokenizer" / "tokenizer.json"
    source = cached if cached.exists() else committed if args.resume and committed.exists() else None
    if source is None:
        tokenizer = data.train_tokenizer(documents, args.vocab_size, args.tokenizer_characters)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(source.parent)
    tokenizer.save_pretrained(cached.parent)
    streams = {kind: np.load(runs / f"{kind}.npy") for kind in data.MIXTURE if (runs / f"{kind}.npy").exists()}
    if not streams:
        streams = data.encode_streams(documents, tokenizer)
        for kind, tokens in streams.items():
            np.save(runs / f"{kind}.npy", tokens)
    return streams, tokenizer, documents


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the bundled target and drafter.")
    text = [Path("../shared/data/corpus"), Path("../shared/data/gsm8k")]
    parser.add_argument("--text", nargs="+", type=Path, default=text, help="folders of .jsonl[.zst], .txt, .md, .py")
    parser.add_argument("--assets", type=Path, default=Path("stree/assets"), help="where the pair is written")
    parser.add_argument("--runs", type=Path, default=Path("runs/bundled"), help="checkpoints and encoded text")
    parser.add_argument("--resume", action="store_true", help="continue from checkpoints, else from the saved weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--target-minutes", type=float, default=65.0)
    parser.add_argument("--drafter-minutes", type=float, default=21.0, help="text, target-written text, distillation")
    for kind, hidden, layers in (("target", 256, 8), ("drafter", 112, 2)):
        parser.add_argument(
            f"--{kind}-hidden", type=int, default=hidden, help="width; the default is the bundled one's"
        )
        parser.add_argument(f"--{kind}-layers", type=int, default=layers)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--tokenizer-characters", type=int, default=30_000_000)
    parser.add_argument("--measure-bytes", type=int, default=400_000, help="held-out bytes measured of each kind")
    parser.add_argument("--seed", type=int, default=0)
    settings = Settings()
    parser.add_argument("--batch", type=int, default=settings.batch_size)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--muon-lr", type=float, default=settings.muon_lr)
    parser.add_argument("--adam-lr", type=float, default=settings.adam_lr)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="skip torch.compile")
    return parser.parse_args(arguments)


def train_pair(
    args: argparse.Namespace, settings: Settings, sizes: dict[str, dict[str, int]], text: Corpus, tokenizer: Any
) -> dict[str, Any]:
    """Train the target, then the drafter, and save both; return what the stages did."""
    runs, assets = args.runs, args.assets
    eos, vocab = int(tokenizer.eos_token_id), len(tokenizer)
    target, drafter = (
        load_or_build(kind, assets, args.resume, vocab, eos, **size).to(args.device) for kind, size in sizes.items()
    )
    for model, swap in ((target, nets.swap), (drafter, network.use_training_forward)):
        print(f"{model.config.model_type}: training forward agrees to {network.check_forward(model, swap):.1e}")
    nets.swap(target, torch.bfloat16, compiler(settings))
    batches = Batches(text, settings.length, settings.seed + 2)
    budget: Budget = ("seconds", 60 * args.target_minutes)
    done = train(runs / "target.pt", target, text_loss(settings), batches, settings, budget, resume=args.resume)
    save_model(target, tokenizer, assets / "target")
    writer = TreeLM.from_pretrained(assets / "target", args.device)
    probs = probs_of(target.eval(), torch.bfloat16)
    stages, generated = fit(writer, probs, drafter, text, settings, runs, resume=args.resume)
    save_model(drafter, tokenizer, assets / "drafter")
    return {
        "target_parameters": target.num_parameters(),
        "drafter_parameters": drafter.num_parameters(),
        "sampled_tokens": generated,
        "stages": {"target": done, **stages},
    }


def main(arguments: list[str] | None = None) -> None:
    """Run every stage and write the assets."""
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    runs, assets = args.runs, args.assets
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / "commands.txt").open("a") as log:
        log.write(shlex.join(["python", "-m", "benchmarks.training.bundled", *(arguments or sys.argv[1:])]) + "\n")
    settings = Settings(
        minutes=args.drafter_minutes, batch_size=args.batch, length=args.length, muon_lr=args.muon_lr,
        adam_lr=args.adam_lr, dtype=torch.bfloat16, compile=args.compile, save_every=240.0, seed=args.seed,
    )  # fmt: skip
    streams, tokenizer, documents = prepare_text(args, runs, assets)
    text = Corpus(streams, data.MIXTURE, data.MAX_PASSES, int(tokenizer.eos_token_id))
    sizes = {
        "target": {"hidden": args.target_hidden, "layers": args.target_layers},
        "drafter": {"hidden": args.drafter_hidden, "layers": args.drafter_layers},
    }
    metrics = {
        **train_pair(args, settings, sizes, text, tokenizer),
        "sizes": sizes,
        "vocab_size": len(tokenizer),
        "window": settings.length,
        "settings": {k: str(v) for k, v in asdict(settings).items()},
        "held_out": report.measure_folder(assets, documents, args.measure_bytes, args.device),
        "machine": f"{torch.get_num_threads()} CPU threads" if args.device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commands": (runs / "commands.txt").read_text().splitlines(),
    }
    (assets / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (assets / "README.md").write_text(report.model_card(metrics))
    print(json.dumps(metrics["held_out"]))


if __name__ == "__main__":
    main()
