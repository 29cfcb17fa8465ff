"""``python -m stree``, the same as ``stree``."""

import sys

from stree.cli import main

if __name__ == "__main__":
    sys.exit(main())
