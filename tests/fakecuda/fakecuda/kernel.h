// What the driver knows about a compiled kernel.
#pragma once
#include <cstddef>

struct FakeLaunch {
    unsigned grid[3], block[3], shared;
    bool descending;  // the order of blocks and threads
};

struct FakeKernel {
    const char* name;
    int parameters;
    const size_t* sizes;                                         // of the parameters, in bytes
    const bool* pointers;                                        // whether each parameter begins with the address of an array
    const char* (*run)(const FakeLaunch&, void** arguments);     // returns what failed, or null
};
