"""``python -m stree``, the same as ``stree``."""

from stree.cli.__main__ import run

if __name__ == "__main__":
    run()
