"""`python -m miles_verifiers`."""

import sys

from miles_verifiers.cli import main

sys.exit(main())
