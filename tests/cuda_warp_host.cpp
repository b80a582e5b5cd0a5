// Runs the routing kernels of cuda/ without a GPU, for tests/test_cuda_routing.py: launches come on
// the standard input, what they leave in their tensors goes to the standard output.
// Compiled by g++ with -include cuda_shim.h -include cuda_warp.h and its sanitizers, to which each
// tensor is a piece of memory of its own.
//
//   launch:  i32 length of the kernel's name, the name, i64 grid, i32 threads, u64 seed,
//            i32 number of arguments, then each: a letter and
//              t  i64 bytes, the bytes of a tensor        n  nothing: a null pointer
//              i  i32                                     l  i64
//   answer:  the bytes of each tensor, in order

#include <cinttypes>
#include <map>
#include <memory>
#include <string>
#include <variant>

#include "arrived_route.cuh"
#include "experts.cuh"

namespace i32_index {
#define INDEX int
#define route_counts route_counts_i32
#define route_rows route_rows_i32
#include "route_counts.cu"
#include "route_rows.cu"
#undef route_counts
#undef route_rows
#undef INDEX
}  // namespace i32_index

namespace i64_index {
#define INDEX i64
#define route_counts route_counts_i64
#define route_rows route_rows_i64
#include "route_counts.cu"
#include "route_rows.cu"
#undef route_counts
#undef route_rows
#undef INDEX
}  // namespace i64_index

namespace slots {
#include "chosen_experts.cu"
#include "slot_counts.cu"
#define slot_rows slot_rows_kernel  // which has an argument of that name
#include "slot_rows.cu"
#undef slot_rows
}  // namespace slots

struct Tensor {
    std::unique_ptr<char[]> bytes;
    int64_t size = 0;
};

// What stands for one argument; it becomes what the kernel takes there, or ends the program.
class Argument {
  public:
    std::variant<std::nullptr_t, Tensor, int32_t, int64_t> value;

    template <typename T>
    operator T*() {
        if (std::holds_alternative<std::nullptr_t>(value)) return nullptr;
        if (Tensor* tensor = std::get_if<Tensor>(&value)) {
            return reinterpret_cast<T*>(tensor->bytes.get());
        }
        fail("a number for a pointer");
    }
    operator int() { return number<int32_t>(); }
    operator i64() { return number<int64_t>(); }

  private:
    template <typename T>
    T number() {
        if (const T* found = std::get_if<T>(&value)) return *found;
        fail("an argument of another width");
    }
};

using Arguments = std::vector<Argument>;
using Kernel = std::function<void(Arguments&)>;

template <typename... Parameters, size_t... I>
static void call(void (*kernel)(Parameters...), Arguments& arguments, std::index_sequence<I...>) {
    kernel(arguments[I].operator Parameters()...);
}

template <typename... Parameters>
static Kernel kernel_of(void (*kernel)(Parameters...)) {
    return [kernel](Arguments& arguments) {
        if (arguments.size() != sizeof...(Parameters)) fail("another number of arguments");
        call(kernel, arguments, std::index_sequence_for<Parameters...>());
    };
}

static const std::map<std::string, Kernel> KERNELS = {
    {"route_counts -DINDEX=int", kernel_of(i32_index::route_counts_i32)},
    {"route_counts -DINDEX=i64", kernel_of(i64_index::route_counts_i64)},
    {"route_rows -DINDEX=int", kernel_of(i32_index::route_rows_i32)},
    {"route_rows -DINDEX=i64", kernel_of(i64_index::route_rows_i64)},
    {"chosen_experts", kernel_of(slots::chosen_experts)},
    {"slot_counts", kernel_of(slots::slot_counts)},
    {"slot_rows", kernel_of(slots::slot_rows_kernel)},
};

static void read_bytes(void* to, size_t size) {
    if (size > 0 && std::fread(to, 1, size, stdin) != size) fail("half a launch");
}

template <typename T>
static T read_number() {
    T number;
    read_bytes(&number, sizeof number);
    return number;
}

static Argument read_argument() {
    Argument argument;
    switch (const char kind = read_number<char>()) {
        case 'n':
            argument.value = nullptr;
            break;
        case 'i':
            argument.value = read_number<int32_t>();
            break;
        case 'l':
            argument.value = read_number<int64_t>();
            break;
        case 't': {
            Tensor tensor;
            tensor.size = read_number<int64_t>();
            tensor.bytes.reset(new char[tensor.size]);
            read_bytes(tensor.bytes.get(), tensor.size);
            argument.value = std::move(tensor);
            break;
        }
        default:
            std::fprintf(stderr, "%d: ", kind);
            fail("no kind of argument");
    }
    return argument;
}

int main() {
    for (int32_t length; std::fread(&length, 1, sizeof length, stdin) == sizeof length;) {
        std::string name(length, ' ');
        read_bytes(name.data(), length);
        const int64_t grid = read_number<int64_t>();
        const int32_t threads = read_number<int32_t>();
        const uint64_t seed = read_number<uint64_t>();
        Arguments arguments;
        for (int32_t left = read_number<int32_t>(); left > 0; left--) {
            arguments.push_back(read_argument());
        }
        const auto kernel = KERNELS.find(name);
        if (kernel == KERNELS.end()) fail("no such kernel");
        run_warps(grid, threads, seed, [&] { kernel->second(arguments); });
        for (Argument& argument : arguments) {
            if (const Tensor* tensor = std::get_if<Tensor>(&argument.value)) {
                std::fwrite(tensor->bytes.get(), 1, tensor->size, stdout);
            }
        }
        std::fflush(stdout);
    }
    return 0;
}
