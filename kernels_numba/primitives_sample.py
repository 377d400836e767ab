"""Candidates of a row of logits, by mass and by place in their order: what sampling's kernel is made of.

A candidate is an `order_key` (logit before id); mass = round(2^41 * exp((logit - greatest) / temperature)), an
integer, so that sums are exact in whatever order they run. `rate` is 2 / temperature, `greatest` the row's greatest
logit. Candidates FARTHEST or more exponents below it have no mass and count nowhere.

A set of candidates is (bucket, mask, digits): those of one first bucket (-1: of all) whose key & mask is digits.
"""

from numba import cuda, float32, int32, uint32, uint64

from kernels_numba.primitives import SIMULATED, device_function, exp, float_from_bits, fma, order_key
from kernels_numba.primitives_block import block_max_u64

DIGIT = 3 if SIMULATED else 10  # bits a level
THREADS = 1 << DIGIT  # of the block: one bucket a thread, and one candidate a thread when they are sorted
UNROLL = 4  # loads in flight a thread, written out in `read4`
ONE = 1 << 41  # the mass of the greatest logit
FARTHEST = 28.4  # ONE * exp(-FARTHEST) is just above 1
BUCKETS_PER_UNIT = THREADS / FARTHEST
LIMB, LIMB_MASK = 14, (1 << 14) - 1  # masses are added in three limbs of 14 bits: 2^18 of them fit 32 bits
MAX_VOCAB = 1 << 18
# What `choose` writes: the bucket or key, mass and count before it, its own mass and count.
WHICH, MASS_BEFORE, COUNT_BEFORE, MASS, COUNT, FOUND = 0, 1, 2, 3, 4, 5


@device_function
def value_of(key):
    """The logit of an order_key: -inf for a NaN's, 0.0 for -0.0."""
    ordered = uint32(key >> uint64(32))
    positive = ordered >> uint32(31)
    return float_from_bits(ordered & uint32(0x7FFFFFFF) if positive else uint32(~ordered))


@device_function
def exponent_of(value, greatest, rate):
    """(greatest - value) / temperature, with rate = 2 / temperature; halves first, so that no difference overflows."""
    if value == greatest:
        return float32(0)  # equal infinities have no difference
    return fma(value, float32(-0.5), greatest * float32(0.5)) * rate


@device_function
def mass_of(exponent):
    """round(ONE * exp(-exponent)) as u64."""
    return uint64(fma(exp(-exponent), float32(ONE), float32(0.5)))


@device_function
def first_bucket(exponent):
    """The bucket of an exponent in 0..FARTHEST at the first level, the greatest logits in bucket 0."""
    return min(int32(exponent * float32(BUCKETS_PER_UNIT)), int32(THREADS - 1))


@device_function
def read(logits, row, i):
    """The order_key of logits[row, i], or 0 past the end, where the last logit is loaded again."""
    last = int32(logits.shape[1] - 1)
    # The key is made before the test: no branch stands around the load, so that four go out together.
    key = order_key(logits[row, min(int32(i), last)], i)
    return key if i <= last else uint64(0)


@device_function
def read4(logits, row, i):
    """The keys of this thread's next four logits: UNROLL loads in flight."""
    step = int32(THREADS)
    a, b = read(logits, row, i), read(logits, row, i + step)
    c, d = read(logits, row, i + int32(2) * step), read(logits, row, i + int32(3) * step)
    return a, b, c, d


@device_function
def inside(key, greatest, rate, bucket, mask, digits):
    """The key, if it has mass and is of the set (bucket, mask, digits); else 0."""
    exponent = exponent_of(value_of(key), greatest, rate)
    if key == uint64(0) or not exponent < float32(FARTHEST):
        return uint64(0)
    if bucket >= 0 and (first_bucket(exponent) != bucket or key & mask != digits):
        return uint64(0)
    return key


@device_function
def tally(key, greatest, rate, bucket, shift, limbs):
    """Add a key's mass and count to its place: by exponent when `bucket` is -1, else by its digit at `shift`."""
    if key != uint64(0):
        exponent = exponent_of(value_of(key), greatest, rate)
        place = first_bucket(exponent)
        if bucket >= 0:
            place = int32(THREADS - 1) - int32((key >> shift) & uint64(THREADS - 1))
        mass = mass_of(exponent)
        cuda.atomic.add(limbs, (0, place), uint32(mass & uint64(LIMB_MASK)))
        cuda.atomic.add(limbs, (1, place), uint32((mass >> uint64(LIMB)) & uint64(LIMB_MASK)))
        cuda.atomic.add(limbs, (2, place), uint32(mass >> uint64(2 * LIMB)))
        cuda.atomic.add(limbs, (3, place), uint32(1))


@device_function
def histogram(logits, row, greatest, rate, bucket, mask, digits, shift, limbs):
    """Mass and count of this thread's bucket, over all keys inside."""
    thread = int32(cuda.threadIdx.x)
    cuda.syncthreads()  # the last histogram has been read
    for part in range(int32(4)):
        limbs[part, thread] = uint32(0)
    cuda.syncthreads()  # every bucket is empty
    for i in range(thread, int32(logits.shape[1]), int32(UNROLL * THREADS)):
        a, b, c, d = read4(logits, row, i)
        tally(inside(a, greatest, rate, bucket, mask, digits), greatest, rate, bucket, shift, limbs)
        tally(inside(b, greatest, rate, bucket, mask, digits), greatest, rate, bucket, shift, limbs)
        tally(inside(c, greatest, rate, bucket, mask, digits), greatest, rate, bucket, shift, limbs)
        tally(inside(d, greatest, rate, bucket, mask, digits), greatest, rate, bucket, shift, limbs)
    cuda.syncthreads()  # every key is counted
    mass = uint64(limbs[0, thread]) + (uint64(limbs[1, thread]) << uint64(LIMB))
    return mass + (uint64(limbs[2, thread]) << uint64(2 * LIMB)), uint64(limbs[3, thread])


@device_function
def extremes(logits, row, greatest, rate, bucket, mask, digits, scratch, partials):
    """The least and the greatest key inside."""
    high, low = uint64(0), uint64(0)  # low is kept as the greatest complement
    for i in range(int32(cuda.threadIdx.x), int32(logits.shape[1]), int32(UNROLL * THREADS)):
        for key in read4(logits, row, i):
            chosen = inside(key, greatest, rate, bucket, mask, digits)
            high = max(high, chosen)
            low = max(low, ~chosen if chosen != uint64(0) else uint64(0))
    return ~block_max_u64(low, scratch, partials), block_max_u64(high, scratch, partials)


@device_function
def collect(key, keys, filled):
    """Append a key to `keys`, unless it is 0."""
    if key != uint64(0):
        keys[cuda.atomic.add(filled, 0, int32(1))] = key


@device_function
def sorted_keys(logits, row, greatest, rate, bucket, mask, digits, count, keys, filled):
    """The thread's key of the `count` <= THREADS keys inside, greatest in thread 0; 0 past them. A bitonic sort."""
    thread = int32(cuda.threadIdx.x)
    keys[thread] = uint64(0)
    if thread == 0:
        filled[0] = 0
    cuda.syncthreads()  # the slots are empty
    for i in range(thread, int32(logits.shape[1]), int32(UNROLL * THREADS)):
        a, b, c, d = read4(logits, row, i)
        collect(inside(a, greatest, rate, bucket, mask, digits), keys, filled)
        collect(inside(b, greatest, rate, bucket, mask, digits), keys, filled)
        collect(inside(c, greatest, rate, bucket, mask, digits), keys, filled)
        collect(inside(d, greatest, rate, bucket, mask, digits), keys, filled)
    size = int32(2)
    while size < int32(2) * int32(count):
        stride = size >> int32(1)
        while stride > 0:
            cuda.syncthreads()  # the keys of the step before are there
            partner = thread ^ stride
            if partner > thread:
                mine, other = keys[thread], keys[partner]
                if (mine < other) == (thread & size == 0):
                    keys[thread], keys[partner] = other, mine
            stride >>= int32(1)
        size <<= int32(1)
    cuda.syncthreads()  # the keys are sorted
    return keys[thread]


@device_function
def choose(which, mass, mass_to, count, count_to, by_count, target, found):
    """The thread in whose bucket the cumulative count or mass passes `target` writes it to `found`."""
    own, to = (count, count_to) if by_count else (mass, mass_to)
    cuda.syncthreads()  # the last choice has been read
    if to - own <= target and target < to:
        found[WHICH], found[MASS], found[COUNT] = which, mass, count
        found[MASS_BEFORE], found[COUNT_BEFORE] = mass_to - mass, count_to - count
    cuda.syncthreads()  # the choice is there


@device_function
def below(fraction, bits, mass):
    """floor(fraction / 2^bits * mass): fraction <= 2^bits, bits 24 or 32, mass < 2^60, with no product past 64 bits."""
    low = mass & ((uint64(1) << bits) - uint64(1))
    return fraction * (mass >> bits) + ((fraction * low) >> bits)
