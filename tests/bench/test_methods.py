"""Methods by name."""

from __future__ import annotations

import re

import pytest

from stree.bench.methods import parse_methods
from stree.bench.records import ROOT
from stree.verify import VERIFIERS


def test_methods_are_read_with_ranges_shapes_and_budgets() -> None:
    text = (
        "plain,transformers,mamba-ssm,chain:4,chain:2-8,static:3,2,stree,dyspec,dyspec:32,suffix,suffix:8,fused:32,auto,"
        "transformers-lookup,transformers-assistant:4,unrolled,snapshot:static:2,2"
    )
    found = {method.name: (method.drafter, method.budget) for method in parse_methods(text)}
    assert found == {
        "plain": ("none", 1), "transformers": ("transformers", 1),
        "mamba-ssm": ("mamba-ssm", 1), "chain:4": ("model", 5), "chain:2-8": ("model", 9),
        "static:3,2": ("model", 10), "stree": ("model", 13), "dyspec": ("model", 16),
        "dyspec:32": ("model", 32), "suffix": ("suffix", 16), "suffix:8": ("suffix", 8),
        "fused:32": ("fused", 32), "auto": ("model", "auto"),
        "transformers-lookup": ("transformers-lookup", 11), "transformers-assistant:4": ("transformers-assistant", 5),
        "unrolled": ("model", 16), "snapshot:static:2,2": ("model", 7),
    }  # fmt: skip


def test_a_method_that_is_given_again_is_measured_again() -> None:
    methods = parse_methods("plain,chain:4,plain,plain,transformers-lookup,transformers-lookup")
    assert [method.name for method in methods] == [
        "plain", "chain:4", "plain#2", "plain#3", "transformers-lookup", "transformers-lookup#2"
    ]  # fmt: skip
    assert methods[0].kind == methods[2].kind == "plain" and methods[5].kind == "transformers-lookup"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "plain,dyspce:16",
            "method 'dyspce:16' is unknown; known are plain, .* no growth is named 'dyspce'; growths are calibrated",
        ),
        ("lossy-target-init:2,3@match", "has a rule of its own to accept tokens; leave @match out"),
        ("chain:4-2", "method 'chain:4-2' must go from a depth of at least 1 up"),
        ("dyspec:8@best", f"the verifier of 'dyspec:8@best' must be one of {', '.join(VERIFIERS)}, got 'best'"),
    ],
)
def test_a_bad_method_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_methods(text)


def test_the_page_of_methods_names_files_that_exist_and_commands_that_are_read() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    files = set(re.findall(r"`((?:stree|models|kernels|tests|benchmarks)/[\w./]+)`", page))
    assert len(files) > 25 and not [file for file in files if not (ROOT / file).exists()]
    commands = re.findall(r"`BENCH ([^` ]+)", page)
    assert len(commands) >= 20 and all(parse_methods(command) for command in commands)
