// cuFFT: transforms of rank 1 to 3, real and complex, computed by NumPy.
#include <complex>
#include <map>
#include <vector>

#include "library.h"

namespace {

using Complex = std::complex<double>;
enum Type { R2C = 0x2a, C2R = 0x2c, C2C = 0x29, D2Z = 0x6a, Z2D = 0x6c, Z2Z = 0x69 };
enum Status { SUCCESS = 0, INVALID_PLAN = 1, INVALID_VALUE = 4, EXEC_FAILED = 6 };

struct Plan {
    std::vector<int> n, in_embed, out_embed;
    long in_stride = 1, in_distance = 0, out_stride = 1, out_distance = 0;
    int type = 0, batch = 1;
    void* stream = nullptr;
};
std::map<int, Plan> plans;

// In place, on an array of this shape; `host.py` sets it.
void (*transform)(void* values, const int* shape, int rank, int wide, int sign);

// The offset of an element in an array whose axes have the lengths `embed`.
long offset(long index, const std::vector<int>& shape, const std::vector<int>& embed, long stride) {
    long at = 0, scale = 1;
    for (int axis = (int)shape.size() - 1; axis >= 0; axis--) {
        at += index % shape[axis] * scale;
        index /= shape[axis];
        scale *= embed[axis];
    }
    return at * stride;
}

template <class Real, class In, class Out>
int compute(int handle, const In* in, Out* out, int sign) {
    auto found = plans.find(handle);  // it must live as long as a graph with its transforms
    if (found == plans.end()) return INVALID_PLAN;
    const Plan& plan = found->second;
    const bool real_in = plan.type == R2C || plan.type == D2Z, real_out = plan.type == C2R || plan.type == Z2D;
    std::vector<int> half = plan.n;
    half.back() = half.back() / 2 + 1;
    const std::vector<int>&in_shape = real_out ? half : plan.n, &out_shape = real_in ? half : plan.n;
    const std::vector<int> in_embed = plan.in_embed.empty() ? in_shape : plan.in_embed;
    const std::vector<int> out_embed = plan.out_embed.empty() ? out_shape : plan.out_embed;
    long total = 1, in_count = 1, out_count = 1;
    for (size_t i = 0; i < plan.n.size(); i++) total *= plan.n[i], in_count *= in_shape[i], out_count *= out_shape[i];
    const int last = plan.n.back();
    for (int b = 0; b < plan.batch; b++) {
        std::vector<std::complex<Real>> values(total);
        for (long i = 0; i < in_count; i++) {
            const std::complex<Real> value(in[b * plan.in_distance + offset(i, in_shape, in_embed, plan.in_stride)]);
            if (!real_out) values[i] = value;
            else values[i / half.back() * last + i % half.back()] = value;
        }
        if (real_out)  // the other half is the conjugate at the mirrored indices
            for (long i = 0; i < total; i++) {
                if (i % last < half.back()) continue;
                long mirrored = 0, scale = 1, rest = i;
                for (int axis = (int)plan.n.size() - 1; axis >= 0; axis--) {
                    const long index = rest % plan.n[axis];
                    rest /= plan.n[axis];
                    mirrored += (plan.n[axis] - index) % plan.n[axis] * scale;
                    scale *= plan.n[axis];
                }
                values[i] = std::conj(values[mirrored]);
            }
        transform(values.data(), plan.n.data(), (int)plan.n.size(), sizeof(Real) == sizeof(double), sign);
        for (long i = 0; i < out_count; i++) {
            const long at = real_in ? i / half.back() * last + i % half.back() : i;
            Out& result = out[b * plan.out_distance + offset(i, out_shape, out_embed, plan.out_stride)];
            if constexpr (std::is_floating_point<Out>::value) result = (Out)values[at].real();
            else result = Out(values[at]);
        }
    }
    return SUCCESS;
}

template <class Real, class In, class Out>
int execute(const char* name, int handle, const In* in, Out* out, int sign) {
    auto found = plans.find(handle);
    if (found == plans.end()) return INVALID_PLAN;
    const Plan& plan = found->second;
    FakeCall call{name, plan.stream, {in, out}, [=] { return compute<Real>(handle, in, out, sign); }};
    call.bytes = plan.batch * double(plan.in_distance * sizeof(In) + plan.out_distance * sizeof(Out));
    const int error = fake_call(call);
    return error >= 900 ? EXEC_FAILED : error;
}

}  // namespace

EXPORT void fake_set_transform(void (*function)(void*, const int*, int, int, int)) { transform = function; }
EXPORT int cufftCreate(int* handle) {
    static int last = 0;
    plans[*handle = ++last] = Plan();
    return SUCCESS;
}
EXPORT int cufftDestroy(int handle) { plans.erase(handle); return SUCCESS; }
EXPORT int cufftGetVersion(int* version) { *version = 12000; return SUCCESS; }
EXPORT int cufftSetAutoAllocation(int, int) { return SUCCESS; }
EXPORT int cufftSetWorkArea(int, void*) { return SUCCESS; }
EXPORT int cufftSetStream(int handle, void* stream) {
    auto found = plans.find(handle);
    if (found == plans.end()) return INVALID_PLAN;
    found->second.stream = stream;
    return SUCCESS;
}
EXPORT int cufftMakePlanMany(int handle, int rank, int* n, int* in_embed, int in_stride, int in_distance, int* out_embed, int out_stride,
                             int out_distance, int type, int batch, size_t* work) {
    Plan plan;
    plan.stream = plans[handle].stream;
    plan.n.assign(n, n + rank);
    if (in_embed) plan.in_embed.assign(in_embed, in_embed + rank), plan.in_stride = in_stride, plan.in_distance = in_distance;
    if (out_embed) plan.out_embed.assign(out_embed, out_embed + rank), plan.out_stride = out_stride, plan.out_distance = out_distance;
    plan.type = type;
    plan.batch = batch;
    const bool real_in = type == R2C || type == D2Z, real_out = type == C2R || type == Z2D;
    long whole = 1, half = 1;
    for (int i = 0; i < rank; i++) whole *= n[i], half *= i == rank - 1 ? n[i] / 2 + 1 : n[i];
    if (!in_embed) plan.in_distance = real_out ? half : whole;  // packed
    if (!out_embed) plan.out_distance = real_in ? half : whole;
    plans[handle] = plan;
    *work = 0;
    return SUCCESS;
}
EXPORT int cufftMakePlan1d(int handle, int n, int type, int batch, size_t* work) {
    return cufftMakePlanMany(handle, 1, &n, nullptr, 1, 0, nullptr, 1, 0, type, batch, work);
}
using C = std::complex<float>;
EXPORT int cufftExecC2C(int plan, C* in, C* out, int sign) { return execute<float>("cufftExecC2C", plan, in, out, sign); }
EXPORT int cufftExecR2C(int plan, float* in, C* out) { return execute<float>("cufftExecR2C", plan, in, out, -1); }
EXPORT int cufftExecC2R(int plan, C* in, float* out) { return execute<float>("cufftExecC2R", plan, in, out, 1); }
EXPORT int cufftExecZ2Z(int plan, Complex* in, Complex* out, int sign) { return execute<double>("cufftExecZ2Z", plan, in, out, sign); }
EXPORT int cufftExecD2Z(int plan, double* in, Complex* out) { return execute<double>("cufftExecD2Z", plan, in, out, -1); }
EXPORT int cufftExecZ2D(int plan, Complex* in, double* out) { return execute<double>("cufftExecZ2D", plan, in, out, 1); }
