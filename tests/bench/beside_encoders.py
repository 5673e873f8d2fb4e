"""Compare Quire's embeddings with OpenVINO, ONNX Runtime and torch, alternating in one run: texts per second, ratios.

usage: beside_encoders.py --peers-python PYTHON [--model FOLDER] [--work FOLDER] [--shapes 1x16,8x128] …

PYTHON belongs to an environment with torch, transformers, sentence-transformers, onnx, onnxruntime, openvino and nncf.
FOLDER is a BERT model of sentence-transformers; without it, one is made in the shape of all-MiniLM-L6 with random
weights. The peers' models are made from it once and kept in --work.

    torch            sentence-transformers, f32
    onnx f32, int8   ONNX Runtime, graph optimized for BERT, attention not fused; int8 dynamic
    openvino, int8   OpenVINO, in the processor's own precision (bf16 where it has it); int8 quantized by nncf

All sides get token ids and return one mean-pooled, normalized vector per text; a shape is texts x tokens. Each side is
a process of its own with a thread per CPU, and sleeps while another one works. Quire answers through `LLM.embed`, the
others through their sessions. Figures are medians over --rounds rounds. The whole table takes about five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sides import Side, serve

SHAPES = "1x16,8x16,64x16,1x128,8x128,64x128,1x512,8x512,64x512"
PEERS = ("torch", "onnx f32", "onnx int8", "openvino", "openvino int8")
MINILM: dict[str, Any] = {
    "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
}  # fmt: skip
Run = Callable[[list[list[int]]], Any]


def main() -> None:
    arguments = _parse_arguments()
    if arguments.side:
        _serve(arguments)
        return
    with tempfile.TemporaryDirectory() as scratch:
        _compare(arguments, arguments.work or Path(scratch))


def _compare(arguments: argparse.Namespace, work: Path) -> None:
    model = arguments.model or work / "minilm"
    subprocess.run(_command(arguments.peers_python, "make", model, work), check=True, stdout=sys.stderr)
    quire = [f"quire {dtype}" for dtype in arguments.weights.split(",")]
    names = [*(peer for peer in PEERS if peer in arguments.peers.split(",")), *quire]
    pythons = {name: sys.executable if name in quire else arguments.peers_python for name in names}
    sides = {name: Side(_command(python, name, model, work)) for name, python in pythons.items()}
    print(f"texts per second, medians of {arguments.rounds} rounds; {quire[0]} over the fastest of the others")
    print(f"{'':9}{''.join(f'{name:>15}' for name in names)}{'ratio':>8}")
    for shape in arguments.shapes.split(","):
        texts, tokens = map(int, shape.split("x"))
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                times[name].append(side.seconds([texts, tokens]))
        rates = {name: texts / statistics.median(seconds) for name, seconds in times.items()}
        others = [rate for name, rate in rates.items() if name not in quire]
        ratio = rates[quire[0]] / max(others, default=rates[quire[0]])
        print(f"{shape:9}{''.join(f'{rate:15.1f}' for rate in rates.values())}{ratio:7.2f}x", flush=True)
    for side in sides.values():
        side.close()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", required=True)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--work", type=Path, help="folder that keeps the peers' files")
    parser.add_argument("--weights", default="q8", help="of Quire; the first one is compared")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    return parser.parse_args()


def _command(python: str, side: str, model: Path, work: Path) -> list[str]:
    return [python, __file__, "--peers-python", "", "--side", side, "--model", str(model), "--work", str(work)]


# One side, in a separate process.


def _serve(arguments: argparse.Namespace) -> None:
    if arguments.side == "make":
        _make(arguments.model, arguments.work)
        return
    run = _side(arguments.side, arguments.model, arguments.work)
    generator = random.Random(1)

    def prepare(shape: list[int]) -> Callable[[], Any]:
        texts, tokens = shape
        inputs = [[generator.randrange(1000, 30000) for _ in range(tokens)] for _ in range(texts)]
        return lambda: run(inputs)

    serve(prepare)


def _side(name: str, model: Path, work: Path) -> Run:
    threads = len(os.sched_getaffinity(0))
    if name == "torch":
        return _torch(model, threads)
    if name.startswith("onnx"):
        return _onnx(work / f"{name.replace(' ', '_')}.onnx", threads)
    if name.startswith("openvino"):
        return _openvino(work / f"{name.replace(' ', '_')}.xml", threads)
    from quire import LLM

    llm = LLM(str(model), weights=name.split()[1], threads=threads)
    return lambda inputs: llm.embed([tuple(each) for each in inputs])


def _torch(model: Path, threads: int) -> Run:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    transformer = SentenceTransformer(str(model), device="cpu").eval()

    def run(inputs: list[list[int]]) -> Any:
        ids = torch.tensor(inputs)
        with torch.inference_mode():
            return transformer({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"].numpy()

    return run


def _onnx(path: Path, threads: int) -> Run:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: list[list[int]]) -> Any:
        ids = np.array(inputs, np.int64)
        return session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]

    return run


def _openvino(path: Path, threads: int) -> Run:
    import numpy as np
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(str(path), "CPU", settings).create_infer_request()

    def run(inputs: list[list[int]]) -> Any:
        ids = np.array(inputs, np.int64)
        return request.infer({"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]

    return run


# The files of the peers, made in their environment.


def _make(model: Path, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        _make_minilm(model)
    if not (work / "onnx_f32.onnx").exists():
        _make_onnx(model, work)
    if not (work / "openvino_int8.xml").exists():
        _make_openvino(model, work)


def _make_minilm(folder: Path) -> None:
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
    from tokenizers import Tokenizer, models

    torch.manual_seed(1)
    words = {"[PAD]": 0, "[UNK]": 1} | {f"word{index}": index for index in range(2, 30522)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "[UNK]")), pad_token="[PAD]", unk_token="[UNK]"
    )
    with tempfile.TemporaryDirectory() as scratch:
        transformers.BertModel(transformers.BertConfig(**MINILM)).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        transformer = Transformer(scratch)
        modules = [transformer, Pooling(MINILM["hidden_size"], "mean"), Normalize()]
        SentenceTransformer(modules=modules).save_pretrained(str(folder))


def _pooled(model: Path) -> Any:
    """Return the model as a torch module from ids and mask to normalized means."""
    import torch
    from transformers import AutoModel

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            added = (1.0 - attention_mask[:, None, None, :].float()) * -1e9  # no mask function: it cannot be exported
            rows = self.bert(input_ids=input_ids, attention_mask=added).last_hidden_state
            mask = attention_mask[:, :, None].float()
            mean = (rows * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean)

    return Pooled().eval()


def _make_onnx(model: Path, work: Path) -> None:
    import torch
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer

    config = json.loads((model / "config.json").read_text())
    ids = torch.ones(2, 16, dtype=torch.int64)
    axes = {0: "texts", 1: "tokens"}
    torch.onnx.export(
        _pooled(model),
        (ids, ids),
        str(work / "plain.onnx"),
        input_names=["input_ids", "attention_mask"],
        output_names=["vectors"],
        dynamic_axes={"input_ids": axes, "attention_mask": axes, "vectors": {0: "texts"}},
        opset_version=17,
        dynamo=False,
    )
    optimized = optimizer.optimize_model(
        str(work / "plain.onnx"),
        "bert",
        num_heads=config["num_attention_heads"],
        hidden_size=config["hidden_size"],
        opt_level=1,
    )
    print(optimized.get_fused_operator_statistics())
    default = {"DefaultTensorType": TensorProto.FLOAT}  # type of the results of fused ops
    int8 = {"weight_type": QuantType.QInt8, "per_channel": True, "extra_options": default}
    quantize_dynamic(optimized.model, work / "onnx_int8.onnx", **int8)
    optimized.save_model_to_file(str(work / "onnx_f32.onnx"))


def _make_openvino(model: Path, work: Path) -> None:
    import nncf
    import openvino
    import torch

    ids = torch.ones(2, 16, dtype=torch.int64)
    converted = openvino.convert_model(_pooled(model), example_input=(ids, ids))
    for part, name in zip(converted.inputs, ("input_ids", "attention_mask"), strict=True):
        part.get_tensor().set_names({name})
        part.get_node().set_partial_shape(openvino.PartialShape([-1, -1]))
    converted.validate_nodes_and_infer_types()
    openvino.save_model(converted, work / "openvino.xml", compress_to_fp16=False)
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(1000, 30000, (1, 64), generator=generator).numpy() for _ in range(16)]
    inputs = [{"input_ids": each, "attention_mask": each * 0 + 1} for each in samples]
    quantized = nncf.quantize(converted, nncf.Dataset(inputs), model_type=nncf.ModelType.TRANSFORMER)
    openvino.save_model(quantized, work / "openvino_int8.xml")


if __name__ == "__main__":
    main()
