"""Bugs in `runtime/engine/text/`."""

from mutant import Mutant

TESTS = "tests/runtime/engine/text tests/runtime/engine/test_text_processor.py"
DETOKENIZER, CHAT, TOKENIZER, SANDBOX, GGUF, NAMES = (
    f"runtime/engine/text/{name}.py"
    for name in ("detokenizer", "chat", "tokenizer", "sandbox", "gguf_tokenizer", "pre_tokenizers")
)
PARSER, ARGUMENTS = "runtime/engine/text/markup_parser.py", "runtime/engine/text/argument_streams.py"
MERGES = "runtime/engine/text/merges.py"
PARSER, ARGUMENTS, GRAMMAR = (
    f"runtime/engine/text/{name}.py" for name in ("markup_parser", "argument_streams", "markup_grammar")
)
MARKUP_TESTS = "tests/runtime/engine/text/test_markup.py tests/runtime/engine/test_tool_calls.py"

MUTANTS = [
    Mutant(
        DETOKENIZER,
        "armed=self.num_tokens >= self._min_tokens)",
        "armed=self.num_tokens > self._min_tokens)",
        "stop strings are armed one token late at min_tokens",
    ),
    Mutant(
        DETOKENIZER,
        "self._matched[index] = borders[matched - 1] if complete else matched",
        "self._matched[index] = 0 if complete else matched",
        "a match that overlaps an unarmed stop string is missed",
    ),
    Mutant(
        DETOKENIZER,
        "        while matched and pattern[matched] != character:\n            matched = borders[matched - 1]",
        "        if matched and pattern[matched] != character:\n            matched = 0",
        "a stop string that begins inside a failed match is missed",
    ),
    Mutant(
        DETOKENIZER,
        "self._patterns = sorted(set(stop), key=len, reverse=True)",
        "self._patterns = sorted(set(stop), key=len)",
        "of two stop strings that end together the shorter wins",
    ),
    Mutant(
        DETOKENIZER,
        "        return max(self._matched)",
        "        return min(self._matched)",
        "the start of a stop string is streamed before it is known not to be one",
    ),
    Mutant(
        DETOKENIZER,
        "self.stop_token_index = self.num_tokens - 1",
        "self.stop_token_index = self.num_tokens",
        "a token after the stop string is kept",
    ),
    Mutant(
        DETOKENIZER,
        "            rest = self._release(rest, self._matcher) + self._held",
        "            rest = self._held + self._release(rest, self._matcher)",
        "at the end the held text comes twice or in the wrong order",
    ),
    Mutant(
        DETOKENIZER,
        "        self._previous = token_id\n",
        "        self._previous = self._previous if self._previous is not None else token_id\n",
        "SentencePiece tokens are decoded after the first token, and spaces are lost",
    ),
    Mutant(
        DETOKENIZER,
        '        if raw == b"" or token_id in self._tokenizer.special_token_ids:',
        '        if raw == b"":',
        "special tokens appear in the text",
    ),
    Mutant(
        CHAT,
        "    return {key: _copy(item, depth - 1, left, what) for key, item in value.items()}",
        "    return {key: _copy(item, depth, left, what) for key, item in value.items()}",
        "the depth of maps in a chat is unlimited",
    ),
    Mutant(
        CHAT,
        "        return [_copy(item, depth - 1, left, what) for item in value]",
        "        return [_copy(item, depth, left, what) for item in value]",
        "the depth of lists in a chat is unlimited",
    ),
    Mutant(
        CHAT,
        "    left[0] -= 1\n",
        "    left = [left[0] - 1]\n",
        "the number of values in a chat is unlimited",
    ),
    Mutant(
        CHAT,
        "        declared = named.get(name)",
        "        declared = next(iter(named.values()), None)",
        "a model with several templates uses the first, such as that for tools",
    ),
    Mutant(
        CHAT,
        '_file_source(folder / "chat_template.jinja") or _config_source(config, "default")',
        '_config_source(config, "default") or _file_source(folder / "chat_template.jinja")',
        "an outdated template in tokenizer_config.json wins over chat_template.jinja",
    ),
    Mutant(
        CHAT,
        'text = declared.get("content") if isinstance(declared, dict) else declared',
        "text = declared",
        "templates of models that declare tokens as objects lack bos_token",
    ),
    Mutant(
        CHAT,
        "if not self._takes_null:",
        "if False:",
        "a message with calls and no text is refused by templates that read a list of parts",
    ),
    Mutant(
        CHAT,
        '.count("None") <= with_text.count("None")',
        ' != ""',
        "a template writes the word None where a message has calls and no text",
    ),
    Mutant(
        CHAT,
        '{"add_generation_prompt": False, **variables}',
        "variables",
        "a reranker's template begins an answer that its training did not have",
        "tests/runtime/engine/text/test_encoder_text.py",
    ),
    Mutant(
        "runtime/engine/text/folder_tokenizer.py",
        "        fast.no_truncation()\n",
        "",
        "long prompts are cut in silence",
    ),
    Mutant(
        "runtime/engine/text/folder_tokenizer.py",
        "        fast.no_padding()\n",
        "",
        "short prompts are padded",
    ),
    Mutant(
        "runtime/engine/text/folder_tokenizer.py",
        "    wanted |= {text: known[text] for text in named if text in known and text not in wanted}\n",
        "",
        "an end token that tokenizer.json does not call special is shown in texts",
    ),
    Mutant(
        "runtime/engine/text/folder_tokenizer.py",
        'special = {} if "added_tokens_decoder" in settings else',
        "special =",
        "tokens with a role come from a file that transformers does not read",
    ),
    Mutant(
        "runtime/engine/text/folder_tokenizer.py",
        "elif has_token and not is_added and is_configured:",
        "elif has_token and not is_added:",
        "texts of models lack the begin token that tokenizer.json puts there",
    ),
    Mutant(
        "runtime/engine/text/detokenizer.py",
        "            self._text.begin_after(context)\n",
        "            self._text.begin_after(())\n",
        "the first generated word sticks to the prompt",
    ),
    Mutant(
        "runtime/engine/text/detokenizer.py",
        'return text.removeprefix("\\ufffd")',
        "return text",
        "a character that the prompt began and nothing ends is replaced twice",
    ),
    Mutant(
        "runtime/engine/text/folder_tokenizer.py",
        'get("eos_token_id", config.get("eos_token_id"))',
        'get("eos_token_id")',
        "a model without generation_config.json never ends",
    ),
    Mutant(
        TOKENIZER,
        "id_to_token, count = self._fast.id_to_token, self.vocab_size",
        "id_to_token, count = self._fast.id_to_token, self._fast.get_vocab_size(with_added_tokens=False)",
        "a prompt of long added tokens is refused as too long",
    ),
    Mutant(
        SANDBOX,
        "        self._run.charged_bytes += num_bytes\n",
        "        self._run.charged_bytes = num_bytes\n",
        "a template may make any amount of text in pieces",
    ),
    Mutant(
        SANDBOX,
        "            self._charge_size(len(left) * right * _size_of_items(left))",
        "            self._charge_size((len(left) + right) * _size_of_items(left))",
        "a template may repeat a text a billion times",
    ),
    Mutant(
        SANDBOX,
        "            _interrupt(thread)\n            raise TimeoutError",
        "            raise TimeoutError",
        "a template that does not end burns a core for ever",
    ),
    Mutant(
        SANDBOX,
        'bits = left.bit_length() * right if operator == "**"',
        'bits = left.bit_length() + right if operator == "**"',
        "a template may compute a number of gigabytes",
    ),
    Mutant(
        MERGES,
        "np.unique(-np.asarray(scores, np.float64)",
        "np.unique(np.asarray(scores, np.float64)",
        "pieces of the worst score are merged first",
    ),
    Mutant(
        GGUF,
        "models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges)",
        "models.BPE(vocabulary, merges)",
        "a word that is a token of Llama 3 is merged from its bytes",
    ),
    Mutant(
        GGUF,
        "is_special = token_type in (_TokenType.CONTROL, _TokenType.UNKNOWN)",
        "is_special = token_type == _TokenType.UNKNOWN",
        "control tokens in a prompt are ordinary text",
    ),
    Mutant(
        GGUF,
        'known.pop("<|end|>", None)',
        "pass",
        "a turn of gpt-oss ends after its first message",
    ),
    Mutant(
        NAMES,
        '_QWEN2 = _cl100k(r"\\p{N}")',
        '_QWEN2 = _cl100k(r"\\p{N}{1,3}")',
        "numbers in prompts for Qwen are split as those for Llama 3",
    ),
    Mutant(
        NAMES,
        "PreTokenizer((_QWEN2,), nfc=True)",
        "PreTokenizer((_QWEN2,))",
        "decomposed characters in prompts for Qwen are other tokens than the folder's",
    ),
    Mutant(
        PARSER,
        "        if self._skips_space:\n            self._buffer = self._buffer.lstrip(SPACE)",
        "        if self._skips_space and len(self._buffer) > 1:\n            self._buffer = self._buffer.lstrip(SPACE)",
        "an answer after reasoning begins with line breaks, if they come as tokens of their own",
    ),
    Mutant(
        PARSER,
        "_without_start(rest, self._calls.trigger) if is_cut else rest)",
        "rest)",
        "an answer cut by max_tokens ends with the beginning of a tool call",
    ),
    Mutant(
        PARSER,
        "        if len(name) == len(self._buffer):\n            return None\n",
        "",
        "the name of a called tool is cut where a token ends",
    ),
    Mutant(
        ARGUMENTS,
        '            if character == "\\\\":\n                self._is_escaped = True\n',
        '            if character == "\\\\":\n                pass\n',
        "arguments end early where a text has an escaped quote and a bracket",
    ),
    Mutant(
        ARGUMENTS,
        '        return "{}" if not is_cut and not self._depth and not self.is_complete else ""',
        '        return ""',
        "a call whose arguments are null has no arguments instead of none",
    ),
    Mutant(
        CHAT,
        'return not shows({PROBE: "a"}) and shows(json.dumps({PROBE: "a"}))',
        "return False",
        "templates that join arguments to texts refuse every chat with tool calls",
    ),
    Mutant(
        PARSER,
        "_without_start(rest, self._calls.trigger) if is_cut else rest)",
        "_without_start(rest, self._calls.trigger))",
        "an answer that ends with the beginning of a marker loses it",
        MARKUP_TESTS,
    ),
    Mutant(
        PARSER,
        "(not is_cut or not rest.strip(SPACE))",
        "not is_cut",
        "a whole answer that begins like a marker is empty",
        MARKUP_TESTS,
    ),
    Mutant(
        PARSER,
        "if recipient and self._takes_calls:",
        "if recipient:",
        "a model of channels calls tools that the request does not have",
        MARKUP_TESTS,
    ),
    Mutant(
        PARSER,
        'if kind in self._seen and kind != "call":',
        "if kind in self._seen:",
        "each call in channels after the first one is followed by an empty call",
        MARKUP_TESTS,
    ),
    Mutant(
        ARGUMENTS,
        'max(num_held(text, "\\n" + END_OF_PARAMETER), num_held(text, END_OF_PARAMETER))',
        'num_held(text, "\\n" + END_OF_PARAMETER)',
        "the end of a parameter that is divided between tokens becomes a part of its value",
        MARKUP_TESTS,
    ),
    Mutant(
        ARGUMENTS,
        'case bool():\n            return frozenset({"boolean"})\n        case int():',
        "case int():",
        "a text `true` becomes a boolean where the schema says integer or text",
        MARKUP_TESTS,
    ),
    Mutant(
        GRAMMAR,
        "return dialect | roots | schema",
        "return dialect | schema",
        "references to definitions in parameters of Qwen3-Coder make the grammar invalid",
        MARKUP_TESTS,
    ),
    Mutant(
        GRAMMAR,
        'f" & ~({heads})" if heads else ""',
        '""',
        "a parameter that the schema describes may be given again with any value",
        MARKUP_TESTS,
    ),
    Mutant(
        ARGUMENTS,
        'self._end = END_OF_JSON if self._form == "json" else END_OF_PARAMETER',
        "self._end = END_OF_PARAMETER",
        "a text with the end of a parameter, in a value that is JSON, cuts the value",
        MARKUP_TESTS,
    ),
    Mutant(
        GRAMMAR,
        'for name in ("analysis", *(["commentary"] if tools else []))',
        'for name in ("analysis",)',
        "gpt-oss cannot announce a call before it",
        MARKUP_TESTS,
    ),
    Mutant(
        PARSER,
        "if self._in_body and not is_cut:\n            self._take(rest, deltas)",
        "if self._in_body:\n            self._take(rest, deltas)",
        "what may be markup is shown at the end of a cut message in channels",
        MARKUP_TESTS,
    ),
    Mutant(
        PARSER,
        "        self._buffer = self._buffer.lstrip(SPACE)  # of the literal's end: more than came with it\n",
        "",
        "a call is lost if the white space before its name comes in two pieces",
        MARKUP_TESTS,
    ),
    Mutant(
        "runtime/engine/text/model_markup.py",
        'if name == "auto" and not markup.channels:',
        'if name == "auto":',
        "a gpt-oss whose folder has a response_template is read as text",
    ),
    Mutant(
        GGUF,
        'middle = merge.find(" ", 1)',
        'middle = merge.find(" ")',
        "a GGUF file with a merge whose left half is a space is refused",
    ),
    Mutant(
        MERGES,
        "| (longest - lengths[lefts])",
        "| 0",
        "pieces of one score merge in another order than in the original tokenizer",
    ),
    Mutant(
        MERGES,
        "np.lexsort((longest - lengths[results], ",
        "np.lexsort((",
        "pieces of one score, and left halves of one length, merge in another order than in the original tokenizer",
    ),
    Mutant(
        GGUF,
        '("phi-3" in name or "phi3" in name)',
        '"phi-3" in name',
        "special tokens of a file named Phi3 keep the space after them",
    ),
]
