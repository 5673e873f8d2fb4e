"""Measure the speed of packing model files: GB of file per second of one core's time, for each form of a matrix.

usage: loading.py [--size 4096] [--only TEXT] [--cold FILE]

Each file is written by the tests' makers and packed as `--weights auto` packs it; the least CPU time of several rounds
counts: other processes share the caches. With --cold: the wall time of loading a GGUF file or folder that is not
in the page cache, and the time of only reading its files, directly from the disk.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from quire.kernels.ops import WeightDtype
from quire.kernels.pack import GGML_DTYPES, PackedMatrix, packed_nbytes
from quire.pager import map_memory
from quire.runtime.model import pack_model, read_spec
from quire.runtime.model.families.registry import open_model
from quire.runtime.model.weights import Checkpoint, packing
from quire.runtime.model.weights.ggml import SUPPORTED
from quire.runtime.model.weights.gguf import GGUFFile
from quire.runtime.model.weights.gguf_checkpoint import GGUFCheckpoint
from quire.runtime.model.weights.safetensors import SafetensorsCheckpoint
from quire.runtime.model.weights.stacked_experts import StackedExperts

from tests.support import gguf_files
from tests.support.ggml import random_blocks
from tests.support.quantized_folders import (
    AWQ,
    COMPRESSED,
    FP8_BLOCKS,
    GPTQ,
    LAYER,
    MATRICES,
    Make,
    awq,
    folder_of,
    fp8,
    gptq,
    int8,
    save_tensors,
    words,
)

ROUNDS = 7
NAME = f"{LAYER}mlp.down_proj.weight"
CHUNK_BYTES = 8 << 20  # bytes of a direct read
Opened = tuple[Checkpoint, str, int]  # the tensors, the name of a matrix, and the bytes that it takes in the file


def quantized(config: dict[str, object], make: Make) -> Callable[[Path, int], Opened]:
    """Return a writer of a folder whose matrices are quantized."""

    def write(folder: Path, size: int) -> Opened:
        made = make(np.random.default_rng(1), size, size)
        changes = {"hidden_size": size, "intermediate_size": size, "num_attention_heads": 32, "num_key_value_heads": 32}
        folder_of(folder, config, lambda *shape: made, (), dict.fromkeys(MATRICES, (size, size)), **changes)
        nbytes = sum(getattr(tensor, "codes", tensor).nbytes for tensor in made.tensors.values())
        return open_model(folder)[1], NAME, nbytes

    return write


def plain(dtype: str) -> Callable[[Path, int], Opened]:
    """Return a writer of a folder with one matrix of 16 or 32 bits."""

    def write(folder: Path, size: int) -> Opened:
        folder.mkdir()
        values = np.random.default_rng(1).standard_normal((size, size)).astype(np.float32)
        save_tensors({NAME: values.astype(dtype)}, folder / "model.safetensors")
        return SafetensorsCheckpoint(folder), NAME, size * size * np.dtype(dtype).itemsize

    return write


def gguf(kind: str) -> Callable[[Path, int], Opened]:
    """Return a writer of a GGUF file with one matrix."""

    def write(folder: Path, size: int) -> Opened:
        folder.mkdir()
        blocks = random_blocks(np.random.default_rng(1), kind, size, size)
        tensor = gguf_files.Tensor((size, size), kind, blocks.tobytes())
        path = gguf_files.write(folder / "a.gguf", {"general.architecture": "llama"}, {NAME: tensor})
        return GGUFCheckpoint(GGUFFile(path)), NAME, blocks.nbytes

    return write


def mxfp4(folder: Path, size: int) -> Opened:
    """Write a folder of gpt-oss's form with one matrix of one expert."""
    golden = Path(__file__).parents[1] / "goldens" / "gpt_oss_mxfp4"
    folder.mkdir()
    rng = np.random.default_rng(1)
    stored = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = rng.integers(0, 256, (1, size, size // 32, 16), np.uint8)
    scales = rng.integers(110, 130, (1, size, size // 32), np.uint8)
    save_tensors({f"{stored}_blocks": blocks, f"{stored}_scales": scales}, folder / "model.safetensors")
    tensors = StackedExperts(SafetensorsCheckpoint(folder), read_spec(golden))
    return tensors, f"{stored}.weight", blocks.nbytes + scales.nbytes


Form = tuple[WeightDtype, Callable[[Path, int], Opened]]  # the dtype in memory, and the writer of the file
FORMS: dict[str, Form] = {
    "GPTQ": ("q4", quantized(GPTQ | {"group_size": 128}, gptq(group=128))),
    "GPTQ, zero points": ("q4_z", quantized(GPTQ | {"group_size": 128}, gptq(group=128, sym=False))),
    "GPTQ, groups of 32": ("q4", quantized(GPTQ, gptq())),
    "GPTQ, 8 bits": ("q8", quantized(GPTQ | {"bits": 8, "group_size": 128}, gptq(bits=8, group=128))),
    "GPTQ, act-order": ("q8", quantized(GPTQ | {"desc_act": True}, gptq(group=128, act_order=True))),
    "AWQ": ("q4_z", quantized(AWQ | {"group_size": 128}, awq(128))),
    "pack-quantized": ("q4", quantized(COMPRESSED, words(group=128))),
    "int8": ("q8", quantized(COMPRESSED, int8())),
    "FP8": (
        "bf16",
        quantized(FP8_BLOCKS | {"weight_block_size": [128, 128]}, fp8((128, 128), name="weight_scale_inv")),
    ),
    "MXFP4": ("mxfp4", mxfp4),
    "F16": ("bf16", plain("float16")),
    "F32": ("bf16", plain("float32")),
    **{f"GGUF {kind}": (GGML_DTYPES.get(kind, "q8"), gguf(kind)) for kind in SUPPORTED},
}


def packing_seconds(checkpoint: Checkpoint, name: str, dtype: WeightDtype) -> float:
    """Return the least CPU time of reading and packing a matrix."""
    shape = checkpoint.shape(name)
    kind = checkpoint.dtype(name)
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    matrix = PackedMatrix(rows, columns, dtype, map_memory(packed_nbytes(rows, columns, dtype)))
    num_rows = max(packing.ELEMENTS_PER_CHECK // columns // 32, 1) * 32
    seconds = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        for row, some in checkpoint.chunks(name, slice(None), num_rows):
            packing.fill_rows(matrix, some, kind, row, None)
        seconds.append(time.thread_time() - begin)
    return min(seconds)


def model_files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from path.glob("*.safetensors")
    else:
        yield from GGUFFile(path).paths


def forget(path: Path) -> int:
    """Remove the files of a model from the page cache; return their bytes."""
    total = 0
    for file in model_files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        total += os.fstat(descriptor).st_size
        os.close(descriptor)
    return total


def read_directly(path: Path) -> float:
    """Return the seconds of reading a model's files past the page cache, in order, by two threads."""
    begin = time.perf_counter()
    for file in model_files(path):
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        size = file.stat().st_size

        def read_every_second(first: int, descriptor: int = descriptor, size: int = size) -> None:
            buffer = mmap.mmap(-1, CHUNK_BYTES)
            for at in range(first * CHUNK_BYTES, size, 2 * CHUNK_BYTES):
                os.preadv(descriptor, [buffer], at)

        threads = [threading.Thread(target=read_every_second, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(descriptor)
    return time.perf_counter() - begin


def print_cold(path: Path) -> None:
    print(f"{'':<10}{'load s':>8}{'GB/s':>7}{'read s':>9}{'GB/s':>7}")
    for round_number in range(1, 4):
        size = forget(path)
        direct = read_directly(path)
        forget(path)
        begin = time.perf_counter()
        pack_model(path, "auto")
        loaded = time.perf_counter() - begin
        print(
            f"round {round_number:<4}{loaded:>8.2f}{size / loaded / 1e9:>7.2f}{direct:>9.2f}{size / direct / 1e9:>7.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--only", default="")
    parser.add_argument("--cold", type=Path)
    options = parser.parse_args()
    if options.cold is not None:
        print_cold(options.cold)
        return
    print(f"{'file':<20}{'in memory':>10}{'GB/s':>8}")
    for name, (dtype, write) in FORMS.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            checkpoint, tensor, nbytes = write(Path(folder) / "model", options.size)
            seconds = packing_seconds(checkpoint, tensor, dtype)
        print(f"{name:<20}{dtype:>10}{nbytes / seconds / 1e9:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
