from libc.stdint cimport int32_t, int64_t

from .isa cimport quire_output, quire_router, quire_tiles
from .step cimport Step, Value

cdef struct RoutingTables:          # the tables of a `Routing`
    float *weights                  # [rows][weights_width]
    int64_t weights_width
    int32_t *places                 # [rows][places_width]
    int64_t places_width
    int32_t *groups                 # [1 + groups][groups_width]
    int64_t groups_width
    int64_t num_experts
    int64_t top_k

cdef struct RouteOp:
    Value logits
    RoutingTables routing
    quire_router router
    const float *scales             # [num_experts], factors of the weights; or NULL

cdef struct DispatchOp:
    Value input
    const float *squares            # [rows][squares_width]
    Value out
    float *out_squares              # [places][squares_width]
    int64_t squares_width
    RoutingTables routing

cdef struct CombineOp:
    Value input
    Value out
    bint is_normed
    quire_output normed
    RoutingTables routing
    bint has_shared
    Value shared                    # [rows][columns] of the shared expert
    Value logits                    # [rows][num_experts + 1]
    bint adds                       # 0: `out` is overwritten

cdef int64_t run_route(const RouteOp *op, const Step *step, const quire_tiles *tiles,
                       long long *counter) noexcept nogil
cdef void group_places(const RouteOp *op, const Step *step, int worker) noexcept nogil
cdef int64_t run_dispatch(const DispatchOp *op, const Step *step, long long *counter) noexcept nogil
cdef int64_t run_combine(const CombineOp *op, const Step *step, const quire_tiles *tiles,
                         long long *counter) noexcept nogil
cdef int64_t num_segments(const CombineOp *op, const Step *step) noexcept nogil
cdef int64_t grouping_scratch_bytes(int64_t num_experts) noexcept
