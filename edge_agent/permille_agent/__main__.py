"""`python -m permille_agent` is `permille-agent`."""

import sys

from permille_agent.cli.main import main

sys.exit(main())
