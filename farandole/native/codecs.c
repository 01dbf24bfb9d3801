/* Selection of a codec by vector level, and the matrix products of PowerSGD, bitwise equal on every processor. */
#include "codecs.h"

#include <math.h>

#include "core.h"
#include "kernels.h"

const struct frd_codec *frd_codec_of(int type)
{
    const int code = type & 0xff;
    const int row = code == FRD_BF16 ? 0 : code == FRD_F16 ? 1 : code == FRD_I8 ? 2 : -1;
    if (row < 0) return NULL;
#if defined(__x86_64__)
    if (frd_vector_level_in_use() == FRD_AVX512) return &frd_codecs_avx512[row];
    if (frd_vector_level_in_use() == FRD_AVX2) return &frd_codecs_avx2[row];
#endif
    return &frd_codecs_plain[row];
}

int frd_encode(int type, const float *x, float factor, float *residual, void *message, float *decoded, size_t count,
               size_t block)
{
    const struct frd_codec *codec = frd_codec_of(type);
    if (!codec || !block || block > FRD_LARGEST_BLOCK) return FRD_UNSUPPORTED;
    codec->encode(x, factor, residual, message, decoded, count, block);
    return FRD_OK;
}

int frd_decode(int type, const void *message, float *x, float factor, size_t count, size_t block)
{
    const struct frd_codec *codec = frd_codec_of(type);
    if (!codec || !block || block > FRD_LARGEST_BLOCK) return FRD_UNSUPPORTED;
    codec->decode(message, x, factor, count, block);
    return FRD_OK;
}

static double product_of(const float *a, const float *b, size_t rows)
{
    double sum = 0;
    for (size_t i = 0; i < rows; i++) sum += (double)a[i] * (double)b[i];
    return sum;
}

void frd_orthonormalize(float *p, size_t rows, size_t rank)
{
    for (size_t k = 0; k < rank; k++) {
        float *own = p + k * rows;
        const double before = product_of(own, own, rows);
        for (size_t other = 0; other < k; other++) {
            const float *earlier = p + other * rows;
            const double along = product_of(own, earlier, rows);
            for (size_t i = 0; i < rows; i++) own[i] = (float)((double)own[i] - along * (double)earlier[i]);
        }
        const double after = product_of(own, own, rows);
        /* a column that depends on earlier columns leaves only rounding error: set it to zero; a NaN stays */
        const double inverse = after <= 1e-10 * before ? 0.0 : 1.0 / sqrt(after);
        for (size_t i = 0; i < rows; i++) own[i] = (float)((double)own[i] * inverse);
    }
}

void frd_outer(float *x, const float *p, const float *q, size_t rows, size_t columns, size_t rank)
{
    for (size_t i = 0; i < rows; i++) {
        float *row = x + i * columns;
        for (size_t j = 0; j < columns; j++) row[j] = 0;
        for (size_t k = 0; k < rank; k++) {
            const float weight = p[k * rows + i], *column = q + k * columns;
            for (size_t j = 0; j < columns; j++) row[j] += weight * column[j];
        }
    }
}
