/* For any processor.  On Arm the baseline already has vectors (NEON), so this is the fast path there. */
#define TABLE frd_reduce_plain
#define CODECS frd_codecs_plain
#define INFERENCE frd_inference_plain
#include "kernels.inc"
#include "codecs.inc"
#include "inference.inc"
