"""`permille personalise`: make a personal model from a model file and a person's text.

This module is imported at each start of `permille`, so it imports the steps only when the command runs.
"""

import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from permille.arguments import named_path
from permille.errors import InputError, PermilleError, RetryableError
from permille.exits import CommandError, Exit
from permille.plain_console import PlainConsole
from permille.plain_text import echo
from permille.time_left import LINE_EVERY_S, TimeLeft, left, progress_line
from permille_personal.request import (
    BaseScheme,
    Form,
    Request,
    Turns,
    check_form,
    check_numbers,
    check_paths,
    check_text,
    chosen_form,
    chosen_scheme,
    key_of,
    named_model,
)

NAME, PANEL = "personal", "Start here"


class Part(StrEnum):
    """Parts of the work, in their order."""

    MASK = "mask"
    WEIGHTS = "weights"
    PACKAGE = "package"
    TRAINING = "training"
    EXPORT = "export"

    @property
    def place(self) -> str:
        """The place among all parts, such as `2 of 5, weights`."""
        return f"{[*Part].index(self) + 1} of {len(Part)}, {self}"


KEPT = {
    None: "what earlier runs have finished",
    Part.MASK: "the scores, except for about the last minute of work",
    Part.WEIGHTS: "the mask",
    Part.PACKAGE: "the mask and the weights",
    Part.TRAINING: "the package and the finished steps",
    Part.EXPORT: "the package and the personal model",
}
"""Results that the same command uses again, by the part in which it was stopped. None is before the first."""


def personalise(
    context: typer.Context,
    text: Annotated[
        list[Path], typer.Option(parser=named_path, help="Your text: a file or folder. Repeat it for more.")
    ],
    out: Annotated[
        Path, typer.Option(resolve_path=True, help="New .gguf file or new folder for the personal model.")
    ],
    form: Annotated[
        Form | None,
        typer.Option(
            "--format",
            help="gguf: a new model file. lora: a small adapter beside your GGUF file, which stays as it is. "
            "transformers: a folder. Default: gguf if --out ends in .gguf, else transformers.",
        ),
    ] = None,
    gguf: Annotated[Path | None, typer.Option(resolve_path=True, help="Model: a GGUF file.")] = None,
    folder: Annotated[
        Path | None, typer.Option(resolve_path=True, help="Model: a folder of transformers.")
    ] = None,
    ollama: Annotated[str | None, typer.Option(help="Model: its name in Ollama.")] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(
            resolve_path=True,
            help="Public text to find the sensitive weights with (.jsonl, .jsonl.gz, .txt). Default: C4, "
            "streamed; without a network, a small text that is included.",
        ),
    ] = None,
    density: Annotated[
        float, typer.Option(help="Share of the weights that train; tiny models need more.")
    ] = 0.001,
    scheme: Annotated[
        BaseScheme | None,
        typer.Option(
            help="source keeps the codes of a GGUF file in Q4_0, Q4_1 or Q8_0; nf4 codes the weights anew. "
            "Default: source where the file allows it."
        ),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="How long to train. Default: 30.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps instead of minutes.")] = None,
    learn: Annotated[
        Turns | None, typer.Option(help="Turns of a conversation to learn. Default: assistant.")
    ] = None,
    rate_scale: Annotated[
        float | None, typer.Option(help="Factor of the learning rate. Try 0.5 if training diverges.")
    ] = None,
    keep_general: Annotated[
        float | None,
        typer.Option(help="Largest allowed rise of the loss on general text, nats per token. Default: 0.1."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(resolve_path=True, help="Folder for package and runs. Default: in the data folder."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of a table.")
    ] = False,
) -> None:
    """Make a model file personal, on this machine alone.

    Examples:

      permille personalise --gguf model.gguf --text ~/notes --out mine.gguf

      permille personalise --gguf model.gguf --text ~/notes --out adapter.gguf --format lora

      permille personalise --ollama smollm2:135m --text ~/notes --out mine.gguf --minutes 20

    Your text never leaves the machine, and you need no account. If the command is stopped or killed, run it
    again: it keeps a finished package and the finished training steps. The model is written only if it is
    surely better on your text.
    """
    with Shown(quiet=as_json) as shown, _stoppable(shown):
        model = named_model(gguf, folder, ollama)
        text = [path.resolve() for path in text]
        folder_of_work = work or context.obj.folder.resolve() / NAME
        check_paths(text, out, corpus, folder_of_work)
        chosen = {
            "minutes": minutes,
            "steps": steps,
            "learn": learn,
            "rate_scale": rate_scale,
            "keep_general": keep_general,
        }
        training = {name: value for name, value in chosen.items() if value is not None}
        check_numbers(density, training)
        form = chosen_form(form, out)
        scheme = chosen_scheme(model, scheme, form)
        check_form(model, form)
        for line in check_text(text):
            shown.say(line)
        key = key_of(model, corpus, density, scheme)
        request = Request(
            model=model,
            texts=tuple(text),
            out=out,
            form=form,
            corpus=corpus,
            density=density,
            scheme=scheme,
            key=key,
            work=work or folder_of_work / key[:16],
            training=training,
        )
        from permille_personal.run import run

        try:
            answer = run(request, shown)
        except InputError:
            raise
        except PermilleError as exc:
            code = Exit.RETRY if isinstance(exc, RetryableError) else Exit.FAILED
            raise CommandError(str(exc), code) from exc
        if as_json:
            echo(json.dumps(answer, indent=2))


@contextmanager
def _stoppable(shown: "Shown") -> Iterator[None]:
    """Let Ctrl-C and SIGTERM unwind the stack, so that the child process is stopped, too.

    Raises:
        CommandError: one of them came. The message says what is kept, and how to go on.
    """
    # Python's default for SIGTERM ends the process at once and would leave the training running.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        where = f"in part {shown.part.place}" if shown.part else "before the first part"
        raise CommandError(
            f"Stopped {where}. Kept: {KEPT[shown.part]}. To go on, run the same command again: "
            f"{shlex.join(('permille', *sys.argv[1:]))}",
            Exit.INTERRUPTED,
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


class Shown:
    """Output for the person: lines, and the progress of the build on standard error.

    A terminal shows a bar. Other output gets a line for each new phase, and one every half minute. Both begin
    with the part of the work. The time left is that of the part.

    Args:
        quiet: show nothing.
        clock: seconds since any moment.
    """

    def __init__(self, *, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.quiet = quiet
        self.part: Part | None = None
        self._place = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=PlainConsole(stderr=True),
            transient=True,
            disable=quiet,
        )
        self._task: TaskID | None = None
        self._clock, self._left = clock, TimeLeft()
        self._phase, self._told_s = "", -LINE_EVERY_S

    def __enter__(self) -> "Shown":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, part: Part, text: str) -> None:
        """Begin a part of the work, and print a line about it."""
        self.part, self._place = part, f"{part.place}: "
        self.say(f"{self._place}{text}")

    def say(self, text: str) -> None:
        """Print a line."""
        if not self.quiet:
            self.end()
            echo(text)

    def progress(self, fraction: float, message: str) -> None:
        """Show the progress of the part."""
        phase, what, now = self._place + message.split(" ")[0], self._place + message, self._clock()
        is_new, self._phase = phase != self._phase, phase
        if is_new:  # phases differ in their pace
            self._left = TimeLeft()
        left_s = self._left.seen(now, fraction)
        if self._bar.console.is_terminal:
            if self._task is None:
                self._bar.start()
                self._task = self._bar.add_task("", total=1.0, left="")
            self._bar.update(self._task, completed=fraction, description=what, left=left(left_s))
        elif not self.quiet and (is_new or now - self._told_s >= LINE_EVERY_S):
            self._told_s = now
            echo(progress_line(what, fraction, left_s), err=True)

    def end(self) -> None:
        """Remove the bar."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._bar.stop()
            self._task = None
