"""`python -m leyline_agent.cli`."""

import sys

from leyline_agent.cli import main

sys.exit(main())
