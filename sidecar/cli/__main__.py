"""`python -m sidecar.cli`: the `kvlake` command where its script is not on the path."""

import sys

from sidecar.cli import main

sys.exit(main())
