"""``model.generate(custom_generate=stree.custom_generate)``: transformers' text and law in fewer forwards."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tiny_family_models import FAMILIES as TINY_FAMILIES
from tiny_family_models import family_model
from tiny_models import VOCAB, tiny_model
from torch import Tensor
from transformers import (
    AutoTokenizer,
    DynamicCache,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerateDecoderOnlyOutput

import stree
from stree.drafters import FusedDrafter, ModelDrafter, SuffixDrafter
from stree.growth import Chain, Static
from stree.models.families import FAMILIES

torch.set_num_threads(1)

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7], [3, 4, 2], [9, 1, 2, 3, 4, 9, 1]]
NEW_TOKENS = 14
REFUSED_BY_TRANSFORMERS = ("mamba", "mamba2", "bamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid", "jamba",
                           "qwen3_next", "qwen3_5_text")  # fmt: skip
LANDED = [family for family in TINY_FAMILIES if family in FAMILIES]


def left_padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """Give transformers' inputs."""
    width = max(map(len, prompts))
    rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def plain(model: PreTrainedModel, prompt: list[int], **arguments: Any) -> list[int]:
    """Run one prompt, without padding, through transformers' own decoding; give the new tokens."""
    common = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(**left_padded([prompt]), **{**common, **arguments})
    return list(out[0].tolist()[len(prompt) :])


def hooked(model: PreTrainedModel, prompts: list[list[int]], **arguments: Any) -> Any:
    """Run prompts through the hook; give what ``generate`` returns."""
    common: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    common |= {"custom_generate": stree.custom_generate}
    return model.generate(**{**left_padded(prompts), **common, **arguments})


def new_tokens(prompts: list[list[int]], sequences: Tensor) -> list[list[int]]:
    """Cut the prompts' columns away, which must have come back unchanged."""
    width = max(map(len, prompts))
    assert torch.equal(sequences[:, :width], left_padded(prompts)["input_ids"])
    return [row[width:] for row in sequences.tolist()]


@cache
def target(family: str = "bamba") -> PreTrainedModel:
    return tiny_model(family)


@cache
def draft_model() -> PreTrainedModel:
    return tiny_model("mamba2", seed=3)


class Copying:
    """Continues the text after an earlier occurrence of its last token: on a repetitive prompt, it copies."""

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        logits = logits.clone()
        for row, text in enumerate(input_ids.tolist()):
            if text[-1] in text[:-1]:
                logits[row, text[text.index(text[-1]) + 1]] += 1e4
        return logits


def count_forwards(model: PreTrainedModel, call: Callable[[], Any]) -> tuple[Any, int]:
    """Count how often a model runs meanwhile."""
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        return call(), len(calls)
    finally:
        handle.remove()


@pytest.mark.parametrize("family", LANDED)
def test_greedy_text_is_that_of_every_prompt_alone(family: str) -> None:
    model, draft = family_model(family), draft_model()
    expected = [plain(model, prompt) for prompt in PROMPTS]
    for drafter in ("suffix", draft):
        for rows in (1, 3):
            out = hooked(model, PROMPTS[:rows], drafter=drafter)
            assert new_tokens(PROMPTS[:rows], out) == expected[:rows], (rows, drafter)
    assert plain(model, PROMPTS[0]) == expected[0], "the hook changed plain generate"


@pytest.mark.parametrize("family", LANDED)
def test_a_copying_text_takes_fewer_forwards_than_tokens(family: str) -> None:
    model = family_model(family)
    arguments: dict[str, Any] = {"logits_processor": LogitsProcessorList([Copying()])}
    expected = plain(model, PROMPTS[0], **arguments)
    assert expected[:5] == [8, 5, 6, 7, 8]
    for drafter in ("suffix", draft_model()):
        out, forwards = count_forwards(model, lambda: hooked(model, PROMPTS[:1], drafter=drafter, **arguments))  # noqa: B023
        assert new_tokens(PROMPTS[:1], out) == [expected]
        assert forwards < NEW_TOKENS / 2


@pytest.mark.parametrize("family", REFUSED_BY_TRANSFORMERS)
def test_transformers_itself_refuses_speculation_on_recurrent_families(family: str) -> None:
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        plain(family_model(family), PROMPTS[0], prompt_lookup_num_tokens=3)


DRAFTERS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": lambda: {"drafter": "none"},
    "suffix-object": lambda: {"drafter": SuffixDrafter(min_match=2), "budget": 7},
    "tree-lm": lambda: {"drafter": stree.TreeLM(draft_model()), "growth": Static([3, 2])},
    "stree-drafter": lambda: {"drafter": ModelDrafter(stree.TreeLM(draft_model())), "growth": Chain(4), "budget": 5},
    "itself": lambda: {"drafter": target(), "growth": Chain(3)},
    "fused": lambda: {"drafter": FusedDrafter(ModelDrafter(stree.TreeLM(draft_model())), SuffixDrafter())},
    "auto": lambda: {"drafter": draft_model(), "budget": "auto"},
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_kind_of_drafter_gives_the_same_text(name: str) -> None:
    expected = [plain(target(), prompt) for prompt in PROMPTS]
    assert new_tokens(PROMPTS, hooked(target(), PROMPTS, **DRAFTERS[name]())) == expected


PROCESSED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "min-new-tokens": {"min_new_tokens": 9, "eos_token_id": [*range(60)]},
    "no-repeat-ngram": {"no_repeat_ngram_size": 1},
    "forced-eos": {"forced_eos_token_id": 4},
    "suppressed": {"suppress_tokens": [*range(50)], "begin_suppress_tokens": [60, 61]},
    "bad-words": {"bad_words_ids": [[8, 9], *([token] for token in range(10, 60))], "remove_invalid_values": True},
    "decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": [10, 11, 12]},
    "prefix": {"prefix_allowed_tokens_fn": lambda _, text: [(int(text[-1]) * 7 + place) % VOCAB for place in range(9)]},
}  # fmt: skip


@pytest.mark.parametrize("drafter", ["suffix", "model"])
@pytest.mark.parametrize("name", PROCESSED)
def test_processors_of_the_config_act_along_each_path(name: str, drafter: str) -> None:
    model, arguments = target(), PROCESSED[name]
    # The padding token occurs in every prompt, for some processors of older transformers take the padding for text.
    prompts = [[5, 0, 7, 8, 5, 0, 7, 8, 5, 0, 7], [3, 0, 2], [9, 1, 2, 0, 4, 9, 1]]
    expected = [plain(model, prompt, **arguments) for prompt in prompts]
    assert expected != [plain(model, prompt) for prompt in prompts]
    out = hooked(model, prompts, drafter=draft_model() if drafter == "model" else drafter, **arguments)
    for found, text in zip(new_tokens(prompts, out), expected, strict=True):
        assert found[: len(text)] == text
        assert not any(found[len(text) :])


# Sampling.  Joint frequencies of the first three tokens against their exact law, which transformers' own processors
# make of fresh forwards.  Seeds are fixed; the significance is 1e-3.  Each law has a control that must be rejected.
SAMPLES, SMALL = {"temperature": 6000}, 11  # 2000 of the other laws, whose controls are coarser
LAWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({"temperature": 0.2, "top_k": 0}, {"temperature": 0.18}),
    "top-k": ({"temperature": 1.3, "top_k": 4}, {"top_k": 5}),
    "top-p": ({"temperature": 1.5, "top_k": 0, "top_p": 0.7}, {"top_p": 0.8}),
    "min-p": ({"temperature": 1.2, "top_k": 0, "min_p": 0.2}, {"min_p": 0.1}),
    "all": (
        {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.5},
        {"repetition_penalty": 1.0},
    ),
}


@cache
def small(family: str) -> PreTrainedModel:
    return tiny_model(family, vocab_size=SMALL, initializer_range=0.05)


def laws_after(model: PreTrainedModel, texts: Tensor, options: dict[str, Any]) -> Tensor:
    """Give the laws of the next tokens, float64[texts, vocab], by transformers' own processors in its own order."""
    known: dict[str, Callable[[Any], Any]] = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    chosen = LogitsProcessorList([make(options[name]) for name, make in known.items() if options.get(name)])
    with torch.no_grad():
        logits = model(texts, use_cache=False).logits[:, -1]
    law: Tensor = chosen(texts, logits).softmax(-1).double()
    return law


def joint_law(model: PreTrainedModel, prompt: list[int], options: dict[str, Any]) -> Tensor:
    """Enumerate the law of the next three tokens: float64[vocab ** 3]."""
    law, texts = torch.ones(1, dtype=torch.float64), torch.tensor([prompt])
    for _ in range(3):
        law = (law[:, None] * laws_after(model, texts, options)).flatten()
        texts = torch.cat([texts.repeat_interleave(SMALL, 0), torch.arange(SMALL).repeat(len(texts))[:, None]], 1)
    return law


def p_value(counts: Tensor, law: Tensor) -> float:
    """Test counts against a law, rare cells together."""
    expected = law * counts.sum()
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)
    if bool(counts[law == 0].any()):
        return 0.0
    is_rare = expected < 5  # the approximation by chi-square needs five a cell
    cells = [torch.cat([one[~is_rare], one[is_rare].sum()[None]]) for one in (counts, expected)]
    is_empty = cells[1] < 1e-9
    return float(chisquare(cells[0][~is_empty], cells[1][~is_empty] * (counts.sum() / cells[1].sum())).pvalue)


def sampled(options: dict[str, Any], prompts: list[list[int]], **arguments: Any) -> Tensor:
    """Count the first three tokens after every prompt: float64[vocab ** 3]."""
    out = hooked(small("bamba"), prompts, do_sample=True, max_new_tokens=3, seed=0, **options, **arguments)
    cells = out[:, -3] * SMALL**2 + out[:, -2] * SMALL + out[:, -1]
    return torch.bincount(cells, minlength=SMALL**3).double()


@pytest.mark.parametrize(
    ("name", "drafter"), [*((name, "rejection") for name in LAWS), ("all", "match"), ("all", "suffix")]
)
def test_sampled_texts_follow_transformers_own_law(name: str, drafter: str) -> None:
    prompt, (options, change) = [3, 4, 5, 3, 4, 5, 3], LAWS[name]
    arguments: dict[str, Any] = {"budget": 8}
    if drafter != "suffix":
        arguments |= {"drafter": small("mamba2"), "verifier": drafter}
    counts = sampled(options, [prompt] * SAMPLES.get(name, 2000), **arguments)
    assert p_value(counts, joint_law(small("bamba"), prompt, options)) > 1e-3
    assert p_value(counts, joint_law(small("bamba"), prompt, options | change)) < 1e-6, "the test has no power"


def test_a_seed_fixes_the_text_and_torch_s_seed_does_so_by_default() -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.2}

    def text(torch_seed: int, **arguments: Any) -> list[list[int]]:
        torch.manual_seed(torch_seed)
        return new_tokens(PROMPTS, hooked(target(), PROMPTS, **options, **arguments))

    assert text(1, seed=5) == text(2, seed=5) != text(2, seed=6)
    assert text(1) == text(1) != text(2)
    torch.manual_seed(1)
    first, second = (new_tokens(PROMPTS, hooked(target(), PROMPTS, **options)) for _ in range(2))
    assert first != second, "two calls in a row must not repeat each other"


def test_returned_sequences_are_sampled_independently() -> None:
    out = hooked(target(), PROMPTS[:1], do_sample=True, num_return_sequences=4, seed=1)
    assert len({tuple(row) for row in out.tolist()}) == 4


def test_finished_rows_are_padded_as_transformers_pads_them() -> None:
    texts = [plain(target(), prompt) for prompt in PROMPTS]
    stops = [texts[0][3], texts[1][7]]
    expected = [plain(target(), prompt, eos_token_id=stops) for prompt in PROMPTS]
    out = new_tokens(PROMPTS, hooked(target(), PROMPTS, eos_token_id=stops, pad_token_id=96))
    assert len({len(text) for text in expected}) > 1
    longest = max(map(len, expected))
    assert out == [text + [96] * (longest - len(text)) for text in expected]
    mamba = target("mamba2")  # whose padded batches transformers runs exactly
    theirs = mamba.generate(
        **left_padded(PROMPTS), max_new_tokens=9, do_sample=False, eos_token_id=stops, pad_token_id=0
    )
    assert torch.equal(hooked(mamba, PROMPTS, max_new_tokens=9, eos_token_id=stops), theirs)


@pytest.mark.parametrize("length", [{"max_new_tokens": 1}, {"max_length": 14, "max_new_tokens": None}])
def test_lengths_are_those_of_transformers(length: dict[str, Any]) -> None:
    inputs = left_padded(PROMPTS)
    theirs = target("mamba2").generate(**inputs, do_sample=False, eos_token_id=None, pad_token_id=0, **length)
    assert torch.equal(hooked(target("mamba2"), PROMPTS, **length), theirs)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.6, "min_new_tokens": 5}], ids=["plain", "processed"])
def test_scores_are_those_of_transformers(options: dict[str, Any]) -> None:
    model, prompts = target("mamba2"), PROMPTS[:1]
    common: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 9, **options}
    theirs = model.generate(**left_padded(prompts), do_sample=False, **common)
    ours = hooked(model, prompts, eos_token_id=0, **common)
    assert type(ours) is GenerateDecoderOnlyOutput
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.scores) == len(theirs.scores)
    for mine, other in zip(ours.scores, theirs.scores, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    transitions = model.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    assert bool((transitions < 0).all())


def test_scores_of_a_batch_are_zero_after_a_text_s_end() -> None:
    stop = plain(target(), PROMPTS[1])[2]
    out = hooked(
        target(), PROMPTS, eos_token_id=stop, return_dict_in_generate=True, output_scores=True, max_new_tokens=6
    )
    assert len(out.scores) == out.sequences.shape[1] - 11 == 6
    assert [bool(score[1].any()) for score in out.scores] == [True] * 3 + [False] * 3
    assert all(bool(score[0].any()) for score in out.scores)
    assert hooked(target(), PROMPTS, return_dict_in_generate=True).scores is None


class StopAt(StoppingCriteria):  # type: ignore[misc]
    """Ends a text at a token; notes the lengths it is asked about and whether it saw scores."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[tuple[int, Any]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.seen.append((input_ids.shape[1], None if scores is None else len(scores)))
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("drafter", ["suffix", "itself"])
def test_stopping_criteria_are_asked_after_every_token(drafter: str) -> None:
    chosen = target() if drafter == "itself" else drafter
    text = plain(target(), PROMPTS[0])
    end = next(place for place in range(4, NEW_TOKENS) if text[place] not in text[:place])
    criterion = StopAt(text[end])
    out = hooked(target(), PROMPTS[:1], drafter=chosen, stopping_criteria=[criterion])
    assert new_tokens(PROMPTS[:1], out) == [text[: end + 1]]
    assert criterion.seen == [(len(PROMPTS[0]) + count, None) for count in range(1, end + 2)]
    criterion.seen.clear()
    common: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    out = hooked(target(), PROMPTS[:1], drafter=chosen, stopping_criteria=[criterion], **common)
    assert len(out.scores) == end + 1
    assert criterion.seen == [(len(PROMPTS[0]) + count, count) for count in range(1, end + 2)]


def test_a_time_limit_ends_the_text_after_its_first_token() -> None:
    assert len(new_tokens(PROMPTS[:1], hooked(target(), PROMPTS[:1], max_time=1e-9))[0]) == 1


def test_criteria_that_end_rows_at_different_lengths_need_a_padding_token() -> None:
    with pytest.raises(ValueError, match="may end at different lengths under these criteria; set pad_token_id"):
        model = copy.deepcopy(target())
        model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
        hooked(model, PROMPTS, pad_token_id=None, stopping_criteria=[StopAt(3)])


@pytest.fixture(scope="module")
def spoken() -> tuple[PreTrainedModel, Any, list[int]]:
    """The bundled target with its tokenizer and a prompt."""
    folder = Path(stree.__file__).parent / "assets" / "target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return stree.TreeLM.from_pretrained(folder, "cpu").model, tokenizer, tokenizer("def add(a, b):")["input_ids"]


def test_stop_strings_are_a_criterion(spoken: tuple[PreTrainedModel, Any, list[int]]) -> None:
    model, tokenizer, prompt = spoken
    text = plain(model, prompt)
    words = tokenizer.batch_decode([[token] for token in text])
    end = next(place for place in range(3, NEW_TOKENS) if words[place].strip() not in "".join(words[:place]))
    criterion = StopStringCriteria(tokenizer, [words[end].strip()])
    assert new_tokens([prompt], hooked(model, [prompt], stopping_criteria=[criterion])) == [text[: end + 1]]
    with pytest.raises(ValueError, match="must pass the model's tokenizer"):  # transformers drops it on the way
        hooked(model, [prompt], stop_strings=["a"], tokenizer=tokenizer)


def test_a_bound_streamer_hears_the_whole_text(
    spoken: tuple[PreTrainedModel, Any, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer, prompt = spoken
    expected = tokenizer.decode([*prompt, *plain(model, prompt)])
    streamer = TextIteratorStreamer(tokenizer)
    hooked(model, [prompt], custom_generate=functools.partial(stree.custom_generate, streamer=streamer))
    assert "".join(streamer) == expected
    bound = functools.partial(stree.custom_generate, streamer=TextStreamer(tokenizer))
    hooked(model, [prompt], custom_generate=bound)
    assert capsys.readouterr().out == expected + "\n"
    with pytest.raises(ValueError, match="a streamer takes one prompt, got 3"):
        hooked(model, PROMPTS, custom_generate=bound)


def test_a_model_is_grafted_once_and_again_only_when_its_weights_move() -> None:
    model = copy.deepcopy(target("mamba2"))
    hooked(model, PROMPTS[:1])
    lm = model.__dict__["_stree"][1]
    hooked(model, PROMPTS[:1])
    assert model.__dict__["_stree"][1] is lm
    twin = copy.deepcopy(model)
    expected = plain(target("mamba2"), PROMPTS[0])
    assert new_tokens(PROMPTS[:1], hooked(twin, PROMPTS[:1])) == [expected]
    assert twin.__dict__["_stree"][1].model is twin
    model.double()
    assert new_tokens(PROMPTS[:1], hooked(model, PROMPTS[:1])) == [plain(model, PROMPTS[0])]
    assert model.__dict__["_stree"][1] is not lm
    assert not any("stree" in name for name in model.state_dict())


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "beam": ({"num_beams": 2}, NotImplementedError, "does greedy search and sampling, got beam search"),
    "beam-sample": ({"num_beams": 2, "do_sample": True}, NotImplementedError, "got beam sample"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, NotImplementedError, "got contrastive search"),
    "dola": ({"dola_layers": "low"}, NotImplementedError, "got dola generation"),
    "constrained": ({"force_words_ids": [[3]], "num_beams": 2}, NotImplementedError, "got constrained beam search"),
    "guidance": ({"guidance_scale": 1.5}, NotImplementedError, "has no classifier-free guidance, got .*1.5"),
    "logits": ({"output_logits": True}, NotImplementedError, "does not give raw logits, got output_logits=True"),
    "attentions": ({"output_attentions": True}, NotImplementedError, "does not give attentions"),
    "hidden-states": ({"output_hidden_states": True}, NotImplementedError, "does not give hidden states"),
    "cache-kind": ({"cache_implementation": "static"}, NotImplementedError, "does not give a cache of another kind"),
    "cache": ({"past_key_values": DynamicCache()}, NotImplementedError, "cannot go on from past_key_values"),
    "positions": (
        {"position_ids": torch.arange(1, 12)[None]}, NotImplementedError, "counts positions from each prompt's first",
    ),
    "right-padding": (
        {"attention_mask": torch.tensor([[1] * 8 + [0] * 3])}, ValueError, "prompts must be padded on the left",
    ),
    "hole": (
        {"attention_mask": torch.tensor([[1, 0] + [1] * 9])}, ValueError, "prompts must be padded on the left",
    ),
    "watermark": (
        {"logits_processor": [SynthIDTextWatermarkLogitsProcessor(3, [1, 2], 100, 0, 8, torch.device("cpu"))]},
        NotImplementedError, "cannot run SynthIDTextWatermarkLogitsProcessor along the paths of a tree",
    ),
    "drafter-name": ({"drafter": "sufix"}, ValueError, "drafter must be 'suffix', 'none', a model, .* got 'sufix'"),
    "drafter-type": ({"drafter": 3}, TypeError, "drafter must be a name, a model, or a drafter of .* got int"),
    "budget": ({"budget": 0}, ValueError, "budget must be at least 1, got 0"),
    "verifier": ({"verifier": "typical"}, ValueError, "verifier must be one of"),
    "unnamed": ({"depth": 4}, ValueError, r"not used by the model: \['depth'\]"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_before_anything_runs(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    def call() -> None:
        with pytest.raises(error, match=message):
            hooked(target(), PROMPTS[:1], **arguments)

    assert count_forwards(target(), call)[1] == 0


def test_models_that_cannot_take_part_are_refused() -> None:
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    encoder = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(NotImplementedError, match="decoder-only models; T5ForConditionalGeneration has an encoder"):
        encoder.generate(torch.tensor([[1, 2]]), custom_generate=stree.custom_generate, max_new_tokens=2)
    with pytest.raises(ValueError, match="one vocabulary: the drafter has 11 tokens, the target 97"):
        hooked(target(), PROMPTS, drafter=small("mamba2"))
    elsewhere = tiny_model("mamba2").to("meta")
    with pytest.raises(ValueError, match="must be on one device: the drafter is on meta, the target on cpu"):
        hooked(target(), PROMPTS, drafter=elsewhere)
    with pytest.raises(ValueError, match="must be on one device"):
        hooked(target(), PROMPTS, drafter=FusedDrafter(ModelDrafter(stree.TreeLM(elsewhere)), SuffixDrafter()))
    with pytest.raises(NotImplementedError, match="takes token ids only, got inputs_embeds, pixel_values"):
        stree.custom_generate(
            target(), torch.tensor([[1]]), LogitsProcessorList(), [], target().generation_config,
            pixel_values=torch.zeros(1), inputs_embeds=torch.zeros(1), token_type_ids=None,
        )  # fmt: skip
