// What the stand-ins of CUDA's libraries share: they report each call, with the arrays that it was passed, to the driver.
#pragma once
#include <initializer_list>

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" int fake_library_call(const char* name, const void* const* addresses, int count);
extern "C" void fake_count_product();
extern "C" void fake_library_stream(void* stream);

// Returns whether the device is the null device, for which nothing is computed.
static inline bool called(const char* name, std::initializer_list<const void*> addresses) {
    return fake_library_call(name, addresses.begin(), (int)addresses.size());
}
