"""``python -m lading``, as ``torchrun -m lading`` starts it."""

import sys

from lading.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
