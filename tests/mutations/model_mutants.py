"""Bugs in `runtime/model/`, without the encoders."""

from mutant import Mutant

TESTS = "tests/runtime/model"
PACKING_TESTS = "tests/runtime/model/test_packing.py tests/runtime/model/test_gguf_models.py"
QUANTISED_TESTS = "tests/runtime/model/test_quantised_folders.py"
EXPERT_TESTS = "tests/runtime/model/weights tests/runtime/model/test_packing.py"
CONFIG_TESTS = "tests/runtime/model/test_config_json.py tests/runtime/model/test_config_of_experts.py"
GOLDEN_TESTS = "tests/runtime/model/test_goldens.py"
DECODER_WEIGHTS, PACKING, GROUPED, GPTQ, COMPRESSED, STACKED, GGUF_CHECKPOINT, MAPPED_FILE = (
    f"runtime/model/weights/{name}.py"
    for name in (
        *("decoder_weights", "packing", "grouped", "gptq", "compressed", "stacked_experts"),
        *("gguf_checkpoint", "mapped_file"),
    )
)
QWEN3_MOE, GPT_OSS = "runtime/model/families/qwen3_moe.py", "runtime/model/families/gpt_oss.py"
DECODER, FILES = "runtime/model/decoder.py", "runtime/model/files.py"
GGUF_CONFIG, GGUF_TESTS = "runtime/model/gguf_config.py", "tests/runtime/model/test_gguf_models.py"
GGUF_FAMILY_TESTS = "tests/runtime/model/test_gguf_families.py"
QUANTIZATION_CONFIG = "runtime/model/quantization_config.py"
SAFETENSORS, GGML = "runtime/model/weights/safetensors.py", "runtime/model/weights/ggml.py"
GGUF_FILE, GGUF_FILE_TESTS = "runtime/model/weights/gguf.py", "tests/runtime/model/weights/test_gguf.py"
SAFETENSORS_TESTS, GGML_TESTS = (f"tests/runtime/model/weights/test_{name}.py" for name in ("safetensors", "ggml"))

MUTANTS = [
    Mutant(
        DECODER_WEIGHTS,
        "first_row, num_rows = expert * rows + part.first_row,",
        "first_row, num_rows = part.first_row,",
        "all experts of a GGUF file have the weights of the first one",
        EXPERT_TESTS,
    ),
    Mutant(
        DECODER_WEIGHTS,
        "whole = all(columns % 32 == 0 for columns, _ in ranges[:-1])",
        "whole = True",
        "a file whose Q, K and V differ in type does not load if a head is not a multiple of 32",
        PACKING_TESTS,
    ),
    Mutant(
        DECODER_WEIGHTS,
        "and all(part.interleave is None for part in parts)",
        "",
        "gate and up of different types are packed as if they were one above the other",
        PACKING_TESTS,
    ),
    Mutant(
        DECODER_WEIGHTS,
        'one = packed if isinstance(packed, str) else "q8"',
        'one = packed if isinstance(packed, str) else "f32"',
        "experts whose matrices differ in type take four times the memory",
        PACKING_TESTS,
    ),
    Mutant(
        PACKING,
        "start = part.start + row * columns_per_row",
        "start = part.start + row",
        "gate and up of large models are packed over each other after the first rows",
        PACKING_TESTS,
    ),
    Mutant(
        PACKING,
        '                if self._stop.is_set():\n                    raise Unavailable("loading the model was cancelled")\n',
        "",
        "Ctrl-C while a model loads is noticed when it has loaded",
        "tests/runtime/model/test_packing.py",
    ),
    Mutant(
        PACKING,
        "return part.start + rows // 16 * 32 + 16 * part.interleave + rows % 16",
        "return part.start + rows // 16 * 32 + rows % 16",
        "biases of gate and up are added to the wrong columns",
        PACKING_TESTS,
    ),
    Mutant(
        GROUPED,
        "if order.min() == -1 or (num_groups > 1 and not order.any()):",
        "if num_groups > 1 and not order.any():",
        "folders of compressed-tensors with an order that is not used are refused",
        QUANTISED_TESTS,
    ),
    Mutant(
        GROUPED,
        "here = slice(first + row, first + row + len(words))",
        "here = slice(row, row + len(words))",
        "the second part of a fused matrix has the scales of the first one",
        QUANTISED_TESTS,
    ),
    Mutant(
        GROUPED,
        "if (self._zeros() == 1 << self._bits - 1).all():",
        "if (self._zeros() == 1 << self._bits - 1).any():",
        "zero points are ignored in a matrix of which one is in the middle",
        QUANTISED_TESTS,
    ),
    Mutant(
        GPTQ,
        "        zeros &= np.uint8((1 << self._bits) - 1)\n",
        "",
        "zero points of 0 in version 1 of GPTQ are read as 16",
        QUANTISED_TESTS,
    ),
    Mutant(
        COMPRESSED,
        "numbers, E4M3, scales[first + row : first + row + len(numbers)], self._grid.columns",
        "numbers, E4M3, scales[row : row + len(numbers)], self._grid.columns",
        "the second part of a fused matrix in FP8 has the scales of the first one",
        QUANTISED_TESTS,
    ),
    Mutant(
        STACKED,
        "before = expert * rows_each + begin - first",
        "before = expert * rows_each + begin",
        "the second half of an expert's gate and up is packed over other columns",
        EXPERT_TESTS,
    ),
    Mutant(
        STACKED,
        "if self._biases[0] != name:",
        "if not self._biases[0]:",
        "experts of all layers have the biases of the first layer",
        f"{EXPERT_TESTS} {GOLDEN_TESTS}",
    ),
    Mutant(
        GGUF_CHECKPOINT,
        "array, first = _typed(stored, chunk), wanted.start + row",
        "array, first = _typed(stored, chunk), row",
        "rows of K are taken from wrong places where Q, K and V are one tensor of a GGUF file",
        PACKING_TESTS,
    ),
    Mutant(
        GGUF_CHECKPOINT,
        "unit = lcm(self._pairs[name][0], 32)",
        "unit = 32",
        "rows of large matrices with heads of more than 32 are mixed up between two reads",
        PACKING_TESTS,
    ),
    Mutant(
        MAPPED_FILE,
        "rest, at = rest[count:], at + count",
        "rest = rest[count:]",
        "a tensor of more than 2 GiB, which the system reads in parts, has its beginning twice",
        "tests/runtime/model/test_packing.py",
    ),
    Mutant(
        QWEN3_MOE,
        "(layer + 1) % step == 0",
        "layer % step == 0",
        "a Qwen3-MoE with experts in every second layer looks for them in the wrong ones",
        CONFIG_TESTS,
    ),
    Mutant(
        GPT_OSS,
        "return tuple(0 if layer % 2 else window for layer in range(layers))",
        "return tuple(window if layer % 2 else 0 for layer in range(layers))",
        "the wrong layers of a gpt-oss without layer_types slide",
        f"{CONFIG_TESTS} tests/runtime/model/test_gguf_gpt_oss.py",
    ),
    Mutant(
        GPT_OSS,
        'ConfigTable({**config.values, "rope_parameters": YARN}, config.where, config.source, config.names)',
        "config",
        "a gpt-oss without rope_parameters is not scaled beyond 4,096 tokens",
        f"{CONFIG_TESTS} tests/runtime/model/test_gguf_gpt_oss.py",
    ),
    Mutant(
        DECODER,
        "rounded = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000",
        "rounded = bits + 0x8000 & 0xFFFF0000",
        "Gemma's scale of embeddings is rounded up in a tie",
        equivalent="the square root of no hidden size lies half-way between two numbers of bf16",
    ),
    Mutant(
        FILES,
        "files = [path for path in found if not _is_projector(path)] or found",
        "files = found",
        "a folder with a GGUF model and a file for its images is refused",
        "tests/runtime/model/test_gguf_models.py",
    ),
    Mutant(
        "runtime/model/families/registry.py",
        'if family.tensors is None and any(name.endswith(".mlp.experts.gate_up_proj") for name in stored.names()):',
        'if any(name.endswith(".mlp.experts.gate_up_proj") for name in stored.names()):',
        "a gpt-oss in bf16 has the names of another family's router",
        f"{EXPERT_TESTS} {GOLDEN_TESTS}",
    ),
    Mutant(
        GGUF_CONFIG,
        "NO_TOKEN = (-1, 0xFFFFFFFF)",
        "NO_TOKEN = (-1,)",
        "a GGUF file without an end-of-turn token is refused",
        GGUF_TESTS,
    ),
    Mutant(
        GGUF_CONFIG,
        'if kind == "none" or (kind',
        "if (kind",
        "a GGUF file that says that nothing is scaled is refused",
        GGUF_TESTS,
    ),
    Mutant(
        GGUF_CONFIG,
        'metadata.get(f"{architecture}.rope.scale_linear", 1)',
        "1",
        "the scaling of an old GGUF file is ignored",
        GGUF_TESTS,
    ),
    Mutant(
        GGUF_CONFIG,
        "QUANTISATION, QUANTISATION, QUANTISATION)",
        "0, 9, QUANTISATION)",
        "blocks of another version of GGML are read as if they were of this one",
        GGUF_TESTS,
    ),
    Mutant(
        "runtime/model/config_rope.py",
        "if original < 2:",
        "if False:",
        "a folder with LongRoPE from one token on ends loading with a traceback",
        CONFIG_TESTS,
    ),
    Mutant(
        DECODER_WEIGHTS,
        "        same = all(np.array_equal(as_f32(rows), as_f32(others)) for (_, rows), (_, others) in pairs)\n",
        "",
        "a head beside tied embeddings is ignored",
        "tests/runtime/model/test_bad_checkpoints.py",
    ),
    Mutant(
        GROUPED,
        "if order[-1] + 1 != num_groups:",
        "if False:",
        "a GPTQ matrix has the scales of other groups where config.json has a wrong group_size",
        QUANTISED_TESTS,
    ),
    Mutant(
        "runtime/model/config_rope.py",
        'suggested(table.positive("mscale")) / suggested(table.positive("mscale_all_dim"))',
        'suggested(table.positive("mscale"))',
        "the attention factor of YaRN with DeepSeek's keys is too large",
        CONFIG_TESTS,
    ),
    Mutant(
        GGUF_CONFIG,
        "(rotated + 0.5) / head_dim",
        "rotated / head_dim",
        "a file of Phi-3 with heads of 44, of which 30 elements rotate, is refused",
        GGUF_FAMILY_TESTS,
    ),
    Mutant(
        "runtime/model/config_json.py",
        "ConfigTable({**defaults, **self.values},",
        "ConfigTable(defaults | {key: value for key, value in self.values.items() if value is not None},",
        "heads of a Gemma 3 file without freq_base are rotated by another base than in llama.cpp",
        GGUF_FAMILY_TESTS,
    ),
    Mutant(
        "runtime/model/families/gemma.py",
        "if layers == largest:",
        "if layers < 0:",
        "the scores of Gemma 27B from a GGUF file are scaled by the size of a head",
        GGUF_FAMILY_TESTS,
    ),
    Mutant(
        "runtime/model/families/gemma.py",
        "if layers == largest:",
        "if layers >= largest:",
        "the scores of a deeper model than Gemma 27B are scaled as those of Gemma 27B",
        GGUF_FAMILY_TESTS,
    ),
    Mutant(
        "runtime/model/families/gemma3.py",
        'derived | {"sliding_window": 1,',
        'derived | {"sliding_window": 4096,',
        "a Gemma 3 file without a window has one of another size",
        GGUF_FAMILY_TESTS,
        equivalent="no layer slides in such a file, and the window of layers that see all tokens is not read",
    ),
    Mutant(
        GROUPED,
        'np.argsort(self._groups, kind="stable")',
        'np.argsort(-self._groups, kind="stable")',
        "inputs of a matrix with act-order are sorted by group in the other direction",
        QUANTISED_TESTS,
        equivalent="any order in which the inputs of a group are neighbours has the same weights",
    ),
    Mutant(
        GROUPED,
        "ScaleGrid(min(block[0], rows), min(block[1], columns))",
        "ScaleGrid(min(block[1], rows), min(block[0], columns))",
        "FP8 blocks that are not square have the scales of others",
        QUANTISED_TESTS,
    ),
    Mutant(
        GPTQ,
        "AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])",
        "AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])",
        "outputs of AWQ have the zero points of their neighbours",
        QUANTISED_TESTS,
    ),
    Mutant(
        QUANTIZATION_CONFIG,
        'zero_offset=1 if version == "gptq" else 0',
        "zero_offset=1",
        "zero points of version 2 of GPTQ are too large by one",
        QUANTISED_TESTS,
    ),
    Mutant(
        QUANTIZATION_CONFIG,
        "else _gptq(table)",
        'else Quantisation(layout="gptq", bits=4)',
        "zero points and groups of AutoRound are read as those of another format",
        QUANTISED_TESTS,
    ),
    Mutant(
        COMPRESSED,
        "np.bitwise_xor(signed.view(np.uint8), np.uint8(0x80),",
        "np.bitwise_xor(signed.view(np.uint8), np.uint8(0x00),",
        "negative int8 weights are read as large positive ones",
        QUANTISED_TESTS,
    ),
    Mutant(
        COMPRESSED,
        "np.where(exponent == 0, mantissa * 2.0**-9,",
        "np.where(exponent == 0, mantissa * 2.0**-10,",
        "the smallest FP8 weights are halved",
        QUANTISED_TESTS,
    ),
    Mutant(
        "kernels/ggml.c",
        "four_of(block + 8, load32(block + 4), line)",
        "four_of(block + 8, load32(block + 4), 7 - line)",
        "weights of Q5_1 have the bits of others",
        GGML_TESTS,
    ),
    Mutant(
        SAFETENSORS,
        "inside = 0 <= begin <= end <= file.size - data_start",
        "inside = 0 <= begin <= end <= file.size",
        "a file whose header names a tensor twice is read beyond its end",
        SAFETENSORS_TESTS,
    ),
    Mutant(
        SAFETENSORS,
        "if Path(name).name != name:",
        "if False:",
        "an index can name any file of the machine as a part of the model",
        SAFETENSORS_TESTS,
    ),
    Mutant(
        GGUF_FILE,
        'found = part.metadata.integer("split.no", 0, MAX_KEYS), part',
        "found = number, part",
        "a copy of a part of a split GGUF file under the name of another part is taken for it",
        GGUF_FILE_TESTS,
    ),
    Mutant(
        QUANTIZATION_CONFIG,
        "size = table.integer(key, -1, MAX_WIDTH, 128)",
        "size = table.integer(key, -1, MAX_WIDTH, -1)",
        "folders of GPTQ with neither group_size nor g_idx have the scales of other groups",
        QUANTISED_TESTS,
    ),
]
