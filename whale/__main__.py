"""``python -m whale`` is the command ``whale``."""

import sys

from whale.cli import main

sys.exit(main())
