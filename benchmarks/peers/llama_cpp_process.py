"""Runs llama.cpp by the package llama-cpp-python: python llama_cpp_process.py FILE THREADS PLANES.

It imports nothing of this project, for an environment of its own.  Each line of the input is a call: ``prefill N``,
``token``, ``chunk N``, ``checkpoint N KEPT``, ``planes N KEPT`` or ``prefill-planes N``.  The answer is a line of JSON:
milliseconds (of processor time, with several threads wall time) and the greedy next token.  The first answer says how
llama.cpp was built, how many rollback planes it keeps for the model, and the bytes of a recurrent state.

Speculation is llama.cpp's own: a step scores N tokens and keeps the first KEPT of them.  With rollback planes a context
holds the recurrent state after each of the last tokens; with a checkpoint the state before the step is copied, restored
when a token was rejected, and the kept tokens are run again.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp as llama
import numpy as np

LENGTH = 4096  # of a context


class Context:
    """A text in llama.cpp.

    Attributes:
        planes: rollback planes that llama.cpp keeps for this model, at most those asked for.
        chosen: the greedy next token.
    """

    def __init__(self, model: Any, vocab: int, threads: int, planes: int) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = LENGTH, 512, 512, 1
        params.n_threads, params.n_threads_batch, params.n_rs_seq = threads, threads, planes
        self._handle = llama.llama_init_from_model(model, params)
        self._memory = llama.llama_get_memory(self._handle)
        self._batch = llama.llama_batch_init(512, 0, 1)
        self._vocab = vocab
        self._length, self.chosen = 0, 5
        self.planes: int = llama.llama_n_rs_seq(self._handle)

    def _run(self, tokens: Sequence[int], scored: int) -> None:
        """Run tokens, and choose the likeliest token after each of the last ones."""
        batch = self._batch
        batch.n_tokens = count = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, self._length + i, i >= count - scored
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if status := llama.llama_decode(self._handle, batch):
            raise SystemExit(f"llama_decode returned {status}")
        self._length += count
        for i in range(count - scored, count):
            logits = llama.llama_get_logits_ith(self._handle, i)
            array = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._vocab)).contents
            self.chosen = int(np.ctypeslib.as_array(array).argmax())

    def _cut(self, length: int) -> None:
        if not llama.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise SystemExit(f"llama.cpp cannot cut a text of {self._length} tokens to {length}")
        self._length = length

    def prefill(self, count: int) -> None:
        """Run a prompt."""
        llama.llama_memory_clear(self._memory, True)
        self._length = 0
        self._run(range(5, 5 + count), 1)

    def token(self) -> None:
        """Run one token."""
        self._run([self.chosen], 1)

    def chunk(self, count: int) -> None:
        """Run so many tokens, and score each."""
        self._run([self.chosen, *range(5, 4 + count)], count)

    def speculate_with_planes(self, count: int, kept: int) -> None:
        """Score a chain and go back to the state after the kept tokens."""
        before = self._length
        self.chunk(count)
        self._cut(before + kept)

    def speculate_with_checkpoint(self, count: int, kept: int) -> None:
        """Score a chain, go back to the state before it, and run the kept tokens."""
        before, tokens = self._length, [self.chosen, *range(5, 4 + count)]
        saved = self.state()
        self._run(tokens, count)
        llama.llama_state_seq_set_data_ext(self._handle, saved, len(saved), 0, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        self._cut(before)
        self._run(tokens[:kept], 1)

    def state(self) -> Any:
        """Copy the recurrent state."""
        size = llama.llama_state_seq_get_size_ext(self._handle, 0, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        saved = (ctypes.c_uint8 * size)()
        llama.llama_state_seq_get_data_ext(self._handle, saved, size, 0, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        return saved


def main(file: str, threads: int, planes: int) -> None:
    """Answer the calls of the standard input."""
    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, None)
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(file.encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {file}")
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    plain, with_planes = Context(model, vocab, threads, 0), Context(model, vocab, threads, planes)
    plain.prefill(8)
    build = f"llama-cpp-python {llama.__version__}, {llama.llama_print_system_info().decode()}"
    print(json.dumps({"build": build, "planes": with_planes.planes, "state_bytes": len(plain.state())}), flush=True)
    calls: dict[str, Callable[..., None]] = {
        "prefill": plain.prefill, "token": plain.token, "chunk": plain.chunk,
        "checkpoint": plain.speculate_with_checkpoint, "planes": with_planes.speculate_with_planes,
        "prefill-planes": with_planes.prefill,
    }  # fmt: skip
    clock = time.process_time if threads == 1 else time.perf_counter
    for line in sys.stdin:
        name, *counts = line.split()
        context = with_planes if name.endswith("planes") else plain
        began = clock()
        calls[name](*map(int, counts))
        print(json.dumps([1e3 * (clock() - began), context.chosen]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
