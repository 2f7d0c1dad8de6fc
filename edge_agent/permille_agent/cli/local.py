"""Commands that use the model on this device: compare, generate, chat, serve, export."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from permille.arguments import named_path
from permille.errors import InputError
from permille.extras import install_line
from permille.plain_text import echo
from permille_agent.cli.console import (
    COMPUTING,
    PERSONALISE,
    SAMPLING,
    USE,
    EngineOption,
    JsonOption,
    home_of,
    show,
)
from permille_agent.state.home import as_json as json_of
from permille_agent.training.engines import AUTO, EngineChoice

if TYPE_CHECKING:
    from permille_agent.local.compare import SideBySide
    from permille_agent.local.model import Generated, LocalModel, Sampling, Variant

BaseOption = Annotated[bool, typer.Option("--base", help="Use the model as it was before training.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Threads of the engine. Default: all cores.", rich_help_panel=COMPUTING),
]
TokensOption = Annotated[
    int,
    typer.Option(
        "--max-tokens", min=1, help="Largest number of tokens to generate.", rich_help_panel=SAMPLING
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=2.0,
        help="Randomness; 0 gives the most likely text. Default: the model's own setting.",
        rich_help_panel=SAMPLING,
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1.0,
        help="Draw from the likeliest tokens that have this probability together. Default: the model's own "
        "setting.",
        rich_help_panel=SAMPLING,
    ),
]
SeedOption = Annotated[
    int, typer.Option(min=0, help="The same seed gives the same text.", rich_help_panel=SAMPLING)
]
NotesOption = Annotated[
    bool,
    typer.Option(
        "--notes/--no-notes",
        help="Put passages of your text that fit before the question, and show them.",
    ),
]

MemoryOption = Annotated[
    bool, typer.Option("--memory/--no-memory", help="Use the memory of the personal model, if it has one.")
]


class ExportForm(StrEnum):
    """Forms that a model can be exported in, named for the programs that load them."""

    TRANSFORMERS = "transformers"
    PEFT = "peft"
    GGUF = "gguf"
    LORA = "lora"
    EXECUTORCH = "executorch"


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command("show", rich_help_panel=PERSONALISE)(show_page)
    app.command(rich_help_panel=PERSONALISE)(compare)
    app.command(rich_help_panel=USE)(generate)
    app.command(rich_help_panel=USE)(chat)
    app.command(rich_help_panel=USE)(serve)
    app.command(rich_help_panel=USE)(export)


def compare(
    context: typer.Context,
    data: Annotated[
        list[Path] | None,
        typer.Option(parser=named_path, help="Measure on this text instead of the held-out text of the run."),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue. Repeat it for more.")] = None,
    max_tokens: TokensOption = 48,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    engine: EngineOption = AUTO,
    memory: MemoryOption = True,
    as_json: JsonOption = False,
) -> None:
    """Compare the base and the personal model: losses on held-out text, and samples.

    [bold]Examples[/bold]

      permille-agent compare

      permille-agent compare --prompt "Dear Anna," --max-tokens 80
    """
    from permille_agent.local.compare import compare as compare_models

    home = home_of(context)
    with _open_model(context, threads, engine, memory) as model:
        sampling = _sampling(model, max_tokens, temperature, top_p, seed)
        result = compare_models(home, model, data_paths=data or [], prompts=prompt or [], sampling=sampling)
    show(json_of(result), as_json=as_json, render=lambda console: _render_comparison(console, result))


def show_page(
    context: typer.Context,
    run: Annotated[
        str | None, typer.Argument(help="Name of the run, or its beginning. Default: the last finished run.")
    ] = None,
    threads: ThreadsOption = None,
    engine: EngineOption = AUTO,
    as_json: JsonOption = False,
) -> None:
    """Write a page about a run: the loss during training, samples before and after training, the decision.

    [bold]Examples[/bold]

      permille-agent show

    Any browser opens the page, without network access. The page is in the run's folder, and only you can read
    it.
    """
    from permille_agent.local.show import show_run

    page = show_run(home_of(context), run, EngineChoice(name=engine, threads=threads))
    show({"page": str(page)}, as_json=as_json)


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="Text to continue, or with --chat the message to answer.")],
    base: BaseOption = False,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Answer the prompt, using the model's chat template.")
    ] = False,
    max_tokens: TokensOption = 128,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    engine: EngineOption = AUTO,
    notes: NotesOption = True,
    memory: MemoryOption = True,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, or with --chat answer a message.

    [bold]Examples[/bold]

      permille-agent generate "Once upon a time"

      permille-agent generate "Dear Anna," --temperature 0 --base --json

      permille-agent generate --chat "What is the capital of France?" --temperature 0

    With --chat, the model also reads passages of your text that fit the message. They are shown on standard
    error. --base and --no-notes leave them out.
    """
    with _open_model(context, threads, engine, memory, notes) as model:
        sampling = _sampling(model, max_tokens, temperature, top_p, seed)
        variant = _variant(model, base)
        if as_chat:
            generated, pieces = model.reply([("user", prompt)], variant, sampling)
        else:
            generated, pieces = model.complete(prompt, variant, sampling)
        if as_json:
            # `generated` has its counts only after all pieces were read.
            text = "".join(pieces)
        else:
            _show_notes(generated)
            # Without a chat, prompt and continuation are one text.
            echo("" if as_chat else prompt, nl=False)
            for piece in pieces:
                echo(piece, nl=False)
            echo()
            return
    document = {
        "model": variant.value,
        "prompt": prompt,
        "text": text,
        "prompt_tokens": generated.prompt_tokens,
        "completion_tokens": generated.completion_tokens,
        "finish_reason": generated.finish_reason,
        **(generated.notes.fields() if generated.notes else {}),
    }
    show(document, as_json=True)


def chat(
    context: typer.Context,
    base: BaseOption = False,
    system: Annotated[str | None, typer.Option(help="System message at the beginning.")] = None,
    max_tokens: TokensOption = 256,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    engine: EngineOption = AUTO,
    notes: NotesOption = True,
    memory: MemoryOption = True,
) -> None:
    """Talk to the model in the terminal.

    [bold]Examples[/bold]

      permille-agent chat

      permille-agent chat --base --system "Answer in one sentence."

    Type /reset to start a new conversation, /exit or Ctrl-D to end. Before an answer, you see the passages of
    your text that the model reads with your message. --base and --no-notes leave them out.
    """

    beginning = [("system", system)] if system else []
    messages = list(beginning)
    with _open_model(context, threads, engine, memory, notes) as model:
        # Fail before the user has typed a message.
        model.tokenizer.require_chat()
        variant = _variant(model, base)
        # Show the hint only to a person who types. Messages may also come from a pipe.
        if _is_typed():
            echo(f"{variant.value} model; /reset, /exit", err=True)
        while (line := _read_line()) is not None:
            if line == "/reset":
                messages = list(beginning)
                continue
            messages.append(("user", line))
            # Use another seed for each turn. Otherwise, all answers would use the same random numbers.
            sampling = _sampling(model, max_tokens, temperature, top_p, seed + len(messages))
            try:
                generated, pieces = model.reply(messages, variant, sampling)
            except InputError as exc:
                echo(f"not sent: {exc}", err=True)
                # Otherwise the next turn would fail on the same message.
                messages.pop()
                continue
            _show_notes(generated)
            answer = ""
            for piece in pieces:
                echo(piece, nl=False)
                answer += piece
            echo()
            messages.append(("assistant", answer))


def serve(
    context: typer.Context,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on. 0 takes a free port.")
    ] = 8081,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Allow pages of this origin, like http://localhost:3000. Repeat it for more."),
    ] = None,
    threads: ThreadsOption = None,
    engine: EngineOption = AUTO,
    notes: NotesOption = True,
    memory: MemoryOption = True,
    as_json: JsonOption = False,
) -> None:
    """Serve the model to programs on this machine, through the REST interfaces of OpenAI and Ollama.

    [bold]Examples[/bold]

      permille-agent serve --port 8081

      curl -H "Authorization: Bearer $(cat TOKEN_FILE)" http://127.0.0.1:8081/v1/models

    The server listens on loopback only. It prints the name of a file with a token. Clients send this token as
    their API key. The models are `personal`, `personal-no-memory` and `base`, if the device has
    them. A request for any other name gets the first of these. This first model and
    `personal-no-memory` also read passages of your text that fit a message. The answer lists them in the
    field `notes`.
    """
    from permille_agent.local.serve import LocalServer, read_or_make_access

    access = read_or_make_access(home_of(context), allow_origin or ())
    with _open_model(context, threads, engine, memory, notes) as model:
        # Listen on loopback only, because the token and the text travel over plain HTTP.
        server = LocalServer(("127.0.0.1", port), model, access)
        second = server.with_ipv6()
        root = f"http://127.0.0.1:{server.port}"
        document = {
            "address": f"{root}/v1",
            "ollama_address": root,
            "token_file": str(access.token_file),
            "models": [variant.value for variant in model.variants],
        }
        # Print this before the first request, because clients need the port and the token.
        show(document, as_json=as_json)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            echo("stopped", err=True)
        finally:
            for each in (server, second):
                if each is not None:
                    each.server_close()


def export(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="New or empty folder.")],
    form: Annotated[
        ExportForm, typer.Option("--format", help="Form of the export, for the program that loads it.")
    ] = ExportForm.TRANSFORMERS,
    kind: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="Type of the weights in a GGUF file: f32, f16, q8_0, q4_0 or source. Default: source for "
            "packages with the codes of a GGUF file, else q8_0. For --format lora: f32 (default, exact) or "
            "f16.",
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            help="The GGUF file that the model came from. The new file takes its tokenizer and metadata."
        ),
    ] = None,
    memory_text: Annotated[
        bool,
        typer.Option(help="Write the text of the memory into the Modelfile, as the system message."),
    ] = False,
    base: BaseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Export the personal model for other programs.

    [bold]Examples[/bold]

      permille-agent export ~/models/mine

      permille-agent export ~/models/mine-gguf --format gguf --type q8_0

      permille-agent export ~/models/mine-gguf --format gguf --like ~/models/model.gguf

      permille-agent export ~/models/my-adapter --format lora

    The export merges your changes into the weights. --format gguf is for llama.cpp and Ollama. With --like,
    llama.cpp cuts texts into the same tokens as with the given file. --format lora writes your changes alone,
    as a small file that llama.cpp loads beside the model (llama-cli --lora). --format peft does this for
    peft. --format executorch needs torch and ExecuTorch's exporter. The export is personal data. It has no
    memory, because other programs cannot load one. With --memory-text, the Modelfile has the text of the
    memory as the system message, and your changes are as weak as they are beside the memory.
    """
    from permille.engines.export import export_transformers
    from permille.package.blobs import BlobFolder
    from permille.package.reader import Package
    from permille_agent.local.model import memory_text_of
    from permille_agent.state.models import require_active
    from permille_agent.training.personal import model_values, personal_memory
    from permille_agent.training.run import RunFolder

    if kind is not None and form not in (ExportForm.GGUF, ExportForm.LORA):
        raise InputError(f"--type needs --format gguf or lora, not {form}. Leave --type out.")
    if like is not None and form is not ExportForm.GGUF:
        raise InputError(f"--like needs --format gguf, not {form}. Leave --like out.")
    if memory_text and (form is not ExportForm.GGUF or base):
        raise InputError("--memory-text needs --format gguf without --base. Leave --memory-text out.")
    home = home_of(context)
    active = require_active(home)
    folder = folder.expanduser().absolute()
    if not folder.parent.is_dir():
        raise InputError(f"The folder {folder.parent} does not exist. Create it, or choose another place.")
    package = Package.open(BlobFolder(home.blobs), active.package)
    # A damaged memory must not prevent an export of the state, so it is read only if its text is wanted.
    memory = personal_memory(home, active, package) if memory_text else None
    values_K = package.values()
    if not base:
        values_K = model_values(home, active, package, beside_memory=memory is not None)
    remembers = not base and active.run is not None and RunFolder(home.runs / active.run).memory.exists()
    personal = active.run is not None and not base
    document: dict[str, object] = {"folder": str(folder), "package": active.package, "personal": personal}
    if form is ExportForm.TRANSFORMERS:
        export_transformers(package, values_K, folder)
    elif form is ExportForm.PEFT:
        with _needing("lora"):
            from permille.engines.peft_export import export_peft
        export_peft(package, values_K, folder)
    elif form is ExportForm.LORA:
        with _needing("lora"):
            from permille.engines.gguf.adapter import export_gguf_adapter
        adapter = export_gguf_adapter(package, values_K, folder, kind=kind or "f32")
        document |= {"type": adapter.kind.value, "bytes": adapter.size_bytes}
        document |= {"linears": adapter.linears, "largest_rank": adapter.largest_rank}
        document["change_kept"] = round(adapter.kept, 6)
    elif form is ExportForm.EXECUTORCH:
        with _needing("executorch"):
            from permille.engines.executorch.exporting import export_executorch
        document |= {"bytes": export_executorch(package, values_K, folder)}
    else:
        with _needing("gguf"):
            from permille.engines.gguf.export import MODELFILE, export_gguf
            from permille.engines.gguf.modelfile import add_system
            from permille.models.ollama import ollama_name
        exported = export_gguf(package, values_K, folder, kind=kind, like=like and like.expanduser())
        document |= {"type": exported.kind.value, "bytes": exported.size_bytes}
        # Quote the path, because the user copies this command into a shell.
        use = shlex.quote(str(folder / MODELFILE))
        document["ollama"] = f"ollama create {ollama_name(folder.name)} --file {use}"
        if personal:
            # Rounding to the type of the file can lose a part of the change.
            document["change_kept"] = round(exported.kept, 6)
        if memory is not None:
            add_system(folder / MODELFILE, memory_text_of(package, memory))
    if remembers:
        document["memory"] = "in the Modelfile as text" if memory_text else "stays on this device"
    show(document, as_json=as_json)


@contextmanager
def _needing(extra: str) -> Iterator[None]:
    """Raise an InputError that names the extra to install if an import in this context fails."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise InputError(f"This format needs {exc.name}. Run {install_line(extra)}.") from exc


def _open_model(
    context: typer.Context, threads: int | None, engine: str, memory: bool, notes: bool = False
) -> "LocalModel":
    from permille_agent.local.model import LocalModel

    chosen = EngineChoice(name=engine, threads=threads)
    return LocalModel(home_of(context), chosen, memory=memory, notes=notes)


def _show_notes(generated: "Generated") -> None:
    """Show on standard error which passages of the user's text an answer sees."""
    for line in generated.notes.lines() if generated.notes else ():
        echo(f"[{line}]", err=True)


def _sampling(
    model: "LocalModel", max_tokens: int, temperature: float | None, top_p: float | None, seed: int
) -> "Sampling":
    """Return the model's own settings with the user's changes."""
    own = model.sampling
    return replace(
        own,
        max_new_tokens=max_tokens,
        seed=seed,
        temperature=own.temperature if temperature is None else temperature,
        top_p=own.top_p if top_p is None else top_p,
    )


def _variant(model: "LocalModel", base: bool) -> "Variant":
    from permille_agent.local.model import Variant

    # The first variant is the default: personal, else base.
    return Variant.BASE if base else model.variants[0]


def _read_line() -> str | None:
    """Return the next line that is not empty, or None at the end. Only a terminal shows a prompt."""
    prompt = "> " if _is_typed() else ""
    while True:
        try:
            line = input(prompt).strip()
        except (EOFError, KeyboardInterrupt, RuntimeError):  # the last one: there is no standard input
            return None
        if line == "/exit":
            return None
        if line:
            return line


def _is_typed() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _render_comparison(console: Console, result: "SideBySide") -> None:
    from permille_agent.local.compare import first_token_words
    from permille_agent.training.parts import general_words

    losses = result.losses
    console.print(f"measured on: {losses.text}", highlight=False)
    table = Table("", "base", "personal")
    for name, measured in (
        ("loss per token", (losses.base, losses.personal)),
        ("bits per byte", (losses.bits_per_byte_base, losses.bits_per_byte_personal)),
    ):
        table.add_row(name, *(f"{number:.4f}" for number in measured if number is not None))
    # An untested memory has no losses.
    if losses.base is not None:
        console.print(table)
    if losses.improvement is not None:
        console.print(f"improvement on the base: {losses.improvement}", highlight=False)
    words = general_words(losses.general, losses.parts)
    console.print(f"loss on general text: {words}", highlight=False)
    if losses.parts is not None:
        console.print(f"memory: {losses.parts.words()}", markup=False, highlight=False)
    if words := first_token_words(result.first_token_s):
        console.print(f"time to the first token: {words}", highlight=False)
    for sample in result.samples:
        console.print(Text(f"\n{sample.prompt} ...", style="bold"))
        table = Table.grid(padding=(0, 2))
        table.add_row("base", Text(sample.base))
        table.add_row("personal", Text(sample.personal))
        console.print(table)
