"""`python -m edge_agent` is `permille-agent`."""

import sys

from edge_agent.cli import main

sys.exit(main())
