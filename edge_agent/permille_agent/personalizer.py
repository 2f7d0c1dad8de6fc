"""`permille.Personalizer`: train, judge, use and export a personal model from Python.

It works like `permille-agent`, but without a server. It takes the same training steps, decides by
the same test and writes the same files. To resume an interrupted run, repeat the call.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from permille.engines.export import export_transformers
from permille.errors import InputError
from permille.files import write_atomic
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille_agent.embed import install_package
from permille_agent.local.compare import ComparedLosses, judged_losses, measured_losses
from permille_agent.local.model import LocalModel, Sampling, Variant
from permille_agent.state.home import Home, open_home
from permille_agent.state.lock import hold_lock
from permille_agent.state.models import installed_release, require_active
from permille_agent.text.notes import Passage, find_passages
from permille_agent.training.decision import Decision
from permille_agent.training.engines import AUTO, EngineChoice
from permille_agent.training.options import RunContext, TrainOptions
from permille_agent.training.outcome import RunResult
from permille_agent.training.personal import model_values
from permille_agent.training.run import list_runs
from permille_agent.training.train import run_training

Text = str | Mapping[str, Any] | Path
"""A text, a row such as {"prompt": ..., "completion": ...}, or the path of a file or folder."""


class Personalizer:
    """A package, and the personal model that is trained from it. For example:

        personal = permille.Personalizer(package, "home")
        result = personal.fit(["First note.", "Second note.", ...], minutes=10)
        result.outcome             # adopted, kept_base, refused_data, ...
        personal.evaluate()        # losses of base and personal model on held-out text
        personal.generate("What shall I plant in March?")
        personal.save("mine")      # open it again with Personalizer.load("mine")

    Nothing leaves the folder. The folder holds personal data.
    """

    def __init__(
        self,
        package: Package,
        folder: str | Path | None = None,
        *,
        engine: str = AUTO,
        threads: int | None = None,
    ) -> None:
        """Install a package in a folder.

        Args:
            package: a package from `permille.build_package`.
            folder: the folder for the package and all runs. None uses a temporary folder, which
                is lost unless you call `save`.
            engine: "auto", "light", "light-int8" or "torch".
            threads: the number of threads. None uses all cores.

        Raises:
            InputError: the folder has another package, or `package` is not a package.
            OperatorError: the folder cannot be used.
            PackageError: the package cannot be opened.
        """
        if not isinstance(package, Package):
            raise InputError(
                f"Pass a package from `permille.build_package`, not {type(package).__name__}. To open a "
                "folder again, use Personalizer.load(folder)."
            )
        self._temporary = tempfile.TemporaryDirectory(prefix="permille-") if folder is None else None
        root = Path(self._temporary.name if self._temporary else folder or "").expanduser().absolute()
        self._home = open_home(root)
        self._engine = EngineChoice(name=engine, threads=threads)
        self._package = package.digest
        # Lock only to install, so that a folder with the package can be opened while a `fit` works in it.
        if self._installed() is None:
            with hold_lock(self._home, "install"):
                if self._installed() is None:
                    install_package(self._home, package)

    @classmethod
    def load(cls, folder: str | Path, **options: Any) -> "Personalizer":
        """Open a folder that `save` or an earlier session wrote.

        Args:
            folder: the folder.
            options: `engine` and `threads`, as for the class.

        Raises:
            InputError: the folder has no package.
        """
        root = Path(folder).expanduser().absolute()
        # `open_home` would create folders in any directory that the user names by mistake.
        known = installed_release(Home(root)) if root.is_dir() else None
        if known is None:
            raise InputError(f"{root} has no package. Make one with Personalizer(package, folder).")
        return cls(Package.open(BlobFolder(root / "blobs"), known.manifest_digest), root, **options)

    def __repr__(self) -> str:
        return f"Personalizer({str(self.folder)!r})"

    @property
    def folder(self) -> Path:
        """The folder that keeps the package and all runs."""
        return self._home.root

    def fit(
        self,
        texts: Iterable[Text] | Path,
        *,
        minutes: float | None = None,
        steps: int | None = None,
        context: RunContext = RunContext(),
        **options: Any,
    ) -> RunResult:
        """Train on a person's text, judge the result on held-out text, and adopt a significant gain.

        For example:

            result = personal.fit(my_texts, steps=40, seed=3)
            print(result.outcome, result.message)

        Args:
            texts: the person's text, at least 700 tokens to train. A `Path` is a file or folder.
            minutes: the training time. Default: 10, unless `steps` is given.
            steps: the number of steps, in place of `minutes`.
            context: a progress callback and an event that stops the run. Its engine is ignored.
            options: other fields of `TrainOptions`, such as `seed`, `rate_scale` or `keep_general`.

        Returns:
            The outcome, with a `message` for people and a `decision` with the numbers.

        Raises:
            InputError: the text or the options cannot be used.
            LockedError: another `fit` works in the folder.
        """
        if minutes is None and steps is None:
            minutes = 10.0
        _check_options(minutes, steps, options)
        wanted = TrainOptions(minutes=minutes, steps=steps, **options)
        with hold_lock(self._home, "fit"):
            self._installed()  # raises if another process has installed another package
            # The file is kept, because a resumed run and `show` read the text again.
            paths = [texts] if isinstance(texts, Path) else _written(self.folder / "fit.jsonl", texts)
            return run_training(self._home, paths, wanted, replace(context, engine_of=self._engine))

    def evaluate(self, texts: Iterable[Text] | Path | None = None) -> ComparedLosses:
        """Return the losses of the base and the personal model, in nats per token.

        Args:
            texts: the text to measure the adopted model on. None returns the losses that the last
                `fit` measured on held-out and on general text, also if its result was not adopted.

        Raises:
            InputError: nothing was trained or adopted yet, or the text cannot be used.
        """
        if texts is None:
            judged = [run for run in list_runs(self._home) if run.load("decision", Decision) is not None]
            if not judged:
                raise InputError("Nothing was judged yet. Call `fit` first.")
            return judged_losses(judged[-1])
        with (
            LocalModel(self._home, self._engine) as model,
            tempfile.TemporaryDirectory(prefix=".evaluate-", dir=self.folder) as own,
        ):
            model.values(Variant.PERSONAL)  # raises if there is no personal model
            paths = [texts] if isinstance(texts, Path) else _written(Path(own) / "evaluate.jsonl", texts)
            return measured_losses(model, paths)

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        base: bool = False,
        memory: bool = True,
        notes: bool = True,
    ) -> str:
        """Answer the prompt if the model has a chat template. Otherwise, continue the prompt.

        This uses the personal model if one was adopted, else the base. A chat model also reads passages
        of the text of `fit` that fit the prompt (see `passages`).

        Args:
            prompt: the message or the beginning of the text.
            max_tokens: the largest number of tokens to generate.
            temperature: the sampling temperature. 0 always takes the most likely token.
            base: use the base instead of the personal model.
            memory: use the memory of the personal model, if it has one.
            notes: let a chat model read passages. The base beside a personal model reads none.

        Raises:
            InputError: the prompt is empty or too long, or a number is out of range.
        """
        if max_tokens < 1:
            raise InputError(f"`max_tokens` must be at least 1, got {max_tokens}.")
        sampling = Sampling(max_new_tokens=max_tokens, temperature=temperature)
        with LocalModel(self._home, self._engine, memory=memory, notes=notes) as model:
            variant = Variant.BASE if base else model.variants[0]
            if model.tokenizer.can_chat:
                return "".join(model.reply([("user", prompt)], variant, sampling)[1])
            return "".join(model.complete(prompt, variant, sampling)[1])

    def passages(self, question: str) -> tuple[Passage, ...]:
        """Return the passages of the text of `fit` that fit a question, the best last.

        For example, `personal.passages("What is my cat called?")[-1].text`.

        Raises:
            OperatorError: the index of the text is damaged.
        """
        return find_passages(self._home, question) if self._home.notes.exists() else ()

    def export(
        self, form: str, folder: str | Path, *, base: bool = False, like: str | Path | None = None
    ) -> Path:
        """Write the personal model for other programs. For example:

            personal.export("gguf", "mine")            # llama.cpp and Ollama
            personal.export("gguf", "mine", like="model.gguf")
            personal.export("transformers", "mine")
            personal.export("lora", "mine")            # your changes alone, for llama.cpp

        Args:
            form: "gguf", "transformers", "peft" or "lora". The last two hold only your changes.
            folder: a new or empty folder.
            base: write the base instead of the personal model.
            like: for "gguf", the GGUF file that the model came from. The new file takes its
                tokenizer and metadata.

        Returns:
            The absolute path of the folder.

        Raises:
            InputError: the form is unknown or cannot be written, `like` is a file of another model,
                the folder is not empty, or there is no personal model.
        """
        if form not in ("gguf", "transformers", "peft", "lora"):
            raise InputError(
                f"{form!r} is not a form of export. Choose 'gguf', 'transformers', 'peft' or 'lora'."
            )
        if like is not None and form != "gguf":
            raise InputError(f"`like` is for the form 'gguf', and the form is {form!r}.")
        active = require_active(self._home)
        if active.run is None and not base:
            raise InputError("No personal model was adopted. Call `fit`, or export the base with base=True.")
        package = Package.open(BlobFolder(self._home.blobs), active.package)
        values_K = package.values() if base else model_values(self._home, active, package)
        target = Path(folder).expanduser().absolute()
        if form == "gguf":
            from permille.engines.gguf.export import export_gguf  # needs the gguf extra

            file = None if like is None else Path(like).expanduser()
            export_gguf(package, values_K, target, kind="q8_0", like=file)
        elif form == "transformers":
            export_transformers(package, values_K, target)
        elif form == "lora":
            from permille.engines.gguf.adapter import export_gguf_adapter  # needs the lora extra

            export_gguf_adapter(package, values_K, target)
        else:
            from permille.engines.peft_export import export_peft  # needs the lora extra

            export_peft(package, values_K, target)
        return target

    def save(self, folder: str | Path) -> Path:
        """Copy the package and all runs to a new folder, which `load` can open.

        The folder appears only after the copy is complete. For example, `personal.save("mine")`.

        Raises:
            InputError: the folder exists, or lies inside this one.
            LockedError: a `fit` works in the folder.
            OSError: a file cannot be written.
        """
        target = Path(folder).expanduser().absolute()
        if target.exists():
            raise InputError(f"{target} exists. Choose a new folder.")
        if target.resolve().is_relative_to(self.folder.resolve()):
            raise InputError(f"{target} lies inside {self.folder}. Choose a folder elsewhere.")
        target.parent.mkdir(parents=True, exist_ok=True)
        # Other users may be able to read the parent folder, so the copy is made in a private one.
        with (
            hold_lock(self._home, "save"),
            tempfile.TemporaryDirectory(prefix=".permille-", dir=target.parent) as temporary,
        ):
            whole = Path(temporary) / "whole"
            shutil.copytree(
                self.folder, whole, ignore=shutil.ignore_patterns("*.lock", "*.holder", "notes.sqlite*")
            )
            whole.rename(target)
        return target

    def _installed(self) -> str | None:
        """Return the digest of the package in the folder, or None without one.

        Raises:
            InputError: the folder has another package.
        """
        known = installed_release(self._home)
        if known is not None and known.manifest_digest != self._package:
            # A new package must not answer with the personal model that was trained on the old one.
            raise InputError(
                f"{self.folder} has another package, {known.manifest_digest}. Choose another folder, or open "
                "that one with Personalizer.load(folder)."
            )
        return None if known is None else known.manifest_digest


def _check_options(minutes: object, steps: object, options: Mapping[str, Any]) -> None:
    """Check the names and types of the options of `fit`. Raises InputError."""
    known = {field.name for field in fields(TrainOptions)}
    if unknown := sorted(options.keys() - known):
        raise InputError(f"`fit` has no option {unknown[0]!r}. It has {', '.join(sorted(known))}.")
    if not isinstance(steps, int | None) or isinstance(steps, bool):
        raise InputError(f"`steps` must be a whole number, got {steps!r:.60}.")
    if not isinstance(minutes, float | int | None) or isinstance(minutes, bool):
        raise InputError(f"`minutes` must be a number, got {minutes!r:.60}.")


def _is_file_name(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # a long name, an unknown user after "~", a null character
        return False


def _written(path: Path, texts: Iterable[Text]) -> list[Path]:
    """Write texts to a `.jsonl` file, and return its path together with the paths among the texts."""
    if isinstance(texts, str | Mapping):
        raise InputError("Pass a list of texts, not one: [text].")
    paths, rows = [], []
    for text in texts:
        if isinstance(text, Path):
            paths.append(text)
        elif isinstance(text, str) and _is_file_name(text):
            raise InputError(f"The text {text!r} is the name of a file. Pass Path({text!r}) to read it.")
        elif isinstance(text, str | Mapping):
            rows.append(json.dumps({"text": text} if isinstance(text, str) else dict(text)))
        else:
            raise InputError(f"A text must be a string, a mapping or a Path, not {type(text).__name__}.")
    if rows:
        write_atomic(path, ("\n".join(rows) + "\n").encode(), mode=0o600)
        paths.append(path)
    if not paths:
        raise InputError("The list of texts is empty. Give at least one text.")
    return paths
