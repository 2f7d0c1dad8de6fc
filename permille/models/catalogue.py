"""A catalogue of published models, with the disk space and memory that each of them needs on a device.

    for entry in CATALOGUE:
        print(entry.name, entry.parameters, entry.package_bytes(Scheme.NF4))

The configs are those of the publishers, reduced to the keys that determine sizes. Sizes are computed from
them. A test compares the number of parameters with the published one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Any, Final

from permille.models.families import expected_tensors, scoped_tensors
from permille.quantization import default_group_size
from permille.quantization.types import Scheme, bits_of

TRAINED_TOKENS: Final = 256
# Each group of weights has a float32 scale.
_SCALE_BITS: Final = 32
_TABLE_BYTES: Final = 34 / 32
"""Bytes for a weight of embedding or head: 8 bits, and 1/32 of the float16 scale of its group."""
_TRAINING_BYTES: Final = 75_000_000
"""Memory of a training process apart from package and activations. It is fitted to measurements."""


class Ran(StrEnum):
    """Extent of the tests of a model: only its config, or its real weights.

    In addition, tests compare a small random model of every family with transformers.
    """

    CONFIG = "config"
    REAL = "real weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """The special tokens around a text of a published model.

    No published tokenizer here adds a token after a text. These settings are for people. Rows of tokens begin
    as the files of the model at hand say (`permille.tokenizer_files`).

    Attributes:
        bos: the token that the tokenizer puts before every text, or None.
        between: the token between the documents that the publisher trained on.
        template_bos: whether the chat template writes BOS itself. None means that there is no template.
    """

    bos: str | None
    between: str
    template_bos: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A published model.

    Attributes:
        name: the name on the hub.
        config: the keys of its `config.json` that determine sizes.
        published: the number of parameters that the publisher states, or None if it is unknown.
        ran: what was tested of the model.
        framing: the special tokens around a text, or None if the publisher's settings were not at hand.
    """

    name: str
    config: Mapping[str, Any]
    framing: Framing | None = None
    published: int | None = None
    ran: Ran = Ran.CONFIG

    @property
    def family(self) -> str:
        """Return the `model_type` of the config."""
        return str(self.config["model_type"])

    @property
    def parameters(self) -> int:
        """Return the number of weights. A tied head counts once."""
        return sum(map(prod, expected_tensors(self.config).values()))

    def package_bytes(self, scheme: Scheme) -> int:
        """Return the size of a package without its tokenizer.

        A weight of embedding or head is stored in 8 bits, and a weight of a norm in 32.
        """
        shapes = expected_tensors(self.config)
        linears = sum(prod(shape) for _, shape in scoped_tensors(self.config))
        # Biases are 1-D, too, and are stored like norms.
        norms = sum(prod(shape) for shape in shapes.values() if len(shape) == 1)
        tables = self.parameters - linears - norms
        # Bits of a weight, including its share of the scale of its group.
        bits = bits_of(scheme) + _SCALE_BITS / default_group_size(scheme)
        return round(linears * bits / 8 + tables * _TABLE_BYTES + norms * 4)

    @property
    def training_bytes(self) -> int:
        """Estimate the memory, without the package, of a gradient step on one row of `TRAINED_TOKENS`.

        The estimate is the sum of a hidden vector for each token and decoder layer, the activations of one
        layer, and the process. It is within 3 % of the memory that `docs/results/real-model.md` reports for
        models of 0.5 and of 1.1 billion weights.
        """
        # float32 has 4 bytes. The activations of one layer take 32 hidden vectors for each token.
        layers, hidden = self.config["num_hidden_layers"], self.config["hidden_size"]
        return _TRAINING_BYTES + 4 * TRAINED_TOKENS * (int(layers) + 32) * int(hidden)


_QWEN: Final = Framing(bos=None, between="<|endoftext|>", template_bos=False)
_GEMMA: Final = Framing(bos="<bos>", between="<eos>", template_bos=True)

CATALOGUE: Final = (
    Entry(
        name="SmolLM2-135M-Instruct",
        framing=Framing(bos=None, between="<|endoftext|>", template_bos=False),
        config={
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
        published=134_515_008,
        ran=Ran.REAL,
    ),
    Entry(
        name="Llama-3.2-1B",
        framing=Framing(bos="<|begin_of_text|>", between="<|end_of_text|>", template_bos=True),
        config={
            "model_type": "llama",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
        published=1_235_814_400,
    ),
    Entry(
        name="TinyLlama-1.1B",
        framing=Framing(bos="<s>", between="</s>", template_bos=False),
        config={
            "model_type": "llama",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "vocab_size": 32000,
            "tie_word_embeddings": False,
        },
        published=1_100_048_384,
    ),
    Entry(
        name="Llama-2-7B",
        framing=Framing(bos="<s>", between="</s>", template_bos=True),
        config={
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32000,
            "tie_word_embeddings": False,
        },
        published=6_738_415_616,
    ),
    Entry(
        name="Mistral-7B-v0.3",
        framing=Framing(bos="<s>", between="</s>", template_bos=True),
        config={
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32768,
            "tie_word_embeddings": False,
        },
        published=7_248_023_552,
    ),
    Entry(
        name="Qwen2.5-0.5B",
        framing=_QWEN,
        config={
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        published=494_032_768,
    ),
    Entry(
        name="Qwen3-0.6B",
        framing=_QWEN,
        config={
            "model_type": "qwen3",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        published=596_049_920,
    ),
    Entry(
        name="SmolLM3-3B",
        config={
            "model_type": "smollm3",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
        published=3_075_098_624,
    ),
    Entry(
        name="Phi-3.5-mini",
        framing=Framing(bos=None, between="<|endoftext|>", template_bos=False),
        config={
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "tie_word_embeddings": False,
        },
        published=3_821_079_552,
    ),
    Entry(
        name="Phi-4-mini",
        framing=Framing(bos=None, between="<|endoftext|>", template_bos=False),
        config={
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "vocab_size": 200064,
            "tie_word_embeddings": True,
        },
        published=3_836_021_760,
    ),
    Entry(
        name="Gemma-2-2b",
        framing=_GEMMA,
        config={
            "model_type": "gemma2",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256000,
        },
        published=2_614_341_888,
    ),
    Entry(
        name="Gemma-3-1b",
        framing=_GEMMA,
        config={
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
        },
        published=999_885_952,
    ),
    Entry(
        name="Gemma-2b",
        framing=_GEMMA,
        config={
            "model_type": "gemma",
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 256000,
        },
        published=2_506_172_416,
    ),
    Entry(
        name="OLMo-2-1B",
        framing=Framing(bos=None, between="<|endoftext|>", template_bos=True),
        config={
            "model_type": "olmo2",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 100352,
            "tie_word_embeddings": False,
        },
        published=1_484_916_736,
    ),
    Entry(
        name="OLMo-3-7B",
        config={
            "model_type": "olmo3",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 100278,
            "tie_word_embeddings": False,
        },
    ),
    Entry(
        name="Granite-3.3-2b",
        framing=Framing(bos=None, between="<|end_of_text|>", template_bos=False),
        config={
            "model_type": "granite",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 49159,
            "tie_word_embeddings": True,
        },
        published=2_533_539_840,
    ),
    Entry(
        name="EXAONE-4.0-1.2B",
        config={
            "model_type": "exaone4",
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "num_hidden_layers": 30,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 102400,
            "tie_word_embeddings": True,
        },
        published=1_279_391_488,
    ),
    Entry(
        name="OPT-1.3B",
        framing=Framing(bos="</s>", between="</s>", template_bos=None),
        config={
            "model_type": "opt",
            "hidden_size": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 2048,
            "tie_word_embeddings": True,
        },
        published=1_315_758_080,
    ),
    Entry(
        name="Pythia-410m",
        framing=Framing(bos=None, between="<|endoftext|>", template_bos=None),
        config={
            "model_type": "gpt_neox",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 50304,
            "tie_word_embeddings": False,
        },
        published=405_334_016,
    ),
    Entry(
        name="Ministral-3-3B",
        config={
            "model_type": "ministral3",
            "hidden_size": 3072,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 131072,
            "tie_word_embeddings": True,
        },
    ),
)
