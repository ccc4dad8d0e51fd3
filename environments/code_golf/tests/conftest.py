"""The environment's package is found beside its tests, so that they run without installing it.

What is in `with_verifiers` needs an interpreter with Verifiers 0.3 or newer; the rest runs in any.
"""

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    collect_ignore = ["with_verifiers"] if importlib.metadata.version("verifiers") < "0.3" else []
except importlib.metadata.PackageNotFoundError:
    collect_ignore = ["with_verifiers"]
