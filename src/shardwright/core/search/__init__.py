"""Search for the cuts of every operator of a graph on a device matrix.

Notation. Operator ``o`` has a rule with factors ``F(o)``; the device matrix has axes ``1 .. A`` of
sizes ``d_1 .. d_A`` (the prime factors of the number of devices, slowest links first).

Nouns of a search, from small to large:

    choice      the factor that one operator cuts over one axis, or none
    cuts        the choices of an operator over all axes
    layout      placement of a tensor, as implied by the cuts of its producer or consumer
    decisions   cuts, storage, stages and recomputation of a full model
    candidate   decisions with their predicted step time; the best becomes the plan
    bound       lower bound on the seconds of all candidates with some property

Decision variables:

    c[o, a] in F(o) + {none}      the factor that operator o cuts over axis a
    s[p]    a layout              the storage of parameter p
    g[o]    in 1 .. S             the pipeline stage of operator o
    r[b]    an option or none     the recomputation of block b in its backward pass
    m       a divisor of B        the number of micro-batches of a batch of B samples

Objective with a cluster (seconds of a step plus weighted parameter memory):

    (1)  T(c) = m (F + W + R) + E + U + w K

    F, W   forward and backward computation       sum over o of work(o, c) / rate
    R      redistributions of activations         sum over values v of the cheapest steps from the
                                                  layout of its producer to those of its consumers
    E      exposed communication of parameters    max(0, Ga - F) + max(0, Gr - W): all-gathers hide
                                                  behind the forward, reductions behind the backward
    U      the optimizer's update                 bytes of parameters and state / memory bandwidth
    w K    mem_coeff times the bytes of parameters on a device, in seconds of the fastest link

    implemented in: by_time/objective.py: Objective.cost, ObjectiveCost.total

Objective without a cluster (numbers of communicated and stored elements, as in MindSpore's
recursive programming):

    (2)  sum over o, axis by axis, of  min over f of  cut_cost(o, f) + redistribution(o, f)

         redistribution(o, f)  to the neighbors of o whose choice on this axis is decided

    implemented in: cost/symbolic.py: cut_cost, redistribution_cost; recursive/search.py: Recursion

Constraints:

    (3)  the sizes of all dimensions with factor f are divisible by the product of d_a over the axes
         that cut f                                       indexed_graph.py: IndexedGraph
    (4)  c[o, .] of a pinned operator is as the user says request.py: SearchRequest.pinned
    (5)  g is monotone along every data dependency        assign_stages.py: balanced_chunks
    (6)  the peak memory of each stage is at most the limit
                                             planner/fit_memory.py: candidate_within_memory
    (7)  s[p] shards only over axes over which every use of p is replicated
                                                          optimizer_sharding.py: sharded_storage

How (1) is minimized:

    one axis, all others fixed    exactly, by variable elimination
                                  by_time/axis_tables.py: AxisTables.decide
    all axes                      outermost first and innermost first, then each axis again until
                                  the cost stops falling    by_time/search.py: timed_search
    one operator, all axes        by_time/local_search.py: local_search
    two axes, some operators      by_time/swap_axes.py: swap_axes
    a lower bound of (1)          by_time/certificate.py: certify
    jointly, small models         by_time/exact.py: ExactSearch
    r, under (6)                  a knapsack of each stage  recompute/knapsack.py: cheapest
    m, S, and levels of s         enumerated                planner/choose_micro_batches.py,
                                                            planner/choose_stages.py
"""
