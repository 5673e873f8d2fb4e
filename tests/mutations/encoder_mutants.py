"""Bugs in encoders, vision towers, images and requests to embed, from `runtime/model/` to `runtime/server/`."""

from mutant import Mutant

TESTS = "tests/runtime/model/encoder"
RUNNER = "runtime/model/runner/encoder_runner.py"
TRANSFORMER_MODULE = "runtime/model/encoder/transformer_module.py"
EMIT, MODULES, REGISTRY, MODERNBERT, TENSORS, WEIGHTS = (
    f"runtime/model/encoder/{name}.py"
    for name in ("emit", "sentence_transformers", "registry", "modernbert", "tensors", "weights")
)
TOWER, VISION, IMAGES, IMAGE_RUNNER, VISION_TESTS = (
    "runtime/model/vision/spec.py",
    "runtime/model/vision",
    "runtime/engine/images",
    "runtime/model/runner/image_runner.py",
    "tests/runtime/model/test_vision.py",
)
IMAGE_TESTS = "tests/runtime/engine/test_image_files.py"
ENCODER_TEXT, ENCODER_TEXT_TESTS = (
    "runtime/engine/text/encoder_text.py",
    "tests/runtime/engine/text/test_encoder_text.py",
)
VECTOR_MATH = "runtime/engine/vectors.py"
EMBEDDING, EMBEDDING_TESTS = "runtime/engine/embedding.py", "tests/runtime/engine/test_embedding.py"
PLANNER, PLANNER_TESTS = "scheduler/encoding.py", "tests/scheduler/test_encoding.py tests/sim/test_embedding_flood.py"
LIVE, VECTORS, HTTP = (f"runtime/server/{name}.py" for name in ("live_embedding", "vector_stream", "openai/embeddings"))
DOOR_TESTS = "tests/system/test_embeddings.py"
STREAM_TESTS = "tests/runtime/server/test_vector_stream.py"

MUTANTS = [
    Mutant(
        RUNNER,
        "        self._program.give_up()\n        token_ids",
        "        token_ids",
        "a refused batch is answered with the values of the one before it",
    ),
    Mutant(
        RUNNER,
        '        if any(len(of_text) != len(text.token_ids) for of_text, text in zip(types, texts, strict=True)):\n            raise ValueError("a text has a type for each token, or none")\n',
        "",
        "types that are fewer than tokens are read beyond their end",
    ),
    Mutant(
        RUNNER,
        "types = [text.type_ids or (0,) * len(text.token_ids) for text in texts]",
        "types = [text.type_ids or () for text in texts]",
        "texts without types cannot be embedded beside texts with them",
    ),
    Mutant(
        RUNNER,
        "return self._values[: self._num_texts, : self.spec.dimensions].copy()",
        "return self._values[: self._num_texts, : self.spec.dimensions]",
        "vectors of a batch are overwritten by the next one",
    ),
    Mutant(
        RUNNER,
        "return self._base_s + self._row_s * tokens + self._pair_s * pairs",
        "return self._base_s + self._row_s * tokens",
        "long texts take far longer than predicted, and sequences beside them stall",
    ),
    Mutant(
        EMIT,
        "scale, window, causal=False",
        "scale, 0, causal=False",
        "layers with a window see all tokens",
    ),
    Mutant(
        MODULES,
        "if len(chosen) > 1 or",
        "if",
        "two ways of pooling are one of them",
    ),
    Mutant(
        MODULES,
        "        projections.append(_dense(config, path, width))\n",
        "        projections.append(_dense(config, path, hidden_size))\n",
        "models with two dense modules are refused",
    ),
    Mutant(
        MODULES,
        '"sigmoid" if labels == 1 else "identity"',
        '"sigmoid"',
        "scores of several labels are squeezed to probabilities",
    ),
    Mutant(
        MODULES,
        'elif kind == "Dense" and pooling is not None and not normalise and not scores:',
        'elif kind == "Dense" and pooling is not None and not scores:',
        "vectors are normalised after a dense module that follows their norm",
    ),
    Mutant(
        REGISTRY,
        "token >= body.vocab_size:",
        "token > body.vocab_size:",
        "an answer token after the end of the vocabulary is read out of bounds",
    ),
    Mutant(
        MODERNBERT,
        'window = config.integer("local_attention", 2, MAX_POSITIONS, 128) // 2',
        'window = config.integer("local_attention", 2, MAX_POSITIONS, 128)',
        "windows of ModernBERT are twice as wide",
    ),
    Mutant(
        MODERNBERT,
        "KINDS[bool(layer % every)]",
        "KINDS[bool((layer + 1) % every)]",
        "other layers of ModernBERT see all tokens",
    ),
    Mutant(
        TENSORS,
        "row(answer.true) - row(answer.false)",
        "row(answer.true)",
        "the logit of the token for false does not count",
    ),
    Mutant(
        WEIGHTS,
        "spec.first_position, max_positions)",
        "0, max_positions)",
        "positions of RoBERTa begin with those of padding",
    ),
    Mutant(
        REGISTRY,
        "max_model_len=min(body.max_position_embeddings, settings.max_length or body.max_position_embeddings),",
        "max_model_len=settings.max_length or body.max_position_embeddings,",
        "a folder whose longest text has more tokens than the model has positions is loaded",
    ),
    Mutant(
        TENSORS,
        "max(answer.true, answer.false or 0) >= shape[0]",
        "answer.true >= shape[0]",
        "a head without the row of the token for false ends loading with an error without a type",
    ),
    Mutant(
        TRANSFORMER_MODULE,
        'lower_case=config.flag("do_lower_case", False),',
        "lower_case=False,",
        "texts are not lower-cased where the folder says so",
        ENCODER_TEXT_TESTS,
    ),
    Mutant(
        MODULES,
        "    if default is not None and default not in prompts:",
        "    if default is not None and not prompts:",
        "a default prompt that does not exist ends every request",
    ),
    Mutant(
        TOWER,
        "split.transpose(0, 3, 1, 4, 6, 2, 5)",
        "split.transpose(0, 3, 1, 4, 6, 5, 2)",
        "each patch of an image is mirrored along its diagonal",
        VISION_TESTS,
    ),
    Mutant(
        f"{VISION}/processor_files.py",
        'PROCESSOR_FILES = {"processor_config.json": "image_processor", "preprocessor_config.json": ""}',
        'PROCESSOR_FILES = {"preprocessor_config.json": "", "processor_config.json": "image_processor"}',
        "pixels are normalised by the older of two processor files",
        VISION_TESTS,
    ),
    Mutant(
        f"{VISION}/registry.py",
        "    if grid % scale:",
        "    if grid < scale:",
        "a tower whose patches do not fill whole squares ends loading with an error without a type",
        VISION_TESTS,
    ),
    Mutant(
        IMAGE_RUNNER,
        "while self._cache_bytes > self._max_cache_bytes",
        "while self._cache_bytes >= self._max_cache_bytes",
        "a cache with room for two images holds one",
        VISION_TESTS,
    ),
    Mutant(
        IMAGE_RUNNER,
        "        self._cache.move_to_end(key)\n",
        "",
        "the images that are used most leave the cache first",
        VISION_TESTS,
    ),
    Mutant(
        f"{IMAGES}/reader.py",
        " or end > len(token_ids)",
        "",
        "a prompt that ends within an image is computed with rows beyond its end",
        IMAGE_TESTS,
    ),
    Mutant(
        f"{IMAGES}/reader.py",
        "num_bytes += sum(array.nbytes for array in images[-1].arrays)",
        "num_bytes = sum(array.nbytes for array in images[-1].arrays)",
        "many images of one chat take more memory than those of all requests may",
        IMAGE_TESTS,
    ),
    Mutant(
        f"{IMAGES}/decoding.py",
        "6: Image.Transpose.ROTATE_270,",
        "6: Image.Transpose.ROTATE_90,",
        "photographs of telephones held upright are upside down",
        IMAGE_TESTS,
    ),
    Mutant(
        VECTOR_MATH,
        "-min(max(value, -500), 500)",
        "-value",
        "a pair with a very low logit ends its request",
        EMBEDDING_TESTS,
    ),
    Mutant(
        VECTOR_MATH,
        "np.maximum(lengths, 1e-12)).astype",
        "lengths).astype",
        "the score of a document whose vector is zero is NaN",
        EMBEDDING_TESTS,
    ),
    Mutant(
        EMBEDDING,
        "await self._embedder.add(self.request, texts, self._deadline, True)",
        "await self._embedder.add(self.request, texts, None, True)",
        "a request with thousands of texts goes on after its deadline",
        EMBEDDING_TESTS,
    ),
    Mutant(
        EMBEDDING,
        "if self._leave(stream) and self.observer is not None:",
        "self._leave(stream)\n        if self.observer is not None:",
        "a cancelled request is counted twice",
        EMBEDDING_TESTS,
    ),
    Mutant(
        EMBEDDING,
        "return text[:most]",
        "return text",
        "a text of megabytes is tokenized to be truncated",
        EMBEDDING_TESTS,
    ),
    Mutant(
        PLANNER,
        "            if steps and stage_s > seconds:\n                break\n",
        "",
        "sequences wait for a stage of one batch more than there is time for",
        PLANNER_TESTS,
    ),
    Mutant(
        PLANNER,
        "return seconds / max(fitting, key=lambda stages: stages * fitting[stages])",
        "return seconds / max(fitting)",
        "beside a latency target batches have few texts, and a flood takes longer than it must",
        PLANNER_TESTS,
    ),
    Mutant(
        PLANNER,
        "or len(texts) == self._limits.max_texts:",
        "or len(texts) > self._limits.max_texts:",
        "batches of many short texts fail",
        PLANNER_TESTS,
    ),
    Mutant(
        HTTP,
        'for name in ("priority", "deadline_ms", "truncate_prompt_tokens"):',
        'for name in ("deadline_ms", "truncate_prompt_tokens"):',
        "the priority of HTTP requests to embed is ignored",
        STREAM_TESTS,
    ),
    Mutant(
        HTTP,
        'shows_documents = fields.take("return_documents", bool, True)',
        "shows_documents = True",
        "rerank sends all documents back although the client asked it not to",
        DOOR_TESTS,
    ),
    Mutant(
        VECTORS,
        "per_frame = max(1, room // (SCORE_BYTES if self._is_score else VALUE_BYTES * size))",
        "per_frame = num_texts",
        "vectors that are longer than a frame end the connection",
        STREAM_TESTS,
    ),
    Mutant(
        VECTORS,
        "        if not self._cancelled:\n            await self._delivery.send_buffer.wait_until_short()\n",
        "",
        "a client that does not read fills the server's memory with vectors",
        STREAM_TESTS,
    ),
    Mutant(
        LIVE,
        "self._tenant.leave(usage)",
        "self._tenant.leave(None)",
        "tokens of texts are missing in the totals of their tenant",
        STREAM_TESTS,
    ),
    Mutant(
        EMBEDDING,
        "rows = shortened(rows, request.dimensions, info.normalise)",
        "rows = shortened(rows, request.dimensions, True)",
        "shortened vectors of a model that does not normalise have length 1",
        EMBEDDING_TESTS,
    ),
    Mutant(
        EMBEDDING,
        "        self.prompt_tokens += num_tokens\n",
        "        self.prompt_tokens = num_tokens\n",
        "the usage of many texts is that of the last chunk",
        EMBEDDING_TESTS,
    ),
    Mutant(
        "runtime/engine/encoder.py",
        "finite = np.logical_and.reduce(np.isfinite(rows), axis=1)",
        "finite = np.full(len(rows), np.isfinite(rows).all())",
        "a text with values that are not finite ends all requests of its batch",
        EMBEDDING_TESTS,
    ),
    Mutant(
        ENCODER_TEXT,
        "EncodedText(cut(text.token_ids), None if text.type_ids is None else cut(text.type_ids))",
        "EncodedText(cut(text.token_ids), None if text.type_ids is None else text.type_ids[:max_tokens])",
        "the last token of a truncated pair has the type of the query",
        ENCODER_TEXT_TESTS,
    ),
    Mutant(
        ENCODER_TEXT,
        "encode_typed(self._prompt + query, document)",
        "encode_typed(query, document)",
        "the default prompt of a reranker without a template is not used",
        ENCODER_TEXT_TESTS,
    ),
    Mutant(
        ENCODER_TEXT,
        "while count > 1 and ids[count - 1] == padding:",
        "if count > 1 and ids[count - 1] == padding:",
        "a classifier that is a decoder pools a padding token where a text ends with two",
        ENCODER_TEXT_TESTS,
    ),
    Mutant(
        ENCODER_TEXT,
        'return "token_type_ids" in names',
        "return True",
        "the document of a pair has type 1 although the tokenizer gives the model no types",
        ENCODER_TEXT_TESTS,
    ),
    Mutant(
        ENCODER_TEXT,
        "and body.first_position - 1 in ids",
        "and body.first_position in ids",
        "a text with RoBERTa's padding token has other positions than in transformers",
        ENCODER_TEXT_TESTS,
    ),
    Mutant(
        TRANSFORMER_MODULE,
        "if value is not None and not allowed[key](value):",
        "if value is not None and not allowed[key]:",
        "a folder whose texts have no special tokens gets them",
    ),
    Mutant(
        TRANSFORMER_MODULE,
        "1 <= limit <= MAX_POSITIONS",
        "limit <= MAX_POSITIONS",
        "a folder whose tokenizer has the limit -1 takes no text",
    ),
    Mutant(
        HTTP,
        "for index, row in enumerate(chunk.values, chunk.first_index):\n            vector",
        "for index, row in enumerate(chunk.values):\n            vector",
        "the index of vectors begins again with each chunk",
        DOOR_TESTS,
    ),
    Mutant(
        f"{IMAGES}/processors.py",
        "if max(width, height) / min(width, height) > MAX_RATIO:",
        "if max(width, height) / min(width, height) >= MAX_RATIO:",
        "an image that is 200 times as long as high is refused",
        "tests/runtime/model/test_dynamic_vision.py",
    ),
    Mutant(
        "runtime/common/prompts.py",
        "return sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()",
        "return sha256(pixels.tobytes()).digest()",
        "two images of one colour and of different shapes are one in the caches",
        IMAGE_TESTS,
    ),
    Mutant(
        IMAGE_RUNNER,
        "rows = self._rows((sequence.salt, image.digest), image)",
        'rows = self._rows((b"", image.digest), image)',
        "a step computes the images of a tenant with a salt once more, without a limit of time",
        VISION_TESTS,
    ),
    Mutant(
        "runtime/server/openai/image_urls.py",
        "        allowed = [self._allowed(image) for image in images]  # all, before one is fetched\n",
        "        allowed = (self._allowed(image) for image in images)\n",
        "images are fetched for a request that is refused",
        "tests/runtime/server/test_openai_image_urls.py",
    ),
    Mutant(
        f"{IMAGES}/decoding.py",
        "    if max(width, height) > MAX_EDGE:",
        "    if max(width, height) >= MAX_EDGE:",
        "an image with an edge of 65,535 pixels, the most that JPEG allows, is refused",
        IMAGE_TESTS,
    ),
    Mutant(
        f"{IMAGES}/decoding.py",
        '    if image.format in ("JPEG", "MPO"):',
        '    if image.format == "JPEG":',
        "photographs of telephones that have a second picture are refused as animated",
        IMAGE_TESTS,
    ),
    Mutant(
        EMBEDDING,
        '("document", "passage")',
        '("passage", "document")',
        "documents have the prompt for passages although the model has one for documents",
        EMBEDDING_TESTS,
    ),
]
