"""`python -m tests.contract [PLACE…]`: record what vLLM releases say of what kvlake uses.

PLACE is a wheel, or a folder that holds `vllm/`; without one, the installed vLLM is taken. Nothing
is imported, so a CUDA wheel will do anywhere:

    pip download --no-deps vllm==0.33.0 && python -m tests.contract vllm-0.33.0-*.whl

Writes `tests/contract/manifests/VERSION.json` and prints what is not as kvlake expects it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.contract.installed import installed
from tests.contract.reading import Sources
from tests.contract.surface import MANIFESTS, dump, moved, record


def main() -> int:
    """Exit code 1 where something moved."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.contract", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )  # fmt: skip
    parser.add_argument("places", nargs="*", type=Path, metavar="PLACE")
    bad = 0
    for place in parser.parse_args().places or [installed()]:
        manifest = record(Sources(place))
        path = MANIFESTS / f"{manifest['version']}.json"
        path.write_text(dump(manifest))
        print(path)
        for line in moved(manifest):
            print(f"  {line}")
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
