"""``stree generate``: continue a prompt."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from logging import getLogger
from pathlib import Path
from typing import Any

from stree.checks import check_counts
from stree.cli.compiling import MANY_TOKENS, advice
from stree.cli.datastore import load_datastore
from stree.cli.generation_report import print_samples, report_of, summary, write_page
from stree.cli.importing import import_models, without_collection
from stree.cli.options import add_command, add_generation, add_grammar, add_rules, grammar_of, token_rules_of
from stree.cli.progress import Progress, TextPrinter
from stree.files import check_file
from stree.inputs import encode_turn, load_tokenizer, locate, stop_tokens

__all__ = ["add_generate", "drafting_options", "generation_options", "prepare"]


def add_generate(commands: Any) -> None:
    """Register the command with an argparse subparsers object."""
    text = "continue a prompt; the text follows the target's own distribution exactly"
    command = add_command(commands, "generate", _generate, text)
    command.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue; standard input if left out")
    add_generation(command)
    add_grammar(command)
    add_rules(command)
    command.add_argument("--stop", action="append", metavar="TEXT", help="end the text at TEXT; may be repeated")
    command.add_argument("-n", "--num-samples", type=int, default=1, help="texts of the prompt; several need sampling")
    command.add_argument("--tp", action="store_true", help="shard the target over the processes of torchrun")
    command.add_argument("--json", action="store_true", help="print one JSON document as the last line")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page that shows the trees of all steps")


def _generate(arguments: argparse.Namespace) -> int:
    """Run ``stree generate``."""
    check_counts(num_samples=arguments.num_samples)
    if arguments.num_samples > 1 and arguments.temperature == 0:
        raise ValueError(f"--num-samples {arguments.num_samples} needs a temperature above 0: greedy texts are equal")
    options = {**generation_options(arguments), "grammar": grammar_of(arguments), **token_rules_of(arguments)}
    if arguments.html is not None:
        check_file(arguments.html)
        options["return_steps"] = True
    prompt = _prompt(arguments)
    tokenizer, load = prepare(arguments)
    options |= {"tokenizer": tokenizer, "stop_strings": arguments.stop, "num_samples": arguments.num_samples}
    if "bad_words" in options:
        from stree.rule_fields import tokenized_words

        options["bad_words"] = tokenized_words(options["bad_words"], tokenizer)
    if not (prompt_ids := encode_turn(tokenizer, prompt, chat=arguments.chat)):
        raise ValueError("the prompt is empty; give at least one token")
    lm, drafter = load()
    if arguments.chat:
        options["stop_token_ids"] = stop_tokens(lm, tokenizer)

    from stree.warming import compile_steps

    drafting = {name: options[name] for name in ("growth", "budget", "verifier")}
    warm_up_s = compile_steps(lm, drafter, batches=[[options["sampling"]] * arguments.num_samples], **drafting)
    prints = not arguments.tp or os.environ["RANK"] == "0"  # of several processes the first one prints
    if prints and arguments.num_samples == 1:
        options["streamer"] = Progress(arguments.max_new_tokens) if arguments.json else TextPrinter(tokenizer)
    output, status = _run(lm, prompt_ids, drafter, options)
    if prints and output.sequences:  # none where it was interrupted while step times were profiled
        report = report_of(arguments, output, tokenizer, lm, warm_up_s)
        print_samples(report if not arguments.json else {})
        print(json.dumps(report) if arguments.json else summary(report), file=None if arguments.json else sys.stderr)
        if report["num_new_tokens"] >= MANY_TOKENS and not arguments.json and (line := advice(lm)):
            print(line, file=sys.stderr)
        if arguments.html is not None:
            write_page(arguments, output, tokenizer, report)
    return status


def prepare(arguments: argparse.Namespace) -> tuple[Any, Callable[[], tuple[Any, Any]]]:
    """Check the models that the options name, by their configs and tokenizers; the default drafter is filled in.

    Returns:
        The tokenizer, and a function that loads target and drafter.

    Raises:
        ValueError: no such model, one of another tokenizer, or options that do not go together.
    """
    from stree.cli.threads import FreeCores

    target = locate(arguments.target, "target")
    cores = FreeCores()  # measured while libraries and models are loaded
    import_models(compiles=arguments.compile)
    from transformers.utils import logging

    from stree.models.families import config_of_text_model, family_of

    logging.set_verbosity_error()
    getLogger("huggingface_hub").setLevel("ERROR")  # a line for every time that it tries again
    logging.disable_progress_bar()
    # Configs and tokenizers come before weights, so that mistakes are named at once.
    config = config_of_text_model(_config(arguments, target))
    family_of(config)
    if arguments.drafter is None:
        arguments.drafter = _default_drafter(arguments.target, config, target)
    tokenizer = _tokenizer(arguments, target)
    load_drafter = _drafter(arguments, tokenizer)

    def load() -> tuple[Any, Any]:
        is_sharded = getattr(arguments, "tp", False)
        lm = _load(arguments, target, tp_plan="auto" if is_sharded else None)
        lm.captures_steps = False if arguments.eager or is_sharded else None
        drafter = load_drafter(lm)
        for model in (lm, *drafter.models) if arguments.compile else ():
            model.compile()
        if lm.device.type == "cpu":
            cores.fit(lm.model.parameters())
            cores.adapt()
        return lm, drafter

    return tokenizer, load


def generation_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check the options of ``stree.generate``, and return them."""
    from stree.checks import check_sizes

    with without_collection():
        from stree.sampling import Sampling

    options = drafting_options(arguments)
    check_counts(max_new_tokens=arguments.max_new_tokens)
    check_sizes(prefill_chunk=arguments.prefill_chunk)
    return {
        "sampling": Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p),
        "max_new_tokens": arguments.max_new_tokens, "seed": arguments.seed, **options,
    }  # fmt: skip


def drafting_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check the options of growth, budget and verifier, and return them."""
    from stree.growth import TargetInit, sized_growth
    from stree.verify import VERIFIERS

    budget: Any = arguments.budget
    if budget is not None and budget != "auto":
        if not budget.lstrip("-").isdigit():
            raise ValueError(f"--budget must be a number of nodes or 'auto', got {budget!r}")
        budget = int(budget)
        check_counts(budget=budget)
    if arguments.verifier not in VERIFIERS:
        raise ValueError(f"--verifier must be one of {', '.join(VERIFIERS)}, got {arguments.verifier!r}")
    growth, budget = sized_growth(arguments.growth, budget, arguments.default_budget)
    if isinstance(growth, TargetInit):
        raise ValueError("--growth lossy-target-init does not keep the target's distribution; stree bench run takes it")
    if growth is not None and isinstance(budget, int):
        growth.plan(budget)  # refuses a fixed shape above the budget
    return {"growth": growth, "budget": budget, "verifier": arguments.verifier}


def _run(lm: Any, prompt_ids: list[int], drafter: Any, options: dict[str, Any]) -> tuple[Any, int]:
    """Generate; return what was generated, also until an error or Ctrl-C, and the exit status."""
    from stree.generation import GenerationError, GenerationInterrupted, generate

    try:
        output = generate(lm, [prompt_ids], drafter, **options)
    except GenerationInterrupted as interrupt:
        _end(options)
        return interrupt.output, 130
    except GenerationError as error:
        _end(options)
        print(f"stree: error: {error}", file=sys.stderr)
        return error.output, 2
    errors = [reason for reason in output.stats["finish_reasons"] if reason.startswith("error: ")]
    if errors:
        print(f"stree: {errors[0]}", file=sys.stderr)
    return output, 2 if errors else 0


def _end(options: dict[str, Any]) -> None:
    """End the line of a text that was printed as it came."""
    if "streamer" in options:
        options["streamer"].end()


def _prompt(arguments: argparse.Namespace) -> str:
    """Take the prompt from the command line, else from standard input."""
    if arguments.prompt is None and sys.stdin.isatty():
        raise ValueError("no prompt: give one as argument or on standard input")
    prompt: str = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
    try:
        prompt.encode()  # bytes that are not UTF-8 arrive as surrogates
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is no UTF-8 text: {error}") from error
    return prompt


def _load(arguments: argparse.Namespace, name: str, tp_plan: str | None = None) -> Any:
    """Load a model as the options say."""
    from stree.models.tree_lm import TreeLM

    lm = TreeLM.from_pretrained(
        name, device=arguments.device, dtype=arguments.dtype, tp_plan=tp_plan,
        trust_remote_code=arguments.trust_remote_code,
    )  # fmt: skip
    lm.chunk_size = arguments.prefill_chunk
    return lm


def _tokenizer(arguments: argparse.Namespace, name: str) -> Any:
    """Load the tokenizer of a checkpoint, or the one that the options name."""
    return load_tokenizer(arguments.tokenizer or name, trust_remote_code=arguments.trust_remote_code)


def _default_drafter(target: str, config: Any, source: str) -> str:
    """Return the drafter where none is named: what fits the target best of what is at hand."""
    from stree.heads import mtp_files

    if target == "bundled":
        return "bundled"
    return "mtp" if mtp_files(config, source) else "suffix"


def _config(arguments: argparse.Namespace, name: str) -> Any:
    """Read the config of a checkpoint."""
    from stree.models.loading import load_config

    return load_config(name, trust_remote_code=arguments.trust_remote_code)


def _drafter(arguments: argparse.Namespace, tokenizer: Any) -> Callable[[Any], Any]:
    """Check the options of the drafter; return what loads it for a target."""
    from stree.drafters import DRAFTERS, FusedDrafter, NoDrafter, SuffixDrafter

    name = arguments.drafter
    kind, _, rest = name.partition(":")
    is_fused = kind == "fused"
    if arguments.datastore is not None and name != "suffix" and not is_fused:
        raise ValueError(f"--datastore is read by --drafter suffix and fused, got {name!r}")
    store = load_datastore(arguments, tokenizer)
    if name in ("suffix", "none"):
        if arguments.growth is not None:
            raise ValueError(f"--growth shapes the trees of a draft model; --drafter {name} has none")
        if arguments.drafter_vocab is not None:
            raise ValueError(f"--drafter-vocab trims a draft model's head; --drafter {name} has none")
        return lambda _: NoDrafter() if name == "none" else SuffixDrafter(store)
    if name in DRAFTERS and name != "mtp":  # of the user
        return DRAFTERS[name]
    load = _drafting(arguments, rest or "bundled" if is_fused else name, tokenizer)
    return lambda lm: FusedDrafter(load(lm), SuffixDrafter(store)) if is_fused else load(lm)


def _drafting(arguments: argparse.Namespace, name: str, tokenizer: Any) -> Callable[[Any], Any]:
    """Check a draft model or head; return what loads its drafter for a target."""
    from stree.drafters import HeadDrafter, ModelDrafter
    from stree.heads import head_layout, load
    from stree.vocabulary import load_vocabulary

    folder = locate(name, "drafter")
    if not Path(folder).is_dir() and "/" not in name and name != "mtp":  # a mistake in a name must not ask the network
        raise ValueError(
            f"--drafter must be one of the names in --help, a folder, or a hub id OWNER/NAME, got {name!r}; names of "
            "your own are entered by --import"
        )
    path = arguments.drafter_vocab
    if name == "mtp" or head_layout(folder) is not None:
        if path is not None:
            target = _config(arguments, locate(arguments.target, "target"))
            load_vocabulary(path, target.get_text_config().vocab_size, ())
        return lambda lm: HeadDrafter(load(folder, lm), vocab=_kept(path, lm.vocab_size, lm))
    config = _config(arguments, folder)
    theirs, ours = _tokenizer(arguments, folder).get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        raise ValueError(
            f"drafter {name!r} and target {arguments.target!r} have different tokenizers "
            f"({len(theirs)} and {len(ours)} tokens, {len(theirs.items() & ours.items())} the same)"
        )
    if path is not None:
        load_vocabulary(path, config.get_text_config().vocab_size, ())

    def load_model(lm: Any) -> Any:
        model = _load(arguments, folder)
        return ModelDrafter(model, vocab=_kept(path, model.vocab_size, lm))

    return load_model


def _kept(path: str | None, vocab_size: int, lm: Any) -> list[int] | None:
    """Read the tokens that a drafter keeps, or None for all."""
    from stree.vocabulary import load_vocabulary

    return None if path is None else load_vocabulary(path, vocab_size, lm.eos_token_ids)
