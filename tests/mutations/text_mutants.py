"""Bugs in `runtime/engine/text/`."""

from mutant import Mutant

TESTS = "tests/runtime/engine/text tests/runtime/engine/markup tests/runtime/engine/test_text_processor.py"
DETOKENIZER, CHAT, TOKENIZER, SANDBOX, GGUF, NAMES = (
    f"runtime/engine/text/{name}.py"
    for name in ("detokenizer", "chat", "tokenizer", "sandbox", "gguf_tokenizer", "pre_tokenizers")
)
VOCABULARY = "runtime/engine/text/gguf_vocabulary.py"
ENCODER_TOKENIZER = "runtime/engine/text/gguf_encoder_tokenizer.py"
PARSER = "runtime/engine/markup/markup_parser.py"
ARGUMENTS = "runtime/engine/markup/argument_streams.py"
MERGES = "runtime/engine/text/merges.py"
CHAT_INPUT = "runtime/engine/text/chat_input.py"
TEMPLATE_FILES = "runtime/engine/text/template_files.py"
ABILITIES = "runtime/engine/text/template_abilities.py"
HISTORY = "runtime/engine/text/chat_history.py"
MARKS = "runtime/engine/text/content_marks.py"
CHAT_TOKENS = "runtime/engine/text/chat_tokens.py"
FUNCTIONS = "runtime/engine/text/template_functions.py"
CALL_TEXT = "runtime/engine/markup/call_text.py"
PARSER, ARGUMENTS, GRAMMAR = (
    f"runtime/engine/markup/{name}.py" for name in ("markup_parser", "argument_streams", "markup_grammar")
)
MARKUP_TESTS = "tests/runtime/engine/markup/test_markup.py tests/runtime/engine/structured/test_tool_calls.py"

MUTANTS = [
    Mutant(
        DETOKENIZER,
        "armed=self._num_tokens >= self._min_tokens)",
        "armed=self._num_tokens > self._min_tokens)",
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
        "self.stop_token_index = self._num_tokens - 1",
        "self.stop_token_index = self._num_tokens",
        "a token after the stop string is kept",
    ),
    Mutant(
        DETOKENIZER,
        "        rest = self._release(self._text.finish()) + self._held",
        "        rest = self._held + self._release(self._text.finish())",
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
        CHAT_INPUT,
        "        return {key: self.copy(item, depth - 1, what) for key, item in value.items()}",
        "        return {key: self.copy(item, depth, what) for key, item in value.items()}",
        "the depth of maps in a chat is unlimited",
    ),
    Mutant(
        CHAT_INPUT,
        "            return [self.copy(item, depth - 1, what) for item in value]",
        "            return [self.copy(item, depth, what) for item in value]",
        "the depth of lists in a chat is unlimited",
    ),
    Mutant(
        CHAT_INPUT,
        "        self._left -= 1\n",
        "        self._left -= 0\n",
        "the number of values in a chat is unlimited",
    ),
    Mutant(
        TEMPLATE_FILES,
        "default = templates.get(DEFAULT)",
        "default = next(iter(templates.values()), None)",
        "a model with several templates uses the first, such as that for tools",
    ),
    Mutant(
        TEMPLATE_FILES,
        "        templates[DEFAULT] = source\n",
        "        templates.setdefault(DEFAULT, source)\n",
        "an outdated template in tokenizer_config.json wins over chat_template.jinja",
    ),
    Mutant(
        TEMPLATE_FILES,
        "token_text(settings.get(name)) for name",
        "settings.get(name) for name",
        "templates of models that declare tokens as objects lack bos_token",
    ),
    Mutant(
        ABILITIES,
        'return "" if self.shows_calls("") else None',
        "return None",
        "a message with calls and no text is refused by templates that read a list of parts",
    ),
    Mutant(
        ABILITIES,
        "return content is not None or not self._writes_none(texts[0], chats[0])",
        "return True",
        "a template writes the word None where a message has calls and no text",
    ),
    Mutant(
        CHAT,
        '{"add_generation_prompt": False, **variables}',
        "variables",
        "a reranker's template begins an answer that its training did not have",
        "tests/runtime/engine/embedding/test_encoder_text.py",
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
        "runtime/engine/text/folder_tokenizer.py",
        "            fast.model.dropout = None  # the tokens of a text would vary\n",
        "            pass\n",
        "a text has other tokens each time",
        "tests/runtime/engine/text/test_tokenizer_limits.py",
    ),
    Mutant(
        "runtime/engine/text/tokenizer_limits.py",
        "return 1.0 + len(content)  # an expression",
        "return 1.0 + 0 * len(content)  # an expression",
        "a normalizer of expressions makes gigabytes of a short text",
        "tests/runtime/engine/text/test_tokenizer_limits.py",
    ),
    Mutant(
        "runtime/engine/text/detokenizer.py",
        "self._context = () if as_bytes else context  #",
        "self._context = ()  #",
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
        "id_to_token = self._fast.id_to_token\n        count = self.vocab_size",
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
        "_SPECIAL = (int(TokenType.CONTROL), int(TokenType.UNKNOWN))",
        "_SPECIAL = (int(TokenType.UNKNOWN),)",
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
        "_without_start(rest, *self._ends_of_answer()) if is_cut else rest)",
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
        PARSER,
        "            self._answer_end = self._tags.close\n",
        "",
        "the answers of Hunyuan end with </answer>",
    ),
    Mutant(
        PARSER,
        '            self._answer_end = ""\n            return self._answer\n',
        "            return None\n",
        "an answer that ends in the middle of a piece holds back the calls after it",
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
        ABILITIES,
        'return not shows({TWO: "a"}) and shows(json.dumps({TWO: "a"}))',
        "return False",
        "templates that join arguments to texts refuse every chat with tool calls",
    ),
    Mutant(
        PARSER,
        "_without_start(rest, *self._ends_of_answer()) if is_cut else rest)",
        "_without_start(rest, *self._ends_of_answer()))",
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
        "max(num_held(text, line_break + literal), num_held(text, literal))",
        "num_held(text, line_break + literal)",
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
        'f" & ~({others})" if others else ""',
        '""',
        "a parameter that the schema describes may be given again with any value",
        MARKUP_TESTS,
    ),
    Mutant(
        ARGUMENTS,
        'is_json_on_lines = self._form == "json" and self._syntax.on_lines',
        "is_json_on_lines = False",
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
        "if self._in_body and not is_cut:\n            self._add_text(rest, deltas)",
        "if self._in_body:\n            self._add_text(rest, deltas)",
        "what may be markup is shown at the end of a cut message in channels",
        MARKUP_TESTS,
    ),
    Mutant(
        PARSER,
        "        self._buffer = self._buffer.lstrip(SPACE)  # more spaces may follow the literal's end\n",
        "",
        "a call is lost if the white space before its name comes in two pieces",
        MARKUP_TESTS,
    ),
    Mutant(
        "runtime/engine/markup/model_markup.py",
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
        VOCABULARY,
        "if token_type == TokenType.CONTROL:",
        "if False:",
        "special tokens of a BERT in a GGUF file are pieces inside of words",
    ),
    Mutant(
        ENCODER_TOKENIZER,
        "fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])",
        "fast.pre_tokenizer = words",
        "XLM-RoBERTa in a GGUF file gets a token for each space beyond the first one",
    ),
    Mutant(
        VOCABULARY,
        '("phi-3" in name or "phi3" in name)',
        '"phi-3" in name',
        "special tokens of a file named Phi3 keep the space after them",
    ),
    Mutant(
        FUNCTIONS,
        'parser.parse_statements(("name:endgeneration",), drop_needle=True)',
        'parser.parse_statements(("name:endgeneration",), drop_needle=True)[:0]',
        "answers within the training tag are missing in the prompt",
    ),
    Mutant(
        FUNCTIONS,
        "found.group() if PRIVATE.match(found.group()) else json.dumps(found.group())[1:-1]",
        "json.dumps(found.group())[1:-1]",
        "templates that write ASCII show private characters of content",
    ),
    Mutant(
        CHAT,
        "reads_calls == [False, True]",
        "reads_calls == [True, False]",
        "calls of a chat without tools are left out though the template for tools has them",
    ),
    Mutant(
        TEMPLATE_FILES,
        '("chat_template.json", "processor_config.json", SETTINGS)',
        '(SETTINGS, "chat_template.json", "processor_config.json")',
        "the template of a tokenizer wins over that of the image processor",
    ),
    Mutant(
        TEMPLATE_FILES,
        "others or list(templates.values())",
        "list(templates.values())",
        "a list of templates without a default uses that for tools",
    ),
    Mutant(
        HISTORY,
        "if not abilities.takes_any_id:",
        "if False:",
        "ids of other servers are refused by Mistral's templates",
    ),
    Mutant(
        HISTORY,
        "if not abilities.takes_parallel_calls:",
        "if False:",
        "parallel calls are refused by Llama's template",
    ),
    Mutant(
        HISTORY,
        "if abilities.shows_calls_after_text:",
        "if True:",
        "the text beside a call is refused where roles must alternate",
    ),
    Mutant(
        HISTORY,
        '    if result_role == "tool":',
        "    if True:",
        "results of tools are left out by templates of three roles",
    ),
    Mutant(
        HISTORY,
        "    if num_later and not (abilities",
        "    if False and not (abilities",
        "system messages in the middle of a chat are left out or refused",
    ),
    Mutant(
        HISTORY,
        'role == "user" and not abilities.takes_repeated_users',
        "False",
        "two messages of a user in a row are refused where roles alternate",
    ),
    Mutant(
        HISTORY,
        "            if before_is_result:",
        "            if False:",
        "each result of parallel calls is a message of its own",
    ),
    Mutant(
        HISTORY,
        "        if syntax is not None:\n",
        "        if False:\n",
        "a prompt with tools does not say how a call is written",
    ),
    Mutant(
        HISTORY,
        "    if not abilities.shows_answers and abilities.takes_users:",
        "    if False:",
        "calls vanish where a template shows no answers",
    ),
    Mutant(
        CALL_TEXT,
        "ARGUMENTS * bool(text)",
        "ARGUMENTS",
        "a call without arguments has an empty line in Qwen3-Coder's form",
    ),
    Mutant(
        MARKS,
        "private(edge) for edge in self._edges",
        "edge for edge in self._edges",
        "parts of content join to special tokens",
    ),
    Mutant(
        MARKS,
        "(bare := _bare(text)) in self._bare_names",
        "False and (bare := _bare(text))",
        "a name between brackets of a template becomes a special token",
    ),
    Mutant(
        MARKS,
        "one_of(kept | frozenset(written) - frozenset(special))",
        "one_of(kept)",
        "the reasoning of earlier answers is encoded as text, and the prefix cache misses it",
    ),
    Mutant(
        MARKS,
        'keeps_added=is_answer and key != "tool_calls"',
        "keeps_added=is_answer",
        "a call's arguments may have the tokens around calls",
    ),
    Mutant(
        MARKS,
        "if chr(code) not in used",
        "",
        "private characters in a user's text become brackets",
    ),
    Mutant(
        CHAT_TOKENS,
        "and span not in written",
        "and False",
        "a user's text ends its message and begins another one",
    ),
    Mutant(
        CHAT_TOKENS,
        "if len(name) > 1 and not self._markup_ids.isdisjoint(token_ids):",
        "if False:",
        "a name that is a piece of the vocabulary is a special token",
    ),
    Mutant(
        CHAT_TOKENS,
        "                token_ids = both[len(before) :]\n",
        "                token_ids = token_ids\n",
        "a space is put before a special token's name",
    ),
    Mutant(
        CHAT_TOKENS,
        "if chat.marked == chat.text and not is_normalized:",
        "if chat.marked == chat.text:",
        "a text that normalizes to a special token is one",
    ),
    Mutant(
        CHAT_INPUT,
        "num_calls += len(pending)",
        "num_calls = len(pending)",
        "calls of several answers are given the same ids, and results the wrong calls",
    ),
    Mutant(
        CHAT_INPUT,
        'limit.copy(arguments, MAX_SCHEMA_DEPTH, "a call")',
        'ValueLimit().copy(arguments, MAX_SCHEMA_DEPTH, "a call")',
        "a chat with thousands of calls holds millions of values",
    ),
    Mutant(
        MARKS,
        "            unseen.extend(each.keys())\n",
        "",
        "private characters in names of arguments become brackets",
    ),
    Mutant(
        MARKS,
        'keeps_added=is_answer and key != "tool_calls"',
        "keeps_added=is_answer",
        "arguments of an earlier call end the call",
    ),
    Mutant(
        MARKS,
        '- {"", *literals}',
        '- {""}',
        "a template that compares content with the bare name of a token does not find it",
    ),
    Mutant(
        HISTORY,
        "        changed += results\n",
        "",
        "results with an unknown id are lost where a template takes one call per message",
    ),
    Mutant(
        HISTORY,
        "        before_is_result = is_result\n",
        "        before_is_result = before_is_result or is_result\n",
        "later results join the model's answers",
    ),
    Mutant(
        HISTORY,
        'role == last.get("role") and not last.get("tool_calls")',
        'role == last.get("role")',
        "the text of an answer after a call is lost",
    ),
]
