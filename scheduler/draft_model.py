"""A draft model as the scheduler sees it: which proposals to ask for after a step, and proposals that have come back.

Must not import the planner or the scheduler. The time of a pass of the draft model is learned as a ratio to the
predicted time of the same step of the model, so that one cost model serves both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .acceptance import DraftLengths
from .cost import CostModel, StepLoad
from .plan import DraftResult, DraftTask
from .request import Request

RATIO_MEMORY = 0.9  # weight of the earlier ratio, per measured step
MAX_SURPRISE = 2.0  # limit of a measured to the expected ratio, and of the reverse
EXPECTED_OUTPUT = 256  # most further tokens of a request for which the tokens before them are computed


class DraftModel:
    """A `Drafter` whose proposals are computed after the step before the one that verifies them."""

    def __init__(self, cost: CostModel, ratio: float, reads_steps: bool = False) -> None:
        """`ratio` is the estimated time of a pass over that of a step.

        With `reads_steps` it is a head of the model, which cannot compute missing tokens: it reads each step's rows.
        """
        self.reads_steps = reads_steps
        self.spent_s = 0.0  # time of the last proposals
        self._cost = cost
        self._ratio = ratio
        self._proposals: dict[int, tuple[int, Sequence[int]]] = {}  # request id -> number of tokens before, and tokens
        self._started: set[int] = set()  # ids of live requests that proposals were asked for
        self._ended: list[int] = []
        self._lengths: dict[int, int] = {}
        self._salts: dict[int, bytes] = {}

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        """See `Drafter.propose`. A proposal that began some tokens ago serves as far as these are as proposed."""
        end, tokens = self._proposals.get(request.request_id, (0, ()))
        num_since = len(request.token_ids) - end
        if num_since >= len(tokens) or list(tokens[:num_since]) != request.token_ids[end:]:
            return ()
        return tokens[num_since : num_since + limit]

    def forget(self, request: Request) -> None:
        """See `Drafter.forget`."""
        request_id = request.request_id
        self._proposals.pop(request_id, None)
        if request_id in self._started:
            self._started.remove(request_id)
            self._ended.append(request_id)

    def lengths(self, load: StepLoad, pause_s: float, margin: float) -> DraftLengths:
        """Return the lengths that pay for a decoding step with this load, if the draft model has to run for them."""
        rows = load.decode_rows
        step_s = self._cost.predict(load)
        cost = self._cost.coefficients.decode_row + (self._ratio * step_s / rows if rows else 0.0)
        return DraftLengths(step_s + pause_s, rows, margin * cost)

    def ask(self, request: Request, length: int, lengths: DraftLengths, acceptance_rate: float) -> bool:
        """Ask for `length` tokens after the step, and return True, unless its text is too long for what it may gain."""
        request_id = request.request_id
        if request_id not in self._started and not self.reads_steps:
            further = min(EXPECTED_OUTPUT, request.spec.max_tokens - request.num_output_tokens)
            missing_s = self._ratio * self._cost.predict_prefill(len(request.token_ids))
            if missing_s > further * lengths.saving(acceptance_rate, length):
                return False
        self._lengths[request_id] = length
        self._salts[request_id] = request.spec.prefix_salt
        return True

    def read(self, request: Request) -> None:
        """Let a head read the rows of the step, without a proposal."""
        if self.reads_steps:
            self._lengths[request.request_id] = 0
            self._salts[request.request_id] = request.spec.prefix_salt

    def task(self, load: StepLoad, seconds_left: float | None) -> DraftTask | None:
        """Return the task of what was asked for since the last call.

        Its passes and the verification of its tokens take at most `seconds_left`; None: no limit.
        """
        lengths, self._lengths = self._lengths, {}
        salts, self._salts = self._salts, {}
        max_rows = 1 << 30
        if seconds_left is not None and any(lengths.values()):
            pass_s = self._ratio * self._cost.predict(load)
            per_token_s = pass_s + len(lengths) * self._cost.coefficients.decode_row
            most = int(seconds_left / per_token_s) if per_token_s else max(lengths.values())
            lengths = {request_id: min(length, most) for request_id, length in lengths.items()}
            if not most and not self.reads_steps:
                lengths = {}
            per_row_s = self._ratio * self._cost.coefficients.prefill_token
            left_s = seconds_left - per_token_s * max(lengths.values(), default=0)
            max_rows = 2 * len(lengths) + int(left_s / per_row_s) if per_row_s else max_rows
        if not lengths:
            return None
        self._started |= lengths.keys()
        ended, self._ended = tuple(self._ended), []
        return DraftTask(lengths, salts, max_rows, ended)

    def note(self, result: DraftResult, requests: Mapping[int, Request]) -> None:
        """Take the proposals of a step, and learn from their time. `requests` are live, by id."""
        self.spent_s = result.seconds
        for request_id, tokens in result.tokens.items():
            request = requests.get(request_id)
            if request is not None:
                self._proposals[request_id] = len(request.token_ids), tokens
        num_sequences = len(result.tokens)
        if not num_sequences or result.num_rows > (result.num_passes + 1) * num_sequences:
            return  # The first pass has more than 2 rows per sequence only where tokens were missing.
        base, row, *_ = self._cost.coefficients
        expected_s = self._ratio * (base * result.num_passes + row * result.num_rows)
        if expected_s > 0:
            surprise = min(max(result.seconds / expected_s, 1 / MAX_SURPRISE), MAX_SURPRISE)
            self._ratio *= RATIO_MEMORY + (1 - RATIO_MEMORY) * surprise
