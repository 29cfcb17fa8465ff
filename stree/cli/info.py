"""``stree info``: what a checkpoint is and what decoding it takes, from its config alone.

No weights are read, except by ``--check``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from stree.cli.importing import without_collection
from stree.cli.options import add_command
from stree.files import check_file
from stree.inputs import locate

__all__ = ["add_info", "describe_model"]

LENGTH, NODES = 4096, 64  # the text and tree for which the memory of a captured step is shown


def add_info(commands: Any) -> None:
    """Register the command with an argparse subparsers object."""
    text = "describe a checkpoint and what decoding it takes; reads its config only, except with --check"
    command = add_command(commands, "info", _info, text)
    command.add_argument(
        "model", nargs="?", default="bundled", metavar="MODEL", help="'bundled', a folder, or a hub id"
    )
    command.add_argument("--dtype", default="auto", help="of the weights: auto (the checkpoint's own), bfloat16, ...")
    command.add_argument("--trust-remote-code", action="store_true", help="execute the checkpoint's own code")
    command.add_argument("--json", action="store_true", help="print one JSON document instead")
    command.add_argument(
        "--check", action="store_true", help="load it, compare it with transformers, time steps, write one JSON file"
    )
    command.add_argument("--device", default=None, help="of --check: auto (the default), cpu, cuda, ...")
    command.add_argument("--out", type=Path, default=None, help="file of --check; by default stree-check-MODEL.json")


def describe_model(config: Any, dtype: Any, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Describe the model of a transformers config.

    Args:
        config: of any model.
        dtype: torch dtype of the weights.
        trust_remote_code: whether the checkpoint's own code may be executed.

    Returns:
        A JSON-able dict; where ``is_supported`` is False, ``reason`` says why and there are no sizes.
    """
    from stree.models.families import config_of_text_model, family_of
    from stree.models.state_size import empty_model
    from stree.models.tree_lm import TreeLM

    config = config_of_text_model(config)
    report: dict[str, Any] = {
        "family": config.model_type,
        "num_layers": getattr(config, "num_hidden_layers", None),
        "dtype": str(dtype).removeprefix("torch."),
    }
    try:
        family_of(config)
        if getattr(config, "quantization_config", None) is not None:
            raise NotImplementedError(
                "the checkpoint is quantised, which layers that keep a state must not be; it runs if they were left out"
            )
        lm = TreeLM(empty_model(config, dtype, trust_remote_code=trust_remote_code))
    except NotImplementedError as error:
        return {**report, "is_supported": False, "reason": str(error)}
    return {**report, "is_supported": True, "reason": None, **_sizes(lm)}


def _sizes(lm: Any) -> dict[str, Any]:
    """Bytes that decoding takes, and what is kept of captured steps."""
    from stree.decode.capture import MOST_GRAPHS
    from stree.decode.memory import state_bytes
    from stree.decode.step_cache import MAX_DECODE_STEPS
    from stree.models.state_size import measure_state

    memory = measure_state(lm)
    return {
        "layers": memory.layers,
        "num_parameters": sum(parameter.numel() for parameter in lm.model.parameters()),
        "max_length": lm.max_length,
        "state_bytes": memory.state,
        "window_bytes": memory.window,
        "kv_bytes_per_token": memory.kv_per_token,
        "stash_bytes_per_node": memory.stash_per_node,
        "kv_stash_bytes_per_node": memory.kv_stash_per_node,
        "nodes_per_state": memory.state / memory.stash_per_node if memory.state else None,
        "graphs": {
            "decode_steps": MAX_DECODE_STEPS, "graphs_per_decode_step": MOST_GRAPHS, "max_length": LENGTH,
            "max_nodes": NODES, "state_bytes": state_bytes(lm, 1, LENGTH, NODES),
        },
    }  # fmt: skip


def _info(arguments: argparse.Namespace) -> int:
    """Run ``stree info``."""
    if arguments.check:
        return _check(arguments)
    for name in ("device", "out"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} belongs to --check, which is missing")
    with without_collection():
        import torch

        from stree.models.families import config_of_text_model
        from stree.models.loading import load_config, torch_dtype

    config = load_config(locate(arguments.model, "target"), trust_remote_code=arguments.trust_remote_code)
    own = getattr(config, "dtype", None) or torch.float32
    dtype = torch_dtype(own if arguments.dtype == "auto" else arguments.dtype)
    source, trusted = locate(arguments.model, "target"), arguments.trust_remote_code
    report = {
        "model": arguments.model,
        **describe_model(config, dtype, trust_remote_code=trusted),
        "mtp_parameters": _mtp_parameters(config_of_text_model(config), source),
        "mtp_reason": None,
    }
    if report["is_supported"] and report["mtp_parameters"]:
        report["mtp_reason"] = _mtp_reason(config, dtype, source, trust_remote_code=trusted)
    sys.stdout.write((json.dumps(report) if arguments.json else _page(report)) + "\n")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """Run ``stree info --check``; 1 where something disagrees."""
    out = check_file(arguments.out or Path(f"stree-check-{Path(arguments.model).resolve().name}.json"))
    with without_collection():
        from transformers.utils import logging

        from stree.cli.check_model import check_checkpoint, write_report

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    report = check_checkpoint(
        arguments.model, device=arguments.device or "auto", dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
    )  # fmt: skip
    write_report(report, out)
    sys.stdout.write((json.dumps(report) if arguments.json else _check_page(report)) + "\n")
    print(f"written: {out}", file=sys.stderr)
    return 0 if report["ok"] else 1


def _check_page(report: dict[str, Any]) -> str:
    """Lay the result of a check out as text."""
    lines = {"model": report["model"], "all agrees": "yes" if report["ok"] else "no"}
    parts = {name: report.get(name, {}) for name in ("self_check", "text", "steps")}
    errors = {name: part["error"] for name, part in (("error", report), *parts.items()) if "error" in part}
    for name, row in parts["self_check"].get("compared", {}).items():
        lines[f"{name} "] = f"relative error {row['error']:.1e}, bound {row['bound']:.0e}"
    if "num_tokens" in parts["text"]:
        first = parts["text"].get("first_difference")
        where = first and f"at new token {first['position']}, by a logit gap of {first['logit_gap']:.2g}"
        kind = first and ("a near-tie" if first["is_near_tie"] else "not a near-tie")
        lines["greedy text"] = f"differs {where}: {kind}" if first else "equals model.generate's"
    for nodes, ms in parts["steps"].get("median_ms", {}).items():
        lines[f"{nodes} nodes"] = f"{ms:.1f} ms a step, {parts['steps']['over_one_node'][nodes]:.2f} times one node's"
    return _aligned(lines | errors)


def _mtp_parameters(config: Any, source: str) -> int | None:
    """Count the parameters of the MTP layers in a checkpoint, None where it has none; only headers are read."""
    from stree.heads import mtp_files
    from stree.models.heads.weights import count_parameters

    names = mtp_files(config, source)
    return count_parameters(source, names) if names else None


def _mtp_reason(config: Any, dtype: Any, source: str, *, trust_remote_code: bool) -> str | None:
    """Say why the MTP layers of a checkpoint cannot be loaded, by their shapes alone; None where they can be."""
    from stree.models.heads.mtp import load_mtp
    from stree.models.state_size import empty_model
    from stree.models.tree_lm import TreeLM

    try:
        load_mtp(TreeLM(empty_model(config, dtype, trust_remote_code=trust_remote_code)), source)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return None


def _page(report: dict[str, Any]) -> str:
    """Lay a report out as text."""
    lines = {"model": report["model"], "family": report["family"]}
    if not report["is_supported"]:
        lines["supported"] = f"no: {report['reason']}"
        return _aligned(lines)
    kinds = ", ".join(f"{count} {kind}" for kind, count in report["layers"].items())
    lines["layers"] = f"{report['num_layers']}: {kinds}"
    lines["parameters"] = f"{report['num_parameters']:,} ({report['dtype']})"
    lines["positions"] = "any" if report["max_length"] is None else f"at most {report['max_length']:,}"
    lines["state"] = f"{_size(report['state_bytes'])} a sequence"
    lines["conv windows"] = f"{_size(report['window_bytes'])} a sequence"
    lines["keys, values"] = f"{_size(report['kv_bytes_per_token'])} a token"
    ratio = report["nodes_per_state"]
    share = "" if not ratio else f", 1/{ratio:.0f} of a state" if ratio > 1.5 else f", {1 / ratio:.2g} times a state"
    lines["stash"] = f"{_size(report['stash_bytes_per_node'])} a node{share}"
    lines["stash, keys"] = f"{_size(report['kv_stash_bytes_per_node'])} a node"
    graphs = report["graphs"]
    lines["CUDA graphs"] = (
        f"kept for at most {graphs['decode_steps']} kinds of batch, {graphs['graphs_per_decode_step']} graphs each; "
        f"{_size(graphs['state_bytes'])} a sequence of {graphs['max_length']:,} tokens and {graphs['max_nodes']} nodes"
    )
    mtp, reason = report["mtp_parameters"], report["mtp_reason"]
    use = f"not loaded: {reason}" if reason else "--drafter mtp"
    lines["MTP layers"] = "none" if mtp is None else f"{mtp:,} parameters; {use}"
    lines["supported"] = "yes"
    return _aligned(lines)


def _aligned(lines: dict[str, str]) -> str:
    """Put values in one column."""
    return "\n".join(f"{name:<14}{value}" for name, value in lines.items())


def _size(count: int) -> str:
    """Write bytes with a unit."""
    from rich.filesize import pick_unit_and_suffix

    unit, name = pick_unit_and_suffix(count, ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{count / unit:.1f} {name}" if unit > 1 else f"{count} B"
