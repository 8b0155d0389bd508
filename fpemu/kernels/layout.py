"""Where a tally keeps what: COUNTS int64 counts and SUMS float64 sums."""

FIELDS = (
    "count",
    "zero",
    "negative",  # nonzero finite values below zero
    "positive_infinity",
    "negative_infinity",
    "nan",
    "underflow",
    "subnormal",
    "overflow",
)
COUNT, ZEROS, NEGATIVE, INFINITIES, _, NANS, UNDER, SUBNORMAL, OVER = range(len(FIELDS))
LOWEST = -1074  # floor(log2|x|) of bin 0; the binades of float64, so that every dtype fits
BINS = 2098
HISTOGRAM = len(FIELDS)
POWERS = HISTOGRAM + BINS  # exact powers of two, a count for each binade
COUNTS = POWERS + BINS

AMAX, SQUARES, ERRORS = 0, 1, 2
SUMS = 3
