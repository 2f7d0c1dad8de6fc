"""The commands of the other program: a person who types one at the wrong program is told where it is.

Operators type `permille`, and devices type `permille-agent`. The programs never import each other, so the
names are listed here. A test compares them with the programs.
"""

from typing import Any, Final

from typer.core import TyperGroup

_NAMES = {
    "permille": "up personalise preflight builds sparsifications masks quantizations packages poolings "
    "exports fleet releases trust invitations devices runs rollouts groups webhooks models corpora jobs "
    "tokens tenants audit retention blobs evaluate",
    "permille-agent": "enroll pull train show compare run install-service policy data generate chat serve "
    "export status rollback reset forget verify unenroll report privacy share-log share-state",
}
COMMANDS: Final = {program: frozenset(names.split()) for program, names in _NAMES.items()}
"""The commands of each program that the other one does not have."""


class ProgramGroup(TyperGroup):
    """A program that knows the commands of the other one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Name the other program if it has the command and this one does not."""
        name = args[0]
        for program, commands in COMMANDS.items():
            if name in commands and name not in self.commands:
                ctx.fail(f"{self.name} has no command {name!r}. Type `{program} {name}`.")
        return super().resolve_command(ctx, args)
