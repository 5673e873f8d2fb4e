from libc.stdint cimport int64_t

from .attention cimport AttentionOp
from .experts cimport CombineOp, DispatchOp, RouteOp
from .isa cimport quire_tiles
from .latent cimport SplitOp
from .linear cimport LinearOp
from .lora cimport LoraOp
from .pool cimport quire_pool, quire_progress, quire_share
from .recurrence cimport ConvolutionOp, GatedNormOp, RecurrenceOp
from .rows cimport AddGivenOp, AddNormOp, ConvertOp, EmbedOp, GateRowsOp, GatherOp, NormOp, PoolOp
from .step cimport Step

cdef enum Kind:
    EMBED
    CONVERT
    LINEAR
    ATTENTION
    GATHER
    ADD_NORM
    NORM
    POOL
    ROUTE
    DISPATCH
    COMBINE
    ADD_GIVEN
    CONVOLUTION
    RECURRENCE
    GATED_NORM
    SPLIT
    GATE_ROWS
    LORA

cdef union Payload:
    EmbedOp embed
    ConvertOp convert
    LinearOp linear
    AttentionOp attention
    GatherOp gather
    AddNormOp add_norm
    NormOp norm
    PoolOp pool
    RouteOp route
    DispatchOp dispatch
    CombineOp combine
    AddGivenOp add_given
    ConvolutionOp convolution
    RecurrenceOp recurrence
    GatedNormOp gated_norm
    SplitOp split
    GateRowsOp gate_rows
    LoraOp lora

cdef struct Record:
    Kind kind
    Payload op
    quire_progress stored           # attention: stored keys and values of chunks; routing: experts chosen for rows
    quire_progress progress
    int64_t nanoseconds             # time until all workers were done; reset by `Program.op_seconds`

cdef struct Replay:
    Record *records
    int64_t num_records
    int64_t first, end              # records that the step runs
    quire_share *shares             # [workers], of the items of linear layers
    Step step
    const quire_tiles *tiles
    quire_pool *pool
    int64_t started                 # start of the step, as `now` returns it

cdef int64_t now() noexcept nogil
cdef void replay_ops(void *argument, int worker, int workers) noexcept nogil
