"""Point a user who types a command of the other program to that program.

Operators use `permille`, devices use `permille-agent`. The programs never import each other, so the names of
their commands are listed here. A test compares the lists with the programs. Extensions name their commands in
entry points.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from typer.core import TyperGroup

_NAMES = {
    "permille": "up preflight builds masks quantizations packages "
    "exports fleet releases trust invitations devices runs models corpora jobs tokens tenants audit "
    "retention blobs",
    "permille-agent": "enroll pull train show compare run install-service policy data generate chat serve "
    "export status rollback reset forget verify unenroll report share-log share-state",
}
ENTRY_POINTS: Final = "permille.commands"
"""The group of entry points of commands that other installed packages add to `permille`."""
AGENT_ENTRY_POINTS: Final = "permille.agent_commands"
"""The group of entry points of commands that extensions add to `permille-agent`."""
KINDS: Final = "permille.kinds"
"""The group of the kinds of jobs of extensions. An entry point has the name of the kind's commands."""


@cache
def commands() -> dict[str, frozenset[str]]:
    """Return the commands of each program that the other program does not have."""
    found = {program: frozenset(names.split()) for program, names in _NAMES.items()}
    for program, group in (
        ("permille", ENTRY_POINTS),
        ("permille", KINDS),
        ("permille-agent", AGENT_ENTRY_POINTS),
    ):
        found[program] |= {entry.name for entry in entry_points(group=group)}
    both = frozenset.intersection(*found.values())
    return {program: names - both for program, names in found.items()}


class ProgramGroup(TyperGroup):
    """A command group that knows the commands of the other program."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Fail with the name of the other program if only that program has the command."""
        name = args[0]
        if name not in self.commands:
            for program in (one for one, names in commands().items() if name in names):
                ctx.fail(f"{self.name} has no command {name!r}. Type `{program} {name}`.")
        return super().resolve_command(ctx, args)
