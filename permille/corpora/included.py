"""Public text for masks: C4 of the hub, or the small text that is included."""

import os
from pathlib import Path

HUB = "https://huggingface.co"
HUB_TIMEOUT_S = 5.0


def reaches_hub() -> bool:
    """Return whether C4 can be streamed from here, within five seconds."""
    import httpx  # the library's base installation does without it

    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    try:
        url = f"{os.environ.get('HF_ENDPOINT') or HUB}/api/datasets/allenai/c4"
        return httpx.head(url, timeout=HUB_TIMEOUT_S, follow_redirects=True).is_success
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def included_corpus() -> Path | None:
    """Return the path of the public text, in the installed package or in the examples of a checkout.

    None if this installation has no such text, as in the images of the service.
    """
    places = (
        Path(__file__).with_name("corpus.jsonl.gz"),
        Path(__file__).parents[2] / "examples" / "corpus.jsonl.gz",
    )
    return next((place for place in places if place.is_file()), None)
