"""python -m bench NAME [options]; the name is that of a module of this folder that has a `main(argv) -> exit code`."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("rollout", "wire")


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in BENCHMARKS:
        print(f"usage: python -m bench {{{','.join(BENCHMARKS)}}} [options]", file=sys.stderr)
        return 2
    code: int = importlib.import_module(f"bench.{argv[0]}").main(argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
