"""`python -m resformer ...` and `torchrun ... -m resformer ...`: the same as the `resformer` command."""

import sys

from resformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
