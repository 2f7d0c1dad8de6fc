"""Commands for the daemon: run, install-service, policy."""

import json
import logging
import signal
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from permille.plain_text import echo
from permille_agent.cli.console import PERSONALISE, EngineOption, JsonOption, home_of, show
from permille_agent.state.lock import hold_lock
from permille_agent.training.engines import AUTO


class JsonLines(logging.Formatter):
    """Log format with one JSON object per line: time, level and message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of one record."""
        # This replaces the formatter that removes control characters. `json.dumps` escapes them.
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": at, "level": record.levelname.lower(), "message": record.getMessage()})


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command(rich_help_panel=PERSONALISE)(run)
    app.command("install-service", rich_help_panel=PERSONALISE)(install_service)
    app.command(rich_help_panel=PERSONALISE)(policy)


def run(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Pull, train if allowed, report, then end.")] = False,
    engine: EngineOption = AUTO,
    as_json: JsonOption = False,
) -> None:
    """Run the daemon: pull new packages, train when your policy allows, report.

    [bold]Examples[/bold]

      permille-agent run

      permille-agent run --once

    Stop the daemon with Ctrl-C or SIGTERM. A kill loses no finished work. The daemon logs to standard error.
    With --json, each line of the log is one JSON object.
    """
    from permille_agent.daemon.loop import Daemon

    home = home_of(context)
    if as_json:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _set_from_signal(stop))
    # Hold the daemon's own lock. The writers' lock must be free for other commands while the daemon waits.
    with hold_lock(home, "run", of=home.daemon_lock):
        daemon = Daemon(home, stop, engine=engine)
        if once:
            daemon.run_once()
        else:
            daemon.run()


def install_service(
    context: typer.Context,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the file instead of writing it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a service file, so that systemd or launchd starts the daemon at each login.

    [bold]Examples[/bold]

      permille-agent install-service --print

      permille-agent install-service

    This writes one file in your home folder and needs no root. The command that is printed enables the
    service.
    """
    from permille_agent.daemon.service_file import agent_command, service_file
    from permille_agent.daemon.service_file import install_service as write_file

    home = home_of(context)
    file = service_file(
        sys.platform, user_home=Path.home(), agent_home=home.root, command=agent_command(home.root)
    )
    if print_only:
        # Print no additional line break, so that redirected output equals the file that would be written.
        echo(file.text, nl=False)
        return
    write_file(file)
    show({"written": str(file.path), "enable": file.enable, "disable": file.disable}, as_json=as_json)


def policy(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show when the daemon may train, and whether it may train now.

    [bold]Examples[/bold]

      permille-agent policy

    To change the policy, write policy.toml in the agent's home folder. Possible entries:
    hours = ["22:00-07:00"], require_ac = true, min_battery = 50, max_load = 0.5, minutes_per_day = 60,
    minutes_per_run = 30, method = "zeroth-order", report_loss = "bit", tags = ["canary"].
    """
    from permille_agent.daemon.state import read_daemon_state
    from permille_agent.state.policy import read_machine, read_policy, reasons_to_wait

    home = home_of(context)
    current = read_policy(home)
    state, now = read_daemon_state(home), datetime.now().astimezone()
    used = state.minutes_used(now.date())
    reasons = reasons_to_wait(current, read_machine(), now=now, minutes_used=used)
    document = {
        **current.model_dump(),
        "hours": [str(hours) for hours in current.hours],
        "file": str(home.policy),
        "file_exists": home.policy.exists(),
        "may_train_now": not reasons,
        "reasons_against": list(reasons),
    }
    show(document, as_json=as_json)


def _set_from_signal(stop: threading.Event) -> None:
    # `Event.set` takes a lock. The interrupted thread may hold it, so only another thread can wait for it.
    threading.Thread(target=stop.set, daemon=True).start()
