"""Structured outputs: grammars of clients' rules, their trial and compilation, masks for each step.

Masks depend on the grammar and the generated tokens alone.

* One job computes the next masks of all sequences. After the samples of a step, `StepMasks.advance` moves every
  matcher forward and prepares the job. The step's thread gives the samples to the event loop and then computes the
  job itself (`MaskQueue.run`): one call of llguidance without the GIL, while the event loop commits the samples and
  plans. Another thread runs the next step. Masks that a job cannot compute begin with the step (`Grammars.begin`).
* A slow grammar delays only its own request. `ModelRunner.execute` waits 2 ms for masks that are not ready. A sample
  without its mask is deferred (`SampledToken.is_deferred`): its row is rolled back and computed again in the next
  step. A sequence whose mask was late computes its next ones isolated, in jobs of its own.
* A call that never ends ends only its own request. If a job takes more than five seconds, its sequences restart, each
  isolated and with a new matcher. After ten seconds other threads replace the threads of such jobs (`JobThreads`).
* The work of a call is bounded beforehand, because a call cannot be ended. Before an engine compiles a grammar, a
  process of the API server does (`Trials`), for a vocabulary of bytes, and takes some bytes of text; the system ends
  the process at 2 s or 128 MiB, and the grammar is refused. The library looks at text that a grammar forces up to its
  end, but forced text may have no end in Lark's or llama.cpp's notation: such grammars force none (`UNFORCED`). They
  may have 350 possible items at once (`MAX_AMBIGUOUS_ITEMS`), since their texts may be read in several ways, and the
  library holds the GIL while it takes a token.
* Matchers of one compiled grammar share a lexer and its mutex, for which llguidance waits with the GIL. So a job
  holds the lock of each compiled grammar (`MaskJob.hold`). A sequence that does not get the lock begins its masks
  with the next step, and after five seconds with a compiled grammar of its own. It also gets its own when the lexer
  has reached a limit, which may be due to other sequences or to a replay. A lexer of its own reads the text with all
  masks, as generation did.
* The vocabulary is read with the first grammar (`ModelTables`), in the thread that compiles it: a second tokenizer
  and the library's tables take 4 s and 250 MB for 262,144 tokens, 0.6 s and 50 MB for 49,152. The library holds the
  GIL for a third of that time, once; heartbeats announce it (`HELD_UP` in workers/health.py).
* A request begins cheaply. Requests mostly repeat a grammar: it is checked once per tenant (`CheckedStructures`) and
  kept compiled. The mask before the first token is computed with the grammar, for all its requests. A sequence whose
  grammar is kept joins with a copy of its matcher and needs no thread; a beam has a copy of its parent's matcher.
* Memory is bounded (`compiled_grammars.py`). Before a grammar is compiled there must be room for it; kept grammars
  make room first. A compiled grammar counts for the growth of the heap meanwhile; using it adds a few MiB at most
  (`MAX_LEXER_STATES`). Memory that grammars free between blocks that stay returns to the system before the next
  grammar is compiled (`UnusedMemory`).
* Ids of a forced text have its bytes (`grammar_vocabulary.py`), or llguidance fails. Many tokenizers change a text:
  they put a space before it, or compose its characters. Then the text is encoded after a control character, and at
  last read with the longest tokens.
* Forced text becomes draft tokens. It is tokenized in `advance`, because a job would wait for the GIL, and only its
  beginning (`MAX_FORCED_CHARACTERS`). `StepPlan.max_forced` says how many of its tokens would pay as draft tokens;
  the job has the masks after these, too.
"""
