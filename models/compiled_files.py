"""Compiled functions on disk, in a folder of inductor's cache: a later process loads them and traces nothing."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Hashable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.codecache import write_atomic
from torch._inductor.cpu_vec_isa import pick_vec_isa, valid_vec_isa_list
from torch._inductor.runtime.cache_dir_utils import cache_dir

from stree.models.compiled_function import CompiledFunction
from stree.models.layout import portable_layout_of
from stree.models.passed_checks import code_digest
from stree.models.patched_model import PatchedModel
from stree.models.patching import is_hooked

__all__ = ["CompiledFiles"]

logger = logging.getLogger("stree")


class CompiledFiles:
    """The folder of the compiled functions of models that differ in nothing but the values of their weights.

    Its name is a hash of the model's configuration, settings, shapes of weights and classes, of the code that runs
    them, and of the settings of torch that a trace or inductor reads.  A function has two files: inductor's artifact,
    and JSON with the names of the weights that it takes and the sizes for which it holds, whose name is its hash, and
    which has the artifact's: what is damaged is compiled again.  Models with hooks on modules have no files.

    Args:
        lm: the model.
    """

    def __init__(self, lm: PatchedModel) -> None:
        self._lm = lm
        self._named = dict([*lm.model.named_parameters(), *lm.model.named_buffers()])

    def load(self, kind: Hashable, wanted: Sequence[Tensor]) -> CompiledFunction | None:
        """Return a function for a kind of calls that takes the ``wanted`` tensors, or None."""
        for file in [] if self._folder is None else sorted(self._folder.glob("*.json")):
            try:
                record, binary = json.loads(file.read_text()), file.with_suffix(".bin")
                artifact = record.pop("artifact")
                sizes = record["shapes"], record["conditions"]
                if record["kind"] == repr(kind) and CompiledFunction.holds(wanted, *sizes):
                    if file.stem != _digest(json.dumps(record).encode()) or artifact != _digest(binary.read_bytes()):
                        raise ValueError("its bytes are not those that were written")
                    weights = [self._named[name] for name in record["names"]]
                    _trust_compiler(record["instructions"])
                    return CompiledFunction.load(binary, kind, weights, *sizes)
            except Exception as problem:  # files of another release, or half of them; torch raises anything
                logger.debug("%s is not loaded: %s: %s", file, type(problem).__name__, problem)
        return None

    def save(self, function: CompiledFunction) -> None:
        """Write a function down, unless it takes tensors that are no weights of the model, or inductor cannot."""
        names = {id(tensor): name for name, tensor in self._named.items()}
        if self._folder is None or not {*map(id, function.weights)} <= names.keys():
            return
        record = {
            "kind": repr(function.kind), "shapes": function.shapes, "conditions": function.conditions,
            "names": [names[id(weight)] for weight in function.weights], "instructions": str(pick_vec_isa()),
        }  # fmt: skip
        file = self._folder / _digest(json.dumps(record).encode())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            function.save(binary := file.with_suffix(".bin"))
            text = json.dumps({**record, "artifact": _digest(binary.read_bytes())})
            write_atomic(str(file.with_suffix(".json")), text)
        except Exception as problem:  # inductor keeps no cache, or no file can be written
            logger.debug("%s is not written: %s: %s", file, type(problem).__name__, problem)

    @cached_property
    def _folder(self) -> Path | None:
        """Folder of the files, or None where the model has none."""
        modules = [*self._lm.model.modules()]
        if any(map(is_hooked, modules)):
            return None
        switches: tuple[Any, ...] = (
            torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled,
            getattr(torch.cpu, "get_capabilities", dict)(), config.save_config_portable(),
        )  # fmt: skip
        kinds = {type(module) for module in (self._lm, *modules)}
        digest = code_digest((portable_layout_of(self._lm), switches), kinds, self._lm.device)
        return None if digest is None else Path(cache_dir(), "stree", digest)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _trust_compiler(instructions: str) -> None:
    """Let inductor take the best vector instructions without a test of the compiler, if it took these before.

    The test takes a second of each process.
    """
    with config.patch("cpp.vec_isa_ok", True):
        if str(pick_vec_isa()) != instructions:
            valid_vec_isa_list.cache_clear()
