# cython: language_level=3
"""One worker's part of a step: the ops of a program in order, each begun when the one before it is finished.

An op is finished when all its items are computed, whether or not every worker took part.
"""
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from .attention cimport num_attention_items, num_chunk_units, run_attention, store_chunks
from .experts cimport group_places, num_segments, run_combine, run_dispatch, run_route
from .isa cimport QUIRE_ENDS
from .latent cimport run_split
from .linear cimport help_linear, num_items, run_linear
from .lora cimport num_lora_items, run_lora
from .pool cimport (quire_is_finished, quire_pool_await, quire_pool_report, quire_pool_report_written,
                    quire_progress, quire_progress_add)
from .recurrence cimport num_convolved_items, num_recurrent_items, run_convolution, run_gated_norm, run_recurrence
from .rows cimport (run_add_given, run_add_norm, run_convert, run_embed, run_gate_rows, run_gather, run_norm,
                    run_pool)
from .step cimport end_item, first_item

cdef enum:
    PATIENCE_NS = 10000             # shortest wait of a worker for items of others, before it helps


cdef void replay_ops(void *argument, int worker, int workers) noexcept nogil:
    """Run the ops of a `Replay` that are not finished; worker 0 adds up their times.

    A worker other than 0 returns early instead of waiting long. It is called again when an op is finished.
    """
    cdef Replay *replay = <Replay *>argument
    cdef int64_t i, before = replay.started
    for i in range(replay.first, replay.end):
        if quire_is_finished(&replay.records[i].progress):
            continue
        if not _run(&replay.records[i], replay, worker, workers):
            break
    if worker == 0:
        for i in range(replay.first, replay.end):
            replay.records[i].nanoseconds += max(<int64_t>0, replay.records[i].progress.finished_ns - before)
            before = max(before, <int64_t>replay.records[i].progress.finished_ns)
    for i in range(QUIRE_ENDS):
        if replay.tiles.ends[i] != NULL:
            replay.tiles.ends[i]()


cdef int64_t now() noexcept nogil:
    """Return the nanoseconds of the monotonic clock."""
    cdef timespec at
    clock_gettime(CLOCK_MONOTONIC, &at)
    return at.tv_sec * <int64_t>1000000000 + at.tv_nsec


cdef bint _run(Record *record, const Replay *replay, int worker, int workers) noexcept nogil:
    """Take part in an op and wait until it is finished. Return whether the op is finished, which is always so for
    worker 0."""
    cdef const Step *step = &replay.step
    cdef const quire_tiles *tiles = replay.tiles
    cdef long long *counter = &record.progress.taken
    cdef int64_t computed, total, stored
    if record.kind == LINEAR:
        return _run_linear(record, replay, worker, workers)
    if record.kind == ROUTE:
        return _run_route(record, replay, worker)
    if record.kind == ATTENTION:
        total = _items(step, num_attention_items(&record.op.attention, step))
        stored = max(<int64_t>0, min(total, num_chunk_units(&record.op.attention, step)
                                     - first_item(step, num_attention_items(&record.op.attention, step))))
        if stored:
            computed = store_chunks(&record.op.attention, step, tiles, &record.stored.taken, workers)
            quire_pool_report(replay.pool, &record.stored, computed, stored)
            if not quire_pool_await(replay.pool, &record.stored, worker):
                return False
        computed = run_attention(&record.op.attention, step, tiles, counter, worker, workers)
        total -= stored
    elif record.kind == CONVERT:
        computed = run_convert(&record.op.convert, step, tiles, counter, worker, workers)
        total = _items(step, step.samples if record.op.convert.sampled else step.rows)
    elif record.kind == DISPATCH:
        computed = run_dispatch(&record.op.dispatch, step, counter)
        total = step.rows
    elif record.kind == COMBINE:
        computed = run_combine(&record.op.combine, step, tiles, counter)
        total = num_segments(&record.op.combine, step)
    elif record.kind == EMBED:
        computed = run_embed(&record.op.embed, step, tiles, counter, worker, workers)
        total = _items(step, step.rows)
    elif record.kind == NORM:
        computed = run_norm(&record.op.norm, step, tiles, counter, worker, workers)
        total = _items(step, step.samples if record.op.norm.sampled else step.rows)
    elif record.kind == POOL:
        computed = run_pool(&record.op.pool, step, tiles, counter)
        total = _items(step, step.samples)
    elif record.kind == CONVOLUTION:
        computed = run_convolution(&record.op.convolution, step, tiles, counter, workers)
        total = num_convolved_items(&record.op.convolution, step)
    elif record.kind == RECURRENCE:
        computed = run_recurrence(&record.op.recurrence, step, tiles, counter, workers)
        total = num_recurrent_items(&record.op.recurrence, step)
    elif record.kind == GATED_NORM:
        computed = run_gated_norm(&record.op.gated_norm, step, tiles, counter, workers)
        total = step.rows
    elif record.kind == SPLIT:
        computed = run_split(&record.op.split, step, tiles, counter, workers)
        total = step.rows
    elif record.kind == GATE_ROWS:
        computed = run_gate_rows(&record.op.gate_rows, step, tiles, counter, workers)
        total = step.rows
    elif record.kind == LORA:
        computed = run_lora(&record.op.lora, step, tiles, counter, workers)
        total = num_lora_items(&record.op.lora, step, workers)
    elif record.kind == ADD_GIVEN:
        computed = run_add_given(&record.op.add_given, step, tiles, counter)
        total = step.rows
    elif record.kind == ADD_NORM:
        computed = run_add_norm(&record.op.add_norm, step, tiles, counter)
        total = step.rows
    else:
        computed = run_gather(&record.op.gather, step, tiles, counter)
        total = step.samples
    quire_pool_report(replay.pool, &record.progress, computed, total)
    return quire_pool_await(replay.pool, &record.progress, worker)


cdef int64_t _items(const Step *step, int64_t items) noexcept nogil:
    """Return how many of an op's `items` the step computes."""
    return end_item(step, items) - first_item(step, items)


cdef bint _run_linear(Record *record, const Replay *replay, int worker, int workers) noexcept nogil:
    """Compute items, then repeat the items that other workers do not finish in time."""
    cdef const LinearOp *op = &record.op.linear
    cdef quire_share *shares = replay.shares
    cdef int64_t number = record - replay.records + 1
    cdef int64_t begun = now(), total = num_items(op, &replay.step), patience = PATIENCE_NS
    cdef int64_t computed = run_linear(op, &replay.step, replay.tiles, shares, number, worker, workers)
    quire_pool_report_written(replay.pool, &record.progress, shares, number, total)
    if computed:
        patience = max(patience, 2 * (now() - begun) // computed)      # time of two items
    if not _finishes_within(&record.progress, patience):
        help_linear(op, &replay.step, replay.tiles, shares, number, worker, workers)
        quire_pool_report_written(replay.pool, &record.progress, shares, number, total)
    return quire_pool_await(replay.pool, &record.progress, worker)


cdef bint _run_route(Record *record, const Replay *replay, int worker) noexcept nogil:
    """Choose the experts of rows; the worker that computes the last row also groups the rows by expert."""
    cdef const Step *step = &replay.step
    cdef int64_t computed = run_route(&record.op.route, step, replay.tiles, &record.progress.taken)
    if computed and quire_progress_add(&record.stored, computed) == step.rows:
        group_places(&record.op.route, step, worker)
        quire_pool_report(replay.pool, &record.progress, 1, 1)
    return quire_pool_await(replay.pool, &record.progress, worker)


cdef bint _finishes_within(const quire_progress *progress, int64_t nanoseconds) noexcept nogil:
    """Wait at most `nanoseconds`; return whether the op is finished."""
    cdef int64_t end = now() + nanoseconds
    while not quire_is_finished(progress):
        if now() > end:
            return False
    return True
