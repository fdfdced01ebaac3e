"""The time of attention by its shape.

A program computes 128 rows of queries against all keys (forward), or 128 keys against all queries (backward), block by
block. Three things make a shape slower than a large one. A program has a fixed cost, as much as some more keys. Causal
programs are not equally long, and their blocks on the diagonal count as a whole. And a pair of a query and a key costs
an exponential and the rest of a softmax, which take as long for narrow heads as for wide ones.

The constants were fitted to 54 shapes on an H200 with cuDNN 9 (26 November 2026, torch 2.11): heads of 32, 64 and 128,
128 to 8,192 tokens, causal or not. Errors have a standard deviation of 4.5% forward and 3.6% backward. They are ratios
of work, so they hold for other GPUs as far as those have the same ratio of exponentials to matrix operations.

The memory-efficient kernels, which torch takes where there is a mask or a bias, have constants of their own: fitted to
192 shapes, each without a bias, with one, and with one that is learnt (H200, 29 November 2026, torch 2.11): heads of
32, 64 and 128, 49 to 2,048 tokens, 96 and 768 heads, bfloat16 and float32. Errors have standard deviations of 8 to 11%.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# The part of the longest program that runs after the others have ended, where programs are not equally long.
_TAIL = 0.75


@dataclass(frozen=True)
class AttentionPass:
    """What differs between forward and backward.

    Attributes:
        gemms: GEMMs over all pairs of a query and a key.
        ends: the fixed cost of a program, as so many more keys.
        narrowest: narrower heads take as long as those of this width, because of the exponentials.
        extra_bytes: per element of the queries, of kernels beside the main one. Backward reads the output and its
            gradient for their row sums, fills a float32 gradient of the queries with zeros, adds to it (a read and a
            write), and converts it to 16 bits: 2 + 2 + 4 + 8 + 4 + 2.
        extra_kernels: number of those kernels.
        rows: of queries (forward) or keys (backward) per program.
        block: keys (forward) or queries (backward) that a program visits at a time.
        resident: programs that share a multiprocessor.
    """

    gemms: int
    ends: int
    narrowest: int
    extra_bytes: int = 0
    extra_kernels: int = 0
    rows: int = 128
    block: int = 128
    resident: int = 1


FORWARD = AttentionPass(gemms=2, ends=192, narrowest=88)
BACKWARD = AttentionPass(gemms=5, ends=128, narrowest=84, extra_bytes=22, extra_kernels=2)


@dataclass(frozen=True)
class EfficientKernel:
    """What differs between the memory-efficient kernels, forward and backward, of two element sizes.

    Attributes:
        narrow, wide: of heads of at most 64 elements, and of wider ones.
        rate: as a part of that of large GEMMs.
        biased: the part of the rate that is left where a bias or a mask is added to the scores.
        learnt: the part of that which is left where backward computes the gradient of the bias.
    """

    narrow: AttentionPass
    wide: AttentionPass
    rate: float
    biased: float
    learnt: float = 1.0


def _kernel(narrow: AttentionPass, rate: float, biased: float, learnt: float = 1.0, **wide: int) -> EfficientKernel:
    return EfficientKernel(narrow, replace(narrow, block=128, resident=1, **wide), rate, biased, learnt)


# By whether it is backward, and bytes of an element.
_EFFICIENT = {
    (False, 2): _kernel(AttentionPass(2, ends=42, narrowest=85, rows=64, block=64, resident=2), 0.254, 0.732),
    (False, 4): _kernel(AttentionPass(2, ends=24, narrowest=87, rows=64, block=64), 0.97, 0.87),
    (True, 2): _kernel(AttentionPass(5, ends=0, narrowest=80, rows=64, block=64), 0.181, 0.903, 0.931, rows=128),
    (True, 4): _kernel(AttentionPass(5, ends=16, narrowest=58, rows=64, block=64, resident=2), 0.73, 0.956, 0.966),
}


@dataclass(frozen=True)
class AttentionShape:
    """Attention of ``heads`` heads of a batch, each of ``queries`` queries and ``keys`` keys of ``width`` elements.

    ``shared`` says that several heads of queries have one head of keys and values (grouped-query attention).
    """

    heads: int
    queries: int
    keys: int
    width: float
    causal: bool
    shared: bool = False


# The attention that rates of GPUs refer to.
LARGE = AttentionShape(32, 8192, 8192, 128, causal=True)

# Backward of shared keys and values writes their gradients for every head of queries, and a further kernel sums them:
# bytes per element of the queries.
_SHARED_BYTES = 2 * (2 + 2)


def operations(attention: AttentionShape, gemms: int) -> float:
    """Multiplications and additions of attention with so many GEMMs. Causal attention skips the keys after each
    query."""
    queries, keys = attention.queries, attention.keys
    pairs = float(queries * keys)
    if attention.causal:
        pairs = min(queries, keys) ** 2 / 2 + max(queries - keys, 0) * keys
    return 2 * attention.heads * pairs * gemms * attention.width


def seconds(
    attention: AttentionShape, kind: AttentionPass, rate: float, multiprocessors: int, bandwidth: float
) -> float:
    """Seconds of attention without launches.

    Args:
        rate: operations per second of :data:`LARGE`.
        bandwidth: bytes per second of a large copy.
    """
    extra = _extra_seconds(LARGE, kind, bandwidth)
    # Attention so fast that its memory-bound kernels would take all the time is not described by these constants.
    large = max(operations(LARGE, kind.gemms) / rate - extra, extra)
    fastest = _work(LARGE, kind, multiprocessors, backward=kind is BACKWARD) / large
    work = _work(attention, kind, multiprocessors, backward=kind is BACKWARD)
    return work / fastest + _extra_seconds(attention, kind, bandwidth)


def efficient_seconds(
    attention: AttentionShape,
    gemm_rate: float,
    itemsize: int,
    multiprocessors: int,
    *,
    backward: bool,
    biased: bool,
    learnt: bool,
) -> float:
    """Seconds of memory-efficient attention without launches.

    Args:
        gemm_rate: operations per second of large GEMMs in the dtype.
        itemsize: bytes of an element.
        biased: whether a bias or a mask is added to the scores.
        learnt: whether the gradient of the bias is computed.
    """
    kernel = _EFFICIENT[backward, 2 if itemsize <= 2 else 4]
    kind = kernel.narrow if attention.width <= 64 else kernel.wide
    rate = gemm_rate * kernel.rate * (kernel.biased if biased else 1) * (kernel.learnt if learnt else 1)
    return _work(attention, kind, multiprocessors, backward=backward) / rate


def _extra_seconds(attention: AttentionShape, kind: AttentionPass, bandwidth: float) -> float:
    each = kind.extra_bytes + (_SHARED_BYTES if kind is BACKWARD and attention.shared else 0)
    return each * attention.heads * attention.queries * attention.width / bandwidth


def _work(attention: AttentionShape, kind: AttentionPass, multiprocessors: int, *, backward: bool) -> float:
    """Operations that all multiprocessors could do in the time of the programs."""
    rows, others = attention.queries, attention.keys
    if backward:
        rows, others = others, rows
    programs = attention.heads * -(-rows // kind.rows)
    if not programs or not others:
        return 0.0
    longest = -(-others // kind.block) * kind.block + kind.ends
    length = -(-programs // (multiprocessors * kind.resident)) * kind.resident * longest
    if attention.causal:
        visited = _visited(attention, kind.block) / -(-rows // kind.block) + kind.ends
        length = min(length, max(programs / multiprocessors * visited + _TAIL * longest, longest))
    return multiprocessors * length * 2 * kind.rows * kind.gemms * max(attention.width, kind.narrowest)


def _visited(attention: AttentionShape, size: int) -> float:
    """Keys that causal attention visits in one head, summed over blocks of so many queries; backward, queries over
    blocks of keys. Queries beyond the keys see all of them; keys beyond the queries are seen by none."""
    across, along = -(-attention.queries // size), -(-attention.keys // size)
    square = min(across, along)
    return (square * (square + 1) / 2 + (across - square) * along) * size
