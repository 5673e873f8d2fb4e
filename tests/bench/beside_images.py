"""Compare image encoding with OpenVINO and ONNX Runtime, alternating in one run: milliseconds per image, ratios.

usage: beside_images.py --peers-python PYTHON [--work FOLDER] [--weights q8,bf16,f32] [--peers NAMES] [--rounds 3]

PYTHON belongs to an environment with torch, transformers, onnx, onnxruntime, openvino and nncf. The model is made once
in --work: the tower and the connector of SmolVLM-256M (512 x 512 pixels, 1,024 patches, 12 layers, 768 columns) with
random weights. The peers' models are exported from it for one image, with constant shapes.

    onnx f32, int8   ONNX Runtime, graph optimized for vision transformers; int8 dynamic
    openvino f32     OpenVINO, told to compute in f32
    openvino, int8   OpenVINO, in the processor's own precision (bf16 where it has it); int8 quantized by nncf

Quire gets pixels and normalizes them, the others get normalized pixels. Each side first computes the rows of an image,
which must be near to the rows of torch. A ratio compares a data type of Quire with the fastest other side that has the
same or a larger data type. The whole run takes less than three minutes once the files are made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sides import Side, serve

BITS = {"onnx f32": 32, "openvino f32": 32, "openvino": 16, "onnx int8": 8, "openvino int8": 8}  # bits of each peer
QUIRE_BITS = {"f32": 32, "bf16": 16, "q8": 8}
LEAST_COSINE = 0.95  # cosine of a row and torch's
LAYERS = HEADS = 12
HIDDEN = 768
SIZE = 512
PATCH = 16
CONFIG: dict[str, Any] = {
    "vision_config": {
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 3072,
        "image_size": SIZE, "patch_size": PATCH,
    },
    "text_config": {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 1, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 64, "vocab_size": 100, "pad_token_id": 0, "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "scale_factor": 4, "image_token_id": 99, "pad_token_id": 0,
}  # fmt: skip

Floats = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]  # [SIZE, SIZE, 3]


def main() -> None:
    arguments = _parse_arguments()
    if arguments.side:
        _serve(arguments.side, arguments.work)
        return
    with tempfile.TemporaryDirectory() as scratch:
        _compare(arguments, arguments.work or Path(scratch))


def _compare(arguments: argparse.Namespace, work: Path) -> None:
    subprocess.run(_command(arguments.peers_python, "make", work), check=True, stdout=sys.stderr)
    peers = [name for name in BITS if name in arguments.peers.split(",")]
    quire = [f"quire {dtype}" for dtype in arguments.weights.split(",")]
    sides = {name: Side(_command(arguments.peers_python, name, work)) for name in peers}
    sides |= {name: Side(_command(sys.executable, name, work)) for name in quire}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, side in sides.items():
            times[name].append(side.seconds(None))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"milliseconds per image, medians of {arguments.rounds} rounds")
    for name, seconds in medians.items():
        print(f"{name:15}{1000 * seconds:9.1f}{_ratio(name, medians)}")
    for side in sides.values():
        side.close()


def _ratio(name: str, medians: dict[str, float]) -> str:
    """Return the speed of a side of Quire relative to the fastest peer with at least as many bits."""
    bits = QUIRE_BITS.get(name.removeprefix("quire "), 0)
    others = [name for name in medians if bits and BITS.get(name, 0) >= bits]
    if not others:
        return ""
    fastest = min(others, key=lambda other: medians[other])
    return f"{medians[fastest] / medians[name]:8.2f}x  of {fastest}"


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", required=True)
    parser.add_argument("--peers", default=",".join(BITS))
    parser.add_argument("--work", type=Path, help="folder that keeps the model and the peers' files")
    parser.add_argument("--weights", default=",".join(reversed(QUIRE_BITS)), help="of Quire")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    return parser.parse_args()


def _command(python: str, side: str, work: Path) -> list[object]:
    return [python, __file__, "--peers-python", "", "--side", side, "--work", work]


# One side, in a separate process.


def _serve(side: str, work: Path) -> None:
    if side == "make":
        _make(work)
        return
    pixels = np.load(work / "pixels.npy")
    run = _quire(work, side.split()[1], pixels) if side.startswith("quire") else _peer(work, side, pixels)
    rows, expected = run().reshape(-1), np.load(work / "rows.npy").reshape(-1)
    cosine = float(rows @ expected / np.linalg.norm(rows) / np.linalg.norm(expected))
    print(f"{side}: cosine to torch {cosine:.5f}", file=sys.stderr)
    if not cosine >= LEAST_COSINE:
        raise SystemExit(f"{side} computes something else")
    serve(lambda _: run)


def _quire(work: Path, weights: str, pixels: Pixels) -> Callable[[], Floats]:
    from quire.kernels import Pool, supported_levels
    from quire.runtime.model.runner.image_runner import ImageRunner
    from quire.runtime.model.vision import pack_tower, read_vision
    from quire.scheduler import PlacedImage

    spec = read_vision(work / "model")
    assert spec is not None
    runner = ImageRunner(pack_tower(work / "model", spec, weights), 0, Pool(_num_threads()), supported_levels()[-1])
    image = PlacedImage(0, spec.num_tokens, b"", SIZE, SIZE, pixels.tobytes())
    return lambda: runner.encode(image)


def _peer(work: Path, name: str, pixels: Pixels) -> Callable[[], Floats]:
    values = _normalized(pixels)
    if name.startswith("onnx"):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = _num_threads()
        path = str(work / f"{name.replace(' ', '_')}.onnx")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, {"pixels": values})[0]
    import openvino

    settings = {"INFERENCE_NUM_THREADS": _num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    if name == "openvino f32":
        settings["INFERENCE_PRECISION_HINT"] = "f32"
    path = str(work / f"{'openvino_int8' if name.endswith('int8') else 'openvino'}.xml")
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    return lambda: request.infer([values])[0]


def _normalized(pixels: Pixels) -> Floats:
    """Return the reference processor's result for pixels, f32 [1, 3, SIZE, SIZE]."""
    values: Floats = ((pixels.astype(np.float32) / 255 - 0.5) / 0.5).transpose(2, 0, 1)[None].copy()
    return values


def _num_threads() -> int:
    return len(os.sched_getaffinity(0))


# The model, and the files of the peers, made in their environment.


def _make(work: Path) -> None:
    if (work / "openvino_int8.xml").exists():
        return
    import torch
    import transformers

    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    config = transformers.Idefics3Config(**CONFIG)
    transformers.Idefics3ForConditionalGeneration(config).save_pretrained(work / "model")
    pixels = np.random.default_rng(1).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    values = torch.from_numpy(_normalized(pixels))
    with torch.inference_mode():
        np.save(work / "rows.npy", _tower(work, "sdpa")(values).numpy())
    np.save(work / "pixels.npy", pixels)
    _make_onnx(work, values)
    _make_openvino(work, values)


def _tower(work: Path, attention: str) -> Any:
    """Return the tower as a torch module from normalized pixels to rows."""
    import torch
    import transformers

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            model_class = transformers.Idefics3ForConditionalGeneration
            model = model_class.from_pretrained(work / "model", attn_implementation=attention, dtype=torch.float32)
            self.vision = model.model.vision_model
            self.connector = model.model.connector

        def forward(self, pixels: Any) -> Any:
            """Compute the rows. All patches are of the image, so that each has its own position."""
            embeddings = self.vision.embeddings
            patches = embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
            x = self.vision.encoder(inputs_embeds=patches + embeddings.position_embedding.weight).last_hidden_state
            return self.connector(self.vision.post_layernorm(x))

    return Tower().eval()


def _make_onnx(work: Path, values: Any) -> None:
    import torch
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer

    plain = str(work / "plain.onnx")
    torch.onnx.export(_tower(work, "eager"), (values,), plain, input_names=["pixels"], opset_version=17, dynamo=False)
    optimized = optimizer.optimize_model(plain, "vit", num_heads=HEADS, hidden_size=HIDDEN, opt_level=1)
    print(optimized.get_fused_operator_statistics())
    optimized.save_model_to_file(str(work / "onnx_f32.onnx"))
    quantize_dynamic(
        work / "onnx_f32.onnx",
        work / "onnx_int8.onnx",
        op_types_to_quantize=["MatMul", "Attention"],
        weight_type=QuantType.QInt8,
        per_channel=True,
        extra_options={"DefaultTensorType": TensorProto.FLOAT},  # type of the results of fused ops
    )


def _make_openvino(work: Path, values: Any) -> None:
    import nncf
    import openvino
    import torch

    converted = openvino.convert_model(_tower(work, "sdpa"), example_input=values, input=list(values.shape))
    openvino.save_model(converted, work / "openvino.xml", compress_to_fp16=False)
    generator = torch.Generator().manual_seed(1)
    samples = nncf.Dataset([torch.rand(values.shape, generator=generator).numpy() * 2 - 1 for _ in range(4)])
    quantized = nncf.quantize(converted, samples, model_type=nncf.ModelType.TRANSFORMER)
    openvino.save_model(quantized, work / "openvino_int8.xml")


if __name__ == "__main__":
    main()
