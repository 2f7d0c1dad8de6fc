/* Read one call from a file, run the kernel, and write its result and all arrays back (see emulated.py). */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t (*Kernel)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                          int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

#define KERNELS(X)                                                                                             \
    X(dequantize) X(set_values) X(widen_bf16) X(widen_f16) X(sparse_product) X(packed_product) X(token_product) \
    X(direction)    X(add_scaled_int8) X(add_scaled_int32) X(perturbed_int8) X(perturbed_int32) X(perturbed_pairs_int8)        \
    X(perturbed_pairs_int32) X(bit_sums) X(groups) X(group_sums) X(quantize_tokens) X(int8_panels)             \
    X(int8_product)

#define DECLARE(name) int64_t name##_neon(void);
KERNELS(DECLARE)

#define ENTRY(name) {#name, (Kernel)(void *)name##_neon},
static const struct {
    const char *name;
    Kernel kernel;
} TABLE[] = {KERNELS(ENTRY)};

static void take(void *target, size_t size, FILE *file) {
    if (fread(target, 1, size, file) != size) exit(3);
}

int main(int argc, char **argv) {
    char name[32];
    int64_t count, values[16] = {0}, sizes[16] = {0};
    FILE *request = argc == 3 ? fopen(argv[1], "rb") : NULL;
    if (!request) return 2;
    take(name, sizeof name, request);
    take(&count, sizeof count, request);
    if (count > 16) return 2;
    for (int64_t i = 0; i < count; i++) {
        int64_t is_array, value;
        take(&is_array, sizeof is_array, request);
        take(&value, sizeof value, request);
        values[i] = value;
        if (!is_array) continue;
        sizes[i] = value;
        void *data = malloc(value ? (size_t)value : 1);
        if (!data) return 4;
        take(data, (size_t)value, request);
        values[i] = (int64_t)(intptr_t)data;
    }
    Kernel kernel = NULL;
    for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++)
        if (!strcmp(TABLE[i].name, name)) kernel = TABLE[i].kernel;
    if (!kernel) return 5;
    /* Kernels have fewer parameters. On AArch64, a callee ignores further arguments. */
    const int64_t *v = values;
    const int64_t result = kernel(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11],
                                  v[12], v[13], v[14], v[15]);
    FILE *answer = fopen(argv[2], "wb");
    if (!answer) return 6;
    fwrite(&result, sizeof result, 1, answer);
    for (int64_t i = 0; i < count; i++)
        if (sizes[i]) fwrite((void *)(intptr_t)values[i], 1, (size_t)sizes[i], answer);
    return fclose(answer);
}
