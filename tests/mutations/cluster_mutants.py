"""Bugs in `runtime/cluster/`."""

from mutant import Mutant

TESTS = "tests/runtime/cluster"
SOCKETS = "tests/system/test_host_sockets.py"
GREETING, HOST, LINK, REMOTE, CLUSTER = (
    f"runtime/cluster/{name}.py" for name in ("greeting", "host", "host_link", "remote", "cluster")
)

MUTANTS = [
    Mutant(
        GREETING,
        'hmac.digest(secret, role + host_hello + server_hello, "sha256")',
        'hmac.digest(secret, host_hello + server_hello, "sha256")',
        "a stranger is let in with the MAC that the host sent it",
    ),
    Mutant(
        GREETING,
        "    return hmac.digest(secret, role + host_hello + server_hello,",
        "    return hmac.digest(secret, role + server_hello,",
        "a recorded greeting is accepted again",
    ),
    Mutant(
        GREETING,
        ".encode()[:VERSION_BYTES]",
        ".encode()",
        "hosts of a build with a long version cannot be connected to",
    ),
    Mutant(
        HOST,
        "        for adding in set(self._adding.values()):\n            adding.cancel()\n        for request_id in self._requests:",
        "        for request_id in self._requests:",
        "an engine goes on with requests whose API server left before they were answered",
    ),
    Mutant(
        HOST,
        "                self._check_tokens(generated, self._pool.info.vocab_size)\n                self._readmit",
        "                self._readmit",
        "a wrong token id in a moved request is out of the bounds of the embedding",
    ),
    Mutant(
        HOST,
        "                for token_ids in generated:\n                    self._check_tokens(token_ids, self._pool.info.vocab_size)\n",
        "",
        "a wrong token id after which a new request goes on is out of the bounds of the embedding",
    ),
    Mutant(
        HOST,
        "            if len(text.token_ids) > encoder.max_model_len:\n",
        "            if False:\n",
        "a text that is too long for the encoder ends the step of all API servers",
    ),
    Mutant(
        HOST,
        "            self._check_tokens(text.token_ids, encoder.vocab_size)\n",
        "",
        "an unknown token of a text ends the step of all API servers",
    ),
    Mutant(
        HOST,
        "        if self._is_leaving:\n            link.send(HostLeaving())\n",
        "",
        "API servers that connect to a leaving host send it requests",
        SOCKETS,
    ),
    Mutant(
        HOST,
        "        for failure in self._take(self.failures):\n            self._requests.pop(failure.request_id, None)\n",
        "        for failure in self._take(self.failures):\n",
        "a host waits for failed requests when it leaves",
    ),
    Mutant(
        HOST,
        "            for request in requests:\n                self._requests.pop(request.request_id, None)\n            refused",
        "            refused",
        "a host waits for refused requests when it leaves, and their ids cannot be used again",
    ),
    Mutant(
        HOST,
        "                self._pool.drop(request_id, reason, error)\n                self._requests.pop(request_id, None)\n",
        "                self._pool.drop(request_id, reason, error)\n",
        "a host waits for dropped requests when it leaves",
    ),
    Mutant(
        HOST,
        "        held[:] = [each for each in held if each.request_id in self._adding] if self._adding else ()\n",
        "        held[:] = ()\n",
        "the first tokens of a request are lost if they come before its answer",
    ),
    Mutant(
        LINK,
        "            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:\n                self._transport.abort()\n",
        "",
        "messages to an API server that does not read fill the memory of a host",
    ),
    Mutant(
        LINK,
        "        self.data_received(await self._reader.read())\n",
        "        await self._reader.read()\n",
        "what a host sent right after the greeting is lost",
    ),
    Mutant(
        LINK,
        "        if self._reader.at_eof():\n            return\n",
        "",
        "a link that was closed right after the greeting is waited for",
    ),
    Mutant(
        REMOTE,
        "engine=self.stats() if self.is_ready and self._stats is not None else None",
        "engine=self.stats() if self._stats is not None else None",
        "scrapes fail while a host is being given up",
    ),
    Mutant(
        LINK,
        "RecursionError",
        "ZeroDivisionError",
        "a deeply nested message is logged as a bug",
    ),
    Mutant(
        REMOTE,
        "        entry.num_lost_hosts += 1  # of those",
        "        pass  # of those",
        "a request that ends engines moves from host to host for ever",
    ),
    Mutant(
        REMOTE,
        "        self._is_leaving = self._is_failing = False  # it may come back\n",
        "        self._is_failing = False\n",
        "a host that left and came back gets no requests",
    ),
    Mutant(
        REMOTE,
        "        self._is_failing = self._is_failing or is_lost\n",
        "",
        "a request returns to the host whose engines cannot be restarted",
    ),
    Mutant(
        REMOTE,
        "                self._is_failing, self._restarting = False, None\n",
        "                self._restarting = None\n",
        "a host whose engines were gone for a while gets no requests any more",
    ),
    Mutant(
        REMOTE,
        "                super().receive(message)\n                self._listener.resumed()\n",
        "                super().receive(message)\n",
        "requests of a lost host wait although the engines of another one compute again",
    ),
    Mutant(
        REMOTE,
        "        self._num_moved += len(given_up)\n",
        "",
        "moves from lost hosts are not counted",
    ),
    Mutant(
        REMOTE,
        "is_blameless=self._is_leaving",
        "is_blameless=False",
        "requests are quarantined after three updates of hosts",
    ),
    Mutant(
        REMOTE,
        "        if ready.info.max_model_len < self.info.max_model_len:",
        "        if ready.info.max_model_len != self.info.max_model_len:",
        "hosts with a longer context than the first one are refused",
    ),
    Mutant(
        REMOTE,
        "self._next_attempt = max(now, self._next_attempt) + RETRY_S",
        "self._next_attempt = now",
        "an API server connects to a host that closes links without a pause",
    ),
    Mutant(
        REMOTE,
        "        self._on_heartbeat()\n        if not",
        "        if not",
        "a host that is busy sending tokens is lost after a second",
        SOCKETS,
    ),
    Mutant(
        REMOTE,
        "            self._source.connection.link.send(Heartbeat())\n",
        "            pass\n",
        "a host drops the requests of an API server that sends nothing else for ten seconds",
    ),
    Mutant(
        REMOTE,
        "        self.is_retired = False\n        self._source.member = member\n",
        "        self._source.member = member\n",
        "a host that comes back to its name gets no requests",
    ),
    Mutant(
        REMOTE,
        "        self.is_retired = False\n        self._source.member = member\n",
        "        self.is_retired = False\n",
        "a host that takes the address of another one is asked with the secret of that one",
    ),
    Mutant(
        CLUSTER,
        "            await self._where.wait_for_change()\n",
        "            await asyncio.sleep(5)\n",
        "a host that another system reports waits for the next time that DNS is asked",
    ),
    Mutant(
        CLUSTER,
        "            except (NotAccepting, QueueFull) as refusal:",
        "            except QueueFull as refusal:",
        "a host that leaves makes requests fail that others have room for",
    ),
    Mutant(
        CLUSTER,
        "                if not host.num_requests:\n                    del",
        "                if True:\n                    del",
        "requests are cut off when their host leaves its name",
    ),
    Mutant(
        CLUSTER,
        "        except OSError as error:\n            _log",
        "        except ZeroDivisionError as error:\n            _log",
        "hosts that come are not found any more after one failure of DNS",
    ),
    Mutant(
        CLUSTER,
        "        self._listener.ended()\n",
        "        pass\n",
        "the API server does not end after its cluster",
    ),
    Mutant(
        REMOTE,
        "                self._is_failing, self._restarting = False, None\n",
        "                self._is_failing = False\n",
        "a host whose engine was killed once gets no requests any more",
    ),
    Mutant(
        REMOTE,
        "        for request_id in left_there:  # if the link is up\n            self._send(",
        "        for request_id in ():\n            self._send(",
        "a request is computed at two hosts after the engine of the first was killed",
    ),
    Mutant(
        REMOTE,
        "            left_there += self._tokens.take_back(self._restarting.request_ids)\n",
        "            pass\n",
        "requests wait until a killed engine has been restarted although other hosts compute",
    ),
    Mutant(
        REMOTE,
        "        return super().is_ready and self._restarting is None\n",
        "        return super().is_ready\n",
        "new requests wait for the engine of their home although other hosts compute",
    ),
    Mutant(
        HOST,
        "        self.flush()\n        theirs",
        "        theirs",
        "tokens that a killed engine had generated are computed again",
    ),
    Mutant(
        HOST,
        " and each not in self._adding]\n        self.link",
        "]\n        self.link",
        "an API server takes back requests that it does not know to be accepted",
    ),
]
