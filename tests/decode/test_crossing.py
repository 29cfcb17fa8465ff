"""Features crossed at random: every text is that of plain decoding of its prompt alone, or is distributed as it.

Run: python -m pytest tests/decode/test_crossing.py -m slow
Longer, with other draws: STREE_DRAWS=2000 python -m pytest tests/decode/test_crossing.py -m slow --hypothesis-seed=7
"""

from __future__ import annotations

import os

import pytest
from helpers.crossing import Crossing, crossings, first_tokens, plain, run, without_mates
from hypothesis import HealthCheck, Phase, example, given, settings
from scipy.stats import chi2_contingency

DRAWS = int(os.environ.get("STREE_DRAWS", "0"))
COMPILED = Crossing(
    "mamba", "model", "default", 8, verifier="match", sampling="top-p", penalty=2.0, processor="none", grammar="",
    stops=True, logprobs=2, lengths=(3, 7, 1), words=3, slots=2, way="generate", compiled=True, threads=1, keeps=False,
    seed=5,
)  # fmt: skip
LEAST_P = 1e-7  # of 2,000 draws with a test each, one fails by chance in 5,000 runs


def check(one: Crossing) -> None:
    """Compare the texts of a draw, and its distribution where a text is not that of plain decoding."""
    texts = run(one)
    assert all(each == texts[0] for each in texts), "threads or times differ"
    if one.follows_plain:
        assert texts[0] == plain(one)
        return
    if one.budget != "auto":
        assert texts[0] == without_mates(one)
    if one.compiled or one.way != "generate" or one.drafter == "overlapped":
        return
    pair = [first_tokens(one, drafted=drafted) for drafted in (True, False)]
    is_seen = (pair[0] + pair[1]) > 0
    if int(is_seen.sum()) > 1:
        assert chi2_contingency([counts[is_seen].tolist() for counts in pair]).pvalue > LEAST_P


@pytest.mark.slow
@given(one=crossings())
@example(one=COMPILED)
@settings(
    max_examples=DRAWS or 16, derandomize=not DRAWS, deadline=None, suppress_health_check=[*HealthCheck],
    phases=[Phase.explicit, Phase.generate],
)  # fmt: skip
def test_features_that_meet_change_no_text(one: Crossing) -> None:
    check(one)
