"""Bugs in `runtime/engine/`, text excepted."""

from mutant import Mutant

TESTS = (
    "tests/runtime/engine/test_admission.py tests/runtime/engine/test_output.py tests/runtime/engine/test_reports.py "
    "tests/runtime/engine/test_validator.py tests/runtime/engine/test_error_mapping.py "
    "tests/runtime/engine/test_text_processor.py tests/runtime/engine/test_engine.py "
    "tests/runtime/engine/test_continuation.py"
)
CORE, ENGINE, OUTPUT, INPUT, PREPARING = (
    f"runtime/engine/{name}.py" for name in ("engine_core", "engine", "output", "input", "preparing")
)
VALIDATOR, SNAPSHOT, ERRORS, BUILD, PROCESSOR = (
    f"runtime/engine/{name}.py" for name in ("validator", "snapshot", "error_mapping", "build", "text_processor")
)

CONTINUATION = "runtime/engine/continuation.py"
GRAMMARS = "runtime/engine/grammars.py"
COMPILED = "runtime/engine/compiled_grammars.py"
MASKS = "runtime/engine/masks.py"
MASK_TESTS = (
    "tests/runtime/engine/test_grammars.py tests/system/test_structured_outputs.py "
    "tests/system/test_same_bits_of_grammars.py tests/system/test_beams_of_grammars.py"
)
SAVED = "tests/runtime/engine/test_snapshot.py"

MUTANTS = [
    Mutant(
        "runtime/engine/masks.py",
        "            if len(job.parts) > 1:\n                job.is_abandoned = True\n                job.parts.clear()\n                return\n",
        "",
        "a panic of the library ends all sequences whose masks are computed in one call",
        "tests/runtime/engine/test_grammars.py",
    ),
    Mutant(
        "runtime/engine/grammars.py",
        "len(grammar) <= MAX_FORCING_BYTES and not _may_be_ambiguous(structure)",
        "not _may_be_ambiguous(structure)",
        "the first step of a long grammar takes seconds: its forced text is looked for",
        "tests/runtime/engine/test_grammars.py",
    ),
    Mutant(
        "runtime/engine/json_schema.py",
        '    if schema.setdefault("pattern", REAL_DATE) == REAL_DATE:\n        return schema\n',
        '    if "pattern" in schema:\n        return schema\n',
        "a date with a pattern of its own may be 29 February of any year",
        "tests/runtime/engine/test_json_schemas.py",
    ),
    Mutant(
        ENGINE,
        "num_queued + self._prompts.num_preparing(request.tenant))",
        "num_queued)",
        "requests being tokenized do not count as queued: one tenant has any number tokenized",
    ),
    Mutant(
        PREPARING,
        "            self._num_preparing[tenant] -= num_queued\n",
        "            if not done.cancelled() and done.exception() is None:\n"
        "                self._num_preparing[tenant] -= num_queued\n",
        "places held for tokenizing leak when it fails or is cancelled: the tenant is locked out",
    ),
    Mutant(
        PREPARING,
        "self._num_preparing[tenant] += num_queued",
        "self._num_preparing[tenant] += 1",
        "samples being tokenized count as one request, and the count falls below zero",
    ),
    Mutant(
        ENGINE,
        '                self._forget(output, "it was refused")\n',
        "                pass\n",
        "a refused request stays registered: its memory is never freed",
    ),
    Mutant(
        ENGINE,
        "        except BaseException as error:\n            if output is not None:",
        "        except Exception as error:\n            if output is not None:",
        "a request cancelled while it is queued runs to its end without a reader",
    ),
    Mutant(
        ENGINE,
        "        if not update.ended:  # it ended at a stop string, which the core cannot see\n"
        "            self.core.drop(request_id, sequence.finish_reason)\n",
        "",
        "after a stop string the sequence computes on to max_tokens",
    ),
    Mutant(
        ENGINE,
        "                self._fail(output, GenerationFailed(text), now)\n                continue",
        "                raise GenerationFailed(text) from error",
        "one request whose text cannot be decoded ends all requests",
    ),
    Mutant(
        ENGINE,
        "last_s, sequence.last_tokens_s = sequence.last_tokens_s, now",
        "last_s = sequence.last_tokens_s",
        "the inter-token latency metric stays empty",
    ),
    Mutant(
        ENGINE,
        '            error = output.error or GenerationFailed("the engine stopped unexpectedly")',
        '            error = GenerationFailed("the engine stopped unexpectedly")',
        "requests cut by a shutdown are reported as failures that must not be retried",
    ),
    Mutant(
        ENGINE,
        "            output.stream.put(error)\n            self._report(output, None, error, output.usage(), now)\n"
        "        self._sequences.clear()",
        "            output.stream.put(error)\n        self._sequences.clear()",
        "lost requests are not reported to the observer: metrics say that they still run",
    ),
    Mutant(
        ENGINE,
        "error=copy.copy(error),  # without its traceback",
        "error=error,",
        "a remembered error holds its request and its prompt by the traceback",
    ),
    Mutant(
        ENGINE,
        "            self._next_id += len(requests)\n",
        "            self._next_id += 1\n",
        "the samples of one request get the ids of the next request: outputs mix",
    ),
    Mutant(
        ENGINE,
        "e2e_s=now - output.submitted,",
        "e2e_s=now - (output.first_token_time() or now),",
        "the latency metric leaves out the queue and the prefill",
    ),
    Mutant(
        ENGINE,
        "                self._rejected(error)\n            raise\n        return stream",
        "                pass\n            raise\n        return stream",
        "a prompt that is too long is not counted as refused",
    ),
    Mutant(
        ENGINE,
        " if token < info.vocab_size\n",
        "\n",
        "an end token of the tokenizer outside the model's vocabulary fails every request",
    ),
    Mutant(
        OUTPUT,
        "tokens[: detokenizer.stop_token_index + 1 - self.num_tokens]",
        "tokens[: detokenizer.stop_token_index - self.num_tokens]",
        "the token that completes a stop string is lost from ids and usage",
    ),
    Mutant(
        OUTPUT,
        "            elif reason is not None:\n                text += detokenizer.finish()",
        "            elif reason is None:\n                pass",
        "text held back for a stop string is lost at the end",
    ),
    Mutant(
        OUTPUT,
        "min(num_tokens, len(self.prompt_token_ids))",
        "num_tokens",
        "progress after a preemption exceeds the length of the prompt",
    ),
    Mutant(
        OUTPUT,
        "stall_ms=max(request.stall_s for request in requests) * 1000",
        "stall_ms=first.stall_s * 1000",
        "stall time of later branches is lost",
    ),
    Mutant(
        OUTPUT,
        "recomputed_tokens=sum(request.recomputed_tokens for request in requests)",
        "recomputed_tokens=first.recomputed_tokens",
        "recomputed tokens of later branches are lost",
    ),
    Mutant(
        OUTPUT,
        "decode_ms=max(request.decode_s for request in requests) * 1000",
        "decode_ms=max(request.decode_s for request in requests)",
        "usage gives the decode time in seconds",
    ),
    Mutant(
        OUTPUT,
        "                if item.usage is not None:\n                    return\n        finally:\n            self.cancel()",
        "                if item.usage is not None:\n                    return\n        except QuireError:\n            raise",
        "a reader that leaves early does not cancel its request",
    ),
    Mutant(
        OUTPUT,
        "        if self.num_open:\n            return ()\n        if any",
        "        if self.num_open > 1:\n            return ()\n        if any",
        "best_of ranks its candidates before the last one has ended",
    ),
    Mutant(
        OUTPUT,
        "ranked.sort(key=lambda pair: -pair[0])",
        "ranked.sort(key=lambda pair: -pair[0] / max(1, len(pair[1].held_tokens)))",
        "best_of ranks by the mean logprob, not by the cumulative one",
    ),
    Mutant(
        OUTPUT,
        "sequence.num_tokens = sum(len(each.tokens) for each in found)",
        "sequence.num_tokens = len(found[0].tokens)",
        "beams beyond the first are not in the usage",
    ),
    Mutant(
        INPUT,
        "(seed + index) % SEED_LIMIT",
        "(seed + index)",
        "n with a seed near 2**64 fails",
    ),
    Mutant(
        INPUT,
        "(seed + index) % SEED_LIMIT",
        "(seed + i) % SEED_LIMIT",
        "of several outputs that go on at another server, those after an ended one change",
    ),
    Mutant(
        CONTINUATION,
        "detokenizer.push((token_id,))",
        '""',
        "an output that goes on at another server loses a stop string across the border",
    ),
    Mutant(
        CONTINUATION,
        "            parser.feed(text)\n",
        "            pass\n",
        "an answer with tools that goes on at another server is read from its middle",
    ),
    Mutant(
        CONTINUATION,
        " and num_tokens >= params.min_tokens)",
        ")",
        "a request with min_tokens cannot go on after an end-of-sequence token",
    ),
    Mutant(
        OUTPUT,
        "self._num_former_tokens + num_tokens}",
        "num_tokens}",
        "usage lacks the tokens of outputs that another server has ended",
    ),
    Mutant(
        INPUT,
        "submitted + request.deadline_ms / 1000,",
        "submitted + request.deadline_ms,",
        "deadlines are a thousand times later",
    ),
    Mutant(
        INPUT,
        "(frozenset() if params.ignore_eos else eos_token_ids)",
        "eos_token_ids",
        "ignore_eos has no effect",
    ),
    Mutant(
        INPUT,
        "    validator.check_text(text)\n",
        "",
        "a short chat whose template repeats it is tokenized whatever its length",
    ),
    Mutant(
        INPUT,
        "text_processor.encode(text, add_special_tokens=False)",
        "text_processor.encode(text)",
        "chats begin with two BOS tokens",
    ),
    Mutant(
        INPUT,
        "None if request.pin_ms is None else request.pin_ms / 1000",
        "None if not request.pin_ms else request.pin_ms",
        "pins last a thousand times longer",
    ),
    Mutant(
        CORE,
        "            if self._spill_file is not None:\n                self._spill_file.close()\n            with",
        "            with",
        "close leaks the spill file",
    ),
    Mutant(
        CORE,
        "            if spill_file is not None:\n                undo.callback(spill_file.close)\n",
        "",
        "a start that fails leaks the spill file",
    ),
    Mutant(
        CORE,
        "            finally:\n                table.release()\n",
        "            finally:\n                pass\n",
        "computing logits leaks its pages",
    ),
    Mutant(
        CORE,
        "        if self._scoring.locked():\n",
        "        if False:\n",
        "a request accepted while logits are computed runs beside them, and both use the same buffers",
    ),
    Mutant(
        CORE,
        "        if self._closed or self.scheduler.has_work or self._scoring.locked():",
        "        if self._closed or self._scoring.locked():",
        "logits are computed beside a running step, and both use the same buffers",
    ),
    Mutant(
        CORE,
        " for s in sequences if not s.num_samples\n",
        " for s in sequences\n",
        "progress of prefill is reported for decoding sequences",
    ),
    Mutant(
        CORE,
        "        if self.is_broken:\n",
        "        if False:\n",
        "a broken loop in a live process goes unnoticed: statistics look healthy",
    ),
    Mutant(
        VALIDATOR,
        "if len(token_ids) + max_tokens > limit:",
        "if len(token_ids) + max_tokens > limit + 1:",
        "a request one token too long is accepted",
    ),
    Mutant(
        VALIDATOR,
        'for token in (min(token_ids), max(token_ids)):\n            self._check_token("prompt", token)',
        'for token in (token_ids[0], max(token_ids)):\n            self._check_token("prompt", token)',
        "a negative token id in the middle of a prompt reads memory before the embedding",
    ),
    Mutant(
        VALIDATOR,
        "    if not low <= value <= high:  # also true of NaN",
        "    if value < low or value > high:",
        "a temperature of NaN is accepted",
    ),
    Mutant(
        VALIDATOR,
        '        _integer("min_tokens", params.min_tokens, 0, params.max_tokens)',
        '        _integer("min_tokens", params.min_tokens, 0, self._info.max_model_len)',
        "min_tokens above max_tokens is accepted",
    ),
    Mutant(
        ERRORS,
        "max(1, round(seconds * 1000))",
        "max(1, round(seconds))",
        "retry_after_ms is in seconds",
    ),
    Mutant(
        ERRORS,
        "    if reason == DEADLINE_PASSED:\n",
        "    if False:\n",
        "a passed deadline is reported as an internal failure",
    ),
    Mutant(
        BUILD,
        "max(1, int(share * pager.pool.num_pages))",
        "max(1, int(share * config.max_num_seqs))",
        "the page share of a tenant is computed from the number of sequences",
    ),
    Mutant(
        BUILD,
        "config.itl_target_ms / 1000",
        "config.itl_target_ms",
        "the inter-token target is a thousand times larger",
        "tests/runtime/engine/test_build.py",
    ),
    Mutant(
        SNAPSHOT,
        "    yield\n    await core.stop()\n",
        "    yield\n",
        "the snapshot is written while steps change pages",
        SAVED,
    ),
    Mutant(
        "runtime/engine/bits.py",
        'version("quire"), weights, capacity.layout',
        'version("quire"), capacity.layout',
        "pages computed with q8 weights are loaded under bf16 weights: other bits",
        "tests/runtime/engine/test_bits.py",
    ),
    Mutant(
        PROCESSOR,
        "*stops, min_tokens, markup)",
        "*stops, 0, markup)",
        "min_tokens does not hold stop strings back",
    ),
    Mutant(
        "runtime/engine/engine.py",
        "num_queued + self._prompts.num_preparing(request.tenant))",
        "num_queued + sum(self._prompts._num_preparing.values()))",
        "texts of one tenant take the places of another in the queue",
    ),
    Mutant(
        PREPARING,
        "            if not self._num_preparing[tenant]:\n                del self._num_preparing[tenant]\n",
        "",
        "memory grows with each tenant that ever sent a text",
    ),
    Mutant(
        "runtime/engine/fair_executor.py",
        "            self._num_idle += 1\n            if not job.result.done():\n",
        "            if not job.result.done():\n                self._num_idle += 1\n",
        "a text thread whose caller gave up is never used again",
        "tests/runtime/engine/test_fair_executor.py",
    ),
    Mutant(
        "runtime/engine/fair_executor.py",
        "lambda _: job.call.clear()",
        "lambda _: None",
        "a text that its caller gave up stays in memory while it waits",
        "tests/runtime/engine/test_fair_executor.py",
    ),
    Mutant(
        "runtime/engine/engine_core.py",
        "            finally:\n                table.release()",
        "            finally:\n                pass",
        "each call of `logits` takes pages for ever",
        "tests/runtime/engine/test_engine.py",
    ),
    Mutant(
        "runtime/engine/engine_core.py",
        "                    undo.callback(loaded.close)\n",
        "                    pass\n",
        "an engine that cannot start keeps its threads and memory",
        "tests/runtime/engine/test_engine.py",
    ),
    Mutant(
        "runtime/engine/engine_core.py",
        "            stop.set()\n            raise",
        "            raise",
        "a cancelled start loads the model to its end",
        "tests/runtime/engine tests/runtime/cli/test_interrupts.py",
    ),
    Mutant(
        "runtime/engine/engine_core.py",
        "        self._misses_itl_target = bool(overrun)\n",
        "",
        "a latency target that cannot be met is logged in every step",
        "tests/system/test_serving.py",
    ),
    Mutant(
        MASKS,
        "self.end == end and self.drafts[: len(drafts)] == drafts",
        "self.end == end",
        "a late mask for other draft tokens is taken for these",
        MASK_TESTS,
    ),
    Mutant(
        MASKS,
        "                running.note_limit()\n",
        "",
        "a limit of the grammar ends the output as if it were complete",
        MASK_TESTS,
    ),
    Mutant(
        MASKS,
        "            self.distrust = DISTRUST << self.num_late\n",
        "",
        "a grammar whose masks take long delays the masks of all others in every step",
        MASK_TESTS,
    ),
    Mutant(
        MASKS,
        "                while len(slow) > 1:  # its thread must compute no other\n                    slow.pop()\n",
        "                pass\n",
        "a thread that was given up computes masks with matchers that others may use",
        MASK_TESTS,
    ),
    Mutant(
        MASKS,
        "                    job.is_abandoned = True\n",
        "                    pass\n",
        "a grammar that never ends takes the sequences of the same call with it",
        MASK_TESTS,
    ),
    Mutant(
        GRAMMARS,
        "            threads.replace_slow()\n",
        "            pass\n",
        "a grammar that is never compiled holds up all others",
        MASK_TESTS,
    ),
    Mutant(
        "runtime/engine/job_threads.py",
        "        while not self.is_replaced and self._run_next():\n",
        "        while self._run_next():\n",
        "each slow job leaves a thread behind",
        "tests/runtime/engine/test_job_threads.py",
    ),
    Mutant(
        MASKS,
        "compiled, matcher.deep_copy()",
        "compiled, matcher",
        "two beams share a matcher",
        MASK_TESTS,
    ),
    Mutant(
        "runtime/engine/json_schema.py",
        '"contains" not in schema or (',
        "True or (",
        "a keyword that forbids something is ignored",
        "tests/runtime/engine/test_json_schemas.py",
    ),
    Mutant(
        COMPILED,
        "            self._forget([each for each in self._kept if each[0] == tenant], MAX_KEPT_PER_TENANT)\n",
        "",
        "one tenant's grammars evict those of all others",
        MASK_TESTS,
    ),
    Mutant(
        GRAMMARS,
        'if key != "x-guidance"}',
        "if key}",
        "a client's schema switches off the bounds on its own grammar",
        MASK_TESTS,
    ),
    Mutant(
        MASKS,
        "        if token.token_id != draft:\n",
        "        if draft is None:\n",
        "after a rejected draft the grammar's forced tokens are not drafted",
        MASK_TESTS,
    ),
    Mutant(
        GRAMMARS,
        "return running.compiled.matcher.deep_copy()",
        "return running.compiled.matcher",
        "requests with the same grammar share one matcher",
        MASK_TESTS,
    ),
    Mutant(
        VALIDATOR,
        "        if num_bytes > MAX_GRAMMAR_BYTES:",
        "        if num_bytes > MAX_GRAMMAR_BYTES << 10:",
        "a grammar of megabytes is compiled",
        MASK_TESTS,
    ),
    Mutant(
        MASKS,
        "        job.parts.clear()  # they refer",
        "        # they refer",
        "the memory of grammars of ended requests is in use until garbage is collected",
        MASK_TESTS,
    ),
    Mutant(
        GRAMMARS,
        "        initial_lexer_fuel=MAX_FIRST_EXPRESSIONS,\n",
        "",
        "a regular expression of 15 characters takes 180 MB",
        MASK_TESTS,
    ),
    Mutant(
        GRAMMARS,
        " or LEXER_ERROR in error",
        "",
        "a replayed request whose grammar exceeds a limit is refused for its ids",
        MASK_TESTS,
    ),
    Mutant(
        MASKS,
        "if running.compiled is not held:",
        "if False:",
        "the whole engine waits while a mask of the same grammar is computed",
        MASK_TESTS,
    ),
    Mutant(
        GRAMMARS,
        "        job.hold_all()\n        if job.parts and not",
        "        if not",
        "the whole engine waits while a thread takes the tokens of a sequence that joins",
        MASK_TESTS,
    ),
    Mutant(
        MASKS,
        "masks[row].ctypes.data",
        "masks.ctypes.data",
        "a request generates what its grammar forbids after a grammar of another one was in use",
        MASK_TESTS,
    ),
    Mutant(
        MASKS,
        "compiled is not None and compiled.num_users > 1",
        "compiled is None",
        "texts of other requests take a request to the limits of its grammar",
        MASK_TESTS,
    ),
    Mutant(
        MASKS,
        "self.distrust = parent.distrust if job.is_late else 0",
        "self.distrust = 0",
        "beams of a slow grammar delay the masks of all others",
        MASK_TESTS,
    ),
    Mutant(
        COMPILED,
        "own + num_bytes > MAX_LIVE_PER_TENANT or total",
        "total",
        "one tenant's running grammars take the memory of all",
        MASK_TESTS,
    ),
    Mutant(
        COMPILED,
        "max(least, allocated_bytes() - before)",
        "least",
        "short grammars that take much memory are kept as if they took none",
        MASK_TESTS,
    ),
    Mutant(
        CONTINUATION,
        "        if num_tokens % SLICE_TOKENS == 0:\n            yield\n",
        "",
        "a long output that goes on keeps the prompts of all tenants waiting for seconds",
    ),
    Mutant(
        CONTINUATION,
        "    yield\n    return reason",
        "    return reason",
        "many outputs that go on keep the prompts of all tenants waiting for seconds",
    ),
    Mutant(
        "runtime/engine/images/reader.py",
        "            if num_bytes > self.max_memory:",
        "            if images[-1].arrays[0].nbytes > self.max_memory:",
        "an image of many tiles takes more memory than it may",
        "tests/runtime/engine/test_image_files.py",
    ),
    Mutant(
        "runtime/engine/images/processors.py",
        "        return max(width, 1), max(height, 1)\n\n    def _whole",
        "        return width, height\n\n    def _whole",
        "an image that is nearly a line is an internal error",
        "tests/runtime/engine/test_image_files.py",
    ),
]
