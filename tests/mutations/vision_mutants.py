"""Bugs in vision towers, in the processors of images, and in the places of images in prompts and steps."""

from mutant import Mutant

DYNAMIC, QWEN, REGISTRY, PACKED = (
    f"runtime/model/vision/{name}.py" for name in ("dynamic", "qwen", "registry", "packed")
)
RUNNER, POSITIONS, PACED, PROGRAM = (
    f"runtime/model/runner/{name}.py" for name in ("image_runner", "image_positions", "paced_work", "image_program")
)
PROCESSORS = "runtime/engine/images/processors.py"
PLAN = "scheduler/plan.py"
PLANNING = "scheduler/planning.py"
TESTS = "tests/runtime/model/test_vision.py tests/runtime/model/test_dynamic_vision.py"
POSITION_TESTS = "tests/runtime/model/runner/test_image_positions.py"
PACED_TESTS = "tests/runtime/model/runner/test_paced_work.py"
FILE_TESTS = "tests/runtime/engine/test_image_files.py"
STEP_TESTS = "tests/scheduler/test_images.py"
ENGINE_TESTS = "tests/runtime/engine/test_images.py"

MUTANTS = [
    Mutant(
        PACKED,
        r"(?:(?<=vision_tower\.)vision_model\.)?",
        "",
        "a Gemma 3 that transformers before 5.24 saved is not loaded",
        TESTS,
    ),
    Mutant(
        REGISTRY,
        'tile.values["longest_edge"] != size',
        'tile.values["longest_edge"] > size',
        "a model whose tiles are smaller than its tower takes is loaded, and every image fails",
        TESTS,
    ),
    Mutant(
        POSITIONS,
        "shift += max(rows, columns) - image.tokens",
        "shift += rows - image.tokens",
        "text after an image that is wider than high has positions that are too small (M-RoPE)",
        POSITION_TESTS,
    ),
    Mutant(
        POSITIONS,
        "positions[begin:end, 1] += squares // columns",
        "positions[begin:end, 1] += squares // rows",
        "tokens of an image that is not square have other rows",
        POSITION_TESTS,
    ),
    Mutant(
        POSITIONS,
        "squares = np.arange(begin, end) + first - image.position",
        "squares = np.arange(begin, end) - begin",
        "a chunk that begins inside an image has the positions of the image's first tokens",
        POSITION_TESTS,
    ),
    Mutant(
        POSITIONS,
        "self._table[positions[:, axis, None], columns]",
        "self._table[positions[:, 0, None], columns]",
        "heads are turned by the position in time only",
        POSITION_TESTS,
    ),
    Mutant(
        "runtime/model/config_rope.py",
        "axes[axis : 3 * sections[axis] : 3] = [axis]",
        "axes[axis : 3 * sections[axis] : 3] = [3 - axis]",
        "Qwen3-VL takes rows for columns",
        ENGINE_TESTS,
    ),
    Mutant(
        DYNAMIC,
        "windows = (down[:, None] * (across[-1] + 1) + across).reshape(-1)",
        "windows = (down[:, None] * across[-1] + across).reshape(-1)",
        "the last window of a row of windows is one with the first of the next row",
    ),
    Mutant(
        DYNAMIC,
        "np.concatenate([cos[y], cos[x], sin[y], sin[x]], axis=-1)",
        "np.concatenate([cos[x], cos[y], sin[x], sin[y]], axis=-1)",
        "the tower sees images with rows and columns exchanged",
    ),
    Mutant(
        DYNAMIC,
        "out += table[bottom, left] * (down * (1 - across))",
        "out += table[bottom, right] * (down * (1 - across))",
        "learned positions of Qwen3-VL are a little too far to the right",
    ),
    Mutant(
        DYNAMIC,
        "np.float32((grid - 1) / max(count - 1, 1))",
        "np.float32(grid / max(count, 1))",
        "learned positions of Qwen3-VL are stretched",
    ),
    Mutant(
        DYNAMIC,
        "still = patches.reshape(-1, CHANNELS, 1, self.sizes.patch_size**2)",
        "still = patches.reshape(-1, 1, CHANNELS, self.sizes.patch_size**2)",
        "patches have their channels inside of frames instead of frames inside of channels",
    ),
    Mutant(
        DYNAMIC,
        "tuple(whole if sees_all else windows for sees_all in self.sees_all)",
        "tuple(windows if sees_all else whole for sees_all in self.sees_all)",
        "layers of Qwen2.5-VL with windows see the whole image, and the others do not",
    ),
    Mutant(
        DYNAMIC,
        "min_pixels=min(processor.integer",
        "min_pixels=max(processor.integer",
        "small images have more tokens than `--max-image-tokens` allows",
    ),
    Mutant(
        QWEN,
        "return tuple(layer in full for layer in range(layers))",
        "return tuple(layer + 1 in full for layer in range(layers))",
        "other layers of Qwen2.5-VL see the whole image",
    ),
    Mutant(
        QWEN,
        'Merger(f"{start}linear_fc1", f"{start}linear_fc2", level, f"{start}norm")',
        'Merger(f"{start}linear_fc1", f"{start}linear_fc2", level + 1, f"{start}norm")',
        "DeepStack takes the rows of the layer after the right one",
    ),
    Mutant(
        RUNNER,
        "yield from self._merge(1 + read_layers.index(layer), self._patches.result(1), given)",
        "yield from self._merge(1 + read_layers.index(layer), self._patches.result(), given)",
        "DeepStack takes rows that are normed",
    ),
    Mutant(
        RUNNER,
        "self._rows_in_progress[places[first + begin : first + end], columns]",
        "self._rows_in_progress[first + begin : first + end, columns]",
        "rows of an image are in the order of the tower's windows",
    ),
    Mutant(
        RUNNER,
        "rows = patches[(first + begin) * per_square : (first + end) * per_square]",
        "rows = patches[begin * per_square : end * per_square]",
        "all parts of a large image look like the first one",
    ),
    Mutant(
        RUNNER,
        "of_sequence[max(0, image.position - first) : image.end - first] = image.end - 1",
        "of_sequence[image.position - first : image.end - first] = image.end - 1",
        "behind cached pages that end inside an image of Gemma 3, its tokens do not see each other",
    ),
    Mutant(
        RUNNER,
        "            current = self._in_progress\n            if current is None:",
        "            current = self._in_progress\n            if current is None or current != key:",
        "images of two requests begin again in turns, and none is done",
    ),
    Mutant(
        RUNNER,
        "                elif key != self._finished_unused:",
        "                elif key:",
        "each image that is computed counts as a hit of the cache",
    ),
    Mutant(
        REGISTRY,
        'mean_norm="multi_modal_projector.mm_soft_emb_norm", whole_images=True',
        'mean_norm="multi_modal_projector.mm_soft_emb_norm"',
        "tokens of an image of Gemma 3 see only those before them",
    ),
    Mutant(
        PACKED,
        'factory.vector(hidden, [Part(f"{spec.mean_norm}.weight", (hidden,))], offset=1.0)',
        'factory.vector(hidden, [Part(f"{spec.mean_norm}.weight", (hidden,))])',
        "rows of Gemma 3's images lack the 1 that its norms leave out",
    ),
    Mutant(
        PROGRAM,
        "memory[rows, columns:] = 0  # another value of the arena may have been there",
        "pass",
        "an image after one with numbers that are not finite has such numbers, too",
    ),
    Mutant(
        PACED,
        "return int(seconds / item_s) // piece.part_items * piece.part_items",
        "return (int(seconds / item_s) // piece.part_items + 1) * piece.part_items",
        "each step takes longer than its latency target by a part of an image",
        PACED_TESTS,
    ),
    Mutant(
        PACED,
        "            has_begun = True\n",
        "",
        "a step that computes a part of an image does not end before the image does",
        PACED_TESTS,
    ),
    Mutant(
        PACED,
        "pace = (self._clock() - start) / (num_items * piece.size)",
        "pace = (self._clock() - start) / num_items",
        "parts of wide layers take longer than a step may",
        PACED_TESTS,
    ),
    Mutant(
        PLAN,
        "if image.position < first + num_tokens < image.end:",
        "if image.position < first + num_tokens <= image.end:",
        "a chunk that ends where an image ends does not have it, and the prompt never ends",
        STEP_TESTS,
    ),
    Mutant(
        PLAN,
        "if image.position <= first < image.end), 1)",
        "if image.position < first < image.end), 1)",
        "a chunk that begins with an image has one token of it, so that its tokens do not see each other",
        STEP_TESTS,
    ),
    Mutant(
        PLANNING,
        "num_allowed = 0 if self._has_image else 1",
        "num_allowed = 1",
        "a step computes the images of several requests and takes as many times as long",
        STEP_TESTS,
    ),
    Mutant(
        PROCESSORS,
        "max(block, math.floor(edge / scale / block) * block)",
        "max(block, round(edge / scale / block) * block)",
        "a large image has more pixels than the processor allows",
        FILE_TESTS,
    ),
    Mutant(
        PROCESSORS,
        "math.ceil(edge * scale / block) * block",
        "math.floor(edge * scale / block) * block",
        "a small image is made smaller than the reference makes it",
        FILE_TESTS,
    ),
    Mutant(
        PROCESSORS,
        'text = f"\\n\\n{self.placeholder}',
        'text = f"\\n{self.placeholder}',
        "the prompt of an image of Gemma 3 lacks a line break",
        FILE_TESTS,
    ),
]
