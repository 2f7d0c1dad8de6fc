"""Find the GGUF file of a model in Ollama's local store.

    store, path = ollama_file("smollm2:135m")

The store keeps a manifest for each name and tag, and the files by their digests. Nothing is downloaded, and
no server is asked.
"""

import json
import os
import re
from pathlib import Path

from permille.errors import InputError

_PART = r"[a-z0-9][\w.-]*"
_NAME = re.compile(
    rf"(?:(?:(?P<host>{_PART})/)?(?P<owner>{_PART})/)?(?P<model>{_PART})(?::(?P<tag>[\w.-]+))?",
    re.ASCII | re.IGNORECASE,
)
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MODEL = "application/vnd.ollama.image.model"


def ollama_name(text: str) -> str:
    """Return a name that Ollama takes for a model, as near to a text as possible.

    Example:
        >>> ollama_name("my notes (2)"), ollama_name("été")
        ('my-notes-2', 't')
    """
    # Ollama takes up to 80 letters, digits and `_`, `-`, `.`, and the first is no sign.
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII)[:80].strip("-._") or "personal"


def ollama_file(name: str, store: Path | None = None) -> tuple[Path, Path]:
    """Find the GGUF file of a model.

    Args:
        name: as Ollama lists it: `smollm2`, `smollm2:135m`, `user/model:tag` or `hf.co/user/model:tag`.
        store: Ollama's folder of models. None takes OLLAMA_MODELS, else `.ollama/models` of the home folder.

    Returns:
        The store, and the file in it.

    Raises:
        InputError: the name is malformed, the model is not in the store, or its manifest is damaged.
    """
    if store is None:
        store = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama/models")
    # The parts become names of folders, so the pattern allows no separator.
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise InputError(f"Write a model of Ollama as NAME or NAME:TAG, not {name!r:.80}.")
    # `library` is the owner of the models that Ollama itself publishes.
    host, owner = parts["host"] or "registry.ollama.ai", parts["owner"] or "library"
    model, tag = parts["model"], parts["tag"] or "latest"
    manifest = store / "manifests" / host / owner / model / tag
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        # Other layers hold the template, the parameters and the licence.
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _MODEL]
        found = [match[1] for digest in digests if (match := _DIGEST.fullmatch(digest))]
    except FileNotFoundError as exc:
        raise InputError(
            f"Ollama's store {store} has no model {model}:{tag}. Fetch it with `ollama pull {name}`, or name "
            "the store with OLLAMA_MODELS."
        ) from exc
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise InputError(f"The manifest {manifest} of {name} is damaged: {exc!r:.200}") from exc
    path = store / "blobs" / f"sha256-{found[0]}" if len(found) == 1 else manifest
    if path == manifest or not path.is_file():
        raise InputError(
            f"Ollama's store {store} lacks the file of {name}. Fetch it with `ollama pull {name}`."
        )
    return store, path
