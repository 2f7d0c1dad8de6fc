"""What the torch engine holds that no file backs, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from permille.models.families import expected_tensors, scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.config_files import clean_config, config_bytes
from permille.package.layers import (
    write_dense,
    write_file,
    write_mask,
    write_plain,
    write_values,
)
from permille.package.manifest import Manifest, MaskInfo, ModelInfo, Quantization, TensorInfo, sort_layers
from permille.package.writer import write_manifest
from permille.quantization import QuantizedTensor, Scheme
from permille.tensors import RawTensor

# 73 million weights in 4 bits and two tables of 8 MB: 57 MB of package, 290 MB dequantized.
LAYERS, HIDDEN, INNER, VOCABULARY = 6, 1024, 3072, 4096

# Imports, then all else: the engine, a batch of 2 variants x 4 sequences x 64 tokens, directions, a text.
CODE = """
import json, sys, threading
import numpy as np
from pathlib import Path
from permille.engines.torch_engine import TorchEngine
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.zo.estimators import Batch
import transformers.models.llama.modeling_llama
import torch

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10

torch.set_num_threads(1)
torch.randn(512, 512) @ torch.randn(512, 512)
before, seen, done = anonymous(), [], threading.Event()
peaks = {}

def watch():
    while not done.wait(0.002):
        seen.append(anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
package = Package.open(BlobFolder(Path(sys.argv[1])), sys.argv[2])
engine = TorchEngine(package, cache_bytes=0, max_tokens=512)
ids = np.random.default_rng(0).integers(0, 4096, (4, 64))
target = np.ones(ids.shape, bool)
target[:, 0] = False
batch = Batch(input_ids_BT=ids, attention_BT=np.ones(ids.shape, bool), target_BT=target)
values = package.values()
list(engine.generate(values, ids[0, :20], max_new_tokens=3))
peaks["text"] = max(seen) - before
engine.losses(np.stack([values, values + 1]), batch)
peaks["losses"] = max(seen) - before
engine.directional_derivatives(values, np.ones((1, len(values)), np.float32), batch)
peaks["derivatives"] = max(seen) - before
done.set()
watcher.join()
print(json.dumps(peaks))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Random codes: nothing here looks at what they decode to."""
    folder = tmp_path_factory.mktemp("blobs")
    blobs, rng = BlobFolder(folder), np.random.default_rng(0)
    settings = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": LAYERS}
    config = clean_config(LlamaConfig(**settings, **heads).to_dict())
    scoped = dict(scoped_tensors(config))
    dense = [
        (
            name,
            QuantizedTensor(
                scheme=Scheme.NF4,
                shape=(rows, columns),
                group_size=64,
                packed=rng.integers(0, 256, rows * columns // 2, np.uint8),
                scales=np.full(rows * columns // 64, 0.05, np.float32),
            ),
        )
        for name, (rows, columns) in scoped.items()
    ]
    mask = {
        name: np.arange(0, rows * columns, 1000, dtype=np.uint32) for name, (rows, columns) in scoped.items()
    }
    plain = {name: shape for name, shape in expected_tensors(config).items() if name not in scoped}
    values = [
        RawTensor(name=name, dtype="F32", shape=(len(found),), data=np.zeros(4 * len(found), np.uint8))
        for name, found in mask.items()
    ]
    file = write_file(blobs, "config.json", config_bytes(config))
    layers = [
        write_dense(blobs, dense, Scheme.NF4),
        write_plain(blobs, [_ones(name, shape) for name, shape in plain.items()]),
        write_mask(blobs, mask, list(scoped)),
        write_values(blobs, values, list(scoped)),
        file,
    ]
    manifest = Manifest(
        model=ModelInfo(family="llama", config=file.digest),
        scheme=Quantization(name=Scheme.NF4, group_size=64, mask_aware=False),
        mask=MaskInfo(
            method="random", density="0.001", scope="all", k=sum(len(found) for found in mask.values())
        ),
        tensors=tuple(
            TensorInfo(name=name, shape=shape, count=len(mask[name])) for name, shape in scoped.items()
        ),
        layers=sort_layers(layers),
    )
    return folder, write_manifest(blobs, manifest)


def _ones(name: str, shape: tuple[int, ...]) -> RawTensor:
    """bfloat16."""
    bits = np.full(int(np.prod(shape)), 0x3F80, np.uint16)
    return RawTensor(name=name, dtype="BF16", shape=shape, data=bits.view(np.uint8))


def test_no_second_copy_of_the_weights_is_made(package: tuple[Path, str]) -> None:
    folder, digest = package
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), digest], capture_output=True, text=True, check=True
    )
    peaks_mib = json.loads(done.stdout)
    assert peaks_mib["text"] < 60
    assert peaks_mib["losses"] < 80
    # One whole weight, and tangents beside activations.
    assert peaks_mib["derivatives"] < 110
