"""What the command line asks of a quantization."""

import pytest

from permille_service.cli.exits import CommandError
from permille_service.cli.work import quantization_options


def test_auto_round_and_a_corpus_come_together() -> None:
    assert quantization_options("nf4", None, 512, None) == {"scheme": "nf4", "evaluation_tokens": 512}
    assert quantization_options("auto-round", None, 512, "corpus_x") == {
        "scheme": "auto-round",
        "evaluation_tokens": 512,
        "calibration_corpus_id": "corpus_x",
    }
    with pytest.raises(CommandError, match="with no other, got corpus_x with int4"):
        quantization_options("int4", 128, 512, "corpus_x")
    with pytest.raises(CommandError, match="expected --calibrate-on with --scheme auto-round"):
        quantization_options("auto-round", None, 512, None)
