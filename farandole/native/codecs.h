/* Compression of fp32 values between hosts: to 16-bit floats, or to 8-bit integers with a scale per block. */
#ifndef FARANDOLE_CODECS_H
#define FARANDOLE_CODECS_H

#include <stddef.h>

/* Encodes y = x * factor + residual, rounded to the nearest encodable value.  Stores the error in `residual` (NULL
 * discards the error) and the decoded values in `decoded`, which may be NULL or x. */
typedef void (*frd_encode_fn)(const float *x, float factor, float *residual, void *message, float *decoded,
                              size_t count, size_t block);
/* x = x * factor + the decoded message; with a factor of 0, x is not read. */
typedef void (*frd_decode_fn)(const void *message, float *x, float factor, size_t count, size_t block);

struct frd_codec {
    frd_encode_fn encode;
    frd_decode_fn decode;
};

enum { FRD_CODECS = 3 }; /* bf16, fp16, int8, in the order of their element types */

/* One table per vector level, with bitwise equal results. */
extern const struct frd_codec frd_codecs_plain[FRD_CODECS];
#if defined(__x86_64__)
extern const struct frd_codec frd_codecs_avx2[FRD_CODECS];
extern const struct frd_codec frd_codecs_avx512[FRD_CODECS];
#endif

const struct frd_codec *frd_codec_of(int type); /* NULL for a type without a codec */

#endif
