"""Requests of a batch to any server with OpenAI's HTTP API. Needs aiohttp."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from ..common.errors import ConfigError, MissingDependency, Unauthenticated, Unavailable
from ..server.batches.lines import BatchLine, LineAnswer

if TYPE_CHECKING:
    import aiohttp

CONNECT_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 0.2
LONGEST_SERVER_PAUSE_S = 10.0
SERVER_PATIENCE_S = 300.0  # time without a server after which the run ends
RETRIED = (408, 425, 429, 500, 502, 503, 504)
MAX_SERVER_ERRORS = 5  # answers 500 to one line, of which the last is its answer


class RemoteRequests:
    """Sends lines to the server at a base URL, which may end in `/v1`. Close it with `close`."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--server: {base_url!r} is not allowed; write http://HOST:PORT/v1")
        self._http = _aiohttp()
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"content-type": "application/json"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession = self._http.ClientSession(
            headers=headers,
            connector=self._http.TCPConnector(limit=0),
            timeout=self._http.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(self, line: BatchLine) -> LineAnswer:
        """Return the answer to a line, once it is not a refusal for now.

        Raises Unauthenticated, or Unavailable if the server is not reached for `SERVER_PATIENCE_S`.
        """
        pause_s = FIRST_PAUSE_S
        away_s = 0.0
        num_server_errors = 0
        while True:
            try:
                answer, retry_s = await self._post(line)
            except (OSError, self._http.ClientError) as error:
                if away_s > SERVER_PATIENCE_S:
                    text = f"{self._base_url} was not reached for {SERVER_PATIENCE_S:.0f} s"
                    raise Unavailable(f"{text}: {error or type(error).__name__}") from None
                retry_s = None
                away_s += pause_s
            else:
                num_server_errors += answer.status == 500
                if retry_s is None or num_server_errors > MAX_SERVER_ERRORS:
                    return answer
                away_s = 0.0
            pause_s = min(max(pause_s, retry_s or 0.0), LONGEST_SERVER_PAUSE_S)
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def _post(self, line: BatchLine) -> tuple[LineAnswer, float | None]:
        """Return the answer, and the seconds after which to send the line again; None if the answer is final."""
        async with self._session.post(
            self._base_url + line.url, data=line.body, headers={"x-request-id": line.name}
        ) as response:
            content = await response.read()
        if response.status == 401:
            raise Unauthenticated(f"{self._base_url} refuses the key; set --api-key or OPENAI_API_KEY")
        answer = LineAnswer(response.status, content if _is_json(content) else _encoded(content))
        if response.status not in RETRIED or response.headers.get("x-should-retry") == "false":
            return answer, None
        return answer, _seconds(response.headers.get("retry-after"))


def _seconds(value: str | None) -> float:
    try:
        return float(value or 0)
    except ValueError:  # a date
        return LONGEST_SERVER_PAUSE_S


def _is_json(content: bytes) -> bool:
    try:
        msgspec.json.decode(content)
    except msgspec.DecodeError:
        return False
    return True


def _encoded(content: bytes) -> bytes:
    return msgspec.json.encode(content.decode(errors="replace"))


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError:
        raise MissingDependency("--server needs aiohttp: pip install 'quire[loadtest]'") from None
    return aiohttp
