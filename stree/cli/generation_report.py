"""What ``stree generate`` reports of a text: one JSON document, or two lines; and a page that shows its trees."""

from __future__ import annotations

import argparse
from typing import Any

from stree.files import replacing

__all__ = ["print_samples", "report_of", "summary", "write_page"]


def report_of(arguments: argparse.Namespace, output: Any, tokenizer: Any, lm: Any, warm_up_s: float) -> dict[str, Any]:
    """Gather what ``--json`` prints; ``warm_up_s`` is what warming up took before the text."""
    from stree.decode.text import text_of

    stats = output.stats
    num_prompt_tokens, new = stats["num_prompt_tokens"][0], output.new_tokens[0]
    prompt = output.sequences[0][:num_prompt_tokens]
    keys = ("steps", "tau", "draft_calls", "nodes_per_step", "acceptance_by_depth", "tokens_per_s", "total_s")
    parts = ("prefill_s", "draft_s", "verify_s", "accept_s", "commit_s")
    samples = [
        {"text": text_of(tokenizer, prompt, tokens), "token_ids": tokens, "finish_reason": reason}
        for tokens, reason in zip(output.new_tokens, stats["finish_reasons"], strict=True)
    ]
    return {
        "text": text_of(tokenizer, prompt, new),
        "token_ids": new,
        "num_prompt_tokens": num_prompt_tokens,
        "num_new_tokens": len(new),
        **{key: stats[key] for key in keys + parts},
        "warm_up_s": warm_up_s + stats["warm_up_s"],
        "growth": stats["growth"],
        "budget": stats["budget"],
        "verifier": arguments.verifier,
        "rule": stats["rule"],
        "lossless": stats["lossless"],
        "finish_reason": stats["finish_reasons"][0],
        "device": str(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        **({"samples": samples} if len(samples) > 1 else {}),
    }


def print_samples(report: dict[str, Any]) -> None:
    """Print the texts, where there are several, each behind its number; a single one was printed as it came."""
    for number, sample in enumerate(report.get("samples", ()), 1):
        print(f"[{number}] {sample['text']}")


def summary(report: dict[str, Any]) -> str:
    """Summarise a run in two lines."""
    count = sum(len(sample["token_ids"]) for sample in report.get("samples", ())) or report["num_new_tokens"]
    parts = ", ".join(f"{name} {report[name + '_s']:.2f}" for name in ("draft", "verify", "accept", "commit"))
    return (
        f"\n{count} tokens in {report['steps']} steps: tau {report['tau']:.2f}, "
        f"{report['tokens_per_s']:.0f} tokens/s ({report['finish_reason']})\nseconds: {parts}; "
        f"warm-up before the text {report['warm_up_s']:.2f}"
    )


def write_page(arguments: argparse.Namespace, output: Any, tokenizer: Any, report: dict[str, Any]) -> None:
    """Write the page of a text whose steps were kept, at ``--html``; it needs no server."""
    from stree.decode.stop_strings import TokenBytes
    from stree.serving.document import page_document, steps_json

    prompt, new = output.sequences[0][: report["num_prompt_tokens"]], output.new_tokens[0]
    shown = ("target", "drafter", "temperature", "top_k", "top_p", "min_p", "seed")
    asked = {name: getattr(arguments, name) for name in shown}
    ran = {name: report[name] for name in ("growth", "budget", "verifier", "device", "dtype")}
    data = {
        "settings": {"prompt": tokenizer.decode(prompt), **asked, **ran},
        "steps": steps_json(prompt, new, output.steps[0], TokenBytes(tokenizer)),
        "figures": {
            "prefill_s": report["prefill_s"], "decode_s": report["total_s"] - report["prefill_s"],
            "finish_reason": report["finish_reason"],
        },
    }  # fmt: skip
    with replacing(arguments.html) as path:
        path.write_text(page_document({"trees": data})[0], encoding="utf-8")
