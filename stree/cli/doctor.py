"""``stree doctor``: check stree on this machine's device, and write a file to attach to an issue."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from stree.cli.importing import without_collection
from stree.cli.options import add_command
from stree.files import check_file

__all__ = ["add_doctor"]


def add_doctor(commands: Any) -> None:
    """Register the command with an argparse subparsers object."""
    text = (
        "check kernels, captured steps and step times on this device, in under ten minutes; write one JSON file, "
        "without names of users, machines or folders, to attach to an issue"
    )
    command = add_command(commands, "doctor", _doctor, text)
    command.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    command.add_argument("--out", type=Path, default=Path("stree-doctor.json"), help="file of the report")
    command.add_argument("--json", action="store_true", help="print the report as one JSON document, too")


def issues_url() -> str | None:
    """Return the address of the issues that the installed package names, or None."""
    for line in metadata("stree").get_all("Project-URL") or ():
        label, _, address = line.partition(",")
        if label.strip().lower() in ("issues", "bug tracker", "tracker"):
            return str(address.strip())
    return None


def _doctor(arguments: argparse.Namespace) -> int:
    """Run ``stree doctor``; 1 where something disagrees."""
    out = check_file(arguments.out)
    with without_collection():
        from transformers.utils import logging

        from stree.cli.check_device import check_device, lines_of
        from stree.cli.check_model import write_report
        from stree.models.loading import torch_device

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report = check_device(torch_device(arguments.device))
    write_report(report, out)
    page = "\n".join(f"{name:<14}{value}" for name, value in lines_of(report).items())
    sys.stdout.write((json.dumps(report) if arguments.json else page) + "\n")
    url = issues_url()
    where = "in the issue tracker of this project" if url is None else f"at {url}"
    print(f"written: {out}; please read it, and attach it to a new issue {where}", file=sys.stderr)
    return 0 if report["ok"] else 1
