"""``--import`` enters drafters, growths and verifiers of a user's own under names, for commands and benches."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stree.bench.methods import parse_methods
from stree.cli import main
from stree.cli.importing import import_own
from stree.drafters import DRAFTERS
from stree.growth import GROWTHS, STOPS, parse_growth
from stree.verify import VERIFIERS

OWN = """
from dataclasses import dataclass
import stree
from stree.growth import BaseGrowth, Layer, Plan

@dataclass(frozen=True)
class Wide(BaseGrowth):
    width: int = 2
    least: float = 0.5
    def plan(self, budget):
        return Plan((Layer(self.width, self.width),), min(self.width, budget - 1))

@dataclass(frozen=True)
class Top(stree.growth.Stop):
    least: float = 0.3
    def draws(self, values, dist):
        return (dist.amax(-1) > self.least).any(1)

class Repeat(stree.drafters.SuffixDrafter):
    pass

stree.growth.GROWTHS["wide"] = Wide
stree.growth.STOPS["top"] = Top
stree.drafters.DRAFTERS["repeat"] = lambda target: print("made by name") or Repeat()
stree.verify.VERIFIERS["mine"] = stree.verify.VERIFIERS["match"]
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    yield path
    for registry, name in ((DRAFTERS, "repeat"), (GROWTHS, "wide"), (STOPS, "top"), (VERIFIERS, "mine")):
        registry.pop(name, None)


def test_names_of_an_imported_file_are_read(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["generate", "def f", "--import", str(own), "--drafter", "repeat", "--max-new-tokens", "2", "--json"]) == 0
    )
    assert "made by name" in capsys.readouterr().out
    named = parse_growth("wide:8,width=3,least=0.2+top:0.4").growth
    assert str(named) == "Stopped(base=Wide(width=3, least=0.2), rule=Top(least=0.4))"
    with pytest.raises(ValueError, match="no growth is named 'auto'; it is a budget"):
        parse_growth("auto")
    with pytest.raises(ValueError, match="wide has no field named depth, which NODESxDEPTH sets"):
        parse_growth("wide:8x2")
    with pytest.raises(ValueError, match=r"options width, least; got .*; growths are wide \(of your own\), calib"):
        parse_growth("wide:8,depth=2")
    GROWTHS["wide"] = GROWTHS["wide"](width=3)
    with pytest.raises(ValueError, match=r"GROWTHS\['wide'\] must be a class of growths, got Wide"):
        parse_growth("wide:8")
    (method,) = parse_methods("repeat:8@mine")
    assert (method.drafter, method.budget, method.verifier) == ("repeat", 8, "mine")


def test_an_imported_file_finds_those_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_own.py").write_text("VALUE = 7\n")
    (tmp_path / "own.py").write_text("import beside_own\nassert beside_own.VALUE == 7\n")
    import_own(str(tmp_path / "own.py"))
    del sys.modules["beside_own"], sys.modules[str(tmp_path / "own.py")]


@pytest.mark.parametrize(("name", "message"), [("none.py", "FileNotFoundError"), ("no_module", "No module named")])
def test_what_cannot_be_imported_is_one_line(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--import", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stree: error: --import {name}: ") and message in error and error.count("\n") == 1


def test_a_bench_drafter_of_no_name_is_refused_without_the_network(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "run", "--drafter", "repeat", "--out", str(tmp_path / "out")]) == 2
    assert "got 'repeat'; drafters without a model are --methods" in capsys.readouterr().err
