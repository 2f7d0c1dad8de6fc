// ExecuTorch's runtime behind C functions, and the one operator of our programs that it does not have.
//
// build.py compiles this file with the headers and libraries of the `executorch` wheel. It needs nothing of torch.
// A function returns 0, or an error code of ExecuTorch's runtime (runtime/core/error.h).
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

// The wheel has this library, but not its header.
namespace executorch::extension::threadpool {
class ThreadPool {
  public:
    bool _unsafe_reset_threadpool(uint32_t threads);
};
ThreadPool *get_threadpool();
}  // namespace executorch::extension::threadpool

namespace {
using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::EValue;

constexpr int64_t TILE = 16;  // tokens that one pass over a mask serves

// out[r, t] = y[r, t] + S x[r, t]. S has the values of the row's variant at (row, column), and is zero elsewhere.
// Columns of x are gathered from a transposed tile, so that each masked weight is one vector operation. Masks are
// in row-major order, so the sum of a row is complete before the next row begins.
void add_tile(const float *x, const float *values, const int64_t *row, const int64_t *column, int64_t masked,
              int64_t tokens, int64_t n, int64_t k, float *tile, float *out) {
    for (int64_t m = 0; m < TILE; m++)
        for (int64_t j = 0; j < k; j++) tile[j * TILE + m] = m < tokens ? x[m * k + j] : 0.0f;
    for (int64_t i = 0; i < masked;) {
        float sum[TILE] = {0};
        const int64_t to = row[i];
        for (; i < masked && row[i] == to; i++) {
            const float value = values[i], *from = tile + column[i] * TILE;
            for (int64_t m = 0; m < TILE; m++) sum[m] += value * from[m];
        }
        for (int64_t m = 0; m < tokens; m++) out[m * n + to] += sum[m];
    }
}

Tensor &sparse_add_out(executorch::runtime::KernelRuntimeContext &context, const Tensor &y, const Tensor &x,
                       const Tensor &values, const Tensor &variants, const Tensor &rows, const Tensor &columns,
                       Tensor &out) {
    (void)context;
    const int64_t tokens = y.size(1), n = y.size(2), k = x.size(2), masked = values.size(1);
    const int64_t tiles = (tokens + TILE - 1) / TILE;
    const float *y_data = y.const_data_ptr<float>(), *x_data = x.const_data_ptr<float>();
    const float *value_data = values.const_data_ptr<float>();
    const int64_t *row = rows.const_data_ptr<int64_t>(), *column = columns.const_data_ptr<int64_t>();
    const int64_t *variant = variants.const_data_ptr<int64_t>();
    float *out_data = out.mutable_data_ptr<float>();
    executorch::extension::parallel_for(0, y.size(0) * tiles, 1, [&](int64_t begin, int64_t end) {
        std::vector<float> tile(k * TILE);
        for (int64_t work = begin; work < end; work++) {
            const int64_t sequence = work / tiles, first = work % tiles * TILE;
            const int64_t count = first + TILE < tokens ? TILE : tokens - first, at = sequence * tokens + first;
            std::memcpy(out_data + at * n, y_data + at * n, count * n * sizeof(float));
            add_tile(x_data + at * k, value_data + variant[sequence] * masked, row, column, masked, count, n, k,
                     tile.data(), out_data + at * n);
        }
    });
    return out;
}
EXECUTORCH_LIBRARY(permille, "sparse_add.out", sparse_add_out);

int code(Error error) { return static_cast<int>(error); }

thread_local std::string last_message;

// The runtime would write its messages to standard error, which belongs to the caller. Keep the last error, and drop
// all other messages.
void keep_message(et_timestamp_t, et_pal_log_level_t level, const char *, const char *, size_t, const char *message,
                  size_t length) {
    if (level == kError || level == kFatal) last_message.assign(message, length);
}
const bool quiet = executorch::runtime::register_pal(
    executorch::runtime::PalImpl::create(keep_message, __FILE__));
}  // namespace

#pragma GCC visibility push(default)
extern "C" {
// Return the last error message of the runtime in this thread.
const char *program_message() { return last_message.c_str(); }

// Map a program. The caller closes `*opened` with program_close.
int program_open(const char *path, int threads, void **opened) {
    (void)quiet;
    executorch::runtime::runtime_init();
    if (threads > 0) executorch::extension::threadpool::get_threadpool()->_unsafe_reset_threadpool(threads);
    auto module = std::make_unique<Module>(path, Module::LoadMode::Mmap);
    const Error error = module->load();
    if (error == Error::Ok) *opened = module.release();
    return code(error);
}

void program_close(void *opened) { delete static_cast<Module *>(opened); }

// Return the sizes of an input of a method. `*rank` is the number of sizes, at most 4.
int program_input(void *opened, const char *method, int index, int64_t *sizes, int *rank) {
    const auto meta = static_cast<Module *>(opened)->method_meta(method);
    if (!meta.ok()) return code(meta.error());
    const auto info = meta->input_tensor_meta(index);
    if (!info.ok()) return code(info.error());
    *rank = static_cast<int>(info->sizes().size());
    if (*rank > 4) return code(Error::InvalidArgument);
    for (int i = 0; i < *rank; i++) sizes[i] = info->sizes()[i];
    return 0;
}

// Run a method on dense tensors, and copy its only output, which must have exactly `out_bytes`. `types` are
// ExecuTorch's ScalarType. `sizes` has the sizes of all tensors, one after the other.
int program_run(void *opened, const char *method, int inputs, void **data, const int *types, const int *ranks,
                const int32_t *sizes, void *out, size_t out_bytes) {
    std::vector<executorch::extension::TensorPtr> tensors;
    std::vector<EValue> values;
    for (int i = 0; i < inputs; sizes += ranks[i++]) {
        tensors.push_back(executorch::extension::from_blob(data[i], std::vector<int32_t>(sizes, sizes + ranks[i]),
                                                           static_cast<ScalarType>(types[i])));
        values.emplace_back(*tensors.back());
    }
    const auto found = static_cast<Module *>(opened)->execute(method, values);
    if (!found.ok()) return code(found.error());
    if (found->size() != 1 || !(*found)[0].isTensor()) return code(Error::InvalidProgram);
    const Tensor &tensor = (*found)[0].toTensor();
    if (tensor.nbytes() != out_bytes) return code(Error::InvalidProgram);
    std::memcpy(out, tensor.const_data_ptr(), out_bytes);
    return 0;
}
}
#pragma GCC visibility pop
