"""The environment's package is found beside its tests, so that they run without installing it.

What is in `with_verifiers` needs the environment's own interpreter; the rest runs in any.
"""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

collect_ignore = [] if importlib.util.find_spec("verifiers") else ["with_verifiers"]
