"""Public text for masks: C4 of the hub, or the small text that is included."""

import os
from pathlib import Path

import httpx

from permille.exits import CommandError, Exit

HUB = "https://huggingface.co"
HUB_TIMEOUT_S = 5.0


def reaches_hub() -> bool:
    """Return whether C4 can be streamed from here, within five seconds."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    try:
        url = f"{os.environ.get('HF_ENDPOINT') or HUB}/api/datasets/allenai/c4"
        return httpx.head(url, timeout=HUB_TIMEOUT_S, follow_redirects=True).is_success
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def included_corpus() -> Path:
    """Return the path of the public text, in the installed package or in the examples of a checkout.

    Raises:
        CommandError: there is no such text.
    """
    places = (
        Path(__file__).with_name("corpus.jsonl.gz"),
        Path(__file__).parents[3] / "examples" / "corpus.jsonl.gz",
    )
    for place in places:
        if place.is_file():
            return place
    raise CommandError("This installation has no public text. Name one with --corpus FILE.", Exit.USAGE)
