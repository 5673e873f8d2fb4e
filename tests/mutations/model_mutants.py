"""Bugs in `runtime/model/`, without the encoders."""

from mutant import Mutant

TESTS = "tests/runtime/model"
TUNING, TUNED = (f"runtime/model/runner/{name}.py" for name in ("tuning", "tuned"))
TUNING_TESTS, TUNED_TESTS = (f"tests/runtime/model/runner/test_{name}.py" for name in ("tuning", "tuned"))
PACKING_TESTS = "tests/runtime/model/test_packing.py tests/runtime/model/test_gguf_models.py"
QUANTIZED_TESTS = "tests/runtime/model/test_quantized_folders.py"
EXPERT_TESTS = "tests/runtime/model/weights tests/runtime/model/test_packing.py"
CONFIG_TESTS = "tests/runtime/model/test_config_json.py tests/runtime/model/test_config_of_experts.py"
GOLDEN_TESTS = "tests/runtime/model/test_goldens.py"
DECODER_WEIGHTS, PACKING, GROUPED, GPTQ, COMPRESSED, STACKED, PAIRED_ROWS, MAPPED_FILE = (
    f"runtime/model/weights/{name}.py"
    for name in (
        *("decoder_weights", "packing", "grouped", "gptq", "compressed", "stacked_experts"),
        *("paired_rows", "mapped_file"),
    )
)
QWEN3_MOE = "runtime/model/families/qwen3_moe.py"
GPT_OSS = "runtime/model/families/gpt_oss.py"
DECODER, FEED_FORWARD = "runtime/model/decoder.py", "runtime/model/feed_forward.py"
FILES = "runtime/model/files.py"
GGUF_CONFIG = "runtime/model/gguf_config.py"
GGUF_ROPE = "runtime/model/gguf_rope.py"
GGUF_TESTS = "tests/runtime/model/test_gguf_models.py"
GGUF_FAMILY_TESTS = "tests/runtime/model/test_gguf_families.py"
QUANTIZATION_CONFIG = "runtime/model/quantization_config.py"
LINKS = "runtime/model/links.py"
LINKS_TESTS = "tests/runtime/model/test_links.py"
SAFETENSORS = "runtime/model/weights/safetensors.py"
GGML = "runtime/model/weights/ggml.py"
GGUF_FILE = "runtime/model/weights/gguf.py"
GGUF_FILE_TESTS = "tests/runtime/model/weights/test_gguf.py"
SAFETENSORS_TESTS, GGML_TESTS = (f"tests/runtime/model/weights/test_{name}.py" for name in ("safetensors", "ggml"))

MUTANTS = [
    Mutant(
        DECODER_WEIGHTS,
        "first_row = expert * rows + part.first_row",
        "first_row = part.first_row",
        "all experts of a GGUF file have the weights of the first one",
        EXPERT_TESTS,
    ),
    Mutant(
        PACKING,
        "whole = all(columns % 32 == 0 for columns, _ in ranges[:-1])",
        "whole = True",
        "a file whose Q, K and V differ in type does not load if a head is not a multiple of 32",
        PACKING_TESTS,
    ),
    Mutant(
        PACKING,
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
        QUANTIZED_TESTS,
    ),
    Mutant(
        GROUPED,
        "here = slice(first + row, first + row + len(words))",
        "here = slice(row, row + len(words))",
        "the second part of a fused matrix has the scales of the first one",
        QUANTIZED_TESTS,
    ),
    Mutant(
        GROUPED,
        "if (self._zeros() == 1 << self._bits - 1).all():",
        "if (self._zeros() == 1 << self._bits - 1).any():",
        "zero points are ignored in a matrix of which one is in the middle",
        QUANTIZED_TESTS,
    ),
    Mutant(
        GPTQ,
        "        zeros &= np.uint8((1 << self._bits) - 1)\n",
        "",
        "zero points of 0 in version 1 of GPTQ are read as 16",
        QUANTIZED_TESTS,
    ),
    Mutant(
        COMPRESSED,
        "numbers, E4M3, scales[first + row : first + row + len(numbers)], self._grid.columns",
        "numbers, E4M3, scales[row : row + len(numbers)], self._grid.columns",
        "the second part of a fused matrix in FP8 has the scales of the first one",
        QUANTIZED_TESTS,
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
        PAIRED_ROWS,
        "places[first:stop] - first)",
        "places[: stop - first])",
        "rows of K are taken from wrong places where Q, K and V are one tensor of a GGUF file",
        PACKING_TESTS,
    ),
    Mutant(
        PAIRED_ROWS,
        "unit = lcm(self.pairs[name.removesuffix(SORTED)].head_dim, 32)",
        "unit = 32",
        "rows of large matrices with heads of more than 32 are mixed up between two reads",
        PACKING_TESTS,
    ),
    Mutant(
        PAIRED_ROWS,
        "heads[:, self.first : self.first + self.rotated]\n",
        "heads[:, self.first :]\n",
        "a head that is rotated in part has its other rows in the order of rotated ones",
        GOLDEN_TESTS,
    ),
    Mutant(
        MAPPED_FILE,
        "rest = rest[count:]\n            at += count",
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
        FEED_FORWARD,
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
        "if family.tensors is None and _has_fused_experts(own):",
        "if _has_fused_experts(own):",
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
        GGUF_ROPE,
        'if kind == "none" or (kind',
        "if (kind",
        "a GGUF file that says that nothing is scaled is refused",
        GGUF_TESTS,
    ),
    Mutant(
        GGUF_ROPE,
        'metadata.get(f"{architecture}.rope.scale_linear", 1)',
        "1",
        "the scaling of an old GGUF file is ignored",
        GGUF_TESTS,
    ),
    Mutant(
        GGUF_CONFIG,
        "QUANTIZATION, QUANTIZATION, QUANTIZATION)",
        "0, 9, QUANTIZATION)",
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
        QUANTIZED_TESTS,
    ),
    Mutant(
        "runtime/model/config_rope.py",
        'yarn_factor(factor, table.positive("mscale")) / yarn_factor(factor, table.positive("mscale_all_dim"))',
        'yarn_factor(factor, table.positive("mscale"))',
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
        QUANTIZED_TESTS,
        equivalent="any order in which the inputs of a group are neighbors has the same weights",
    ),
    Mutant(
        GROUPED,
        "ScaleGrid(min(block[0], rows), min(block[1], columns))",
        "ScaleGrid(min(block[1], rows), min(block[0], columns))",
        "FP8 blocks that are not square have the scales of others",
        QUANTIZED_TESTS,
    ),
    Mutant(
        GPTQ,
        "AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])",
        "AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])",
        "outputs of AWQ have the zero points of their neighbors",
        QUANTIZED_TESTS,
    ),
    Mutant(
        QUANTIZATION_CONFIG,
        'zero_offset=1 if version == "gptq" else 0',
        "zero_offset=1",
        "zero points of version 2 of GPTQ are too large by one",
        QUANTIZED_TESTS,
    ),
    Mutant(
        QUANTIZATION_CONFIG,
        "else _gptq(table)",
        'else Quantization(layout="gptq", bits=4)',
        "zero points and groups of AutoRound are read as those of another format",
        QUANTIZED_TESTS,
    ),
    Mutant(
        COMPRESSED,
        "np.bitwise_xor(signed.view(np.uint8), np.uint8(0x80),",
        "np.bitwise_xor(signed.view(np.uint8), np.uint8(0x00),",
        "negative int8 weights are read as large positive ones",
        QUANTIZED_TESTS,
    ),
    Mutant(
        COMPRESSED,
        "np.where(exponent == 0, mantissa * 2.0**-9,",
        "np.where(exponent == 0, mantissa * 2.0**-10,",
        "the smallest FP8 weights are halved",
        QUANTIZED_TESTS,
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
        QUANTIZED_TESTS,
    ),
    Mutant(
        "runtime/model/weights/compressed.py",
        '("I32",), -(-shape[0] * bits // 32), num_groups)',
        '("I32",), shape[0] * bits // 32, num_groups)',
        "matrices of compressed-tensors with zero points are refused if their outputs are no multiple of 8",
        "tests/runtime/model/test_quantized_folders.py",
    ),
    Mutant(
        "runtime/model/weights/compressed.py",
        "if -(-columns * bits // 32) == words), 0)",
        "if columns * bits // 32 == words), 0)",
        "matrices of compressed-tensors are refused if their inputs are no multiple of 8",
        "tests/runtime/model/test_quantized_folders.py",
    ),
    Mutant(
        "runtime/model/weights/compressed.py",
        "np.zeros((num_rows, -(-self.shape[1] // 4) * 4), np.uint8)",
        "np.zeros((num_rows, self.shape[1]), np.uint8)",
        "matrices in int8 end loading if their inputs are no multiple of 4",
        "tests/runtime/model/test_quantized_folders.py",
    ),
    Mutant(
        "runtime/model/weights/gptq.py",
        "if words == -(-outputs * bits // 32)), default)",
        "if words == outputs * bits // 32), default)",
        "modules of GPTQ with bits of their own are refused if their outputs are no multiple of 8",
        "tests/runtime/model/test_quantized_folders.py",
    ),
    Mutant(
        "runtime/model/config_rope.py",
        'config.values.get("rope_scaling") else "rope_parameters"',
        '"rope_scaling" in config else "rope_parameters"',
        "the scaling in rope_parameters is dropped where rope_scaling is null",
        "tests/runtime/model/test_config_json.py",
    ),
    Mutant(
        "runtime/model/config_rope.py",
        "return replace(rope, axes=tuple(axes))",
        "return replace(rope, axes=tuple(axes), scaling=None)",
        "models with images are not scaled beyond the context of their training",
        "tests/runtime/model/test_config_json.py",
    ),
    Mutant(
        "runtime/model/gguf_config.py",
        '    "rope_scaling.beta_fast": "rope.scaling.yarn_beta_fast",\n',
        "",
        "the range of YaRN in a GGUF file is that of the paper",
        "tests/runtime/model/test_gguf_families.py",
    ),
    Mutant(
        "runtime/model/gguf_config.py",
        '    "rope_scaling.attention_factor": "rope.scaling.yarn_attn_factor",\n',
        "",
        "the attention factor of YaRN in a GGUF file is that of the paper",
        "tests/runtime/model/test_gguf_families.py",
    ),
    Mutant(
        "runtime/model/encoder/nomic_bert.py",
        "activation, read_rope(config))",
        'activation, read_rope(ConfigTable({**config.values, "rope_parameters": {}})))',
        "the rotary embedding of a NomicBERT of transformers 5 has another base",
        "tests/runtime/model/encoder/test_read_encoder.py",
    ),
    Mutant(
        "runtime/model/encoder/modernbert.py",
        'config.table("rope_parameters").table(kind)',
        "ConfigTable({})",
        "the scaling of a ModernBERT is dropped",
        "tests/runtime/model/encoder/test_read_encoder.py",
    ),
    Mutant(
        LINKS,
        "return commonpath([target, root]) == root",
        "return target.startswith(root)",
        "a link to a folder whose name begins as the model's shows any file there",
        LINKS_TESTS,
    ),
    Mutant(
        GGUF_FILE,
        "(np.abs(array) < MAX_INTEGRAL) & ",
        "",
        "large scores of a GGUF file have other values than before they were f32",
        GGUF_FILE_TESTS,
    ),
    Mutant(
        TUNING,
        "<= WINNING_SHARE * _sum(trials, isa, of)",
        "<= _sum(trials, isa, of)",
        "noise of a measurement chooses the functions of a level",
        TUNING_TESTS,
    ),
    Mutant(
        TUNING,
        "for of in (statistics.median, min))",
        "for of in (statistics.median,))",
        "a busy moment of the own level chooses another level",
        TUNING_TESTS,
    ),
    Mutant(
        TUNING,
        "levels[(number + turn) % len(levels)]",
        "levels[turn]",
        "levels that follow find the data of the first one in the cache, and win",
        TUNING_TESTS,
    ),
    Mutant(
        TUNING,
        "            if time.perf_counter() > deadline:\n",
        "            if time.perf_counter() > 2 * deadline:\n",
        "a start takes longer than the time of tuning",
        TUNING_TESTS,
    ),
    Mutant(
        TUNING,
        "    program.op_seconds()  # resets the times for later readers\n",
        "",
        "the first times by op that are read contain those of tuning",
        TUNING_TESTS,
    ),
    Mutant(
        TUNED,
        "os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC",
        "os.O_RDONLY | os.O_CLOEXEC",
        "a pipe in the cache folder stops the start of an engine",
        TUNED_TESTS,
    ),
    Mutant(
        TUNED,
        "tuning is not None and tuning.key == key",
        "tuning is not None",
        "a file of another machine decides about functions",
        TUNED_TESTS,
    ),
    Mutant(
        TUNED,
        " or not tuning.choices.keys() <= known",
        "",
        "an unknown function in a file of the cache ends the start of an engine",
        TUNED_TESTS,
    ),
    Mutant(
        TUNED,
        "            os.replace(name, folder / tuning.key.file_name)\n",
        "            (folder / tuning.key.file_name).write_bytes(Path(name).read_bytes())\n",
        "an engine reads the half of a file that another engine writes",
        TUNED_TESTS,
    ),
    Mutant(
        TUNED,
        'if capacity.tune == "auto" else None',
        'if capacity.tune != "off" else None',
        "`--tune full` measures nothing if there is a file",
        TUNED_TESTS,
    ),
]
