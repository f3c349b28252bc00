// What the stand-ins of CUDA's libraries share: they pass each call, with its arrays, to the driver, which runs or records it.
#pragma once
#include <functional>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

struct FakeCall {
    const char* name;
    void* stream;                     // of the handle of the library
    std::vector<const void*> arrays;  // that it was passed; the last one is written
    std::function<int()> compute = {};  // on the arrays; a graph calls it at each launch, so that it must have copies of all arguments
    int kernels = 0;
    bool product = false;     // whether its kernels are counted as products
    bool capturable = true;
    const void* workspace = nullptr;  // in which the library writes too
    double bytes = -1;                // that it reads and writes; -1: the whole allocations of its arrays
    double flops = 0;
};

// Returns an error of the runtime, or what `compute` returns; on the null device, which computes nothing, 0.
EXPORT int fake_call(const FakeCall& call);
