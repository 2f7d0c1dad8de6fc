"""Closed sets and limits of the package format: roles, media types, file names and sizes (FORMAT 3)."""

from enum import StrEnum

from permille.quantization import gguf_blocks, integers, nf4
from permille.quantization.types import Scheme

FORMAT = "permille-package"
VERSION = 1
MAX_MANIFEST_BYTES = 4 << 20
MAX_HEADER_BYTES = 8 << 20
MAX_FILE_BYTES = 64 << 20
MAX_REFERENCE_BYTES = 8 << 20  # FORMAT 4.12
# 4 TiB. This is also the largest size that the header of a foreign file can claim for a tensor.
MAX_LAYER_BYTES = 1 << 42
MAX_TENSORS = 1 << 16
MAX_WEIGHTS_OF_A_TENSOR = 1 << 32  # FORMAT 4.4: indices are uint32
MAX_K = (1 << 32) - 1  # FORMAT 3.2: the largest number of trained numbers
MAX_RANK = 256  # FORMAT 3.1: the largest rank of an adapter
MAX_ALPHA = 1024
MAX_LENGTH_EXPONENT = 20  # FORMAT 3.6, 4.13: lengths are 2^-20 to 2^20
MAX_COLUMNS = 16  # FORMAT 4.13
LARGEST_ELEMENT = 127
BLOCK_BYTES = 1 << 20  # FORMAT 4.7
BLOCK_HASH_BYTES = 32
PROGRAM_HEADER_BYTES = 40  # FORMAT 4.11
STATE_BLOCK_WEIGHTS = 4096  # FORMAT 11.2
GROUP_SIZES = {
    Scheme.NF4: (nf4.BLOCK_SIZE,),
    Scheme.SOURCE: (gguf_blocks.GROUP_SIZE,),
    **integers.GROUP_SIZES,
}

# FORMAT 3.3: the only names of files in a package. None has a folder, and none is code.
FILE_NAMES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "added_tokens.json",
        "LICENSE",
    }
)


class Role(StrEnum):
    """Role of a layer.

    - DENSE: the quantized weights of the linear layers.
    - PLAIN: all other tensors of the model.
    - BLOCKS: the hashes of the blocks of these two layers.
    - MASK: the indices of the masked weights.
    - ADAPTER: the matrices A of a low-rank adapter.
    - VALUES: the values of the masked weights.
    - REFERENCE: rows of public text, by which training keeps general knowledge and measures it.
    - BASIS: directions for the first steps of zeroth order, which were learned from public text.
    - PROGRAM: the model as a program for ExecuTorch.
    - FILE: a file of the config, the tokenizer or the license.
    """

    DENSE = "dense"
    PLAIN = "plain"
    BLOCKS = "blocks"
    MASK = "mask"
    ADAPTER = "adapter"
    VALUES = "values"
    REFERENCE = "reference"
    BASIS = "basis"
    PROGRAM = "program"
    FILE = "file"


MEDIA_TYPES = {
    Role.DENSE: "application/vnd.permille.dense+safetensors",
    Role.PLAIN: "application/vnd.permille.plain+safetensors",
    Role.BLOCKS: "application/vnd.permille.blocks",
    Role.MASK: "application/vnd.permille.mask+safetensors",
    Role.ADAPTER: "application/vnd.permille.adapter+safetensors",
    Role.VALUES: "application/vnd.permille.values+safetensors",
    Role.REFERENCE: "application/vnd.permille.reference+safetensors",
    Role.BASIS: "application/vnd.permille.basis+safetensors",
    Role.PROGRAM: "application/vnd.permille.program",
    Role.FILE: "application/vnd.permille.file",
}

# FORMAT 3.3: a package has one layer of each of these roles.
REQUIRED_ROLES = (Role.DENSE, Role.PLAIN, Role.BLOCKS)
MASK_ROLES, ADAPTER_ROLES = (Role.MASK, Role.VALUES), (Role.ADAPTER,)
# FORMAT 4.7: the layers with hashed blocks, in the order of the list of hashes.
BLOCKED_ROLES = (Role.DENSE, Role.PLAIN)
