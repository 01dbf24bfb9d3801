/* For any processor.  On Arm the baseline already has vectors (NEON), so this is the fast path there. */
#define TABLE frd_reduce_plain
#include "kernels.inc"
