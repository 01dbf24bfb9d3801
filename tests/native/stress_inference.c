/* The kernels for generation, without Python: for builds with sanitizers.
 *
 *     stress_inference ROUNDS SEED
 *
 * runs products, elements, storage, attention and steps with random shapes at all vector levels, and compares the results with
 * plain loops.  All arrays have their exact size, so that AddressSanitizer finds an access outside.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "inference.h"

static uint64_t state;

static uint64_t draw(uint64_t limit)
{
    state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    uint64_t x = state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (x ^ x >> 31) % limit;
}

static float *randoms(size_t count)
{
    float *values = malloc(count * sizeof *values);
    for (size_t i = 0; i < count; i++) values[i] = (float)draw(2001) / 1000.0f - 1.0f;
    return values;
}

static float from_bf16(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Truncates the values to bf16, and returns their bits. */
static uint16_t *to_bf16(float *values, size_t count)
{
    uint16_t *halves = malloc(count * sizeof *halves);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
        values[i] = from_bf16(halves[i]);
    }
    return halves;
}

static void compare(const char *name, const float *found, const float *expected, size_t count, float tolerance)
{
    for (size_t i = 0; i < count; i++)
        if (!(fabsf(found[i] - expected[i]) <= tolerance * (1 + fabsf(expected[i])))) {
            fprintf(stderr, "%s: %g instead of %g at %zu\n", name, (double)found[i], (double)expected[i], i);
            exit(1);
        }
}

static void compare_type(const char *name, const void *found, const float *expected, size_t count, int is_bf16)
{
    if (!is_bf16) {
        compare(name, found, expected, count, 1e-4f);
        return;
    }
    float *wide = malloc(count * sizeof *wide);
    for (size_t i = 0; i < count; i++) wide[i] = from_bf16(((const uint16_t *)found)[i]);
    compare(name, wide, expected, count, 0.01f);
    free(wide);
}

/* Rounds each row to int16 values with a factor, as products with int8 weights do. */
static void round_rows(float *x, size_t rows, size_t inputs)
{
    for (size_t row = 0; row < rows; row++, x += inputs) {
        float largest = 1e-30f;
        for (size_t i = 0; i < inputs; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
        const float factor = largest / FRD_LARGEST_INT16;
        for (size_t i = 0; i < inputs; i++) x[i] = rintf(x[i] * (1 / factor)) * factor;
    }
}

static void products(int type)
{
    const size_t rows = 1 + draw(30), inputs = 1 + draw(600), outputs = 1 + draw(100);
    float *x = randoms(rows * inputs), *weight = randoms(outputs * inputs), *scales = randoms(outputs);
    float *bias = draw(2) ? randoms(outputs) : NULL, *out = malloc(rows * outputs * sizeof *out);
    float *expected = malloc(rows * outputs * sizeof *expected);
    void *stored = NULL;
    if (type == FRD_WEIGHTS_BF16) stored = to_bf16(weight, outputs * inputs);
    else if (type == FRD_WEIGHTS_INT8) {
        int8_t *bytes = stored = malloc(outputs * inputs);
        for (size_t i = 0; i < outputs * inputs; i++) {
            bytes[i] = (int8_t)((int)draw(255) - 127);
            weight[i] = (float)bytes[i] * scales[i / inputs];
        }
    }
    void *packed = malloc(frd_packed_size(outputs, inputs, type));
    frd_pack(packed, stored ? stored : weight, outputs, inputs, type);
    if (frd_linear(out, x, packed, scales, bias, rows, inputs, outputs, type, 1 + (int)draw(3)) != FRD_OK) exit(2);
    if (type == FRD_WEIGHTS_INT8) round_rows(x, rows, inputs);
    for (size_t row = 0; row < rows; row++)
        for (size_t output = 0; output < outputs; output++) {
            float sum = bias ? bias[output] : 0;
            for (size_t k = 0; k < inputs; k++) sum += x[row * inputs + k] * weight[output * inputs + k];
            expected[row * outputs + output] = sum;
        }
    compare("linear", out, expected, rows * outputs, 1e-3f);
    free(x), free(weight), free(scales), free(bias), free(out), free(expected), free(stored), free(packed);
}

static void elements(int is_bf16)
{
    const size_t rows = 1 + draw(5), half = 1 + draw(40), width = 2 * half, size = is_bf16 ? 2 : 4;
    float *x = randoms(rows * width), *weight = randoms(width), *cosine = randoms(rows * half), *sine = randoms(rows * half);
    float *expected = malloc(rows * width * sizeof *expected);
    void *out = malloc(rows * width * size), *out_half = malloc(rows * half * size);
    void *bx = is_bf16 ? to_bf16(x, rows * width) : NULL, *bw = is_bf16 ? to_bf16(weight, width) : NULL;
    void *bc = is_bf16 ? to_bf16(cosine, rows * half) : NULL, *bs = is_bf16 ? to_bf16(sine, rows * half) : NULL;
    const void *own = bx ? bx : x;
    for (size_t row = 0; row < rows; row++) {
        float sum = 0;
        for (size_t i = 0; i < width; i++) sum += x[row * width + i] * x[row * width + i];
        const float scale = 1 / sqrtf(sum / (float)width + 1e-5f);
        for (size_t i = 0; i < width; i++) expected[row * width + i] = x[row * width + i] * scale * weight[i];
    }
    frd_rms_norm(out, own, bw ? bw : weight, rows, width, 1e-5f, is_bf16);
    compare_type("rms_norm", out, expected, rows * width, is_bf16);
    for (size_t row = 0; row < rows; row++)
        for (size_t i = 0; i < half; i++) {
            const float gate = x[row * width + i], up = x[row * width + half + i];
            expected[row * half + i] = gate / (1 + expf(-gate)) * up;
        }
    frd_swiglu(out_half, own, rows, half, is_bf16);
    compare_type("swiglu", out_half, expected, rows * half, is_bf16);
    for (size_t row = 0; row < rows; row++)
        for (size_t i = 0; i < half; i++) {
            const float a = x[row * width + i], b = x[row * width + half + i];
            const float c = cosine[row * half + i], s = sine[row * half + i];
            expected[row * width + i] = a * c - b * s;
            expected[row * width + half + i] = b * c + a * s;
        }
    frd_rotate(out, own, bc ? bc : cosine, bs ? bs : sine, rows, 1, width, (int64_t)width, (int64_t)width, is_bf16);
    compare_type("rotate", out, expected, rows * width, is_bf16);
    free(x), free(weight), free(cosine), free(sine), free(expected), free(out), free(out_half);
    free(bx), free(bw), free(bc), free(bs);
}

static void attention(int is_bf16)
{
    const size_t kv_heads = 1 + draw(3), heads = kv_heads * (1 + draw(6)), width = 1 + draw(70), value_width = 1 + draw(90);
    const size_t length = FRD_TILE * (1 + draw(3)), blocks = 1 + draw(3), positions = length * blocks;
    const size_t count = 1 + draw(positions), window = draw(2) ? 1 + draw(positions) : 0, size = is_bf16 ? 2 : 4;
    float *key = randoms(count * kv_heads * width), *value = randoms(count * kv_heads * value_width);
    float *query = randoms(heads * width), *out = malloc(heads * value_width * sizeof *out);
    float *expected = calloc(heads * value_width, sizeof *expected), *scores = malloc(count * sizeof *scores);
    void *bk = is_bf16 ? to_bf16(key, count * kv_heads * width) : NULL;
    void *bv = is_bf16 ? to_bf16(value, count * kv_heads * value_width) : NULL;
    void *keys = calloc(blocks * kv_heads * length * width, size);
    void *values = calloc(blocks * kv_heads * length * value_width, size);
    int32_t *table = malloc(count * blocks * sizeof *table);
    int64_t *at = malloc(count * sizeof *at);
    for (size_t i = 0; i < count; i++) {
        at[i] = (int64_t)i;
        for (size_t block = 0; block < blocks; block++) table[i * blocks + block] = (int32_t)(blocks - 1 - block);
    }
    const int64_t strides[4] = {(int64_t)(kv_heads * width), (int64_t)width, (int64_t)(kv_heads * value_width),
                                (int64_t)value_width};
    frd_store(keys, values, bk ? bk : key, bv ? bv : value, table, at, count, kv_heads, width, value_width, length, blocks,
              strides, is_bf16);
    const size_t first = window && count > window ? count - window : 0;
    for (size_t head = 0; head < heads; head++) {
        const size_t own = head / (heads / kv_heads);
        float most = -INFINITY, total = 0;
        for (size_t i = first; i < count; i++) {
            scores[i] = 0;
            for (size_t d = 0; d < width; d++)
                scores[i] += query[head * width + d] * key[(i * kv_heads + own) * width + d] * 0.3f;
            most = scores[i] > most ? scores[i] : most;
        }
        for (size_t i = first; i < count; i++) total += scores[i] = expf(scores[i] - most);
        for (size_t i = first; i < count; i++)
            for (size_t d = 0; d < value_width; d++)
                expected[head * value_width + d] += scores[i] / total * value[(i * kv_heads + own) * value_width + d];
    }
    const int64_t last = (int64_t)count - 1;
    if (frd_attend(out, query, keys, values, table, &last, 1, heads, kv_heads, width, value_width, length, blocks,
                   (int64_t)(heads * width), (int64_t)width, (int64_t)window, 0.3f, is_bf16, 1 + (int)draw(3)) != FRD_OK)
        exit(2);
    compare("attend", out, expected, heads * value_width, 1e-3f);
    free(key), free(value), free(query), free(out), free(expected), free(scores), free(bk), free(bv), free(keys);
    free(values), free(table), free(at);
}

static struct frd_matrix matrix(size_t outputs, size_t inputs, int type)
{
    float *weight = randoms(outputs * inputs);
    struct frd_matrix result = {malloc(frd_packed_size(outputs, inputs, type)), randoms(outputs),
                                draw(2) ? randoms(outputs) : NULL, type};
    void *stored = NULL;
    if (type == FRD_WEIGHTS_BF16) stored = to_bf16(weight, outputs * inputs);
    else if (type == FRD_WEIGHTS_INT8) {
        int8_t *bytes = stored = malloc(outputs * inputs);
        for (size_t i = 0; i < outputs * inputs; i++) bytes[i] = (int8_t)((int)draw(255) - 127);
    }
    frd_pack((void *)result.packed, stored ? stored : weight, outputs, inputs, type);
    free(weight), free(stored);
    return result;
}

static void free_matrix(struct frd_matrix *own)
{
    free((void *)own->packed), free((void *)own->scales), free((void *)own->bias);
}

static float *times(const float *x, const struct frd_matrix *own, size_t rows, size_t inputs, size_t outputs)
{
    float *out = malloc(rows * outputs * sizeof *out);
    if (frd_linear(out, x, own->packed, own->scales, own->bias, rows, inputs, outputs, own->type, 1) != FRD_OK) exit(2);
    return out;
}

/* Returns the feed-forward network of normalized rows. */
static float *feed_forward(const float *x, const struct frd_layer *layer, size_t rows, size_t width, size_t inner)
{
    float *both = times(x, &layer->gate_up, rows, width, 2 * inner), *activated = malloc(rows * inner * sizeof *activated);
    frd_swiglu(activated, both, rows, inner, 0);
    float *out = times(activated, &layer->down, rows, inner, width);
    free(both), free(activated);
    return out;
}

/* Compares a step, whose tokens are the first of one sequence, with the functions for one operation. */
static void decoder(int type, int is_bf16)
{
    const size_t rows = 1 + draw(20), width = 1 + draw(60), kv_heads = 1 + draw(3), heads = kv_heads * (1 + draw(4));
    const size_t half = 1 + draw(9), head_width = 2 * half, inner = 1 + draw(50), vocabulary = 1 + draw(50);
    const size_t mixed_width = heads * head_width, all = mixed_width + 2 * kv_heads * head_width, length = 32;
    const size_t selected_count = draw(rows + 1), places = length * kv_heads * head_width;
    float *norms[] = {randoms(width), randoms(width), randoms(width), randoms(head_width), randoms(head_width)};
    const int has_norms = (int)draw(2);
    struct frd_layer layer = {.norm_attention = norms[0], .norm_feed_forward = norms[1],
                              .norm_query = has_norms ? norms[3] : NULL, .norm_key = has_norms ? norms[4] : NULL,
                              .qkv = matrix(all, width, type), .out = matrix(width, mixed_width, type),
                              .gate_up = matrix(2 * inner, width, type), .down = matrix(width, inner, type),
                              .keys = calloc(places, 4), .values = calloc(places, 4)};
    float *cosine = randoms(length * half), *sine = randoms(length * half), *hidden = randoms(rows * width);
    const struct frd_decoder own = {.layers = &layer, .layer_count = 1, .width = width, .heads = heads,
                                    .kv_heads = kv_heads, .head_width = head_width, .inner = inner,
                                    .vocabulary = vocabulary, .norm = norms[2], .head = matrix(vocabulary, width, type),
                                    .cosine = cosine, .sine = sine, .epsilon = 1e-5f, .scale = 0.3f,
                                    .is_bf16 = is_bf16};
    int64_t positions[20], selected[20];
    int32_t table[20] = {0};
    for (size_t i = 0; i < rows; i++) positions[i] = (int64_t)i, selected[i] = (int64_t)draw(rows);
    float *state = malloc(rows * width * sizeof *state), *normal = malloc(rows * width * sizeof *normal);
    memcpy(state, hidden, rows * width * sizeof *state);

    frd_rms_norm(normal, state, layer.norm_attention, rows, width, own.epsilon, 0);
    float *projected = times(normal, &layer.qkv, rows, width, all), *mixed = malloc(rows * mixed_width * sizeof *mixed);
    for (size_t row = 0; row < rows; row++) {
        float *query = projected + row * all, *key = query + mixed_width;
        if (has_norms) frd_rms_norm(query, query, norms[3], heads, head_width, own.epsilon, 0);
        if (has_norms) frd_rms_norm(key, key, norms[4], kv_heads, head_width, own.epsilon, 0);
        frd_rotate(query, query, cosine + row * half, sine + row * half, 1, heads + kv_heads, head_width, 0,
                   (int64_t)head_width, 0);
    }
    const int64_t strides[4] = {(int64_t)all, (int64_t)head_width, (int64_t)all, (int64_t)head_width};
    float *keys = calloc(places, 4), *values = calloc(places, 4), *logits = malloc((rows + 1) * vocabulary * sizeof *logits);
    uint16_t *narrow = malloc(rows * all * sizeof *narrow);
    frd_kernels()->narrow(narrow, projected, rows * all);
    const char *from = is_bf16 ? (const char *)(narrow + mixed_width) : (const char *)(projected + mixed_width);
    frd_store(keys, values, from, from + kv_heads * head_width * (is_bf16 ? 2 : 4), table, positions, rows, kv_heads,
              head_width, head_width, length, 1, strides, is_bf16);
    if (frd_attend(mixed, projected, keys, values, table, positions, rows, heads, kv_heads, head_width, head_width, length, 1,
                   (int64_t)all, (int64_t)head_width, 0, own.scale, is_bf16, 1) != FRD_OK)
        exit(2);
    float *added = times(mixed, &layer.out, rows, mixed_width, width);
    for (size_t i = 0; i < rows * width; i++) state[i] += added[i];
    frd_rms_norm(normal, state, layer.norm_feed_forward, rows, width, own.epsilon, 0);
    float *second = feed_forward(normal, &layer, rows, width, inner);
    for (size_t i = 0; i < rows * width; i++) state[i] += second[i];
    frd_rms_norm(normal, state, own.norm, rows, width, own.epsilon, 0);
    float *every = times(normal, &own.head, rows, width, vocabulary);

    void *workspace = malloc(frd_decoder_bytes(&own, rows));
    const struct frd_step step = {hidden, positions, table, selected, logits, workspace, rows, selected_count, 1, length};
    if (frd_decoder_step(&own, &step, 1 + (int)draw(3)) != FRD_OK) exit(2);
    for (size_t i = 0; i < selected_count; i++)
        compare("decoder", logits + i * vocabulary, every + (size_t)selected[i] * vocabulary, vocabulary, 2e-3f);
    if (!is_bf16) compare("decoder keys", layer.keys, keys, places, 2e-3f);
    for (size_t i = 0; i < 5; i++) free(norms[i]);
    free_matrix(&layer.qkv), free_matrix(&layer.out), free_matrix(&layer.gate_up), free_matrix(&layer.down);
    struct frd_matrix head = own.head;
    free_matrix(&head);
    free(layer.keys), free(layer.values), free(cosine), free(sine), free(hidden), free(state), free(normal), free(projected);
    free(mixed), free(keys), free(values), free(logits), free(added), free(second), free(every), free(workspace), free(narrow);
}

int main(int count, char **words)
{
    if (count != 3) return 2;
    state = strtoull(words[2], NULL, 10);
    for (long rounds = strtol(words[1], NULL, 10); rounds > 0; rounds--) {
        frd_use_vector_level((int)draw(3));
        products((int)draw(3));
        elements((int)draw(2));
        attention((int)draw(2));
        decoder((int)draw(3), (int)draw(2));
    }
    printf("complete\n");
    return 0;
}
