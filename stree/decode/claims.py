"""What statistics say of a text's distribution: whether it is the target's, by the classes that took part."""

from __future__ import annotations

from typing import Any, Literal

from stree.drafters import Drafter
from stree.growth import Growth, Stop
from stree.returned import is_ours
from stree.verify import Verifier

__all__ = ["is_own", "losslessness"]


def losslessness(drafter: Drafter, growth: Growth | None, verifier: Verifier) -> bool | Literal["claimed"]:
    """Return whether texts follow the target's distribution.

    False for rules that are known not to keep it, True for classes of this package, which its tests check by
    enumeration, "claimed" where a class of another author takes part: ``stree.testing`` checks those.
    """
    if not (drafter.is_lossless and getattr(verifier, "is_lossless", True)):
        return False
    parts = drafter, growth if drafter.uses_growth else None, verifier
    return "claimed" if not all(map(is_own, parts)) else True


def is_own(policy: Any) -> bool:
    """Whether the class of a policy, and those of the policies that it holds, are of this package."""
    if policy is None:
        return True
    held = [part for part in getattr(policy, "__dict__", {}).values() if _is_policy(part)]
    return is_ours(policy) and all(map(is_own, held))


def _is_policy(part: Any) -> bool:
    return isinstance(part, (Drafter, Stop)) or hasattr(part, "acceptance_model")
