// cub's BlockReduce and BlockLoad, which CuPy's kernels of reductions use.  The terms are added in cub's order: those of a thread, then by
// shuffles those of a warp, then the warps.
#pragma once
#include <cstring>

namespace cub {

template <class T, int THREADS>
class BlockReduce {
   public:
    struct TempStorage {
        alignas(16) char bytes[THREADS * sizeof(T)];
    };
    explicit BlockReduce(TempStorage& storage) : storage(storage) {}

    // The result is that of the block for its first thread, as in cub.
    template <int ITEMS, class Op>
    T Reduce(T (&items)[ITEMS], Op op) {
        T sum = items[0];
        for (int i = 1; i < ITEMS; i++) sum = op(sum, items[i]);
        const int self = fake::thread_number();
        put(self, sum);
        __syncthreads();
        if (self % 32 == 0) {
            const int lanes = THREADS - self < 32 ? THREADS - self : 32;
            for (int offset = 1; offset < 32; offset *= 2)
                for (int i = 0; i + offset < lanes; i++) put(self + i, op(get(self + i), get(self + i + offset)));
        }
        __syncthreads();
        T all = get(self / 32 * 32);
        if (self == 0)
            for (int warp = 32; warp < THREADS; warp += 32) all = op(all, get(warp));
        return all;
    }

   private:
    TempStorage& storage;
    void put(int i, const T& value) { memcpy(storage.bytes + i * sizeof(T), (const void*)&value, sizeof(T)); }
    T get(int i) const {
        T value;
        memcpy((void*)&value, storage.bytes + i * sizeof(T), sizeof(T));
        return value;
    }
};

enum BlockLoadAlgorithm { BLOCK_LOAD_DIRECT };

template <class T, int THREADS, int ITEMS, BlockLoadAlgorithm = BLOCK_LOAD_DIRECT>
class BlockLoad {
   public:
    struct TempStorage {
        char unused;
    };
    explicit BlockLoad(TempStorage&) {}

    template <class From>
    void Load(From from, T (&items)[ITEMS]) {
        for (int i = 0; i < ITEMS; i++) items[i] = from[fake::thread_number() * ITEMS + i];
    }
    template <class From, class Default>
    void Load(From from, T (&items)[ITEMS], int valid, Default otherwise) {
        for (int i = 0; i < ITEMS; i++) {
            const int at = fake::thread_number() * ITEMS + i;
            items[i] = otherwise;
            if (at < valid) items[i] = from[at];
        }
    }
};

}  // namespace cub
