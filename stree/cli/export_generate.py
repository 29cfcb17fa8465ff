"""``stree export-generate``: a model folder whose ``generate`` drafts token trees."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from stree.cli.generate import generation_options, prepare
from stree.cli.options import add_command, add_drafting
from stree.files import check_folder, failures_named, replacing
from stree.inputs import locate

__all__ = ["add_export_generate"]

HEAD = '"""Token trees behind ``model.generate``; written by ``stree export-generate``."""'
FILE = """{head}

from stree.integrations.exported import generate_with

SETTINGS = {settings!a}


def generate(inputs=None, *, model, **options):
    \"\"\"Generate as ``model.generate`` does; ``drafter``, ``budget``, ... of a call replace those above.\"\"\"
    return generate_with(model, inputs, {{**SETTINGS, **options}})
"""
# Options of ``stree generate`` that the model folder or the call of ``generate`` decides.
DEFAULTS: dict[str, Any] = {
    "tokenizer": None, "datastore": None, "drafter_vocab": None, "device": "cpu", "dtype": "auto", "eager": False,
    "compile": False, "prefill_chunk": None, "max_new_tokens": 1, "temperature": 0.0, "top_k": None, "top_p": None,
    "min_p": None, "seed": 0,
}  # fmt: skip


def add_export_generate(commands: Any) -> None:
    """Register the command with an argparse subparsers object."""
    text = "make a model folder that generates with token trees under transformers, transformers serve and lm_eval"
    command = add_command(commands, "export-generate", _export, text)
    command.add_argument("target", metavar="MODEL", help="'bundled', a folder, or a hub id")
    command.add_argument(
        "--out", type=Path, required=True,
        help="a new or empty folder, which gets links to the model's files; or the model's own folder",
    )  # fmt: skip
    command.add_argument("--copy", action="store_true", help="copy the model's files instead, to move the folder")
    add_drafting(command, files=False)
    command.add_argument("--trust-remote-code", action="store_true", help="execute the checkpoints' own code")
    command.set_defaults(**DEFAULTS)


def _export(arguments: argparse.Namespace) -> int:
    """Run ``stree export-generate``."""
    from stree.models.loading import raw_config
    from stree.models.mamba_in_llama import mixer_sizes
    from stree.models.native import is_native

    options = generation_options(arguments)
    out: Path = arguments.out
    check_folder(out)
    file = out / "custom_generate" / "generate.py"
    is_ours = file.is_file() and file.read_text(errors="replace").startswith(HEAD)
    if file.exists() and not is_ours:
        raise ValueError(f"{file} is not of stree export-generate; choose another --out")
    name = locate(arguments.target, "target")
    raw = raw_config(name, trust_remote_code=arguments.trust_remote_code)
    if is_native(raw) or mixer_sizes(name, raw) is not None:
        what = f"{arguments.target!r} is a checkpoint of mamba-ssm or MambaInLlama, which transformers cannot load"
        raise NotImplementedError(what)
    prepare(arguments)
    folder = _folder(name)
    is_own = out.exists() and out.resolve() == folder
    held = [path for path in out.rglob("*") if "custom_generate" not in path.relative_to(out).parts]
    links = [path for path in held if path.is_symlink()]  # of an earlier export
    if not is_own and held and not (is_ours and all(path in links or path.is_dir() for path in held)):
        raise ValueError(f"{out} is not empty; choose a new folder for --out, or the model's own")
    with failures_named(out):
        for link in [] if is_own else links:
            link.unlink()
        file.parent.mkdir(parents=True, exist_ok=True)
        if not is_own:
            _put(folder, out, is_copied=arguments.copy)
    settings = {"drafter": _drafter(arguments.drafter), "growth": arguments.growth}
    settings |= {name: options[name] for name in ("budget", "verifier")}
    with replacing(file) as beside:
        beside.write_text(FILE.format(head=HEAD, settings=settings))
    print(f"{out}: custom_generate={out.resolve()},trust_remote_code=True")
    return 0


def _folder(name: str) -> Path:
    """Return the folder of a checkpoint, downloaded from the hub where it is not here."""
    if Path(name).is_dir():
        return Path(name).resolve()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name))


def _put(folder: Path, out: Path, *, is_copied: bool) -> None:
    """Link or copy the files of a checkpoint."""
    for source in [*folder.rglob("*")]:
        place = out / source.relative_to(folder)
        if source.is_dir() or "custom_generate" in place.relative_to(out).parts:
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if is_copied:
            shutil.copy(source, place)
        else:
            place.symlink_to(source.resolve())


def _drafter(name: str) -> str:
    """Return a drafter's name as ``stree.drafters.load`` takes it, with an absolute path."""
    kind, _, rest = name.partition(":")
    if kind == "fused":
        return f"fused:{_drafter(rest or 'bundled')}"
    path = Path(locate(name, "drafter"))
    return str(path.resolve()) if name not in ("suffix", "none", "mtp") and path.is_dir() else name
