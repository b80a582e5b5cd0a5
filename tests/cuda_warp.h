/*
cuda_warp: what the routing kernels take from nvcc, in plain C++: thread blocks of warps whose 32
lanes take turns.

Put before them, behind cuda_shim.h.  A lane is a coroutine: it runs until it comes to an operation
of the whole warp, and goes on with its result once all 32 have come there.  Lanes that come to
different ones, and a lane that ends while others wait, end the program; so does a warp that ends
while others of its block wait at a barrier.  Lanes, warps and blocks take turns in an order that
`Random` chooses, so that a result which depends on it shows.
*/
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __shared__ static  // one block after the other

struct Dim {
    unsigned int x = 0, y = 0, z = 0;
};

static Dim threadIdx, blockIdx, blockDim, gridDim;

[[noreturn]] static void fail(const char* text) {
    std::fprintf(stderr, "cuda_warp: %s (block %u, thread %u)\n", text, blockIdx.x, threadIdx.x);
    std::_Exit(3);
}

// A sequence that one number decides (xorshift64).
struct Random {
    uint64_t state;
    size_t operator()(size_t below) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return state % below;
    }
};

template <typename T>
static void shuffle(std::vector<T>& values, Random& random) {
    for (size_t i = values.size(); i > 1; i--) std::swap(values[i - 1], values[random(i)]);
}

class Warp {
  public:
    enum Operation { ENDED, BARRIER, MATCH_ANY, BALLOT, SHFL, SHFL_UP, SHFL_DOWN };

    // Have each of 32 lanes begin with `body`; threadIdx.x begins with that of lane 0.
    void begin(const std::function<void()>& body, unsigned int first_thread) {
        body_ = &body;
        first_thread_ = first_thread;
        for (Lane& lane : lanes_) lane.begins = true;
    }

    // Run until the lanes have ended or wait at a barrier, which it returns.
    Operation run(Random& random) {
        std::vector<int> order(LANES);
        std::iota(order.begin(), order.end(), 0);
        running_ = this;
        for (;;) {
            shuffle(order, random);
            for (int i : order) {
                threadIdx.x = first_thread_ + i;
                resume(lanes_[i]);
            }
            const Operation operation = lanes_[0].operation;
            for (const Lane& lane : lanes_) {
                if (lane.operation != operation) fail("lanes came to different places");
            }
            if (operation == ENDED || operation == BARRIER) return operation;
            finish();
        }
    }

    // Called in a lane: wait for the others and return this lane's result.
    uint64_t meet(Operation operation, uint32_t mask, uint64_t value, int argument) {
        if (mask != 0xFFFFFFFFu) fail("a mask without all lanes");
        Lane& lane = *current_;
        lane.operation = operation;
        lane.value = value;
        lane.argument = argument;
        leave(lane, false);
        return lane.result;
    }

    static Warp& current() { return *running_; }

  private:
    static constexpr int LANES = 32;
    static constexpr size_t STACK_BYTES = 1 << 17;

    struct Lane {
        ucontext_t context;
        std::vector<char> stack = std::vector<char>(STACK_BYTES);
        bool begins = true;
        Operation operation = ENDED;
        uint64_t value = 0, result = 0;
        int argument = 0;
        void* fake_stack = nullptr;  // of the sanitizer
    };

    static void start() {
        Warp& warp = current();
        arrive(nullptr);
        (*warp.body_)();
        warp.current_->operation = ENDED;
        warp.leave(*warp.current_, true);
    }

    void resume(Lane& lane) {
        current_ = &lane;
        if (lane.begins) {
            lane.begins = false;
            getcontext(&lane.context);
            lane.context.uc_stack.ss_sp = lane.stack.data();
            lane.context.uc_stack.ss_size = lane.stack.size();
            lane.context.uc_link = nullptr;
            makecontext(&lane.context, &Warp::start, 0);
        }
#ifdef __SANITIZE_ADDRESS__
        void* own = nullptr;
        __sanitizer_start_switch_fiber(&own, lane.stack.data(), lane.stack.size());
        swapcontext(&scheduler_, &lane.context);
        __sanitizer_finish_switch_fiber(own, nullptr, nullptr);
#else
        swapcontext(&scheduler_, &lane.context);
#endif
    }

    void leave(Lane& lane, [[maybe_unused]] bool for_good) {
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_start_switch_fiber(for_good ? nullptr : &lane.fake_stack, stack_, stack_bytes_);
#endif
        swapcontext(&lane.context, &scheduler_);
        arrive(lane.fake_stack);
    }

    // Tell the sanitizer that a lane runs, and note whose stack it comes from.
    static void arrive([[maybe_unused]] void* fake_stack) {
#ifdef __SANITIZE_ADDRESS__
        Warp& warp = current();
        __sanitizer_finish_switch_fiber(fake_stack, &warp.stack_, &warp.stack_bytes_);
#endif
    }

    void finish() {
        for (int i = 0; i < LANES; i++) lanes_[i].result = result_of(i);
    }

    uint64_t result_of(int lane) const {
        const Lane& own = lanes_[lane];
        const int argument = own.argument;
        uint32_t found = 0;
        switch (own.operation) {
            case MATCH_ANY:
                for (int i = 0; i < LANES; i++) found |= (lanes_[i].value == own.value) * (1u << i);
                return found;
            case BALLOT:
                for (int i = 0; i < LANES; i++) found |= (lanes_[i].value != 0) * (1u << i);
                return found;
            case SHFL:
                return lanes_[argument & 31].value;
            case SHFL_UP:
                return lane >= argument ? lanes_[lane - argument].value : own.value;
            default:
                return lane + argument < LANES ? lanes_[lane + argument].value : own.value;
        }
    }

    static inline Warp* running_ = nullptr;

    Lane lanes_[LANES];
    Lane* current_ = nullptr;
    unsigned int first_thread_ = 0;
    const std::function<void()>* body_ = nullptr;
    ucontext_t scheduler_;
    const void* stack_ = nullptr;
    size_t stack_bytes_ = 0;
};

// Run a kernel on blocks of whole warps, in an order that `seed` decides.
static void run_warps(int64_t grid, int threads, uint64_t seed, const std::function<void()>& body) {
    if (threads % 32 != 0) fail("a block of other than whole warps");
    Random random{seed * 2654435761u + 88172645463325252u};
    static std::vector<std::unique_ptr<Warp>> warps;  // of a block
    while (warps.size() < static_cast<size_t>(threads / 32)) {
        warps.push_back(std::make_unique<Warp>());
    }
    std::vector<int64_t> blocks(grid);
    std::iota(blocks.begin(), blocks.end(), 0);
    shuffle(blocks, random);
    gridDim.x = static_cast<unsigned int>(grid);
    blockDim.x = threads;
    blockDim.y = 1;
    for (int64_t block : blocks) {
        blockIdx.x = static_cast<unsigned int>(block);
        std::vector<int> order(threads / 32);
        std::iota(order.begin(), order.end(), 0);
        for (int w : order) warps[w]->begin(body, 32 * w);
        for (bool over = false; !over;) {
            shuffle(order, random);
            int num_ended = 0;
            for (int w : order) num_ended += warps[w]->run(random) == Warp::ENDED;
            over = num_ended == threads / 32;
            if (num_ended > 0 && !over) fail("a warp ended while others wait at a barrier");
        }
    }
}

static void __syncthreads() { Warp::current().meet(Warp::BARRIER, 0xFFFFFFFFu, 0, 0); }

// --- operations of a warp

template <typename T>
static uint64_t to_word(T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "nvcc shuffles 32 and 64 bits");
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    return word;
}

template <typename T>
static T shuffled(Warp::Operation operation, uint32_t mask, T value, int argument) {
    const uint64_t word = Warp::current().meet(operation, mask, to_word(value), argument);
    std::memcpy(&value, &word, sizeof value);
    return value;
}

template <typename T>
static T __shfl_sync(uint32_t mask, T value, int lane) {
    return shuffled(Warp::SHFL, mask, value, lane);
}

template <typename T>
static T __shfl_up_sync(uint32_t mask, T value, unsigned int distance) {
    return shuffled(Warp::SHFL_UP, mask, value, static_cast<int>(distance));
}

template <typename T>
static T __shfl_down_sync(uint32_t mask, T value, unsigned int distance) {
    return shuffled(Warp::SHFL_DOWN, mask, value, static_cast<int>(distance));
}

template <typename T>
static uint32_t __match_any_sync(uint32_t mask, T value) {
    return static_cast<uint32_t>(Warp::current().meet(Warp::MATCH_ANY, mask, to_word(value), 0));
}

static uint32_t __ballot_sync(uint32_t mask, int predicate) {
    return static_cast<uint32_t>(Warp::current().meet(Warp::BALLOT, mask, predicate != 0, 0));
}

static int __ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }
static int __popc(uint32_t bits) { return __builtin_popcount(bits); }

// --- memory

template <typename T>
static T atomicAdd(T* at, T value) {
    const T before = *at;
    *at = before + value;
    return before;
}

template <typename T>
static T atomicMax(T* at, T value) {
    const T before = *at;
    *at = std::max(before, value);
    return before;
}

template <typename T>
static T __ldg(const T* at) {
    return *at;
}
