"""Point a user who types a command of the other program to that program.

Operators use `permille`, devices use `permille-agent`. The programs never import each other, so the names of
their commands are listed here. A test compares the lists with the programs.
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
"""Commands of each program that the other program does not have."""


class ProgramGroup(TyperGroup):
    """A command group that knows the commands of the other program."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Fail with the name of the other program if only that program has the command."""
        name = args[0]
        for program, commands in COMMANDS.items():
            if name in commands and name not in self.commands:
                ctx.fail(f"{self.name} has no command {name!r}. Type `{program} {name}`.")
        return super().resolve_command(ctx, args)
