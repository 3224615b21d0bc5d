"""``python -m tfla_tk``: the same as the command ``tfla-tk``."""

import sys

from tfla_tk.cli import main

sys.exit(main())
