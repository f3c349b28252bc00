"""oneDNN's C API through ctypes: the library, descriptors, primitives and their execution.

    from singa_backend.kernels import onednn as dnn

    src, dst = dnn.MemoryDesc.of(np.float32, (2, 8)), dnn.MemoryDesc.of(np.float32, (2, 8))
    relu = dnn.eltwise(src, dst, algorithm="relu")
    call = dnn.bind(relu, {dnn.args.SRC: (src, x.ctypes.data), dnn.args.DST: (dst, y.ctypes.data)})
    call.execute(*call.args)

`args` numbers the arguments of an execution; `backward` creates the primitives of gradients.
Nothing is loaded before the first call of `library` or of anything that needs it.
"""

from . import args
from .constants import FUSE_NORM_ADD_RELU, FUSE_NORM_RELU, RUNTIME_DIM, USE_GLOBAL_STATS, USE_SCALE, USE_SHIFT
from .elementwise import binary, eltwise, prelu, sum_
from .loading import (
    Library,
    NotTrusted,
    OneDnnError,
    Unimplemented,
    exchange_threads,
    library,
    missing,
    parallel_region,
    reset,
    set_threads,
    sets_threads,
    thread_switch,
    threads,
    using_threads,
)
from .memory import Attributes, Memory, MemoryDesc, supported
from .movement import concat, shuffle
from .normalization import batch_normalization, layer_normalization, lrn, softmax
from .primitives import BoundPrimitive, Primitive, bind, execution, reorder, single_threaded, threads_of
from .products import convolution, deconvolution, gru, lstm, matmul, rnn
from .windows import pooling, reduction, resampling
