"""`python -m rollyard`."""

import sys

from rollyard.cli import main

sys.exit(main())
