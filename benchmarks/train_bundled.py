"""Train the bundled pair: tokenizer, hybrid Bamba target, Mamba-2 drafter pretrained and then distilled on the target.

    python benchmarks/train_bundled.py --text ../shared/data/corpus ../shared/data/gsm8k

writes `stree/assets/{target,drafter}`, `metrics.json` and the model card `README.md`.  Every stage has a wall-clock
budget; its learning rate ends at zero when the budget does.  Checkpoints and encoded text go to `runs/bundled`;
`--resume` continues from them, or from the committed weights where there is no checkpoint.
"""

import argparse
import json
import math
import os
import random
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import BambaForCausalLM, Mamba2ForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
import train_data as data
import train_model as nets
import train_report as report

LossFn = Callable[[PreTrainedModel, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train: batch windows, their length, peak learning rates, schedule, matmul dtype and device."""

    batch: int = 4
    length: int = 1024
    muon_lr: float = 8e-3
    adam_lr: float = 6e-3
    warmup: float = 0.01
    decay: float = 0.6
    clip: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    compile: bool = True
    save_every: float = 240.0
    seed: int = 0


def schedule(progress: float, warmup: float, decay: float) -> float:
    """Learning-rate factor at a share of the budget: linear warm-up, flat, linear decay to zero over the last share."""
    progress = min(max(progress, 0.0), 1.0)
    return min(1.0, (progress + 1e-3) / (warmup + 1e-3), (1.0 - progress) / decay)


def make_optimizers(model: PreTrainedModel, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices, AdamW for the embedding, the convolutions and all vectors."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    rest = [p for p in model.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(
        matrices, lr=settings.muon_lr, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": [embedding], "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=settings.adam_lr, betas=(0.9, 0.95), eps=1e-10)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adam]


def compiler(settings: Settings) -> nets.Compile:
    """`torch.compile` for fixed shapes, or the identity."""
    return partial(torch.compile, dynamic=False) if settings.compile else lambda function: function


def text_loss(settings: Settings) -> LossFn:
    """Mean cross-entropy in nats of the next token on windows (batch, length + 1)."""

    def head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden.to(settings.dtype), weight.to(settings.dtype)).flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten())

    head = compiler(settings)(head)

    def loss(model: PreTrainedModel, windows: Tensor) -> Tensor:
        return head(nets.hidden_states(model, windows[:, :-1]), model.lm_head.weight, windows[:, 1:])

    return loss


def distill_loss(target: PreTrainedModel, settings: Settings) -> LossFn:
    """Mean KL divergence in nats from the target's next-token law to the drafter's, at temperature 1."""

    def head(hidden: Tensor, weight: Tensor, target_hidden: Tensor, target_weight: Tensor) -> Tensor:
        logits = F.linear(hidden.to(settings.dtype), weight.to(settings.dtype)).float()
        wanted = F.linear(target_hidden.to(settings.dtype), target_weight.to(settings.dtype)).float()
        wanted = wanted.log_softmax(-1)
        return (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1).mean()

    head = compiler(settings)(head)

    def loss(model: PreTrainedModel, windows: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = nets.hidden_states(target, windows[:, :-1])
        hidden = nets.hidden_states(model, windows[:, :-1])
        return head(hidden, model.lm_head.weight, wanted, target.lm_head.weight)

    return loss


def train(
    name: str,
    model: PreTrainedModel,
    loss_fn: LossFn,
    batches: data.Batches,
    seconds: float,
    settings: Settings,
    folder: Path,
    resume: bool = False,
    max_steps: int | None = None,
) -> dict[str, float]:
    """Train a model for a wall-clock budget, with checkpoints, and leaves it swapped in its fast form.

    Args:
        name: stage name; the checkpoint is `folder/<name>.pt`.
        model: trained in place.
        loss_fn: loss in nats of a batch of windows.
        batches: source of windows.
        seconds: budget of the stage, time before a resumption included.
        settings: batch, learning rates, schedule and device.
        folder: where checkpoints go.
        resume: continue from the stage's checkpoint where there is one.
        max_steps: stop after so many steps whatever the time.

    Returns:
        Steps, tokens, seconds and the final smoothed loss.
    """
    checkpoint = folder / f"{name}.pt"
    model.to(settings.device).train()
    optimizers = make_optimizers(model, settings)
    done = {"steps": 0.0, "tokens": 0.0, "seconds": 0.0, "loss": 0.0}
    if resume and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=settings.device, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        done = saved["done"]
        batches.drawn.update(saved["drawn"])
        batches.rng = np.random.default_rng(settings.seed + int(done["steps"]))
    nets.swap(model, settings.dtype, compiler(settings))

    def save() -> None:
        states = [optimizer.state_dict() for optimizer in optimizers]
        content = {"model": model.state_dict(), "optimizers": states, "done": done, "drawn": batches.drawn}
        torch.save(content, checkpoint.with_suffix(".tmp"))
        os.replace(checkpoint.with_suffix(".tmp"), checkpoint)

    last = last_save = time.monotonic()
    bar = tqdm(total=round(seconds), initial=round(done["seconds"]), desc=name, unit="s", mininterval=5.0)
    while done["seconds"] < seconds and (max_steps is None or done["steps"] < max_steps):
        factor = schedule(done["seconds"] / seconds, settings.warmup, settings.decay)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
        windows = batches.next(settings.batch).to(settings.device)
        loss = loss_fn(model, windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        value = loss.item()
        if not math.isfinite(value):
            raise RuntimeError(f"{name}: the loss is {value} at step {int(done['steps'])}; resume with a lower rate")
        now = time.monotonic()
        pace = windows[:, 1:].numel() / (now - last)
        bar.update(round(done["seconds"] + now - last) - round(done["seconds"]))
        done["seconds"] += now - last
        done["tokens"] += windows[:, 1:].numel()
        done["loss"] = value if not done["steps"] else 0.98 * done["loss"] + 0.02 * value
        done["steps"] += 1
        last = now
        bar.set_postfix(loss=f"{done['loss']:.3f}", tok_s=f"{pace:.0f}", M=f"{done['tokens'] / 1e6:.2f}", refresh=False)
        if now - last_save > settings.save_every:
            save()
            last_save = now
    bar.close()
    save()
    return done


@torch.no_grad()
def sample_stream(
    target: PreTrainedModel, batches: data.Batches, seconds: float, device: str, width: int = 384
) -> np.ndarray:
    """Text sampled by the target at temperature 1 from training prompts of 32 tokens, as one packed stream."""
    target.to(device).eval()
    target.generation_config.eos_token_id = None  # sampled text runs on past end-of-text, as packed text does
    rows: list[np.ndarray] = []
    start = time.monotonic()
    with tqdm(total=round(seconds), desc="sample", unit="s", mininterval=5.0) as bar:
        while not rows or time.monotonic() - start < seconds:
            prompts = batches.next(32)[:, :32].to(device)
            options = {"attention_mask": torch.ones_like(prompts), "eos_token_id": None, "pad_token_id": None}
            text = target.generate(prompts, do_sample=True, top_k=0, max_new_tokens=width, **options)
            rows.append(text.flatten().cpu().numpy().astype(np.uint16))
            bar.update(round(time.monotonic() - start) - bar.n)
    return np.concatenate(rows)


def load_or_build(kind: str, assets: Path, resume: bool, vocab_size: int, eos: int) -> PreTrainedModel:
    """Fresh model, or with `resume` the committed one in float32, ready for more training."""
    if resume and (assets / kind / "model.safetensors").exists():
        family = BambaForCausalLM if kind == "target" else Mamba2ForCausalLM
        model = family.from_pretrained(assets / kind, dtype=torch.float32)
    else:
        make = nets.target_config if kind == "target" else nets.drafter_config
        model = nets.build(make(vocab_size, eos))
    if hasattr(model.base_model, "embed_tokens"):
        model.base_model.embed_tokens.padding_idx = None  # the pad token is end-of-text, whose embedding must learn
    return model


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save configuration, generation configuration, bfloat16 weights and tokenizer."""
    config = type(model.config).from_dict(model.config.to_dict())
    copy = type(model)(config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
    parser.add_argument("--drafter-minutes", type=float, default=8.0)
    parser.add_argument("--sample-minutes", type=float, default=3.0)
    parser.add_argument("--distill-minutes", type=float, default=10.0)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--tokenizer-characters", type=int, default=30_000_000)
    parser.add_argument("--measure-bytes", type=int, default=400_000, help="held-out bytes measured of each kind")
    parser.add_argument("--seed", type=int, default=0)
    settings = Settings()
    parser.add_argument("--batch", type=int, default=settings.batch)
    parser.add_argument("--length", type=int, default=settings.length)
    parser.add_argument("--muon-lr", type=float, default=settings.muon_lr)
    parser.add_argument("--adam-lr", type=float, default=settings.adam_lr)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="skip torch.compile")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run every stage and writes the assets."""
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    runs, assets = args.runs, args.assets
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / "commands.txt").open("a") as log:
        log.write("python " + shlex.join([sys.argv[0], *(arguments if arguments is not None else sys.argv[1:])]) + "\n")
    chosen = {k: getattr(args, k) for k in ("batch", "length", "muon_lr", "adam_lr", "device", "compile", "seed")}
    settings = Settings(**chosen)
    streams, tokenizer, documents = prepare_text(args, runs, assets)
    eos, vocab = int(tokenizer.eos_token_id), len(tokenizer)
    for config in (nets.target_config(vocab, eos), nets.drafter_config(vocab, eos)):
        tqdm.write(f"{config.model_type}: training forward agrees to {nets.check_swap(config):.1e}")
    stages: dict[str, dict[str, float]] = {}

    def stage(name: str, model: PreTrainedModel, loss: LossFn, text: dict, minutes: float, kind: str) -> None:
        batches = data.Batches(text, settings.length, settings.seed + len(stages))
        stages[name] = train(name, model, loss, batches, 60 * minutes, settings, runs, args.resume)
        save_model(model, tokenizer, assets / kind)

    target = load_or_build("target", assets, args.resume, vocab, eos)
    stage("target", target, text_loss(settings), streams, args.target_minutes, "target")
    drafter = load_or_build("drafter", assets, args.resume, vocab, eos)
    stage("drafter", drafter, text_loss(settings), streams, args.drafter_minutes, "drafter")
    if not (args.resume and (runs / "sampled.npy").exists()):
        sampler = BambaForCausalLM.from_pretrained(assets / "target", dtype=torch.float32)
        batches = data.Batches(streams, settings.length, settings.seed + 10)
        np.save(runs / "sampled.npy", sample_stream(sampler, batches, 60 * args.sample_minutes, args.device))
    mixed = {**streams, "sampled": np.load(runs / "sampled.npy")}  # weight 1 against the mixture's sum of 1: one half
    stage("distill", drafter, distill_loss(target.eval(), settings), mixed, args.distill_minutes, "drafter")
    metrics = {
        "target_parameters": target.num_parameters(),
        "drafter_parameters": drafter.num_parameters(),
        "vocab_size": vocab,
        "window": settings.length,
        "sampled_tokens": len(mixed["sampled"]),
        "stages": stages,
        "settings": {k: str(v) for k, v in asdict(settings).items()},
        "held_out": report.measure_folder(assets, documents, args.measure_bytes),
        "machine": f"{torch.get_num_threads()} CPU threads" if args.device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commands": (runs / "commands.txt").read_text().splitlines(),
    }
    (assets / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (assets / "README.md").write_text(report.model_card(metrics))
    tqdm.write(json.dumps(metrics["held_out"]))


if __name__ == "__main__":
    main()
