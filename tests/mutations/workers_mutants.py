"""Bugs in `runtime/workers/`."""

from mutant import Mutant

TESTS = "tests/runtime/workers"
PROCESSES = "tests/runtime/workers tests/system/test_engine_process.py"
ENGINE, SUPERVISOR, POOL = (f"runtime/workers/{name}.py" for name in ("supervised_engine", "supervisor", "engine_pool"))
ADDS, ROUTER, LOG, HEALTH = (f"runtime/workers/{name}.py" for name in ("pending_adds", "router", "token_log", "health"))
MAIN, PROCESS, LINK, PLACEMENT = (
    f"runtime/workers/{name}.py" for name in ("engine_main", "engine_process", "engine_link", "placement")
)

MUTANTS = [
    Mutant(
        ENGINE,
        "                self._former_counts[name] += getattr(self._stats, name)\n",
        "                pass\n",
        "counters fall at a restart",
    ),
    Mutant(
        ENGINE,
        "        self._stats = None\n        self._num_waiting = 0\n",
        "        self._num_waiting = 0\n",
        "counters of the lost process are counted twice",
    ),
    Mutant(
        ENGINE,
        "        self._stats = None\n        self._num_waiting = 0\n",
        "        self._stats = None\n",
        "after a restart the queue still counts the requests of the old process",
    ),
    Mutant(
        ENGINE,
        "                self._supervisor.health.note_broken()\n",
        "                pass\n",
        "a broken loop in a live process goes unnoticed",
    ),
    Mutant(
        ENGINE,
        '                self._send(DropRequest(request.request_id, None, "the caller left"))\n',
        "                pass\n",
        "an engine keeps a request whose asker left",
    ),
    Mutant(
        ENGINE,
        "if self._tokens.forget(request.request_id) or is_sent:",
        "if self._tokens.forget(request.request_id):",
        "an engine keeps a request whose asker left before the answer",
    ),
    Mutant(
        ENGINE,
        "async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self._clock())):",
        "async with asyncio.timeout(None):",
        "a request with a deadline waits for ever for an engine that does not come back",
    ),
    Mutant(
        ENGINE,
        "        num_waiting = self._num_waiting + self._pending_adds.num_sequences\n",
        "        num_waiting = self._num_waiting\n",
        "requests that wait for an answer do not count: the queue grows without limit during a restart",
    ),
    Mutant(
        ENGINE,
        "        if num_waiting + count > self._max_num_waiting:",
        "        if num_waiting + 1 > self._max_num_waiting:",
        "the samples of a request exceed the limit of the queue",
    ),
    Mutant(
        ENGINE,
        "            if not self._tokens.is_replaying:\n                for pending",
        "            if True:\n                for pending",
        "new requests are computed beside a crash suspect and are suspected themselves",
    ),
    Mutant(
        ENGINE,
        "        self._down = None\n        if self._tokens:",
        "        if self._tokens:",
        "after restarts have failed for a while nothing is accepted any more",
    ),
    Mutant(
        ENGINE,
        "        self._down = reason\n        self._fail_all(reason)",
        "        self._down = reason",
        "requests hang while processes cannot be started",
    ),
    Mutant(
        ENGINE,
        "        self._pending_adds.refuse_all(reason)\n",
        "",
        "callers that wait to be added hang when the engine is closed",
    ),
    Mutant(
        ENGINE,
        "            self._listener.publish([RequestUpdate(request_id, error=DEADLINE_PASSED) for request_id in late])\n",
        "",
        "a request whose deadline passes between two processes never ends",
    ),
    Mutant(
        ENGINE,
        '                self._listener.publish([RequestUpdate(request_id, finish_reason="cancelled")])\n'
        "                self._send_next()",
        "                self._send_next()",
        "a request cancelled between two processes never ends",
    ),
    Mutant(
        ENGINE,
        "[update for update in updates if self._tokens.record(update)]",
        "[update for update in updates if self._tokens.record(update) or True]",
        "tokens of a request that the caller dropped are still delivered",
    ),
    Mutant(
        ENGINE,
        "        self._num_waiting = answer.num_waiting\n        pending",
        "        pending",
        "the length of the queue is not updated by answers: a burst is not refused early",
    ),
    Mutant(
        ENGINE,
        "        self._num_quarantined += len(ended.quarantined)\n",
        "",
        "quarantined requests are not counted",
    ),
    Mutant(
        ENGINE,
        "        if not self.num_requests:\n            self._idle.set()",
        "        if not len(self._tokens):\n            self._idle.set()",
        "a drain ends while requests wait to be added",
    ),
    Mutant(
        SUPERVISOR,
        '                    self._owner.on_restarts_failing(f"the engine cannot be restarted: {error}")\n',
        "                    pass\n",
        "failing restarts are not reported: requests hang",
    ),
    Mutant(
        SUPERVISOR,
        "pause_s = min(MAX_PAUSE_S, 2 * pause_s)",
        "pause_s = 2 * pause_s",
        "after an hour of failing starts the next attempt is hours away",
    ),
    Mutant(
        SUPERVISOR,
        "return was_stopped or (problem is None and status == -signal.SIGKILL)",
        "return was_stopped or status == -signal.SIGKILL",
        "a process that had to be killed counts as killed from outside, and a poisoned request is replayed for ever",
    ),
    Mutant(
        SUPERVISOR,
        "            kv_cache_memory=ready.kv_bytes,\n",
        "",
        "a restarted process takes another amount of memory than the first",
    ),
    Mutant(
        SUPERVISOR,
        "        except BaseException:\n            await process.kill()\n            raise",
        "        except BaseException:\n            raise",
        "a process that hangs while it loads is never killed",
    ),
    Mutant(
        SUPERVISOR,
        "        self.process = process\n        self.health = HealthMonitor(self._timeouts)\n",
        "        self.process = process\n",
        "a running process keeps the time limits of loading: a stall is never noticed",
    ),
    Mutant(
        SUPERVISOR,
        "            self._owner.on_tick()\n            problem = self.health.check()",
        "            problem = self.health.check()",
        "deadlines of requests between processes do not expire while a process runs",
    ),
    Mutant(
        POOL,
        "                self._router.forget(index)\n",
        "                pass\n",
        "the router believes that a restarted engine's cache is warm",
    ),
    Mutant(
        POOL,
        "[index for index in candidates if self.members[index].pid is not None] or candidates",
        "candidates",
        "requests wait for an engine that restarts although another is idle",
    ),
    Mutant(
        POOL,
        "                counters.append(member.counters())\n",
        "                pass\n",
        "counters fall while one of several engines restarts",
    ),
    Mutant(
        POOL,
        "        if not self._num_running:\n            self._listener.ended()",
        "        self._listener.ended()",
        "when one engine has ended the server believes that all have",
    ),
    Mutant(
        POOL,
        'snapshot=snapshot if snapshot is None or len(places) == 1 else f"{snapshot}.{index}"',
        "snapshot=snapshot",
        "several engines write one snapshot file over each other",
    ),
    Mutant(
        POOL,
        "                if isinstance(member, SupervisedEngine):\n                    await member.close()\n",
        "                pass\n",
        "when one engine fails to start the others run on without a server",
    ),
    Mutant(
        POOL,
        "        for member in self.members:\n            member.cancel(request_id)",
        "        self.members[0].cancel(request_id)",
        "requests of later engines cannot be cancelled",
    ),
    Mutant(
        POOL,
        "max(1, min(num_cpus, pick_cpus(config).threads // count))",
        "max(1, min(num_cpus, pick_cpus(config).threads))",
        "each engine takes the whole CPU quota",
    ),
    Mutant(
        ADDS,
        "        for pending in reversed(self._sent.values()):",
        "        for pending in list(self._sent.values()):",
        "askers change order after a crash",
    ),
    Mutant(
        ADDS,
        "                self._waiting.appendleft(pending)",
        "                self._waiting.append(pending)",
        "a request that a crashed process had goes behind newer ones",
    ),
    Mutant(
        ADDS,
        "pending.crash_suspect = pending.crash_suspect or not from_outside",
        "pending.crash_suspect = not from_outside",
        "a suspect is cleared by a kill from outside",
    ),
    Mutant(
        ADDS,
        "        if pending is None or pending.answer.done():\n            return None",
        "        if pending is None:\n            return None",
        "the answer to a caller that has left breaks the engine",
    ),
    Mutant(
        ROUTER,
        "known.popitem(last=False)",
        "known.popitem()",
        "the router forgets its newest entries",
    ),
    Mutant(
        ROUTER,
        "            known.move_to_end(key)\n",
        "",
        "the router forgets prompts that are used all the time",
    ),
    Mutant(
        ROUTER,
        "root_key(tenant.encode())",
        'root_key(b"")',
        "the router counts another tenant's prompt as computed",
    ),
    Mutant(
        LOG,
        "self._num_unproductive + 1 if from_outside and not self._has_gained else 0",
        "self._num_unproductive + 1 if from_outside else 0",
        "a server whose engines are killed from time to time quarantines harmless requests",
    ),
    Mutant(
        LOG,
        "        self._has_gained = False\n        self._isolated = None",
        "        self._isolated = None",
        "kills before any token are never counted as crashes after the first token",
    ),
    Mutant(
        LOG,
        "            (self._suspects if entry.crash_suspect else self._unsent).remove(entry)\n",
        "            pass\n",
        "a request that was dropped between two processes is replayed",
    ),
    Mutant(
        LOG,
        "            if entry.num_gained >= MIN_GAINED_TOKENS:",
        "            if entry.num_gained >= 1:",
        "a suspect that crashes while it decodes is cleared by its prefill",
    ),
    Mutant(
        LOG,
        "            if entry.is_cancelled or (entry.crash_suspect and may_be_cause):",
        "            if entry.crash_suspect and may_be_cause:",
        "a request cancelled before a crash is computed again",
    ),
    Mutant(
        LOG,
        "            if request.first_token_time is None:\n",
        "            if True:\n",
        "time to first token is that of the last token",
    ),
    Mutant(
        LOG,
        "    entry.num_gained = 0\n",
        "",
        "tokens gained in an earlier process clear a suspect",
    ),
    Mutant(
        LOG,
        "    seconds_in[State.PREEMPTED] += seconds_in[State.WAITING]\n    seconds_in[State.WAITING] = 0.0\n",
        "",
        "waiting in a second process counts as time in the queue instead of a stall",
    ),
    Mutant(
        HEALTH,
        "        self._now += TICK_S\n",
        "        self._now += 4 * TICK_S\n",
        "engines are killed four times too early",
    ),
    Mutant(
        HEALTH,
        "        if self._is_broken:\n",
        "        if False:\n",
        "a process whose loop has ended is kept",
    ),
    Mutant(
        MAIN,
        "        if self._core.is_broken:  # the updates say that requests have failed, but they can go on in the next "
        "process\n            _exit()\n",
        "",
        "a broken step fails its requests although the next process could go on",
    ),
    Mutant(
        MAIN,
        "        if self._flush_handle is not None:\n            self._flush_handle.cancel()\n            "
        "self._flush_handle = None\n",
        "        self._flush_handle = None\n",
        "an empty report follows each step",
        equivalent="the flush that is not cancelled finds no updates and sends nothing",
    ),
    Mutant(
        MAIN,
        "        self._begun.difference_update(update.request_id for update in updates if update.ended)\n",
        "",
        "the set of computed requests grows with every request",
    ),
    Mutant(
        MAIN,
        "                    self._begun.discard(request_id)\n",
        "",
        "the set of computed requests grows with every dropped request",
    ),
    Mutant(
        PROCESS,
        "        self.link.receive = _ignore\n",
        "",
        "messages of a killed process are counted for the next one",
        PROCESSES,
    ),
    Mutant(
        PROCESS,
        "            undo.callback(ours.close)\n",
        "",
        "each failed start leaks a socket",
        PROCESSES,
    ),
    Mutant(
        PROCESS,
        "            undo.callback(process.kill)\n",
        "",
        "a process whose link cannot be opened runs on",
        PROCESSES,
    ),
    Mutant(
        SUPERVISOR,
        "            seconds -= TICK_S\n            self._owner.on_tick()",
        "            seconds -= TICK_S",
        "deadlines do not expire between two failed starts",
    ),
    Mutant(
        SUPERVISOR,
        "            except Exception as error:  # whatever",
        "            except Unavailable as error:  # whatever",
        "one failed fork ends all attempts to restart the engine",
    ),
    Mutant(
        SUPERVISOR,
        "failing_at = min(failing_at, now() + self._restart_timeout_s)",
        "failing_at = min(failing_at, now())",
        "the first failed restart ends all requests",
    ),
    Mutant(
        SUPERVISOR,
        "await self._pause(pause_s if left_s <= 0 else min(pause_s, left_s))",
        "await self._pause(pause_s)",
        "requests fail seconds later than the time limit for restarts says",
    ),
    Mutant(
        PROCESS,
        "            os.close(self._heartbeat_fd)\n",
        "",
        "each restart leaks a descriptor",
        PROCESSES,
    ),
    Mutant(
        LINK,
        "            while data := self._end.recv(READ_BYTES):\n                self.data_received(data)",
        "            pass",
        "the last messages of a process that exits are lost",
    ),
    Mutant(
        PLACEMENT,
        "        cpus.update(range(int(first), int(last or first) + 1))",
        "        cpus.update(range(int(first), int(last or first)))",
        "the last CPU of each range is not used",
    ),
]
