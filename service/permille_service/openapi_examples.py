"""Request bodies to start from in the console."""

from typing import Final

from fastapi.openapi.models import Example

from permille_service.parameters import EXAMPLE

_MODEL: Final = f"model_{EXAMPLE}"
_CORPUS: Final = f"corpus_{EXAMPLE}"

MASK_EXAMPLES: Final[dict[str, Example]] = {
    "fisher": {
        "summary": "sensitive weights, by gradients on a corpus",
        "value": {
            "method": "fisher",
            "model_id": _MODEL,
            "corpus_id": _CORPUS,
            "density": 0.001,
            "sequences": 100,
            "length": 512,
            "seed": 0,
        },
    },
    "magnitude": {
        "summary": "largest weights, without a corpus",
        "value": {"method": "magnitude", "model_id": _MODEL, "density": 0.001},
    },
}
QUANTIZATION_EXAMPLES: Final[dict[str, Example]] = {
    "nf4": {
        "summary": "nf4, perplexity measured",
        "value": {
            "model_id": _MODEL,
            "options": {"scheme": "nf4", "group_size": 64, "evaluation_tokens": 8192},
            "evaluation_corpus_id": _CORPUS,
        },
    },
    "int4": {
        "summary": "int4 in groups of 32",
        "value": {"model_id": _MODEL, "options": {"scheme": "int4", "group_size": 32}},
    },
    "auto-round": {
        "summary": "int4 in groups of 128, calibrated on texts",
        "value": {
            "model_id": _MODEL,
            "options": {
                "scheme": "auto-round",
                "calibration_corpus_id": _CORPUS,
            },
        },
    },
}
BUILD_EXAMPLES: Final[dict[str, Example]] = {
    "usual": {
        "summary": "sensitive weights and nf4",
        "value": {
            "model_id": _MODEL,
            "mask": {"method": "fisher", "corpus_id": _CORPUS, "density": 0.001, "sequences": 100},
            "quantization": {"scheme": "nf4"},
        },
    },
    "exponents": {
        "summary": "the same with powers of two",
        "value": {
            "model_id": _MODEL,
            "mask": {"method": "fisher", "corpus_id": _CORPUS, "density": 0.001, "sequences": 100},
            "fisher_exponents": True,
        },
    },
}
PACKAGE_EXAMPLES: Final[dict[str, Example]] = {
    "usual": {
        "summary": "a mask and a quantization",
        "value": {"mask_id": f"mask_{EXAMPLE}", "quantization_id": f"quant_{EXAMPLE}"},
    },
}
